"""Tunnel browsers to the services they may reach: CONNECT on the plain listener, and the PAC file that sends them here.

Theory: a browser keeps its own TLS to the service; we see a name and a port. Names are looked up by our resolver, which is
the point of it: encrypted, cached, raced over IPv6 and IPv4. Only names on the allow list, on port 443 unless the list says
another: an open CONNECT proxy on loopback would carry any local program, or any page, to any port (RFC 9110 9.3.6).

Owner: a `_Connecting` owns its dial task until the tunnel stands, then the tunnel owns both legs. A client that leaves while
we dial cancels the task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import config.model
from proxy import errors
from proxy.forwarding import AllowList, pac_file, target_of
from proxy.io.eyeballs import connect_first
from proxy.io.local import say
from proxy.io.rims import HIGH_WATER, LOW_WATER, Origin
from proxy.io.upgrades import PlainTunnel
from proxy.io.wire import reset
from proxy.messages import NOBODY, Abort, Cause, Fields, Head, Leg, Party, Receiver, RequestHead, ResponseHead, Stage
from proxy.priority import Priority
from resolver.errors import ResolverError

if TYPE_CHECKING:
    from proxy.io.relay import Relay
    from resolver.io.service import ResolverService

CONNECT_TIMEOUT_S = 10.0
MAX_EARLY_BYTES = 64 * 1024


class ForwardProxy:
    """Serves CONNECT and /proxy.pac. `active`: tunnels and dials in progress."""

    def __init__(self, resolver: ResolverService, relay: Relay) -> None:
        self._resolver = resolver
        self._relay = relay
        self._allow = AllowList(())
        self._connecting: set[_Connecting] = set()
        self.enabled = False

    @property
    def active(self) -> int:
        return len(self._connecting)

    def apply(self, forward: config.model.Forward, listeners: Sequence[str]) -> None:
        """Tunnels that stand are left alone, also those whose name is no longer allowed."""
        self.enabled = forward.enabled and bool(listeners)
        self._allow = AllowList(forward.allow)

    def serve_pac(self, leg: Leg, head: RequestHead) -> None:
        """The PAC file, naming the address under which it was asked for."""
        leg.receiver = NOBODY
        body = pac_file(self._allow.patterns, head.authority.decode("latin-1"))
        fields: Fields = [
            (b"content-type", b"application/x-ns-proxy-autoconfig"),
            (b"content-length", b"%d" % len(body)),
            (b"cache-control", b"no-cache"),
        ]
        say(leg, ResponseHead(200, fields, length=len(body), no_body=head.method == b"HEAD"), body)

    def on_connect(self, leg: Leg, head: RequestHead, origin: Origin) -> None:
        target = target_of(head.target)
        if target is None:
            self._refuse(leg, 400, "bad_connect", "CONNECT wants host:port")
        elif not self.enabled or origin.scheme != b"http" or origin.version != "h1":
            self._refuse(
                leg,
                403,
                "connect_refused",
                "CONNECT is served on the plain http listener when proxy.forward is enabled",
            )
        elif not self._allow.allows(*target):
            host, port = target
            self._refuse(leg, 403, "connect_refused", f"{host}:{port} is not in proxy.forward.allow")
        else:
            self._connecting.add(_Connecting(self, leg, *target))

    @staticmethod
    def _refuse(leg: Leg, status: int, code: str, message: str) -> None:
        leg.receiver = NOBODY
        say(leg, *errors.own_answer(status, message, code=code))

    def forget(self, connecting: _Connecting) -> None:
        self._connecting.discard(connecting)

    def abort_all(self) -> None:
        for connecting in list(self._connecting):
            connecting.close_now()

    async def dial(self, host: str, port: int) -> TcpLeg:
        """A TCP connection to a name, by our resolver, addresses in turn with RFC 8305 pacing."""
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            endpoints = await self._resolver.endpoints(host, port)
            # Not the HTTPS record's port: the browser that wants that one asks for it by itself.
            connected = await connect_first(endpoints.addresses, port)
            _, leg = await asyncio.get_running_loop().create_connection(TcpLeg, sock=connected.sock)
            return leg


class _Connecting:
    """One CONNECT from its head to the end of its tunnel; the client leg's receiver while the dial runs."""

    def __init__(self, proxy: ForwardProxy, leg: Leg, host: str, port: int) -> None:
        self._proxy = proxy
        self._leg = leg
        self._early: list[bytes] = []
        self._early_bytes = 0
        self._tunnel: PlainTunnel | None = None
        self._name = f"{host}:{port}"
        leg.receiver = self
        self._task = asyncio.get_running_loop().create_task(self._connect(host, port))

    async def _connect(self, host: str, port: int) -> None:
        try:
            edge = await self._proxy.dial(host, port)
        except TimeoutError:
            self._fail(504, "connect_timeout", f"no connection to {self._name} within {CONNECT_TIMEOUT_S:g} s")
            return
        except (OSError, ResolverError) as exc:
            self._fail(502, "connect_failed", f"no connection to {self._name}: {exc}")
            return
        except asyncio.CancelledError:
            self._proxy.forget(self)
            raise
        self._join(edge)

    def _join(self, edge: TcpLeg) -> None:
        leg = self._leg
        leg.head(ResponseHead(200, [], length=0, no_body=True, reason=b"Connection established"))
        self._tunnel = PlainTunnel(leg, edge, self._on_over)
        for chunk in self._early:
            edge.data(chunk)
        self._early.clear()
        leg.resume()

    def _on_over(self, abort: Abort | None, bytes_in: int, bytes_out: int) -> None:
        self._proxy.forget(self)

    def _fail(self, status: int, code: str, message: str) -> None:
        self._proxy.forget(self)
        self._leg.receiver = NOBODY
        say(self._leg, *errors.own_answer(status, message, code=code))

    def close_now(self) -> None:
        if self._tunnel is not None:
            self._tunnel.close_now()
        else:
            self._task.cancel()
            self._leg.abort(Abort(Party.US, Stage.CONNECT, Cause.REFUSED, "stopping"))

    # ------------------------------------------------ the client's leg before the tunnel stands

    def on_data(self, chunk: bytes) -> None:
        # RFC 9110 9.3.6 lets a client send before the answer; it waits here, bounded.
        self._early.append(chunk)
        self._early_bytes += len(chunk)
        if self._early_bytes > MAX_EARLY_BYTES:
            self._leg.pause()

    def on_abort(self, abort: Abort) -> None:
        self._task.cancel()
        self._proxy.forget(self)

    def on_head(self, head: ResponseHead) -> None: ...
    def on_interim(self, head: ResponseHead) -> None: ...
    def on_trailers(self, fields: Fields) -> None: ...
    def on_end(self) -> None: ...
    def on_full(self) -> None: ...
    def on_drained(self) -> None: ...
    def on_priority(self, priority: Priority) -> None: ...


