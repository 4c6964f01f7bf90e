"""Which connection a WebSocket gets: h2 or h3 where the edge said that it takes extended CONNECTs, h1 anywhere else."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from config.model import Edge, Listen, Tickets
from headrace.lab.ca import ThrowAwayCa
from proxy.io.dial import Rims
from proxy.io.inbound_quic import listen_quic
from proxy.io.inbound_tcp import listen_tcp
from proxy.io.outbound import EdgeConnections
from proxy.messages import RequestHead
from proxy.reach import Reach
from resolver.io.clock import now
from tests.peers import h3peers
from tests.peers.edgepeer import Names, wait_for_leg
from tests.peers.fakeleg import Recorder
from tests.peers.ports import free_port
from tests.peers.services import ByHand
from tests.proxy.h3.exchanges import Older

WEBSOCKET = RequestHead(b"GET", b"/", b"https", b"localhost", [(b"sec-websocket-version", b"13")], 0, b"websocket")


@asynccontextmanager
async def edge(ca: ThrowAwayCa, protocol: Any, port: int = 0) -> AsyncIterator[tuple[ByHand, EdgeConnections]]:
    service = ByHand()
    tls: ssl.SSLContext = ca.server_context(["h2", "http/1.1"])
    listener = await listen_tcp(Listen("https", "127.0.0.1", port), service, tls=tls)
    config = Edge(
        "e",
        "https",
        "localhost",
        listener.address[1],
        protocol=protocol,
        ca_file=str(ca.ca_file),
        addresses=("127.0.0.1",),
    )
    pool = EdgeConnections(config, resolver=Names(), reach=Reach(), clock=now, rims=Rims(), connect_s=30)
    try:
        yield service, pool
    finally:
        await pool.close()
        listener.close()
        for connection in list(service.connections):
            connection.close_now()
        await asyncio.sleep(0.01)


async def version_of_websocket(service: ByHand, pool: EdgeConnections, *, fresh: bool = False) -> str:
    leg, marks = await wait_for_leg(pool, upgrade=b"websocket", fresh=fresh).leg()
    leg.receiver = Recorder()
    leg.head(WEBSOCKET)
    arrived = await service.arrived()
    assert arrived.head.protocol == b"websocket"
    assert arrived.origin.version == marks.version == leg.version
    return marks.version


async def request(service: ByHand, pool: EdgeConnections) -> None:
    leg, _ = await wait_for_leg(pool).leg()
    leg.receiver = Recorder()
    leg.head(RequestHead(b"GET", b"/", b"https", b"localhost", []))
    leg.end()
    (await service.arrived()).answer()


async def test_an_edge_of_any_version_is_dialled_for_h1_until_its_h2_connection_has_said_so(ca: ThrowAwayCa) -> None:
    async with edge(ca, "auto") as (service, pool):
        assert await version_of_websocket(service, pool) == "h1"
        await request(service, pool)
        assert await version_of_websocket(service, pool) == "h2"
        assert pool.counts.shared == 1
        # And from then on a new connection is one of h2 too
        assert await version_of_websocket(service, pool, fresh=True) == "h2"
        assert pool.counts.shared == 2


async def test_an_edge_that_is_asked_for_h2_is_dialled_and_waited_for(ca: ThrowAwayCa) -> None:
    async with edge(ca, "h2") as (service, pool):
        versions = await asyncio.gather(*(version_of_websocket(service, pool) for _ in range(5)))
        assert versions == ["h2"] * 5
        assert pool.counts.shared == 1


async def test_an_edge_that_is_asked_for_h3_is_dialled_and_waited_for(ca: ThrowAwayCa) -> None:
    service = ByHand()
    listener = await listen_quic(
        Listen("h3", "127.0.0.1", 0), service, cert_file=str(ca.cert_file), key_file=str(ca.key_file), tickets=Tickets()
    )
    config = Edge("e", "h3", "localhost", listener.address[1], ca_file=str(ca.ca_file), addresses=("127.0.0.1",))
    pool = EdgeConnections(config, resolver=Names(), reach=Reach(), clock=now, rims=Rims(), connect_s=30)
    try:
        versions = await asyncio.gather(*(version_of_websocket(service, pool) for _ in range(5)))
        assert versions == ["h3"] * 5
        assert pool.counts.shared == 1
    finally:
        await pool.close()
        listener.close()
        await asyncio.sleep(0.01)


async def test_an_h3_edge_without_extended_connect_is_dialled_for_h1(
    ca: ThrowAwayCa, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(h3peers, "H3Connection", Older)
    pem = tmp_path / "both.pem"
    pem.write_bytes(ca.cert_file.read_bytes() + ca.key_file.read_bytes())
    older = h3peers.Server(str(pem))
    older.wanted_port = free_port()
    async with older, edge(ca, "h3", port=older.wanted_port) as (service, pool):
        assert await version_of_websocket(service, pool) == "h1"
        assert await version_of_websocket(service, pool) == "h1"  # and is not asked again
        assert len(older.handshakes) == 1


async def test_an_edge_that_is_asked_for_h1_gets_h1(ca: ThrowAwayCa) -> None:
    async with edge(ca, "h1") as (service, pool):
        assert await version_of_websocket(service, pool) == "h1"


async def test_another_upgrade_never_goes_over_h2(ca: ThrowAwayCa) -> None:
    async with edge(ca, "auto") as (service, pool):
        await request(service, pool)
        _, marks = await wait_for_leg(pool, upgrade=b"made-up").leg()
        assert marks.version == "h1"


async def test_who_waits_for_settings_that_never_come_is_told_in_time(ca: ThrowAwayCa) -> None:
    class Mute(asyncio.Protocol):
        """A server that takes the connection and says nothing."""

    server = await asyncio.get_running_loop().create_server(Mute, "127.0.0.1", 0, ssl=ca.server_context(["h2"]))
    port = server.sockets[0].getsockname()[1]
    config = Edge("e", "https", "localhost", port, protocol="h2", ca_file=str(ca.ca_file), addresses=("127.0.0.1",))
    pool = EdgeConnections(config, resolver=Names(), reach=Reach(), clock=now, rims=Rims(), connect_s=0.3)
    try:
        abort = await wait_for_leg(pool, upgrade=b"websocket").abort()
        assert abort.unprocessed
        assert "0.3 s" in abort.detail
    finally:
        await pool.close()
        server.close()
        await asyncio.sleep(0.01)
