"""Open the DNS listeners of a configuration: UDP, TCP and TLS sockets, all of them or none."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from collections.abc import Sequence

from config.model import Listen
from resolver.io.datagrams import EveryAddressUdpListener, UdpListener
from resolver.io.service import ResolverService
from resolver.io.streams import IDLE_S, Connections, StreamConnection

MOST_CONNECTIONS = 4096


class DnsListeners:
    """What `listen_dns` opened. `addresses` name the real ports where 0 was asked for."""

    def __init__(self) -> None:
        self.datagrams: list[UdpListener] = []
        self.servers: list[asyncio.Server] = []
        self.addresses: list[Listen] = []
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.connections = Connections(MOST_CONNECTIONS if soft < 0 else max(16, min(MOST_CONNECTIONS, soft // 2)))

    def drain(self) -> None:
        """Takes no new connection and no new question on streams; UDP goes on until `close`."""
        for server in self.servers:
            server.close()
        for connection in self.connections.all():
            connection.drain()

    async def close(self) -> None:
        for listener in self.datagrams:
            listener.close()
        for server in self.servers:
            server.close()
        for connection in self.connections.all():
            connection.abort()
        for server in self.servers:
            await server.wait_closed()


async def listen_dns(
    listens: Sequence[Listen], service: ResolverService, *, tls: ssl.SSLContext | None, idle_s: float = IDLE_S
) -> DnsListeners:
    """Opens every `udp`, `tcp` and `tls` address, or none: raises OSError whose text names the address that failed.

    Other schemes are not ours and are passed over. `tls` is needed when there is a `tls` address.
    """
    opened = DnsListeners()
    try:
        for listen in listens:
            if listen.scheme == "udp":
                _open_udp(opened, listen, service)
            elif listen.scheme in ("tcp", "tls"):
                await _open_stream(opened, listen, service, tls if listen.scheme == "tls" else None, idle_s)
    except BaseException:
        await opened.close()
        raise
    return opened


def _open_udp(opened: DnsListeners, listen: Listen, service: ResolverService) -> None:
    sock = _bind(listen, socket.SOCK_DGRAM)
    everywhere = listen.host in ("0.0.0.0", "::")  # noqa: S104 - the user's choice, asked for by name
    opened.datagrams.append((EveryAddressUdpListener if everywhere else UdpListener)(listen, sock, service))
    opened.addresses.append(_actual(listen, sock))


async def _open_stream(
    opened: DnsListeners, listen: Listen, service: ResolverService, tls: ssl.SSLContext | None, idle_s: float
) -> None:
    if listen.scheme == "tls" and tls is None:
        raise ValueError(f"{listen}: no certificate for a TLS listener")
    sock = _bind(listen, socket.SOCK_STREAM)

    def connection() -> StreamConnection:
        return StreamConnection(service, idle_s, sealed=tls is not None, open_ones=opened.connections)

    loop = asyncio.get_running_loop()
    timeout_s = idle_s if tls is not None else None
    server = await loop.create_server(connection, sock=sock, ssl=tls, backlog=512, ssl_handshake_timeout=timeout_s)
    opened.servers.append(server)
    opened.addresses.append(_actual(listen, sock))


def _bind(listen: Listen, kind: socket.SocketKind) -> socket.socket:
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    sock = socket.socket(family, kind | socket.SOCK_NONBLOCK)
    try:
        if kind == socket.SOCK_STREAM:
            # For TCP it only skips TIME_WAIT. For UDP it would let two processes share a port and steal each other's.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((listen.host, listen.port))
    except OSError as exc:
        sock.close()
        raise OSError(exc.errno, f"cannot listen on {listen}: {exc.strerror}") from exc
    return sock


def _actual(listen: Listen, sock: socket.socket) -> Listen:
    return Listen(listen.scheme, listen.host, sock.getsockname()[1])
