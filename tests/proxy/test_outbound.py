"""Dialling an edge and holding its connections, over real sockets and real TLS."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from config.model import Edge
from proxy.io.dial import Pace
from proxy.io.held import PoolLimits, clipped
from proxy.io.outbound import EdgeConnections, PoolCounts
from proxy.io.rims import DialMarks
from proxy.messages import Cause, Party, Stage
from proxy.reach import Reach
from tests.patience import eventually, promptly, soon
from tests.peers.authority import Authority
from tests.peers.edgepeer import Names, ask, edge_peer, ok, say, silent_port, wait_for_leg
from tests.peers.ports import free_port, needs_ipv6, refusing_port


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


NEVER_STEPS = Pace(step_s=600.0)
"""Only what happens leads to the next address, not the time that passes."""
REST_S = 0.2


def plain(port: int, host: str = "127.0.0.1", **facts: Any) -> Edge:
    return Edge("e", "http", host, port, **facts)


@asynccontextmanager
async def connections(
    edge: Edge, names: Names | None = None, reach: Reach | None = None, **options: Any
) -> AsyncIterator[EdgeConnections]:
    pool = EdgeConnections(edge, resolver=names or Names(), reach=reach or Reach(), clock=time.monotonic, **options)
    try:
        yield pool
    finally:
        await pool.close()


# ---------------------------------------------------------------------------------------------- reuse


async def test_a_warm_connection_is_given_inside_open_and_dials_nothing() -> None:
    async with edge_peer() as peer, connections(plain(peer.port)) as pool:
        _, first = await ask(pool)
        assert (first.reused, first.version, first.address) == (False, "h1", "127.0.0.1")
        assert first.connect_s > 0.0
        warm = wait_for_leg(pool)
        assert warm.at_once
        leg, marks = await warm.leg()
        assert marks == DialMarks("h1", "127.0.0.1", reused=True)
        assert leg.reused
        await say(leg).over
        assert peer.accepted == 1


async def test_the_connection_that_became_idle_last_is_taken_first() -> None:
    async with edge_peer() as peer, connections(plain(peer.port)) as pool:
        legs = [(await wait_for_leg(pool).leg())[0] for _ in range(3)]
        for leg in legs:
            await say(leg).over
        assert pool.counts == PoolCounts(idle=3, shared=0, busy=0, dialling=0, waiting=0)
        for _ in range(5):
            await ask(pool)
        assert sorted(connection.served for connection in peer.connections) == [1, 1, 6]


async def test_a_fresh_opening_takes_no_warm_connection() -> None:
    async with edge_peer() as peer, connections(plain(peer.port)) as pool:
        await ask(pool)
        leg, marks = await wait_for_leg(pool, fresh=True).leg()
        assert not marks.reused and not leg.reused
        await say(leg).over
        assert peer.accepted == 2


async def test_a_connection_that_the_edge_closed_while_idle_is_never_given() -> None:
    async with edge_peer() as peer, connections(plain(peer.port)) as pool:
        await ask(pool)
        peer.close_all()
        await eventually(lambda: pool.counts.idle == 0)
        _, marks = await ask(pool)
        assert not marks.reused


async def test_an_opening_in_line_gets_the_connection_that_becomes_free_first() -> None:
    async with edge_peer() as peer, connections(plain(peer.port)) as pool:
        leg, _ = await wait_for_leg(pool).leg()
        waiting = wait_for_leg(pool)
        hearing = say(leg)
        await hearing.over
        other, _ = await waiting.leg()
        await say(other).over


async def test_the_line_is_first_in_first_out() -> None:
    async with edge_peer() as peer, connections(plain(peer.port)) as pool:
        order: list[int] = []
        waits = [wait_for_leg(pool) for _ in range(5)]
        for n, wait in enumerate(waits):
            wait.result.add_done_callback(lambda _, n=n: order.append(n))
        for wait in waits:
            await say((await wait.leg())[0]).over
        assert order == [0, 1, 2, 3, 4]
        assert peer.accepted == 5


async def test_a_cancelled_opening_hears_nothing_and_its_dial_completes_into_the_pool() -> None:
    async with edge_peer() as peer, connections(plain(peer.port)) as pool:
        gone = wait_for_leg(pool)
        pool.cancel(gone)
        await eventually(lambda: pool.counts.idle == 1)
        assert not gone.at_once
        kept = wait_for_leg(pool)
        assert kept.at_once and peer.accepted == 1
        leg, marks = await kept.leg()
        assert marks.reused, "nobody waited for its dial, and the edge may have closed it since"
        await say(leg).over


async def test_the_line_is_bounded() -> None:
    async with silent_port() as port, connections(plain(port), connect_s=0.3, limits=PoolLimits(waiting=2)) as pool:
        waits = [wait_for_leg(pool) for _ in range(3)]
        assert [wait.at_once for wait in waits] == [False, False, True]
        abort = await waits[2].abort()
        assert (abort.by, abort.cause, abort.unprocessed) == (Party.US, Cause.REFUSED, True)
        await asyncio.gather(*(wait.abort() for wait in waits[:2]))


# ---------------------------------------------------------------------------------------------- idle time


async def test_idle_connections_are_closed_before_the_edge_would() -> None:
    async with edge_peer() as peer, connections(plain(peer.port), limits=PoolLimits(idle_s=0.1)) as pool:
        await ask(pool)
        await peer.until(lambda: not peer.connections)
        assert pool.counts.idle == 0


async def test_a_servers_keep_alive_hint_shortens_the_idle_time() -> None:
    async with edge_peer() as peer, connections(plain(peer.port), limits=PoolLimits(idle_s=600.0)) as pool:
        peer.reply = lambda peer, head: ok(fields=b"keep-alive: timeout=1\r\n")
        await ask(pool)
        started = time.monotonic()
        await peer.until(lambda: not peer.connections)
        assert time.monotonic() - started > 0.3, "not at once; and long before what is the rule without a hint"


async def test_the_number_of_idle_connections_is_bounded() -> None:
    async with edge_peer() as peer, connections(plain(peer.port), limits=PoolLimits(idle=2)) as pool:
        legs = [(await wait_for_leg(pool).leg())[0] for _ in range(4)]
        for leg in legs:
            await say(leg).over
        await peer.until(lambda: len(peer.connections) == 2)
        assert pool.counts.idle == 2


async def test_warm_connections_are_held_and_replaced() -> None:
    async with edge_peer() as peer, connections(plain(peer.port), limits=PoolLimits(warm_pause_s=0.05)) as pool:
        pool.warm(1)
        await eventually(lambda: pool.counts.idle == 1)
        peer.close_all()
        await peer.until(lambda: peer.accepted == 2)
        pool.warm(0)
        await eventually(lambda: pool.counts.idle == 1)
        peer.close_all()
        await eventually(lambda: pool.counts.idle == 0)
        await asyncio.sleep(0.1)
        assert peer.accepted == 2


async def test_an_edge_that_closes_idle_connections_at_once_is_not_dialled_all_day() -> None:
    async with edge_peer() as peer, connections(plain(peer.port)) as pool:
        pool.warm(1)
        for _ in range(5):
            await peer.until(lambda: bool(peer.connections)) if peer.accepted == 0 else None
            peer.close_all()
            await eventually(lambda: pool.counts.idle == 0)
            await asyncio.sleep(0.02)  # time in which it would be dialled again
        assert peer.accepted == 1


async def test_a_retired_edge_closes_idle_ones_and_lets_exchanges_end() -> None:
    async with edge_peer() as peer, connections(plain(peer.port)) as pool:
        await ask(pool)
        busy, _ = await wait_for_leg(pool, fresh=True).leg()
        pool.retire()
        await peer.until(lambda: len(peer.connections) == 1)
        assert (await wait_for_leg(pool).abort()).unprocessed
        assert await say(busy).over is None
        await peer.until(lambda: not peer.connections)
        await eventually(lambda: pool.is_empty)


async def test_close_fails_whoever_waits() -> None:
    async with silent_port() as port, connections(plain(port)) as pool:
        wait = wait_for_leg(pool)
        await asyncio.sleep(0.01)  # the dial has begun
        await pool.close()
        assert (await wait.abort()).cause is Cause.REFUSED
        assert pool.counts.dialling == 0


# ---------------------------------------------------------------------------------------------- failures


async def test_a_refused_connection_names_address_and_reason() -> None:
    with refusing_port() as port:
        async with connections(plain(port)) as pool:
            abort = await wait_for_leg(pool).abort()
    assert (abort.by, abort.stage, abort.cause, abort.unprocessed) == (Party.EDGE, Stage.CONNECT, Cause.LOST, True)
    assert abort.detail == f"connect 127.0.0.1:{port}: connection refused"


async def test_an_unknown_name_is_told_as_such() -> None:
    async with connections(plain(443, "nowhere.test")) as pool:
        assert (await wait_for_leg(pool).abort()).detail == "resolve: no address for nowhere.test: NXDOMAIN"


async def test_the_connect_timeout_covers_the_whole_dial() -> None:
    async with silent_port() as port, connections(plain(port), connect_s=0.3) as pool:
        started = time.monotonic()
        abort = await wait_for_leg(pool).abort()
        assert time.monotonic() - started > 0.25
        assert abort.cause is Cause.TIMED_OUT
        assert abort.detail == f"connect 127.0.0.1:{port}: no answer in 0.3 s"


async def test_each_of_many_waiting_openings_hears_of_a_dead_edge() -> None:
    with refusing_port() as port:
        async with connections(plain(port)) as pool:
            aborts = await asyncio.gather(*(wait_for_leg(pool).abort() for _ in range(200)))
    assert {abort.cause for abort in aborts} == {Cause.LOST}


async def test_a_certificate_of_a_strange_authority_says_what_failed(authority: Authority) -> None:
    async with edge_peer(tls=authority.server_context()) as peer:
        edge = Edge("e", "https", "127.0.0.1", peer.port, protocol="h1", server_name="localhost")
        async with connections(edge) as pool:
            abort = await wait_for_leg(pool).abort()
        assert abort.cause is Cause.BROKEN
        assert abort.detail.startswith(f"tls 127.0.0.1:{peer.port}: certificate verify failed: ")
        assert "unable to get local issuer certificate" in abort.detail


async def test_a_certificate_for_another_name_says_so(authority: Authority) -> None:
    async with edge_peer(tls=authority.server_context()) as peer:
        edge = Edge(
            "e", "https", "127.0.0.1", peer.port, protocol="h1", server_name="api.test", ca_file=authority.ca_file
        )
        async with connections(edge) as pool:
            abort = await wait_for_leg(pool).abort()
        assert "hostname mismatch" in abort.detail and "api.test" in abort.detail


async def test_a_ca_file_that_is_not_there_is_a_failure_of_the_dial_not_of_the_daemon(tmp_path: Path) -> None:
    async with edge_peer() as peer:
        edge = Edge("e", "https", "127.0.0.1", peer.port, ca_file=str(tmp_path / "none.pem"))
        async with connections(edge) as pool:
            abort = await wait_for_leg(pool).abort()
        assert abort.detail == "tls files of edge e: no such file or directory"


async def test_a_peer_that_speaks_no_tls_is_broken_not_hung(authority: Authority) -> None:
    async with edge_peer() as peer:
        peer.reply = lambda peer, head: b"HTTP/1.1 400 plain\r\n\r\n"
        edge = Edge("e", "https", "127.0.0.1", peer.port, protocol="h1", ca_file=authority.ca_file)
        async with connections(edge, connect_s=0.5) as pool:
            abort = await wait_for_leg(pool).abort()
        assert abort.cause in (Cause.BROKEN, Cause.TIMED_OUT)
        assert abort.detail.startswith(f"tls 127.0.0.1:{peer.port}: ")


# ---------------------------------------------------------------------------------------------- TLS


async def test_a_second_connection_resumes_the_session_of_the_first(authority: Authority) -> None:
    async with edge_peer(tls=authority.server_context()) as peer:
        edge = Edge(
            "e", "https", "localhost", peer.port, protocol="h1", ca_file=authority.ca_file, addresses=("127.0.0.1",)
        )
        async with connections(edge) as pool:
            _, first = await ask(pool)
            leg, second = await wait_for_leg(pool, fresh=True).leg()
            await say(leg).over
    assert (first.resumed, second.resumed, peer.resumed) == (False, True, 1)
    assert first.tls_s > 0.0 and first.resolve_s == 0.0


async def test_a_dial_times_its_parts_apart(authority: Authority) -> None:
    async with edge_peer(tls=authority.server_context()) as peer:
        edge = Edge("e", "https", "localhost", peer.port, protocol="h1", ca_file=authority.ca_file)
        async with connections(edge, Names(localhost=["127.0.0.1"])) as pool:
            started = time.monotonic()
            _, marks = await wait_for_leg(pool).leg()
            took = time.monotonic() - started
    assert min(marks.resolve_s, marks.connect_s, marks.tls_s) > 0
    assert marks.resolve_s + marks.connect_s + marks.tls_s <= took


class Slow(ThreadPoolExecutor):
    """Threads that sleep first."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kw: Any) -> Future[Any]:
        def late() -> Any:
            time.sleep(REST_S)
            return fn(*args, **kw)

        return super().submit(late)


