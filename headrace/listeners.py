"""The open doors: every listener of the configuration, opened and closed as it changes.

Theory: a reload opens what is new before it lets go of what is old, and either all new doors open or none. Behind each
proxy door stands a `Door`, which knows the connections that came through it, so that a door that goes can be drained alone.

Owner: the daemon. A door that was removed drains by itself and is closed at the latest after `drain_timeout`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from config.model import Listen, Tickets
from headrace import ports
from headrace.imports import load_beside
from proxy.h2_shapes import Find
from proxy.io.express import Known
from proxy.io.inbound_tcp import TcpListener, bind, listen_tcp, was_resumed
from proxy.io.rims import InboundConnection, Limits, Origin
from proxy.io.tls import TlsIdentity
from proxy.messages import Leg, RequestHead
from resolver.io.quic_bind import bind_quic

if TYPE_CHECKING:
    from proxy.io.gateway import Gateway
    from resolver.io.listen import DnsListeners
    from resolver.io.service import ResolverService

HTTP_ALPN = ["h2", "http/1.1"]
DOT_ALPN = ["dot"]
TLS_SCHEMES = ("https", "h3", "tls", "quic")

logger = logging.getLogger("headrace.listeners")


class ListenFailed(Exception):
    """Some addresses could not be had; nothing that was asked for together with them is open."""

    def __init__(self, reasons: Sequence[str], *, privilege: bool) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = tuple(reasons)
        self.privilege = privilege

    @classmethod
    def of(cls, failures: Sequence[tuple[Listen, OSError]]) -> ListenFailed:
        reasons = [ports.explain(listen, exc) for listen, exc in failures]
        return cls(reasons, privilege=all(ports.needs_privilege(exc) for _, exc in failures))


class Door:
    """The gateway as one listener sees it: the same service, and a list of who came through."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.connections: set[InboundConnection] = set()
        # The rim's call goes straight to the gateway: a door costs a request nothing.
        self.on_request: Callable[[Leg, RequestHead, Origin], None] = gateway.on_request
        self.shortcut: Callable[[RequestHead, Origin], Find | None] = gateway.shortcut
        self.known: Callable[[RequestHead, Origin], Known | None] = gateway.known

    @property
    def limits(self) -> Limits:
        return self._gateway.limits

    def on_connected(self, connection: InboundConnection) -> bool:
        accepted = self._gateway.on_connected(connection)
        if accepted:
            self.connections.add(connection)
        return accepted

    def on_disconnected(self, connection: InboundConnection) -> None:
        self.connections.discard(connection)
        self._gateway.on_disconnected(connection)

    def drain(self) -> None:
        for connection in list(self.connections):
            connection.drain()

    def close_now(self) -> None:
        for connection in list(self.connections):
            connection.close_now()


class Open(Protocol):
    """A listener that serves."""

    @property
    def address(self) -> tuple[str, int]: ...
    def drain(self) -> None: ...
    async def close(self) -> None: ...


@dataclass(slots=True)
class OpenTcp:
    listener: TcpListener
    door: Door

    @property
    def address(self) -> tuple[str, int]:
        return self.listener.address

    def drain(self) -> None:
        self.listener.close()
        self.door.drain()

    async def close(self) -> None:
        self.listener.close()
        self.door.close_now()


class QuicServer(Protocol):
    """What answers on a UDP socket: `QuicListener` for h3, `DoqListener` for DNS."""

    full_handshakes: int
    resumed_handshakes: int

    def reload_certificate(self, cert_file: str = "", key_file: str = "") -> None: ...
    def retune(self, tickets: Tickets) -> None: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...


class OpenQuic:
    """A UDP socket that is ours at once, and answers as soon as the QUIC stack is loaded: its import takes 0.1 s.

    `serve` makes the server of a loaded `module`, which then owns the socket.
    """

    def __init__(
        self,
        listen: Listen,
        identity: TlsIdentity,
        module: str,
        serve: Callable[[socket.socket, Tickets], QuicServer],
        tickets: Tickets,
    ) -> None:
        self.scheme = listen.scheme
        self._identity, self._module, self._serve, self._tickets = identity, module, serve, tickets
        self._socket = bind_quic(listen)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self.listener: QuicServer | None = None

    async def load(self) -> None:
        """Datagrams that came meanwhile wait in the kernel."""
        await load_beside(self._module)
        if self._socket.fileno() >= 0 and self.listener is None:
            self.listener = self._serve(self._socket, self._tickets)

    def retune(self, tickets: Tickets) -> None:
        """Give and take tickets by these rules from now on."""
        self._tickets = tickets
        if self.listener is not None:
            self.listener.retune(tickets)

    def renew_certificate(self) -> None:
        if self.listener is not None:
            self.listener.reload_certificate(self._identity.cert_file, self._identity.key_file)

    def drain(self) -> None:
        if self.listener is not None:
            self.listener.drain()

    async def close(self) -> None:
        if self.listener is not None:
            self.listener.close()
        self._socket.close()


