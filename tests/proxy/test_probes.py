"""What a probe does on the wire and what it reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace

import pytest
import uvloop

from config.model import Edge, Probe, Secret
from proxy.io.probes import Prober, ProbeResult, pause_s, probe_forever
from proxy.reach import Reach
from tests.patience import soon
from tests.peers.authority import Authority
from tests.peers.edgepeer import EdgePeer, Names, edge_peer, ok, seeded, silent_port
from tests.peers.ports import needs_ipv6, refusing_port

PATIENT = Probe(timeout_s=30.0)
HEALTHZ = Probe(timeout_s=30.0, path="/healthz")
QUICK = Probe(timeout_s=0.5)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


async def probe(edge: Edge, how: Probe = PATIENT) -> ProbeResult:
    return await Prober(edge, resolver=Names(), reach=Reach(), clock=time.monotonic).probe(how)


def plain(peer: EdgePeer, **facts: object) -> Edge:
    return Edge("e", "http", "127.0.0.1", peer.port, **facts)  # type: ignore[arg-type]


def secure(peer: EdgePeer, authority: Authority) -> Edge:
    return Edge("e", "https", "localhost", peer.port, ca_file=authority.ca_file, addresses=("127.0.0.1",))


async def test_without_a_path_a_probe_connects_and_says_nothing() -> None:
    async with edge_peer() as peer:
        result = await probe(plain(peer))
        await peer.until(lambda: peer.accepted == 1 and not peer.connections)
        assert peer.requests == []
    assert result.ok and result.rtt_s and result.tls_s is None


async def test_tcp_and_tls_are_timed_apart(authority: Authority) -> None:
    async with edge_peer(tls=authority.server_context()) as peer:
        result = await probe(secure(peer, authority))
        await peer.until(lambda: peer.accepted == 1)
    assert result.ok and result.rtt_s and result.tls_s


async def test_what_an_edge_delays_in_tls_is_no_part_of_the_round_trip(authority: Authority) -> None:
    context = authority.server_context()
    context.sni_callback = lambda *_: time.sleep(0.2)  # between the client's hello and the server's
    async with edge_peer(tls=context) as peer:
        started = time.monotonic()
        result = await probe(secure(peer, authority))
        took = time.monotonic() - started
        await peer.until(lambda: peer.accepted == 1)
    assert result.rtt_s and result.tls_s and result.tls_s >= 0.2
    assert result.rtt_s <= took - result.tls_s


async def test_a_probe_uses_up_no_session(authority: Authority) -> None:
    async with edge_peer(tls=authority.server_context()) as peer:
        prober = Prober(secure(peer, authority), resolver=Names(), reach=Reach(), clock=time.monotonic)
        for _ in range(3):
            assert (await prober.probe(HEALTHZ)).ok
        assert peer.resumed == 0


async def test_a_path_is_asked_with_the_edges_own_headers_and_base_path() -> None:
    async with edge_peer() as peer:
        edge = plain(peer, base_path="/v1", headers={"Authorization": Secret("Bearer k")})
        assert await probe(edge, HEALTHZ) == ProbeResult(
            True, rtt_s=pytest.approx(0.0, abs=60.0), status=200, version="h1"
        )
        lines = peer.requests[0].split(b"\r\n")
    assert lines[0] == b"GET /v1/healthz HTTP/1.1"
    assert b"authorization: Bearer k" in lines


@pytest.mark.parametrize(("status", "good"), [(200, True), (204, True), (302, True), (404, False), (503, False)])
async def test_2xx_and_3xx_are_good(status: int, good: bool) -> None:
    async with edge_peer() as peer:
        peer.reply = lambda peer, head: ok(b"", status=status)
        result = await probe(plain(peer), HEALTHZ)
    assert (result.ok, result.status) == (good, status)
    assert result.reason == ("" if good else f"GET /healthz: status {status}")


async def test_an_edge_that_accepts_and_never_answers_fails_in_time() -> None:
    async with edge_peer() as peer:
        peer.reply = lambda peer, head: None
        result = await probe(plain(peer), replace(HEALTHZ, timeout_s=0.5))
    assert (result.ok, result.reason) == (False, "GET /healthz: no answer in 0.5 s")


async def test_failures_name_what_was_seen(authority: Authority) -> None:
    with refusing_port() as port:
        refused = await probe(Edge("e", "http", "127.0.0.1", port))
    assert refused == ProbeResult(False, f"connect 127.0.0.1:{port}: connection refused")
    async with silent_port() as quiet:
        assert (await probe(Edge("e", "http", "127.0.0.1", quiet), QUICK)).reason == (
            f"connect 127.0.0.1:{quiet}: no answer in 0.5 s"
        )
    async with edge_peer(tls=authority.server_context(names=("other.test",))) as peer:
        wrong = await probe(
            Edge("e", "https", "127.0.0.1", peer.port, server_name="edge.test", ca_file=authority.ca_file)
        )
        assert "hostname mismatch" in wrong.reason
    unknown = await probe(Edge("e", "https", "nowhere.test", 443))
    assert unknown.reason == "resolve: no address for nowhere.test: NXDOMAIN"


@needs_ipv6
async def test_ipv6_edges_are_probed() -> None:
    async with edge_peer(host="::1") as peer:
        assert (await probe(Edge("e", "http", "::1", peer.port), HEALTHZ)).ok


def test_the_interval_is_jittered_and_shorter_while_undecided() -> None:
    assert [pause_s(30.0, undecided=False, draw=draw) for draw in (0.0, 0.5, 1.0)] == [27.0, 30.0, 33.0]
    assert pause_s(30.0, undecided=True, draw=0.5) == 10.0
    assert pause_s(0.5, undecided=True, draw=0.5) == 0.5  # haste has a floor of a second, or of a shorter interval


async def test_the_first_probe_comes_soon_and_the_rest_follow_until_cancelled() -> None:
    probed = asyncio.Event()
    times = 0

    async def once() -> bool:
        nonlocal times
        times += 1
        if times == 3:
            probed.set()
        return False

    task = asyncio.create_task(probe_forever(once, lambda: 0.02, seeded()))
    await soon(probed.wait())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()


@pytest.mark.parametrize(
    "scenario",
    [
        test_without_a_path_a_probe_connects_and_says_nothing,
        test_an_edge_that_accepts_and_never_answers_fails_in_time,
        test_ipv6_edges_are_probed,
    ],
)
def test_the_same_on_uvloop(scenario: Callable[[], Coroutine[None, None, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())