async def test_a_tls_context_that_a_dial_waits_for_is_counted_as_tls(authority: Authority) -> None:
    asyncio.get_running_loop().set_default_executor(Slow(1))
    async with edge_peer(tls=authority.server_context()) as peer:
        edge = Edge("e", "https", "localhost", peer.port, protocol="h1", ca_file=authority.ca_file)
        async with connections(edge, Names(localhost=["127.0.0.1"])) as pool:
            _, marks = await wait_for_leg(pool).leg()
    assert marks.tls_s >= REST_S


async def test_what_an_edge_delays_is_counted_to_the_part_that_it_delays(authority: Authority) -> None:
    context = authority.server_context()
    context.sni_callback = lambda *_: time.sleep(REST_S)  # between the client's hello and the server's
    async with edge_peer(tls=context) as peer:
        edge = Edge("e", "https", "localhost", peer.port, protocol="h1", ca_file=authority.ca_file)
        async with connections(edge, Names(localhost=["127.0.0.1"])) as pool:
            started = time.monotonic()
            _, marks = await wait_for_leg(pool).leg()
            took = time.monotonic() - started
    # Then the rest stands in the part of TLS and in no other: they have at most what is left of the whole
    assert marks.tls_s >= REST_S
    assert marks.resolve_s + marks.connect_s <= took - marks.tls_s


