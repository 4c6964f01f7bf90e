"""Accept TLS connections and see their handshakes through, counted from the first moment.

Theory: a connection that shakes hands is the cheapest to make and the dearest to serve, so `max_connections` is for it first
of all. The loop's own way to listen with TLS tells nobody of a connection before its handshake is done, nor that one failed;
so connections are accepted here, take a place in the count or are sent away at once, and are given to the loop one by one.

Where the caches are cold, and with TLS they are, each Python function on this path is a microsecond of some hundred. So the
loop's coroutine is resumed by the future that it waits for, without a task; a connection is one object until it has its rim;
and its socket does not look up in an enumeration what family it is of.

Owner: the listener owns the door; a `Handshake` owns the loop's coroutine, which ends with it: done, failed, too slow (the
header timeout), or cancelled by `drain` or `close_now`. Its place in the count comes free before the rim takes its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
import struct
from collections.abc import Callable, Coroutine
from typing import Any

from proxy.io.rims import Service

logger = logging.getLogger(__name__)

ACCEPTS = 64
"""Connections taken a wake-up at most; the loop's other sockets get their turn in between."""
LOOK_FOR_MORE = 8
"""One wake-up in so many looks for a second connection: to be told that there is none costs an exception and a system call."""
NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
NO_ROOM_PAUSE_S = 1.0
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: no TIME_WAIT for who was never let in

Peer = tuple[str, int]
Arrive = Callable[[asyncio.Transport, Peer], None]


class _V4(socket.socket):
    """An accepted socket. The base class makes an enumeration's member of the number whenever somebody asks."""

    __slots__ = ()
    family = socket.AF_INET
    type = socket.SOCK_STREAM


class _V6(_V4):
    __slots__ = ()
    family = socket.AF_INET6


class Handshake(asyncio.Protocol):
    """One connection until its version is known: an InboundConnection that has asked for nothing, and the loop's protocol
    for it. `arrive` gives the transport another one once TLS stands."""

    __slots__ = ("_arrive", "_counted", "_peer", "_service", "_shaking", "_sock", "_unwanted", "_waiting")

    def __init__(self, service: Service, peer: Peer, arrive: Arrive) -> None:
        self._service, self._peer, self._arrive = service, peer, arrive
        self._sock: socket.socket | None = None
        self._shaking: Coroutine[Any, Any, object] | None = None
        self._waiting: asyncio.Future[object] | None = None
        self._unwanted = False
        self._counted = service.on_connected(self)

    def begin(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, tls: ssl.SSLContext) -> None:
        """Shake hands, if there was a place for it."""
        if self._unwanted or not self._counted:
            self._give_place_back()
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            sock.close()
            return
        self._sock = sock
        self._shaking = loop.connect_accepted_socket(
            lambda: self, sock, ssl=tls, ssl_handshake_timeout=self._service.limits.header_timeout_s
        )
        self._go_on(None)

    def _go_on(self, _waited: object) -> None:
        """Run the loop's coroutine up to its next wait, as a task would."""
        assert self._shaking is not None
        try:
            self._waiting = waiting = self._shaking.send(None)
        except StopIteration:
            self._end()
        except (OSError, asyncio.CancelledError):  # SSLError is an OSError
            self._fail()
        except Exception:
            self._fail()
            logger.exception("tls: a handshake failed")
        else:
            waiting.add_done_callback(self._go_on)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._give_place_back()  # the rim takes its own
        self._arrive(transport, self._peer)  # type: ignore[arg-type]  # `cast` is a call

    def _fail(self) -> None:
        assert self._sock is not None
        self._sock.close()  # its transport's by now, if there is one: then this does nothing
        self._end()

    def _end(self) -> None:
        self._shaking = self._waiting = self._sock = None
        self._give_place_back()

    def _give_place_back(self) -> None:
        if self._counted:
            self._counted = False
            self._service.on_disconnected(self)

    def drain(self) -> None:
        self.close_now()

    def close_now(self) -> None:
        self._unwanted = True  # a gateway that drains says so inside on_connected
        if self._waiting is not None:
            self._waiting.cancel()


class TlsDoor:
    """Accepts on a bound socket, which it owns, until `close`. `arrive` gets each connection for which TLS stands."""

    def __init__(
        self, sock: socket.socket, backlog: int, service: Service, tls: ssl.SSLContext, arrive: Arrive
    ) -> None:
        self._sock = sock
        self._kind = _V6 if sock.family == socket.AF_INET6 else _V4
        self._service, self._tls, self._arrive = service, tls, arrive
        self._loop = asyncio.get_running_loop()
        self._wakes = 0
        self._crowded = False
        self._pause: asyncio.TimerHandle | None = None
        sock.listen(backlog)
        self._open()

    def _open(self) -> None:
        self._pause = None
        self._loop.add_reader(self._sock, self._acceptable)

    def _acceptable(self) -> None:
        self._wakes += 1
        tries = ACCEPTS if self._crowded or self._wakes % LOOK_FOR_MORE == 0 else 1
        for taken in range(tries):
            try:
                descriptor, peer = self._sock._accept()  # type: ignore[attr-defined]  # what `accept` calls
            except OSError as exc:
                if exc.errno in NO_ROOM:
                    self._wait_for_room(exc)
                if isinstance(exc, ConnectionAbortedError):
                    continue
                self._crowded = taken > 1
                return
            sock = self._kind(self._kind.family, self._kind.type, 0, descriptor)
            sock.setblocking(False)
            Handshake(self._service, peer, self._arrive).begin(self._loop, sock, self._tls)
        self._crowded = tries > 1

    def _wait_for_room(self, exc: OSError) -> None:
        logger.error("cannot accept: %s; trying again in %.0f s", exc.strerror, NO_ROOM_PAUSE_S)
        self._loop.remove_reader(self._sock)
        self._pause = self._loop.call_later(NO_ROOM_PAUSE_S, self._open)

    def close(self) -> None:
        """Accept nothing more. Idempotent."""
        if self._pause is not None:
            self._pause.cancel()
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._sock.close()
