"""What a soak stands on: edges that can be killed, a gateway before them, clients of each version, all in one process.

Edges are inbound rims of ours with an origin that speaks by the clock; clients are outbound rims. A request's target says
what its answer shall be, `/s/NUMBER/CHUNKS/SIZE/GAP_MS`, so that both ends know every byte beforehand.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from config.model import Config, Edge, Listen, Pool, Probe, Proxy, Retry, Tickets
from headrace.lab.ca import ThrowAwayCa, issue
from proxy.io.edges import EdgeSet
from proxy.io.gateway import Gateway
from proxy.io.inbound_quic import QuicListener, listen_quic
from proxy.io.inbound_tcp import TcpListener, bind, listen_tcp
from proxy.io.outbound_h1 import H1EdgeConnection
from proxy.io.outbound_h2 import H2EdgeConnection
from proxy.io.outbound_quic import QuicSessions, dial_quic
from proxy.io.rims import EdgeConnection, InboundConnection, Limits, Origin
from proxy.messages import Abort, Leg, NullReceiver, RequestHead, ResponseHead
from proxy.waterfall import RequestRecord
from resolver.io.clock import now

VERSIONS = ("h1", "h2", "h3")
PAIRS = [(down, up) for down in VERSIONS for up in VERSIONS]
STREAMS_EACH = 100  # of an h2 or h3 client connection; the gateway allows 256


def piece(number: int, index: int, size: int) -> bytes:
    """The chunk that the origin sends: another one for every stream and place."""
    return (b"%d.%d;" % (number, index) * (size // 4 + 1))[:size]


class Speaking(NullReceiver):
    """One answer of the origin: the head at once, then a chunk each gap; silent as soon as its client is gone."""

    def __init__(self, leg: Leg, head: RequestHead, living: set[Speaking]) -> None:
        _, _, number, chunks, size, gap = head.target.split(b"/")
        self._leg, self._living = leg, living
        self._number, self._chunks, self._size, self._gap_s = int(number), int(chunks), int(size), int(gap) / 1000
        self._index, self._full = 0, False
        self._timer: asyncio.TimerHandle | None = None
        living.add(self)
        leg.receiver = self
        if head.length == 0:
            self.on_end()

    def on_end(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._gap_s, self._begin)

    def on_abort(self, abort: Abort) -> None:
        self._over()

    def _begin(self) -> None:
        self._leg.head(ResponseHead(200, [(b"content-type", b"application/octet-stream")]))
        self._speak()

    def _speak(self) -> None:
        if self._index == self._chunks:
            self._leg.end()
            self._over()
            return
        self._leg.data(piece(self._number, self._index, self._size))
        self._index += 1
        self._timer = asyncio.get_running_loop().call_later(self._gap_s, self._speak)

    def _over(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._living.discard(self)


class KillableEdge:
    """One edge of one version on a port of its own; `kill` resets everything it holds, `start` brings it back."""

    def __init__(self, version: str, name: str, ca: ThrowAwayCa, host: str = "127.0.0.1") -> None:
        self.version, self.name, self.host, self.port = version, name, host, 0
        self.limits = Limits(max_streams=1000)
        self.living: set[Speaking] = set()
        self.requests = 0
        self._ca = ca
        self.connections: set[InboundConnection] = set()
        self._listener: TcpListener | QuicListener | None = None

    def shortcut(self, head: RequestHead, origin: Origin) -> None:
        return None

    def on_request(self, leg: Leg, head: RequestHead, origin: Origin) -> None:
        self.requests += 1
        Speaking(leg, head, self.living)

    def on_connected(self, connection: InboundConnection) -> bool:
        self.connections.add(connection)
        return True

    def on_disconnected(self, connection: InboundConnection) -> None:
        self.connections.discard(connection)

    async def start(self) -> None:
        self._listener = await listen(self.version, self.port, self, self._ca, self.host)
        self.port = self._listener.address[1]

    def kill(self) -> None:
        assert self._listener is not None
        self._listener.close()
        for connection in list(self.connections):
            connection.close_now()

    def config(self) -> Edge:
        schemes = {"h1": "http", "h2": "https", "h3": "h3"}
        return Edge(
            id=self.name,
            scheme=schemes[self.version],  # type: ignore[arg-type]
            host="localhost",
            port=self.port,
            protocol=self.version,  # type: ignore[arg-type]
            addresses=(self.host,),
            ca_file="" if self.version == "h1" else str(self._ca.ca_file),
            max_active=100_000,
        )


async def listen(
    version: str, port: int, service: Gateway | KillableEdge, ca: ThrowAwayCa, host: str = "127.0.0.1"
) -> TcpListener | QuicListener:
    place = Listen({"h1": "http", "h2": "https", "h3": "h3"}[version], host, port)
    if version == "h3":
        cert, key = str(ca.cert_file), str(ca.key_file)
        return await listen_quic(place, service, cert_file=cert, key_file=key, tickets=Tickets())
    tls = ca.server_context(["h2", "http/1.1"]) if version == "h2" else None
    return await listen_tcp(place, service, tls=tls, sock=bind(place))


class Clients:
    """Connections of one version to the gateway, shared by streams as far as the version shares."""

    def __init__(self, version: str, port: int, ca: ThrowAwayCa) -> None:
        self.version = version
        self._port, self._ca = port, ca
        self._context = ca.client_context(["h2"])
        self._sessions = QuicSessions()
        self._open: list[EdgeConnection] = []
        self._dialling = asyncio.Lock()

    async def connection(self) -> EdgeConnection:
        """One with room; callers open a leg on it before they await again."""
        each = 1 if self.version == "h1" else STREAMS_EACH
        async with self._dialling:
            self._open = [connection for connection in self._open if not connection.closed]
            for connection in self._open:
                if connection.room > 0 and connection.active < each:
                    return connection
            made = await self._dial()
            self._open.append(made)
            return made

    async def _dial(self) -> EdgeConnection:
        loop = asyncio.get_running_loop()
        if self.version == "h1":
            return (await loop.create_connection(H1EdgeConnection, "127.0.0.1", self._port))[1]
        if self.version == "h2":
            context, name = self._context, "localhost"
            _, protocol = await loop.create_connection(
                H2EdgeConnection, "127.0.0.1", self._port, ssl=context, server_hostname=name
            )
            return cast(EdgeConnection, protocol)
        ca_file = str(self._ca.ca_file)
        return await dial_quic(
            "127.0.0.1", self._port, server_name="localhost", ca_file=ca_file, timeout_s=5, sessions=self._sessions
        )

    def close(self) -> None:
        for connection in self._open:
            connection.close()
        self._open.clear()


@dataclass
class Stage:
    gateway: Gateway
    edge_set: EdgeSet
    edges: list[KillableEdge]
    clients: dict[str, Clients]
    pools: tuple[Pool, ...]
    records: list[RequestRecord] = field(default_factory=list)

    def rest(self) -> None:
        """Let go of every connection, warm ones to edges included, and of all that is known of the edges."""
        for clients in self.clients.values():
            clients.close()
        self.edge_set.apply(())

    def resume(self) -> None:
        self.edge_set.apply(self.pools)

    @property
    def is_quiet(self) -> bool:
        busy = self.gateway.active or self.gateway.connections or self.edge_set.views()
        return not busy and not any(edge.living or edge.connections for edge in self.edges)


class NoResolver:
    """Every edge has an address of its own."""

    async def endpoints(self, host: str, port: int) -> None:
        raise AssertionError(f"looked up {host}")


@asynccontextmanager
async def staged(folder: Path, seed: int) -> AsyncIterator[Stage]:
    """Two edges for each version behind one gateway."""
    ca = issue(folder, ["localhost", "127.0.0.1"])
    edges = [KillableEdge(version, f"{version}-{letter}", ca) for version in VERSIONS for letter in "ab"]
    for edge in edges:
        await edge.start()
    edge_set = EdgeSet(resolver=NoResolver(), clock=now, rng=random.Random(seed))  # type: ignore[arg-type]
    records: list[RequestRecord] = []
    gateway = Gateway(edges=edge_set, resolver=None, doh=None, clock=now, record=records.append)  # type: ignore[arg-type]
    pools = tuple(
        Pool(
            version,
            tuple(edge.config() for edge in edges if edge.version == version),
            hosts=(f"{version}.localhost",),
            keep_warm=0,
            probe=Probe(interval_s=1.0, timeout_s=1.0),
            retry=Retry(attempts=2),
        )
        for version in VERSIONS
    )
    gateway.apply(Config(state_dir=folder, pools=pools, proxy=Proxy()))
    edge_set.apply(pools)
    edge_set.start()
    listeners = {version: await listen(version, 0, gateway, ca) for version in VERSIONS}
    clients = {version: Clients(version, listener.address[1], ca) for version, listener in listeners.items()}
    try:
        yield Stage(gateway, edge_set, edges, clients, pools, records)
    finally:
        for each in clients.values():
            each.close()
        gateway.abort_all()
        await edge_set.close()
        for edge in edges:
            edge.kill()
        for listener in listeners.values():
            listener.close()
        await asyncio.sleep(0.05)  # transports report their loss on the next turns