def test_who_came_late_to_a_dial_waited_for_its_end_only() -> None:
    whole = DialMarks("h1", "192.0.2.1", resolve_s=0.1, connect_s=0.2, tls_s=0.3)
    late = clipped(whole, 0.4)
    assert (late.resolve_s, late.connect_s, late.tls_s) == pytest.approx((0.0, 0.1, 0.3))
    assert clipped(whole, 9.0) == whole


# ---------------------------------------------------------------------------------------------- addresses


@needs_ipv6
async def test_a_black_hole_of_ipv6_costs_one_step_and_is_remembered() -> None:
    port, both = free_port(), ["::1", "127.0.0.1"]
    edge, names = plain(port, "edge"), Names(edge=both)

    async def first_dial() -> Reach:
        reach = Reach()
        async with connections(edge, names, reach) as pool:
            started = time.monotonic()
            _, marks = await wait_for_leg(pool).leg()
            took = time.monotonic() - started
        assert marks.address == "127.0.0.1"
        assert marks.connect_s <= took - Pace().step_s * 0.99, "the wait for IPv6 is not IPv4's handshake"
        return reach

    async with silent_port("::1", port), edge_peer(port=port):
        reach = await promptly(0.43, first_dial)  # U26: with a round trip of 270 ms that is below 700 ms
        assert reach.order("edge", both, time.monotonic()) == ["127.0.0.1", "::1"]
        async with connections(edge, names, reach, pace=NEVER_STEPS) as pool:
            _, marks = await wait_for_leg(pool).leg()
            assert marks.address == "127.0.0.1"


