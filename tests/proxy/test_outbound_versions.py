"""Which version a dial ends with: ALPN with a real nginx and hypercorn, and QUIC raced against TCP."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop

from config.model import Edge, Listen, Probe
from headrace.lab.ca import ThrowAwayCa
from headrace.lab.lab import Lab
from proxy.io.dial import Pace, Rims
from proxy.io.inbound_tcp import listen_tcp
from proxy.io.outbound import EdgeConnections
from proxy.io.probes import Prober
from proxy.io.rims import EdgeConnection, Limits
from proxy.messages import Cause, Leg
from proxy.reach import Reach
from tests.patience import eventually, soon, timed
from tests.peers.authority import Authority
from tests.peers.edgepeer import Names, ask, edge_peer, say, wait_for_leg
from tests.peers.fakeleg import FakeLeg
from tests.peers.nginx import needs_nginx, nginx
from tests.peers.ports import free_port
from tests.peers.services import ByHand


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@asynccontextmanager
async def connections(edge: Edge, **options: Any) -> AsyncIterator[EdgeConnections]:
    options = {"resolver": Names(), "reach": Reach(), "clock": time.monotonic, **options}
    pool = EdgeConnections(edge, **options)
    try:
        yield pool
    finally:
        await pool.close()


def serving(folder: Path, authority: Authority, *, h2: bool, limit: int = 1000) -> AbstractAsyncContextManager[int]:
    pem, server = authority.issue(), f'keepalive_requests {limit}; location / {{ return 200 "nginx"; }}'
    return nginx(folder, pem, pem, server, h2=h2)


def at(port: int, authority: Authority, protocol: Any = "auto", **facts: Any) -> Edge:
    return Edge(
        "e", "https", "localhost", port, protocol=protocol, ca_file=authority.ca_file, addresses=("127.0.0.1",), **facts
    )


# ---------------------------------------------------------------------------------------------- ALPN


@needs_nginx
async def test_auto_shares_one_h2_connection_among_a_hundred_requests(authority: Authority, tmp_path: Path) -> None:
    async with serving(tmp_path, authority, h2=True) as port, connections(at(port, authority)) as pool:
        answers = await asyncio.gather(*(ask(pool) for _ in range(100)))
        assert {hearing.body for hearing, _ in answers} == {b"nginx"}
        assert {marks.version for _, marks in answers} == {"h2"}
        assert [marks.reused for _, marks in answers].count(False) == 1
        assert (pool.counts.shared, pool.counts.idle) == (1, 0)


@needs_nginx
async def test_after_a_network_change_a_connection_with_work_gets_no_more(authority: Authority, tmp_path: Path) -> None:
    async with serving(tmp_path, authority, h2=True) as port, connections(at(port, authority)) as pool:
        await ask(pool)
        leg, marks = await wait_for_leg(pool).leg()
        assert marks.reused
        working = say(leg)
        pool.drop_idle()
        _, marks = await ask(pool)
        assert not marks.reused
        assert await soon(working.over) is None
        assert working.body == b"nginx"


async def test_hundreds_that_wait_for_one_connection_are_served_in_their_order(ca: ThrowAwayCa) -> None:
    service, asked = ByHand(Limits(max_streams=1000)), []
    service.on_exchange = lambda exchange: exchange.answer()
    listener = await listen_tcp(Listen("https", "127.0.0.1", 0), service, tls=ca.server_context(["h2"]))
    edge = Edge(
        "e", "https", "localhost", listener.address[1], protocol="h2", ca_file=str(ca.ca_file), addresses=("127.0.0.1",)
    )

    async def one(number: int) -> None:
        leg, _ = await wait_for_leg(pool).leg()
        asked.append(number)
        hearing = say(leg)
        assert await soon(hearing.over) is None

    async with connections(edge) as pool:
        await asyncio.gather(*(one(number) for number in range(900)))
        assert asked == list(range(900))
    listener.close()
    await eventually(lambda: not service.connections)


@needs_nginx
async def test_auto_falls_to_h1_where_alpn_has_no_h2(authority: Authority, tmp_path: Path) -> None:
    async with serving(tmp_path, authority, h2=False) as port, connections(at(port, authority)) as pool:
        answers = await asyncio.gather(*(ask(pool) for _ in range(20)))
        assert {marks.version for _, marks in answers} == {"h1"}


@needs_nginx
async def test_h2_that_the_edge_does_not_offer_is_told(authority: Authority, tmp_path: Path) -> None:
    async with serving(tmp_path, authority, h2=False) as port, connections(at(port, authority, "h2")) as pool:
        abort = await wait_for_leg(pool).abort()
    assert abort.cause is Cause.BROKEN or "alpn" in abort.detail
    assert abort.detail.startswith(f"tls 127.0.0.1:{port}: ")


@needs_nginx
async def test_a_tunnel_gets_h1_from_an_edge_that_speaks_h2(authority: Authority, tmp_path: Path) -> None:
    async with serving(tmp_path, authority, h2=True) as port, connections(at(port, authority)) as pool:
        await ask(pool)
        leg, marks = await wait_for_leg(pool, upgrade=b"websocket").leg()
        assert (marks.version, pool.version) == ("h1", "h2")
        assert await say(leg).over is None


@needs_nginx
@pytest.mark.parametrize("fresh", [False, True])
async def test_a_websocket_of_an_h2_edge_without_extended_connect_is_dialled_again_for_h1(
    authority: Authority, tmp_path: Path, fresh: bool
) -> None:
    # Given a server whose SETTINGS do not offer it (RFC 8441 3), and an edge that is asked for h2
    async with serving(tmp_path, authority, h2=True) as port, connections(at(port, authority, "h2")) as pool:
        waits = [wait_for_leg(pool, upgrade=b"websocket", fresh=fresh) for _ in range(3)]
        assert [(await wait.leg())[1].version for wait in waits] == ["h1"] * 3
        assert pool.counts.shared == 1
        # Then it is not waited for again
        assert (await wait_for_leg(pool, upgrade=b"websocket", fresh=True).leg())[1].version == "h1"
        assert pool.counts.shared == 1


@needs_nginx
async def test_h2_connections_resume_too(authority: Authority, tmp_path: Path) -> None:
    async with serving(tmp_path, authority, h2=True) as port, connections(at(port, authority, "h2")) as pool:
        await ask(pool)
        leg, marks = await wait_for_leg(pool, fresh=True).leg()
        assert await say(leg).over is None
        assert marks.resumed


@needs_nginx
async def test_goaway_after_so_many_requests_loses_none_when_retried_as_told(
    authority: Authority, tmp_path: Path
) -> None:
    async with serving(tmp_path, authority, h2=True, limit=10) as port, connections(at(port, authority)) as pool:
        for _ in range(35):
            hearing, _ = await ask(pool)
            assert hearing.body == b"nginx"
        await eventually(lambda: pool.counts.shared <= 1)


@needs_nginx
async def test_an_edge_that_is_killed_is_refused_and_found_again(authority: Authority, tmp_path: Path) -> None:
    async with connections(at(1, authority)):
        pass
    async with serving(tmp_path, authority, h2=True) as port:
        edge = at(port, authority)
        async with connections(edge) as pool:
            await ask(pool)
    async with connections(edge) as pool:
        assert (await wait_for_leg(pool).abort()).detail == f"connect 127.0.0.1:{port}: connection refused"


@needs_nginx
@pytest.mark.parametrize(
    "scenario",
    [
        test_auto_shares_one_h2_connection_among_a_hundred_requests,
        test_a_tunnel_gets_h1_from_an_edge_that_speaks_h2,
        test_h2_connections_resume_too,
    ],
)
def test_the_same_on_uvloop(
    authority: Authority, tmp_path: Path, scenario: Callable[[Authority, Path], Coroutine[None, None, None]]
) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario(authority, tmp_path))


# ---------------------------------------------------------------------------------------------- QUIC against TCP


class FakeH3:
    """An h3 connection as the pool sees it."""

    version = "h3"

    def __init__(self) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.closed = False
        self.active = 0
        self.room = 100

    def open(self) -> Leg:
        self.active += 1
        return FakeLeg(version="h3", reused=self.active > 1)

    def close(self) -> None:
        self.closed = True
        self.on_change()


class FakeQuic:
    """Dials QUIC as the script says: once `answer` is set, with a connection or a failure."""

    def __init__(self, failure: OSError | None = None, *, silent: bool = False) -> None:
        self.failure = failure
        self.answer = asyncio.Event()
        self.dialled = 0
        if not silent:
            self.answer.set()

    async def __call__(self, address: str, port: int, edge: Edge, timeout_s: float) -> EdgeConnection:
        self.dialled += 1
        await self.answer.wait()
        if self.failure is not None:
            raise self.failure
        return FakeH3()


LONG_HEAD_START = Pace(quic_head_start_s=600.0)
"""Only what happens leads to TCP, not the time that passes."""
H3 = {"resolver": Names(alpn=("h3", "h2"), localhost=["127.0.0.1"])}


def named(port: int, authority: Authority) -> Edge:
    return Edge("e", "https", "localhost", port, ca_file=authority.ca_file)


async def test_quic_that_answers_in_its_head_start_needs_no_tcp(authority: Authority) -> None:
    async with (
        edge_peer(tls=authority.server_context()) as peer,
        connections(named(peer.port, authority), rims=Rims(quic=FakeQuic()), pace=LONG_HEAD_START, **H3) as pool,
    ):
        _, marks = await wait_for_leg(pool).leg()
        assert marks.version == "h3" and peer.accepted == 0


@timed
async def test_a_udp_black_hole_costs_the_head_start_once(authority: Authority) -> None:
    quic = FakeQuic(TimeoutError("no answer"), silent=True)
    reach = Reach()
    async with edge_peer(tls=authority.server_context()) as peer:
        edge = named(peer.port, authority)
        async with connections(edge, rims=Rims(quic=quic), reach=reach, **H3) as pool:
            started = time.monotonic()
            _, marks = await wait_for_leg(pool).leg()
            took = time.monotonic() - started
            assert marks.version == "h1" and took >= Pace().quic_head_start_s
            assert took - marks.tls_s - marks.connect_s < 0.6, (
                "P18: TCP's own time and 300 ms; and the TLS files are read, once"
            )
            await wait_for_leg(pool, fresh=True).leg()
            assert quic.dialled == 1, "a race in progress is not begun a second time"
            quic.answer.set()
            await eventually(lambda: reach.quic_blocked("localhost", peer.port, time.monotonic()))
            await wait_for_leg(pool, fresh=True).leg()
            assert quic.dialled == 1


async def test_a_refused_udp_port_turns_to_tcp_at_once(authority: Authority) -> None:
    quic = FakeQuic(ConnectionRefusedError(111, "refused"))
    async with (
        edge_peer(tls=authority.server_context()) as peer,
        connections(named(peer.port, authority), pace=LONG_HEAD_START, rims=Rims(quic=quic), **H3) as pool,
    ):
        _, marks = await wait_for_leg(pool).leg()
        assert marks.version == "h1"


async def test_a_quic_that_comes_late_is_kept_and_serves_what_follows(authority: Authority) -> None:
    quic = FakeQuic(silent=True)
    async with (
        edge_peer(tls=authority.server_context()) as peer,
        connections(named(peer.port, authority), rims=Rims(quic=quic), **H3) as pool,
    ):
        _, first = await wait_for_leg(pool).leg()
        quic.answer.set()
        await eventually(lambda: pool.counts.shared == 1)
        _, second = await wait_for_leg(pool).leg()
        assert (first.version, second.version, second.reused) == ("h1", "h3", True)


async def test_after_a_block_the_next_try_gives_quic_no_head_start(authority: Authority) -> None:
    reach = Reach()
    async with edge_peer(tls=authority.server_context()) as peer:
        reach.quic_failed("localhost", peer.port, time.monotonic() - 301.0)
        async with connections(
            named(peer.port, authority), pace=LONG_HEAD_START, rims=Rims(quic=FakeQuic(silent=True)), reach=reach, **H3
        ) as pool:
            _, marks = await wait_for_leg(pool).leg()
            assert marks.version == "h1"


async def test_when_both_fail_tcp_says_why_and_quic_is_not_blamed(authority: Authority) -> None:
    port, reach = free_port(), Reach()
    quic = FakeQuic(TimeoutError("no answer"))
    async with connections(named(port, authority), rims=Rims(quic=quic), reach=reach, **H3) as pool:
        assert (await wait_for_leg(pool).abort()).detail == f"connect 127.0.0.1:{port}: connection refused"
    assert not reach.quic_blocked("localhost", port, time.monotonic())


async def test_h3_alone_never_falls_to_tcp(authority: Authority) -> None:
    quic = FakeQuic(TimeoutError("no answer"))
    async with edge_peer(tls=authority.server_context()) as peer:
        edge = at(peer.port, authority, "h3")
        async with connections(edge, rims=Rims(quic=quic)) as pool:
            abort = await wait_for_leg(pool).abort()
        assert abort.detail == f"quic 127.0.0.1:{peer.port}: no answer in time"
        assert peer.accepted == 0


async def test_an_alt_svc_is_followed_by_the_next_dial(authority: Authority) -> None:
    reach = Reach()
    async with (
        edge_peer(tls=authority.server_context()) as peer,
        connections(at(peer.port, authority), rims=Rims(quic=FakeQuic()), reach=reach, pace=LONG_HEAD_START) as pool,
    ):
        _, first = await wait_for_leg(pool).leg()
        reach.heard_alt_svc("localhost", peer.port, b'h3=":443"; ma=60', time.monotonic())
        _, second = await wait_for_leg(pool, fresh=True).leg()
        assert (first.version, second.version) == ("h1", "h3")


async def test_closing_in_the_middle_of_a_race_leaves_nothing_behind(authority: Authority) -> None:
    async with (
        edge_peer(tls=authority.server_context()) as peer,
        connections(named(peer.port, authority), rims=Rims(quic=FakeQuic(silent=True)), **H3) as pool,
    ):
        wait = wait_for_leg(pool)
        await asyncio.sleep(0.05)
        await pool.close()
        assert (await wait.abort()).unprocessed
    assert [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


# ---------------------------------------------------------------------------------------------- real QUIC


async def test_real_quic_wins_against_real_tcp_and_its_probe_measures_tls() -> None:
    async with Lab(("e",)) as lab:
        peer = lab.edges["e"]
        names = Names(alpn=("h3", "h2"), **{peer.host: ["127.0.0.1"]})
        edge = Edge("e", "https", peer.host, peer.port, ca_file=str(lab.ca_file))
        async with connections(edge, resolver=names, pace=LONG_HEAD_START) as pool:
            hearing, marks = await ask(pool, b"/v1/models")
            assert marks.version == "h3" and marks.tls_s > 0
            assert hearing.head is not None and hearing.head.status == 200
            _, again = await ask(pool, b"/v1/models")
            assert again.reused and peer.accepted == 0
        alone = replace(edge, protocol="h3")
        result = await Prober(alone, resolver=names, reach=Reach(), clock=time.monotonic).probe(
            Probe(path="/v1/models", timeout_s=30.0)
        )
        assert (result.ok, result.version, result.rtt_s) == (True, "h3", None)
        assert result.tls_s is not None and result.tls_s > 0


async def test_a_udp_port_that_really_refuses_turns_to_tcp_at_once(authority: Authority) -> None:
    async with (
        edge_peer(tls=authority.server_context()) as peer,  # nobody listens on the UDP port of that number
        connections(named(peer.port, authority), pace=LONG_HEAD_START, **H3) as pool,
    ):
        _, marks = await wait_for_leg(pool).leg()
        assert marks.version == "h1"


@timed
async def test_a_udp_port_that_really_is_silent_costs_its_head_start(authority: Authority) -> None:
    reach = Reach()
    async with edge_peer(tls=authority.server_context()) as peer:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as hole:
            hole.bind(("127.0.0.1", peer.port))
            pace = Pace(quic_timeout_s=0.6)
            async with connections(named(peer.port, authority), reach=reach, pace=pace, **H3) as pool:
                started = time.monotonic()
                _, marks = await wait_for_leg(pool).leg()
                assert marks.version == "h1"
                assert time.monotonic() - started - marks.tls_s - marks.connect_s < 0.6
                await eventually(lambda: reach.quic_blocked("localhost", peer.port, time.monotonic()))
