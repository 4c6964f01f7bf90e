"""A client's HTTP/2 connection: the transport and the timers around `proxy.h2_server`.

Theory: `data_received` feeds the pure connection, which calls the service and the receivers; whatever anybody says gathers
there and leaves as `proxy.io.h2_rim` says. When the transport is full, DATA waits on its streams, and each tells its relay.

Time is looked at by one coarse timer a connection, never one a request; a limit is met within a quarter more than it says.

Owner: the listener that made it; `drain` and `close_now` come from the service. Nothing here is a task.
"""

from __future__ import annotations

import asyncio
import socket
from typing import cast

from proxy.h2_errors import Code, H2ConnectionError
from proxy.h2_limits import H2Limits
from proxy.h2_server import ServerConnection, ServerStream
from proxy.h2_shapes import Find
from proxy.io.h2_rim import H2Rim
from proxy.io.rims import Origin, Service
from proxy.messages import RequestHead

WRITE_HIGH, WRITE_LOW = 64 * 1024, 16 * 1024
UNSENT_IN_KERNEL = 128 * 1024
"""Bytes that the kernel takes beyond what it may send now. What it has taken no urgent answer overtakes any more (RFC 9218 10),
and by itself it takes up to 4 MB."""
DRAIN_ROUND_TRIP_S = 1.0
"""How long the client has to answer the PING that parts our two GOAWAYs."""
PONG_TIMEOUT_S = 15.0
LINGER_S = 2.0
"""What a connection that failed gets to take its last frames."""
LAST_ANSWER_S = 30.0
"""What a client that was served gets to read what still lies in the transport; a hard stop cuts it short."""
UNWANTED_UPLOAD_S = 1.0
"""How long an upload may run on, into its window, after its whole answer."""
_DRAIN_PING = b"headrace"
_ALIVE_PING = b"still on"