async def test_a_refused_address_gives_way_to_the_next_one_at_once() -> None:
    async with edge_peer() as peer:
        names = Names(edge=["127.0.0.9", "127.0.0.1"])  # nobody listens on the first
        async with connections(plain(peer.port, "edge"), names, pace=NEVER_STEPS) as pool:
            _, marks = await wait_for_leg(pool).leg()
            assert marks.address == "127.0.0.1"


async def test_configured_addresses_ask_no_resolver() -> None:
    names = Names()
    async with edge_peer() as peer, connections(plain(peer.port, "edge.test", addresses=("127.0.0.1",)), names) as pool:
        await ask(pool)
    assert names.asked == []


async def test_a_name_that_moves_takes_new_requests_along_and_lets_old_ones_end() -> None:
    port = free_port()
    async with edge_peer(host="127.0.0.1", port=port) as old, edge_peer(host="127.0.0.2", port=port) as new:
        names = Names(edge=["127.0.0.1"], ttl_s=0.1)
        old.reply = lambda peer, head: ok() if b"/quick" in head else None
        async with connections(
            plain(old.port, "edge"), names, limits=PoolLimits(look_up_s=0.1, look_up_idle_s=0.1)
        ) as pool:
            leg, _ = await wait_for_leg(pool).leg()
            in_flight = say(leg, b"/slow")
            await ask(pool, b"/quick")
            await old.until(lambda: len(old.requests) == 2)
            names.hosts["edge"] = ["127.0.0.2"]
            await old.until(lambda: len(old.connections) == 1)  # the idle one was retired
            hearings = await asyncio.gather(*(ask(pool) for _ in range(100)))
            assert {hearing.head.status for hearing, _ in hearings if hearing.head} == {200}
            assert {marks.address for _, marks in hearings} == {"127.0.0.2"}
            assert not in_flight.over.done()
            peer = old.connections[0]
            assert peer.transport is not None
            peer.transport.write(ok())
            assert await soon(in_flight.over) is None
            assert new.requests


