"""An edge's HTTP/2 connection: the transport and the keepalive around `proxy.h2_client`.

Theory: usable from connection_made() on, since nothing in HTTP/2 makes a client wait; preface, SETTINGS and the first
request leave in one write when the request is given in the same turn. While there is work, silence is answered with a
PING: a slow model answers it, a dead path does not, and so the two are told apart within ten seconds.

Owner: the pool (`proxy.io.outbound`) that dialled it. Nothing here is a task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from proxy.h2_client import ClientConnection
from proxy.h2_errors import Code, H2ConnectionError
from proxy.h2_frames import goaway
from proxy.h2_limits import H2Limits
from proxy.io.h2_rim import H2Rim
from proxy.io.rims import HIGH_WATER, LOW_WATER
from proxy.messages import Leg

PING_AFTER_S = 5.0
SUSPECT_AFTER_S = 1.0
"""A ping unanswered for this long: the path may be dead, so new exchanges take another one until something is heard."""
DEAD_AFTER_S = 10.0
LINGER_S = 2.0
STREAM_WINDOW = 2 * 1024 * 1024
"""What an answer may send ahead of a client that reads slower: 10 MB/s on a path of 200 ms."""
_ALIVE_PING = b"headrace"


def _nobody() -> None: ...


class H2EdgeConnection(H2Rim):
    """An EdgeConnection. `allows_websocket`: the edge said that it takes extended CONNECTs (RFC 8441)."""

    version = "h2"

    _h2: ClientConnection

    def __init__(
        self,
        *,
        max_header_bytes: int = 64 * 1024,
        ping_after_s: float = PING_AFTER_S,
        dead_after_s: float = DEAD_AFTER_S,
    ) -> None:
        super().__init__()
        self._ping_after_s = ping_after_s
        self._dead_after_s = dead_after_s
        self._suspect_after_s = ping_after_s + min(SUSPECT_AFTER_S, (dead_after_s - ping_after_s) / 2)
        self._suspect = False
        self.on_change: Callable[[], None] = _nobody
        self.closed = False
        limits = H2Limits(max_header_bytes=max_header_bytes, stream_window=STREAM_WINDOW)
        self._h2 = ClientConnection(limits, self._wake, on_change=self._on_change)
        self._timer: asyncio.TimerHandle | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._heard_at = self._loop.time()

    # ------------------------------------------------------------------------------------------ an EdgeConnection

    @property
    def room(self) -> int:
        return 0 if self._transport is None or self._suspect else self._h2.room

    @property
    def active(self) -> int:
        return self._h2.active

    @property
    def allows_websocket(self) -> bool:
        return self._h2.peer.enable_connect_protocol

    @property
    def is_settled(self) -> bool:
        """Whether the edge's SETTINGS came; `on_change` tells of it."""
        return self._h2.peer_settled

    def open(self) -> Leg:
        """A leg. Its head() sends the request, or tells the receiver at once that it cannot be sent here."""
        if self._timer is None:
            # Silence counts from the moment there is work: an idle connection says nothing for hours.
            self._heard_at = self._loop.time()
            self._timer = self._loop.call_later(self._ping_after_s, self._check_alive)
        return self._h2.open()

    def close(self) -> None:
        if not self._h2.going_away:
            self._h2.leave()
        self._close_when_quiet()

    # ------------------------------------------------------------------------------------------ the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(HIGH_WATER, LOW_WATER)
        self._h2.start()

    def data_received(self, data: bytes) -> None:
        now = self._heard_at = self._loop.time()
        self._h2.receive(data, now)
        if self._suspect:
            self._suspect = False
            self._on_change()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for timer in (self._timer, self._linger):
            if timer is not None:
                timer.cancel()
        self._h2.lose("edge connection lost" if exc is None else f"edge connection lost: {type(exc).__name__}")
        self._gone()

    # ------------------------------------------------------------------------------------------ the end

    def _on_change(self) -> None:
        if not self.closed:
            self.on_change()
            if self._h2.going_away and not self._h2.active:
                self._loop.call_soon(self._close_when_quiet)

    def _gone(self) -> None:
        if not self.closed:
            self.closed = True
            self.on_change()

    def _close_when_quiet(self) -> None:
        if self._h2.active or self._transport is None:
            return
        if self._h2.failed is None:
            self._h2.sender.control(goaway(0, Code.NO_ERROR))
            self._flush()
        self._over()

    def _over(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()
            self._linger = self._loop.call_later(LINGER_S, self._transport.abort)
        self._gone()

    # ------------------------------------------------------------------------------------------ time

    def _check_alive(self) -> None:
        self._timer = None
        # A suspect has no room and so never counts as idle: it is watched to its end even when nobody waits any more.
        if self._h2.failed is not None or not (self._h2.active or self._suspect):
            return
        silent_s = self._loop.time() - self._heard_at
        if silent_s >= self._dead_after_s:
            self._h2.fail(H2ConnectionError(Code.NO_ERROR, f"edge silent for {silent_s:.1f} s, a ping included"))
            if self._transport is not None:
                self._transport.abort()
            return
        due_s = self._ping_after_s
        if silent_s >= self._suspect_after_s:
            self._suspect, due_s = True, self._dead_after_s
            self._on_change()
        elif silent_s >= due_s:
            self._h2.ping(_ALIVE_PING)
            due_s = self._suspect_after_s
        self._timer = self._loop.call_later(due_s - silent_s + 0.001, self._check_alive)