class TcpLeg(asyncio.Protocol):
    """A plain TCP connection as a leg: data both ways, end is a half-close."""

    reused = False
    version = "tcp"

    def __init__(self) -> None:
        self.receiver: Receiver = NOBODY
        self._transport: asyncio.Transport | None = None
        self._ended = self._said_end = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=HIGH_WATER, low=LOW_WATER)

    def data_received(self, data: bytes) -> None:
        self.receiver.on_data(data)

    def eof_received(self) -> bool:
        self._ended = True
        self.receiver.on_end()
        return not self._said_end

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if exc is not None or not (self._ended and self._said_end):
            receiver, self.receiver = self.receiver, NOBODY
            if not self._ended or exc is not None:
                receiver.on_abort(Abort(Party.EDGE, Stage.BODY, Cause.LOST, "connection lost"))

    def pause_writing(self) -> None:
        self.receiver.on_full()

    def resume_writing(self) -> None:
        self.receiver.on_drained()

    def head(self, head: Head) -> None: ...
    def interim(self, head: ResponseHead) -> None: ...
    def trailers(self, fields: Fields) -> None: ...

    def data(self, chunk: bytes) -> None:
        if self._transport is not None and not self._said_end:
            self._transport.write(chunk)

    def end(self) -> None:
        self._said_end = True
        if self._transport is not None:
            if self._ended:
                self._transport.close()
            elif self._transport.can_write_eof():
                self._transport.write_eof()

    def finish(self) -> None:
        self.end()

    def abort(self, abort: Abort) -> None:
        self.receiver = NOBODY
        if self._transport is not None:
            reset(self._transport)

    def prioritize(self, priority: Priority) -> None:
        """A tunnel of its own connection."""

    def pause(self) -> None:
        if self._transport is not None and self._transport.is_reading():
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