async def test_an_answer_that_only_rotates_closes_nothing() -> None:
    async with edge_peer() as peer:
        names = Names(edge=["127.0.0.1", "127.0.0.3"], ttl_s=0.05)
        async with connections(
            plain(peer.port, "edge"), names, limits=PoolLimits(look_up_s=0.05, look_up_idle_s=0.05)
        ) as pool:
            await ask(pool)
            asked = len(names.asked)
            names.hosts["edge"] = ["127.0.0.3", "127.0.0.4"]
            await eventually(lambda: len(names.asked) >= asked + 2)
            assert pool.counts.idle == 1


# ---------------------------------------------------------------------------------------------- the daemon's loop


@pytest.mark.parametrize(
    "scenario",
    [
        test_a_warm_connection_is_given_inside_open_and_dials_nothing,
        test_a_connection_that_the_edge_closed_while_idle_is_never_given,
        test_a_refused_connection_names_address_and_reason,
        test_the_connect_timeout_covers_the_whole_dial,
        test_a_refused_address_gives_way_to_the_next_one_at_once,
        pytest.param(test_a_black_hole_of_ipv6_costs_one_step_and_is_remembered, marks=needs_ipv6),
        test_close_fails_whoever_waits,
    ],
)
def test_the_same_on_uvloop(scenario: Callable[[], Coroutine[None, None, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


@pytest.mark.parametrize(
    "scenario",
    [
        test_a_certificate_of_a_strange_authority_says_what_failed,
        test_a_certificate_for_another_name_says_so,
        test_a_peer_that_speaks_no_tls_is_broken_not_hung,
        test_a_second_connection_resumes_the_session_of_the_first,
        test_a_dial_times_its_parts_apart,
        test_what_an_edge_delays_is_counted_to_the_part_that_it_delays,
    ],
)
def test_tls_is_the_same_on_uvloop(
    authority: Authority, scenario: Callable[[Authority], Coroutine[None, None, None]]
) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario(authority))