@dataclass(slots=True)
class OpenDns:
    listeners: DnsListeners

    @property
    def address(self) -> tuple[str, int]:
        return self.listeners.addresses[0].host, self.listeners.addresses[0].port

    def drain(self) -> None:
        self.listeners.drain()

    async def close(self) -> None:
        await self.listeners.close()


class Listeners:
    """All open listeners, by what the configuration calls them."""

    def __init__(self, gateway: Gateway, resolver: ResolverService) -> None:
        self._gateway = gateway
        self._resolver = resolver
        self._open: dict[Listen, Open] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def addresses(self) -> list[Listen]:
        """What is bound, with the ports that the system chose."""
        return [Listen(listen.scheme, *found.address) for listen, found in self._open.items()]

    @property
    def quic(self) -> list[OpenQuic]:
        return [found for found in self._open.values() if isinstance(found, OpenQuic)]

    async def open(self, wanted: Iterable[Listen], identity: TlsIdentity | None, tickets: Tickets) -> list[Listen]:
        """Open those that are not open yet, all or none. Returns them. Raises ListenFailed with every reason."""
        fresh: dict[Listen, Open] = {}
        failures: list[tuple[Listen, OSError]] = []
        for listen in wanted:
            if listen in self._open:
                continue
            try:
                fresh[listen] = await self._open_one(listen, identity, tickets)
            except OSError as exc:
                failures.append((listen, exc))
        if failures:
            await asyncio.gather(*(found.close() for found in fresh.values()))
            raise ListenFailed.of(failures)
        self._open |= fresh
        return list(fresh)

    async def _open_one(self, listen: Listen, identity: TlsIdentity | None, tickets: Tickets) -> Open:
        assert identity is not None or listen.scheme not in TLS_SCHEMES, f"{listen} opens after the identity is made"
        if listen.scheme == "h3":
            assert identity is not None
            return self._open_h3(listen, identity, tickets)
        if listen.scheme == "quic":
            assert identity is not None
            return self._open_doq(listen, identity, tickets)
        if listen.scheme in ("http", "https"):
            door = Door(self._gateway)
            tls = identity.context(HTTP_ALPN) if identity and listen.scheme == "https" else None
            observe = identity.ring.observe if identity and tls else was_resumed
            return OpenTcp(await listen_tcp(listen, door, tls=tls, observe=observe, sock=bind(listen)), door)
        from resolver.io.listen import listen_dns

        tls = identity.context(DOT_ALPN) if identity and listen.scheme == "tls" else None
        return OpenDns(await listen_dns([listen], self._resolver, tls=tls))

    def _open_h3(self, listen: Listen, identity: TlsIdentity, tickets: Tickets) -> OpenQuic:
        door = Door(self._gateway)

        def serve(sock: socket.socket, tickets: Tickets) -> QuicServer:
            from proxy.io.inbound_quic import QuicListener
            from resolver.io.quic_socket import UdpSocket

            return QuicListener(listen, door, UdpSocket(sock), identity.cert_file, identity.key_file, tickets)

        return OpenQuic(listen, identity, "proxy.io.inbound_quic", serve, tickets)

    def _open_doq(self, listen: Listen, identity: TlsIdentity, tickets: Tickets) -> OpenQuic:
        def serve(sock: socket.socket, tickets: Tickets) -> QuicServer:
            from resolver.io.doq_listener import DoqListener
            from resolver.io.quic_socket import UdpSocket

            return DoqListener(listen, self._resolver, UdpSocket(sock), identity.cert_file, identity.key_file, tickets)

        return OpenQuic(listen, identity, "resolver.io.doq_listener", serve, tickets)

    def retune(self, tickets: Tickets) -> None:
        """The rules for the tickets of QUIC listeners; the ring has those of the others."""
        for found in self.quic:
            found.retune(tickets)

    async def load_quic(self) -> None:
        for found in self.quic:
            await found.load()

    def remove(self, gone: Iterable[Listen], drain_s: float) -> None:
        """Accept nothing more there; what came through goes on for at most `drain_s`."""
        for listen in gone:
            found = self._open.pop(listen)
            found.drain()
            task = asyncio.get_running_loop().create_task(self._close_later(found, drain_s), name=f"drain {listen}")
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _close_later(self, found: Open, drain_s: float) -> None:
        try:
            if isinstance(found, OpenTcp | OpenQuic):
                await asyncio.sleep(drain_s)
        finally:
            await found.close()

    def kept(self) -> set[Listen]:
        return set(self._open)

    def drain(self) -> None:
        for found in self._open.values():
            found.drain()

    async def close(self) -> None:
        """End everything. Idempotent."""
        leaving = list(self._leaving)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        found, self._open = list(self._open.values()), {}
        await asyncio.gather(*(each.close() for each in found))