class H2ServerConnection(H2Rim):
    """An InboundConnection. connection_made() is called by the listener once ALPN, or the preface, said h2."""

    _h2: ServerConnection

    def __init__(self, service: Service, origin: Origin) -> None:
        super().__init__()
        self._service = service
        self._origin = origin
        limits = service.limits
        self._idle_timeout_s = limits.idle_timeout_s
        self._header_timeout_s = limits.header_timeout_s
        self._h2 = ServerConnection(
            H2Limits(limits.max_streams, limits.max_header_bytes),
            self._wake,
            on_request=self._on_request,
            on_closed=self._on_closed,
        )
        self._h2.shortcut_for = self._shortcut_for
        self._h2.on_pong = self._on_pong
        self._h2.on_linger = self._schedule_cut
        self._timer: asyncio.TimerHandle | None = None
        self._drain_timer: asyncio.TimerHandle | None = None
        self._made_at = self._last_read = self._idle_since = self._loop.time()
        self._draining = self._said_goodbye = False

    # ------------------------------------------------------------------------------------------ the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(WRITE_HIGH, WRITE_LOW)
        self._keep_kernel_short(self._transport)
        self._h2.start()
        if not self._service.on_connected(self):
            self._service = _Closed(self._service)
            self._h2.fail(H2ConnectionError(Code.NO_ERROR, "too many connections"))
            return
        self._schedule_tick()

    @staticmethod
    def _keep_kernel_short(transport: asyncio.Transport) -> None:
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_IN_KERNEL)

    def data_received(self, data: bytes) -> None:
        now = self._last_read = self._loop.time()
        self._h2.receive(data, now)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for timer in (self._timer, self._drain_timer):
            if timer is not None:
                timer.cancel()
        self._h2.lose("client connection lost")
        self._service.on_disconnected(self)

    def _over(self) -> None:
        self._close(LINGER_S)

    def _close(self, linger_s: float) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()
            # A peer that does not read would keep the buffer, and us, for ever.
            self._restart_drain_timer(linger_s, self._transport.abort)

    # ------------------------------------------------------------------------------------------ exchanges

    def _on_request(self, stream: ServerStream, head: RequestHead) -> None:
        self._service.on_request(stream, head, self._origin)

    def _shortcut_for(self, head: RequestHead) -> Find | None:
        return self._service.shortcut(head, self._origin)

    def _on_closed(self) -> None:
        if not self._h2.streams:
            self._idle_since = self._last_read if self._transport is None else self._loop.time()
            if self._h2.refuses_above is not None:
                self._loop.call_soon(self._close_when_quiet)
            elif self._draining:
                self._loop.call_soon(self._say_goodbye)

    # ------------------------------------------------------------------------------------------ going away

    def drain(self) -> None:
        """Say goodbye as soon as no stream is left, then close.

        Not before: the `h2` package, which httpx and so many an SDK stands on, gives up every stream at any GOAWAY, also
        at one that promises to finish them. Requests that still come until then are served.
        """
        if self._draining or self._h2.failed is not None or self._transport is None:
            return
        self._draining = True
        self._say_goodbye()

    def _say_goodbye(self) -> None:
        """GOAWAY twice, a round trip apart, so that no request on its way is lost (RFC 9113 6.8)."""
        if self._h2.streams or self._said_goodbye or self._h2.failed is not None:
            return
        self._said_goodbye = True
        # The PING first: the `h2` package takes no other frame after a GOAWAY, and its answer still times the round trip.
        self._h2.ping(_DRAIN_PING)
        self._h2.announce_drain()
        self._restart_drain_timer(DRAIN_ROUND_TRIP_S, self._finish_drain)

    def _on_pong(self, payload: bytes) -> None:
        if self._draining and payload == _DRAIN_PING:
            self._finish_drain()

    def _finish_drain(self) -> None:
        if self._drain_timer is not None:
            self._drain_timer.cancel()
        self._h2.drain()
        self._loop.call_soon(self._close_when_quiet)

    def _close_when_quiet(self) -> None:
        if not self._h2.streams and self._transport is not None:
            self._flush()
            self._close(LAST_ANSWER_S)

    def close_now(self) -> None:
        """Reset every stream, say GOAWAY, close."""
        self._h2.abandon("the proxy stops")
        self._flush()
        if self._transport is not None and self._transport.is_closing():
            self._restart_drain_timer(LINGER_S, self._transport.abort)

    def _restart_drain_timer(self, delay_s: float, then: object) -> None:
        if self._drain_timer is not None:
            self._drain_timer.cancel()
        self._drain_timer = self._loop.call_later(delay_s, then)  # type: ignore[arg-type]

    # ------------------------------------------------------------------------------------------ time

    def _schedule_cut(self) -> None:
        self._loop.call_later(UNWANTED_UPLOAD_S / 2, self._cut_lingering)

    def _cut_lingering(self) -> None:
        if self._transport is not None and self._h2.cut_lingering():
            self._schedule_cut()

    def _schedule_tick(self) -> None:
        step = min(self._header_timeout_s, self._idle_timeout_s) / 4
        self._timer = self._loop.call_later(step, self._tick)

    def _tick(self) -> None:
        now, h2 = self._loop.time(), self._h2
        waiting_since = h2.block_since if h2.peer_settled else self._made_at
        if waiting_since is not None and now - waiting_since >= self._header_timeout_s:
            h2.fail(H2ConnectionError(Code.NO_ERROR, f"no whole head within {self._header_timeout_s:g} s"))
            return
        if not h2.streams and now - self._idle_since >= self._idle_timeout_s:
            self.drain()
        elif h2.streams:
            self._check_alive(now - self._last_read)
        if h2.failed is None:
            self._schedule_tick()

    def _check_alive(self, silent_s: float) -> None:
        # A client whose machine went to sleep never says so; its streams would hold their edges until TCP gives up.
        if silent_s >= self._idle_timeout_s + min(PONG_TIMEOUT_S, self._idle_timeout_s):
            self._h2.fail(H2ConnectionError(Code.NO_ERROR, f"client silent for {silent_s:.0f} s"))
        elif silent_s >= self._idle_timeout_s:
            self._h2.ping(_ALIVE_PING)


class _Closed:
    """The service after it turned the connection away: it is not told of the end."""

    def __init__(self, service: Service) -> None:
        self.limits = service.limits

    def on_request(self, leg: object, head: RequestHead, origin: Origin) -> None: ...
    def known(self, head: RequestHead, origin: Origin) -> None: ...

    def shortcut(self, head: RequestHead, origin: Origin) -> None: ...
    def on_connected(self, connection: object) -> bool:
        return False

    def on_disconnected(self, connection: object) -> None: ...
