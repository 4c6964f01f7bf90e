"""One gateway between any client version and any edge version, in one process over real sockets.

The client is an outbound rim of ours, the origin an inbound rim with a service that the test answers by hand: both ends
speak in legs, so one test is written once for nine pairs. That a rim is right by itself is tested elsewhere, against other
implementations.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import cast

from config.model import Config, Edge, Listen, Pool, Probe, Proxy, Tickets, Timeouts
from headrace.lab.ca import ThrowAwayCa
from proxy.io.edges import EdgeSet
from proxy.io.gateway import Gateway
from proxy.io.inbound_tcp import listen_tcp
from proxy.io.outbound_h1 import H1EdgeConnection
from proxy.io.rims import EdgeConnection, Service
from proxy.messages import Leg, RequestHead
from proxy.waterfall import RequestRecord
from resolver.io.clock import now
from tests.patience import eventually
from tests.peers.heard import Heard
from tests.peers.services import ByHand

VERSIONS = ("h1", "h2", "h3")
PAIRS = [(down, up) for down in VERSIONS for up in VERSIONS]


class Matrix:
    """A gateway with one pool for each edge version; `ask` sends a request as a client of any version."""

    def __init__(
        self, origin: ByHand, gateway: Gateway, edges: EdgeSet, ports: dict[str, int], ca: ThrowAwayCa
    ) -> None:
        self.origin, self.gateway, self.edges = origin, gateway, edges
        self.records: list[RequestRecord] = []
        self._ports = ports
        self._ca = ca
        self._clients: list[EdgeConnection] = []

    def port(self, version: str) -> int:
        """The gateway's, for a client of another's making."""
        return self._ports[version]

    @property
    def ca_file(self) -> str:
        return str(self._ca.ca_file)

    async def client(self, version: str) -> EdgeConnection:
        loop = asyncio.get_running_loop()
        port = self._ports[version]
        connection: EdgeConnection
        if version == "h1":
            _, connection = await loop.create_connection(H1EdgeConnection, "127.0.0.1", port)
        elif version == "h2":
            from proxy.io.outbound_h2 import H2EdgeConnection

            context = self._ca.client_context(["h2"])
            _, protocol = await loop.create_connection(
                H2EdgeConnection, "127.0.0.1", port, ssl=context, server_hostname="localhost"
            )
            connection = cast(EdgeConnection, protocol)
        else:
            from proxy.io.outbound_quic import QuicSessions, dial_quic

            connection = await dial_quic(
                "127.0.0.1",
                port,
                server_name="localhost",
                ca_file=str(self._ca.ca_file),
                timeout_s=30,
                sessions=QuicSessions(),
            )
        self._clients.append(connection)
        return connection

    def ask(self, client: EdgeConnection, up: str, head: RequestHead | None = None) -> tuple[Leg, Heard]:
        """Send a request head to the pool of an edge version."""
        heard, leg = Heard(), client.open()
        leg.receiver = heard
        head = head or RequestHead(b"POST", b"/v1/x", b"https", b"", [], length=None)
        head.authority = f"{up}.localhost".encode()
        head.scheme = b"http" if client.version == "h1" else b"https"
        leg.head(head)
        return leg, heard

    @property
    def open_clients(self) -> list[EdgeConnection]:
        return [client for client in self._clients if not client.closed]

    def close_clients(self) -> None:
        for client in self._clients:
            client.close()


class NoResolver:
    """Every edge has an address of its own."""

    async def endpoints(self, host: str, port: int) -> None:
        raise AssertionError(f"looked up {host}")


@asynccontextmanager
async def matrix(
    ca: ThrowAwayCa, *, timeouts: Timeouts | None = None, proxy: Proxy | None = None
) -> AsyncIterator[Matrix]:
    origin = ByHand()
    async with AsyncExitStack() as stack:
        origin_ports = await _listen_all(origin, ca, stack)
        edges = EdgeSet(resolver=NoResolver(), clock=now, rng=random.Random(7))
        records: list[RequestRecord] = []
        gateway = Gateway(
            edges=edges, resolver=None, doh=None, clock=now, record=lambda one: records.append(one.whole())
        )  # type: ignore[arg-type]
        pools = tuple(_pool(version, origin_ports[version], ca, timeouts or Timeouts()) for version in VERSIONS)
        whole = Config(state_dir=Path("/nonexistent"), pools=pools, proxy=proxy or Proxy())
        gateway.apply(whole)
        edges.apply(pools)
        ports = await _listen_all(gateway, ca, stack)
        made = Matrix(origin, gateway, edges, ports, ca)
        made.records = records
        try:
            yield made
        finally:
            made.close_clients()
            gateway.abort_all()
            await edges.close()
            for connection in list(origin.connections):
                connection.close_now()
            await eventually(lambda: not (origin.connections or gateway.connections or made.open_clients))


async def _listen_all(service: Service, ca: ThrowAwayCa, stack: AsyncExitStack) -> dict[str, int]:
    from proxy.io.inbound_quic import listen_quic

    plain = await listen_tcp(Listen("http", "127.0.0.1", 0), service, tls=None)
    tls: ssl.SSLContext = ca.server_context(["h2", "http/1.1"])
    secure = await listen_tcp(Listen("https", "127.0.0.1", 0), service, tls=tls)
    quic = await listen_quic(
        Listen("h3", "127.0.0.1", 0), service, cert_file=str(ca.cert_file), key_file=str(ca.key_file), tickets=Tickets()
    )
    for listener in (plain, secure, quic):
        stack.callback(listener.close)
    return {"h1": plain.address[1], "h2": secure.address[1], "h3": quic.address[1]}


def _pool(version: str, port: int, ca: ThrowAwayCa, timeouts: Timeouts) -> Pool:
    edge = Edge(
        id=f"{version}-edge",
        scheme={"h1": "http", "h2": "https", "h3": "h3"}[version],  # type: ignore[arg-type]
        host="localhost",
        port=port,
        protocol="auto" if version == "h1" else version,  # type: ignore[arg-type]
        addresses=("127.0.0.1",),
        ca_file=str(ca.ca_file) if version != "h1" else "",
    )
    return Pool(version, (edge,), hosts=(f"{version}.localhost",), keep_warm=0, probe=Probe(), timeouts=timeouts)
