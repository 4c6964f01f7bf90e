"""Race TCP connections to the addresses of one host (RFC 8305, "happy eyeballs").

Theory: raw non-blocking sockets and writer callbacks, one future for the whole race and no task at all. The next address
starts after `step_s`, or at once when one failed. The first that connects wins and the others are closed.

Owner: whoever awaits `connect_first`; cancelled, it closes every socket.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from errno import EINPROGRESS
from ipaddress import ip_address

from proxy.messages import Abort, Cause, Party, Stage
from resolver.io.clock import now


@dataclass(frozen=True, slots=True)
class Connected:
    """A TCP connection, and how long its own handshake took (not what the race had waited before it)."""

    sock: socket.socket
    address: str
    took_s: float


class DialError(OSError):
    """A dial failed; `abort` says it all."""

    def __init__(self, abort: Abort) -> None:
        super().__init__(abort.detail)
        self.abort = abort


async def connect_first(
    addresses: Sequence[str], port: int, *, clock: Callable[[], float] = now, step_s: float = 0.25
) -> Connected:
    """The first TCP connection of a staggered race (RFC 8305 5). Losers are closed: a SYN proves nothing.
    `clock` measures: the time of uvloop's loop stands still within a turn, and a near edge would be 0 ms away.

    Raises DialError naming each address and what was seen there; asyncio.CancelledError closes all of it.
    """
    race = _Race(addresses, port, clock, step_s)
    try:
        return await race.won
    finally:
        race.stop()


class _Race:
    """Attempts in order, one more each `step_s`. `won` gets the first that connects, or DialError after the last."""

    def __init__(self, addresses: Sequence[str], port: int, clock: Callable[[], float], step_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.won: asyncio.Future[Connected] = self._loop.create_future()
        self._port, self._clock, self._step_s = port, clock, step_s
        self._to_try = deque(addresses)
        self._open: dict[socket.socket, tuple[str, float]] = {}
        self._causes: list[str] = []
        self._timer: asyncio.TimerHandle | None = None
        self._next()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for sock in list(self._open):
            self._leave(sock).close()

    def _next(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._to_try and not self._start(self._to_try.popleft()):
            pass
        if self._to_try:
            self._timer = self._loop.call_later(self._step_s, self._next)
        elif not self._open and not self.won.done():
            said = "; ".join(self._causes) or "no address to connect to"
            self.won.set_exception(
                DialError(Abort(Party.EDGE, Stage.CONNECT, Cause.LOST, said, unprocessed=True)),
            )

    def _start(self, address: str) -> bool:
        sock: socket.socket | None = None
        try:
            # A name here would make connect() ask the system's resolver, and block the loop for it.
            family = socket.AF_INET6 if ip_address(address).version == 6 else socket.AF_INET
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            _keep_alive(sock)
            started = self._clock()
            code = sock.connect_ex((address, self._port))
        except (OSError, ValueError) as exc:
            code = getattr(exc, "errno", None) or 0
            self._failed(address, os.strerror(code).lower() if code else str(exc))
            if sock is not None:
                sock.close()
            return False
        if code not in (0, EINPROGRESS):
            sock.close()
            self._failed(address, os.strerror(code).lower())
            return False
        self._open[sock] = (address, started)
        self._loop.add_writer(sock, self._ready, sock)
        return True

    def _ready(self, sock: socket.socket) -> None:
        address, started = self._open[sock]
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        self._leave(sock)
        if code:
            sock.close()
            self._failed(address, os.strerror(code).lower())
            self._next()
        elif self.won.done():
            sock.close()
        else:
            self.won.set_result(Connected(sock, address, self._clock() - started))

    def _leave(self, sock: socket.socket) -> socket.socket:
        del self._open[sock]
        self._loop.remove_writer(sock)
        return sock

    def _failed(self, address: str, said: str) -> None:
        self._causes.append(f"connect {place_of(address, self._port)}: {said}")


def place_of(address: str, port: int) -> str:
    """`192.0.2.1:443`, `[2001:db8::1]:443`."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _keep_alive(sock: socket.socket) -> None:
    """Tell a dead path within 30 s, idle or with bytes unacknowledged, from an edge that only thinks (TCP level)."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 30_000)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
