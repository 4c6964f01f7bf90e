"""Listen on TCP, with or without TLS, and give each connection the rim of the version it speaks.

Theory: over TLS the version is ALPN's; on a plain listener it is told by the first bytes, where only the HTTP/2 preface
(RFC 9113 3.4) means HTTP/2 and anything else is HTTP/1. A connection that never speaks is closed by the header timeout, and
counts from the moment it is accepted: silent ones are cheap to make, and `max_connections` is for them too.

Owner: the daemon owns listeners; a rim owns its connection. Closing a listener leaves its connections alone.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Callable
from typing import cast

from config.model import Listen
from proxy.io.first_heads import FirstHeads
from proxy.io.handshakes import TlsDoor
from proxy.io.inbound_h1 import H1ServerConnection
from proxy.io.read_buffers import give_back
from proxy.io.rims import Origin, Service

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
BACKLOG = 1024


class TcpListener:
    """One listening socket. `address`: what it is bound to, with the port the system gave for port 0."""

    def __init__(
        self, listen: Listen, server: asyncio.Server | TlsDoor, address: tuple[str, int], firsts: FirstHeads
    ) -> None:
        self.listen = listen
        self.address = address
        self._server = server
        self._firsts = firsts

    def close(self) -> None:
        """Accept nothing more. Connections go on."""
        self._server.close()
        self._firsts.forget()


def bind(listen: Listen) -> socket.socket:
    """A bound TCP socket for one address; OSError names the address and the reason."""
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((listen.host, listen.port))
        sock.setblocking(False)
    except OSError as exc:
        sock.close()
        raise OSError(exc.errno or errno.EINVAL, f"{listen}: {os.strerror(exc.errno or errno.EINVAL).lower()}") from exc
    return sock


def was_resumed(tls: ssl.SSLObject) -> bool:
    return bool(tls.session_reused)


async def listen_tcp(
    listen: Listen,
    service: Service,
    *,
    tls: ssl.SSLContext | None,
    observe: Callable[[ssl.SSLObject], bool] = was_resumed,
    sock: socket.socket | None = None,
) -> TcpListener:
    """Accept connections for `service` until the listener is closed. `observe` sees each finished TLS handshake and says
    whether it resumed a session."""
    sock = sock or bind(listen)
    address: tuple[str, int] = sock.getsockname()[:2]
    hand_over = _HandOver(listen, service, observe)
    if tls is not None:
        door = TlsDoor(sock, BACKLOG, service, tls, hand_over.over_tls)
        return TcpListener(listen, door, address, hand_over.firsts)
    server = await asyncio.get_running_loop().create_server(
        lambda: _Arrival(service, hand_over), sock=sock, backlog=BACKLOG
    )
    return TcpListener(listen, server, address, hand_over.firsts)


class _HandOver:
    """Gives the connections of one listener the rim of their version."""

    def __init__(self, listen: Listen, service: Service, observe: Callable[[ssl.SSLObject], bool]) -> None:
        self._listener = str(listen)
        self._service = service
        self._observe = observe
        self.firsts = FirstHeads()

    def over_tls(self, transport: asyncio.Transport, peer: tuple[str, int]) -> None:
        """ALPN tells the version; a client that offers none speaks HTTP/1 (RFC 9112 needs none)."""
        tls: ssl.SSLObject = transport.get_extra_info("ssl_object")
        give_back(transport)
        version = "h2" if tls.selected_alpn_protocol() == "h2" else "h1"
        resumed = self._observe(tls)
        self.give(transport, Origin(peer[0], peer[1], self._listener, b"https", version, "", resumed))

    def in_clear(self, transport: asyncio.Transport, version: str) -> asyncio.Protocol:
        peer = transport.get_extra_info("peername") or ("", 0)
        return self.give(transport, Origin(str(peer[0]), int(peer[1]), self._listener, b"http", version))

    def give(self, transport: asyncio.Transport, origin: Origin) -> asyncio.Protocol:
        if origin.version == "h2":
            # Imported when first spoken: a workstation whose SDKs speak HTTP/1.1 never pays for it.
            from proxy.io.inbound_h2 import H2ServerConnection

            rim: asyncio.Protocol = H2ServerConnection(self._service, origin)
        else:
            rim = H1ServerConnection(self._service, origin, self.firsts)
        transport.set_protocol(rim)
        rim.connection_made(transport)
        return rim


class _Arrival(asyncio.Protocol):
    """A connection in clear whose version is not known yet; it hands the transport over and is gone."""

    def __init__(self, service: Service, hand_over: _HandOver) -> None:
        self._service = service
        self._hand_over = hand_over
        self._transport: asyncio.Transport | None = None
        self._first = b""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if not self._service.on_connected(self):
            self._transport.abort()
            return
        # h1 is served at once; only a first byte that could begin the preface makes us look again.
        timeout = self._service.limits.header_timeout_s
        self._timer = asyncio.get_running_loop().call_later(timeout, self._transport.close)

    def data_received(self, data: bytes) -> None:
        self._first += data
        if PREFACE.startswith(self._first[: len(PREFACE)]) and len(self._first) < len(PREFACE):
            return
        transport, first = self._transport, self._first
        assert transport is not None and self._timer is not None
        self._timer.cancel()
        self._service.on_disconnected(self)  # the rim takes its place in the count
        self._hand_over.in_clear(transport, "h2" if first.startswith(PREFACE) else "h1").data_received(first)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._service.on_disconnected(self)

    def eof_received(self) -> bool:
        return False

    def drain(self) -> None:
        """It has asked for nothing, so nothing is lost."""
        if self._transport is not None:
            self._transport.close()

    def close_now(self) -> None:
        if self._transport is not None:
            self._transport.abort()
