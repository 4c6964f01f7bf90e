"""Open the DNS listeners of a configuration: UDP, TCP and TLS sockets, all of them or none."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import ssl
from collections.abc import Callable, Sequence

from config.model import Listen
from resolver.io.datagrams import UdpListener, listener_for
from resolver.io.service import ResolverService
from resolver.io.streams import IDLE_S, Connections, StreamConnection

MOST_CONNECTIONS = 4096
"""Over all listeners, and half of the process's descriptors at most; half as many again may be in their handshake."""
HANDSHAKE_S = 10.0
BACKLOG, ACCEPTS = 512, 64
"""Connections that wait in the kernel, and that are accepted for each wake-up."""
PAUSE_S = 0.1
NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

log = logging.getLogger("headrace.resolver")


class StreamListener:
    """One listening socket. Accepts by itself: a loop's server holds any number of clients that never finish TLS, and
    when descriptors run out uvloop resets whoever comes next and asyncio stops accepting for a second."""

    def __init__(
        self,
        sock: socket.socket,
        connection: Callable[[], StreamConnection],
        tls: ssl.SSLContext | None,
        doors: Connections,
    ) -> None:
        self._sock = sock
        self._connection = connection
        self._tls = tls
        self._connections = doors
        self._greeting: dict[asyncio.Task[None], None] = {}  # not yet handed to their protocol, in order of arrival
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._on_acceptable)

    def _on_acceptable(self) -> None:
        for _ in range(ACCEPTS):
            try:
                client, _ = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as exc:
                # Anything else (ECONNABORTED) concerns one client that is gone already.
                if exc.errno in NO_ROOM and not self._connections.make_room():
                    self._pause()
                    return
                continue
            client.setblocking(False)
            self._greet(client)

    def _pause(self) -> None:
        """The descriptors are used up by others: asking again in each turn of the loop would only cost time."""
        self._loop.remove_reader(self._sock)
        self._loop.call_later(PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock, self._on_acceptable)

    def _greet(self, client: socket.socket) -> None:
        if len(self._greeting) >= self._connections.most // 2:
            oldest = next(iter(self._greeting))
            del self._greeting[oldest]
            oldest.cancel()
        task = self._loop.create_task(self._take(client))
        self._greeting[task] = None
        task.add_done_callback(lambda done: self._greeting.pop(done, None))

    async def _take(self, client: socket.socket) -> None:
        """Owned by this listener; cancelled for a newer client or by `close`, and the transport closes with it."""
        timeout_s = HANDSHAKE_S if self._tls is not None else None
        try:
            await self._loop.connect_accepted_socket(
                self._connection, client, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
        except OSError as exc:
            log.debug("a client did not get through its handshake: %s", exc)

    def stop(self) -> None:
        """Accepts nobody any more."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._sock.close()

    async def close(self) -> None:
        self.stop()
        tasks = list(self._greeting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class DnsListeners:
    """What `listen_dns` opened. `addresses` name the real ports where 0 was asked for."""

    def __init__(self) -> None:
        self.datagrams: list[UdpListener] = []
        self.streams: list[StreamListener] = []
        self.addresses: list[Listen] = []
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.connections = Connections(MOST_CONNECTIONS if soft < 0 else max(16, min(MOST_CONNECTIONS, soft // 2)))

    def drain(self) -> None:
        """Takes no new connection and no new question on streams; UDP goes on until `close`."""
        for listener in self.streams:
            listener.stop()
        for connection in self.connections.all():
            connection.drain()

    async def close(self) -> None:
        for datagrams in self.datagrams:
            datagrams.close()
        for listener in self.streams:
            await listener.close()
        for connection in self.connections.all():
            connection.abort()
        await asyncio.sleep(0)  # transports say goodbye in the next turn


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
                _open_stream(opened, listen, service, tls if listen.scheme == "tls" else None, idle_s)
    except BaseException:
        await opened.close()
        raise
    return opened


def _open_udp(opened: DnsListeners, listen: Listen, service: ResolverService) -> None:
    sock = _bind(listen, socket.SOCK_DGRAM)
    opened.datagrams.append(listener_for(listen)(listen, sock, service))
    opened.addresses.append(_actual(listen, sock))


def _open_stream(
    opened: DnsListeners, listen: Listen, service: ResolverService, tls: ssl.SSLContext | None, idle_s: float
) -> None:
    if listen.scheme == "tls" and tls is None:
        raise ValueError(f"{listen}: no certificate for a TLS listener")
    sock = _bind(listen, socket.SOCK_STREAM)
    doors = opened.connections

    def connection() -> StreamConnection:
        return StreamConnection(service, idle_s, sealed=tls is not None, open_ones=doors)

    opened.streams.append(StreamListener(sock, connection, tls, doors))
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
        if kind == socket.SOCK_STREAM:
            sock.listen(BACKLOG)
    except OSError as exc:
        sock.close()
        raise OSError(exc.errno, f"cannot listen on {listen}: {exc.strerror}") from exc
    return sock


def _actual(listen: Listen, sock: socket.socket) -> Listen:
    return Listen(listen.scheme, listen.host, sock.getsockname()[1])
