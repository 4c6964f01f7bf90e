"""The edges of all pools: what the relay tells of them, what a reload keeps, what people see."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from config.model import Edge, Pool, Probe, Retry, Secret
from proxy.health import State
from proxy.io.edges import EdgeSet, PoolState, Shed
from proxy.messages import Abort, Cause, Party, ResponseHead, Stage
from tests.patience import eventually
from tests.peers.edgepeer import Names, ask, edge_peer, ok, say, wait_for_leg
from tests.peers.ports import free_port

LOST = Abort(Party.EDGE, Stage.HEAD, Cause.LOST, "connection reset")


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


def edge(edge_id: str, port: int = 9, **facts: Any) -> Edge:
    return Edge(edge_id, "http", "127.0.0.1", port, **facts)


def pool_of(*edges: Edge, **facts: Any) -> Pool:
    return Pool("p", edges, **{"keep_warm": 0, **facts})


@asynccontextmanager
async def edge_set(
    *pools: Pool, clock: Callable[[], float] = time.monotonic, start: bool = False
) -> AsyncIterator[EdgeSet]:
    edges = EdgeSet(resolver=Names(), clock=clock, rng=random.Random(7))
    edges.apply(pools)
    if start:
        edges.start()
    try:
        yield edges
    finally:
        await edges.close()


def answered(
    pool: PoolState, edge_id: str, now: float, *, status: int = 200, ttfb_s: float = 0.1, **fields: str
) -> None:
    """One request, begun and answered at `now`."""
    state = pool.edges[edge_id]
    state.begin(now)
    head = ResponseHead(status, [(name.replace("_", "-").encode(), value.encode()) for name, value in fields.items()])
    state.note_status(head, now, ttfb_s)
    state.finish(None, ttfb_s, now)


def failed(pool: PoolState, edge_id: str, now: float, abort: Abort = LOST) -> None:
    state = pool.edges[edge_id]
    state.begin(now)
    state.finish(abort, None, now)


# ---------------------------------------------------------------------------------------------- choosing


async def test_weighted_pools_spread_consecutive_requests() -> None:
    async with edge_set(pool_of(edge("a", weight=300), edge("b", weight=100), strategy="weighted")) as edges:
        pool = edges.pool("p")
        spread = Counter(pool.choose(1.0)[0] for _ in range(40))
        assert spread["a"] == pytest.approx(30, abs=2)


async def test_an_edge_that_says_429_cools_and_the_other_one_serves() -> None:
    clock = Clock()
    async with edge_set(pool_of(edge("a"), edge("b"), strategy="failover"), clock=clock) as edges:
        pool = edges.pool("p")
        answered(pool, "a", clock.at, status=429, retry_after="5")
        assert pool.choose(clock.at) == ["b"]
        assert pool.choose(clock.at + 4.9) == ["b"]
        assert pool.choose(clock.at + 5.1) == ["a", "b"]


async def test_ten_400s_eject_nobody() -> None:
    async with edge_set(pool_of(edge("a"), edge("b"), strategy="failover")) as edges:
        pool = edges.pool("p")
        for n in range(10):
            answered(pool, "a", float(n), status=400)
        assert pool.choose(20.0) == ["a", "b"]


async def test_at_most_half_of_a_pool_is_ejected() -> None:
    clock = Clock()
    async with edge_set(pool_of(*(edge(name) for name in "abcd")), clock=clock) as edges:
        pool = edges.pool("p")
        for step in range(10):
            for name in "abcd":
                failed(pool, name, clock.at + step)
        assert sorted(state.state.value for state in pool.edges.values()) == [
            "ejected",
            "ejected",
            "healthy",
            "healthy",
        ]


async def test_a_pool_of_one_is_never_ejected() -> None:
    async with edge_set(pool_of(edge("a"), all_down="reject")) as edges:
        pool = edges.pool("p")
        for n in range(20):
            failed(pool, "a", float(n))
        assert pool.choose(21.0) == ["a"]


async def test_a_lost_stale_connection_says_nothing_of_its_edge() -> None:
    async with edge_set(pool_of(edge("a"), edge("b"), strategy="failover")) as edges:
        pool = edges.pool("p")
        for n in range(10):
            pool.edges["a"].begin(float(n))
            pool.edges["a"].finish(LOST, None, float(n), reused=True)
        assert pool.choose(11.0)[0] == "a"


async def test_full_edges_hand_on_and_then_shed_with_a_time() -> None:
    async with edge_set(pool_of(edge("a", max_active=2), edge("b", max_active=1), strategy="failover")) as edges:
        pool = edges.pool("p")
        chosen = []
        while candidates := pool.choose(1.0):
            chosen.append(candidates[0])
            pool.edges[candidates[0]].begin(1.0)
        assert chosen == ["a", "a", "b"]
        assert pool.shed(1.0) == Shed("every usable edge is full, 3 requests in flight", 1)
        pool.edges["a"].finish(None, 0.1, 2.0)
        assert pool.choose(2.0) == ["a"]


async def test_a_pool_that_rejects_says_when_to_come_back() -> None:
    clock = Clock()
    async with edge_set(pool_of(edge("a"), edge("b"), all_down="reject"), clock=clock) as edges:
        pool = edges.pool("p")
        for name in "ab":
            answered(pool, name, clock.at, status=429, retry_after="7")
        assert pool.choose(clock.at) == []
        assert pool.shed(clock.at) == Shed("no edge is usable: a ejected, b ejected", 7)


async def test_when_all_are_out_best_effort_takes_the_least_bad() -> None:
    clock = Clock()
    async with edge_set(pool_of(edge("a"), edge("b")), clock=clock) as edges:
        pool = edges.pool("p")
        answered(pool, "a", clock.at, status=429, retry_after="50")
        answered(pool, "b", clock.at, status=429, retry_after="5")
        assert pool.choose(clock.at) == ["b", "a"]


async def test_an_ejected_edge_is_the_last_resort_unless_the_pool_rejects() -> None:
    clock = Clock()
    for all_down, expected in (("best-effort", ["a"]), ("reject", [])):
        async with edge_set(pool_of(edge("a"), edge("b"), all_down=all_down), clock=clock) as edges:
            pool = edges.pool("p")
            assert pool.last_resort() == []
            for _ in range(5):
                clock.at += 1
                failed(pool, "a", clock.at)
            assert (pool.choose(clock.at), pool.last_resort()) == (["b"], expected)


async def test_a_slow_edge_is_degraded_and_its_live_weight_falls() -> None:
    clock = Clock()
    async with edge_set(pool_of(edge("a"), edge("b")), clock=clock) as edges:
        pool = edges.pool("p")
        for _ in range(30):
            clock.at += 1.0
            answered(pool, "a", clock.at, ttfb_s=0.1)
            answered(pool, "b", clock.at, ttfb_s=0.8)
        a, b = edges.views()
        assert (a.state, b.state) == ("healthy", "degraded")
        assert b.reason == "slow: first byte after 800 ms, the pool's best 100 ms"
        assert a.live_weight + b.live_weight == pytest.approx(200, abs=0.2)
        assert b.live_weight < 30 < 170 < a.live_weight


async def test_a_loaded_edge_is_told_as_such() -> None:
    clock = Clock()
    async with edge_set(pool_of(edge("a", max_active=10)), clock=clock) as edges:
        for _ in range(10):
            edges.pool("p").edges["a"].begin(clock.at)
        (view,) = edges.views()
        assert (view.state, view.reason, view.active) == ("degraded", "high load: 10 of 10 requests in flight", 10)


async def test_counts_stay_whole_whatever_is_told() -> None:
    async with edge_set(pool_of(edge("a"))) as edges:
        state = edges.pool("p").edges["a"]
        state.finish(LOST, None, 1.0)
        state.begin(1.0)
        state.note_status(ResponseHead(307, []), 1.0)
        state.note_status(ResponseHead(200, []), 1.0, 0.1)
        state.finish(None, 0.1, 2.0)
        assert (state.standing.inflight, state.standing.waiting) == (0, 0)


# ---------------------------------------------------------------------------------------------- probing


FAST = Probe(interval_s=0.03, timeout_s=30.0, path="/healthz")


async def test_probes_put_an_edge_down_and_bring_it_back_with_events(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with edge_peer() as peer, edge_set(pool_of(edge("a", peer.port), probe=FAST), start=True) as edges:
        heard: list[tuple[str, State]] = []
        edges.listeners.append(lambda pool, transition: heard.append((pool, transition.new)))
        peer.reply = lambda peer, head: ok(status=503)
        await eventually(lambda: edges.pool("p").edges["a"].state is State.DOWN)
        (view,) = edges.views()
        assert view.reason == "3 probes failed: GET /healthz: status 503"
        peer.reply = lambda peer, head: ok()
        await eventually(lambda: edges.pool("p").edges["a"].state is State.HEALTHY)
        assert heard == [("p", State.DOWN), ("p", State.HEALTHY)]
        assert [t.new for t in edges.transitions] == [State.DOWN, State.HEALTHY]
        assert "edge a of pool p: healthy -> down: 3 probes failed: GET /healthz: status 503" in caplog.text


async def test_one_failed_probe_of_three_changes_nothing() -> None:
    async with edge_peer() as peer, edge_set(pool_of(edge("a", peer.port), probe=FAST), start=True) as edges:
        peer.reply = lambda peer_, head: ok(status=503 if len(peer.requests) % 3 == 0 else 200)
        await peer.until(lambda: len(peer.requests) >= 9)
        assert list(edges.transitions) == []


async def test_views_show_what_probes_measured() -> None:
    async with edge_peer() as peer, edge_set(pool_of(edge("a", peer.port), probe=FAST), start=True) as edges:
        await eventually(lambda: edges.pool("p").edges["a"].probes > 0)
        (view,) = edges.views()
        assert (view.id, view.pool, view.state, view.version) == ("a", "p", "healthy", "h1")
        assert view.url == f"http://127.0.0.1:{peer.port}"
        assert view.rtt_ms is not None and view.rtt_ms > 0
        assert view.tls_ms is None


async def test_warm_connections_are_held_to_active_edges_only() -> None:
    async with edge_peer() as active, edge_peer() as spare:
        pool = pool_of(edge("a", active.port), edge("s", spare.port, standby=True), keep_warm=1)
        async with edge_set(pool, start=True) as edges:
            await eventually(lambda: edges.views()[0].idle == 1)
            assert edges.views()[1].idle == 0


async def test_after_a_network_change_idle_connections_are_dropped_and_probed_again() -> None:
    async with edge_peer() as peer, edge_set(pool_of(edge("a", peer.port)), start=True) as edges:
        state = edges.pool("p").edges["a"]
        await ask(state.connections)
        await eventually(lambda: state.probes == 1)
        edges.network_changed()
        assert state.connections.counts.idle == 0
        await eventually(lambda: state.probes == 2)


# ---------------------------------------------------------------------------------------------- reload


async def test_a_reload_keeps_connections_health_and_measures_of_what_did_not_move() -> None:
    async with edge_peer() as peer:
        before = pool_of(edge("a", peer.port), edge("b"))
        async with edge_set(before) as edges:
            pool = edges.pool("p")
            state = pool.edges["a"]
            await ask(state.connections)
            answered(pool, "a", 1.0, ttfb_s=0.3)
            after = replace(
                before,
                edges=(edge("a", peer.port, weight=7, headers={"X": Secret("y")}), edge("b")),
                retry=Retry(budget=0.5),
            )
            edges.apply([after])
            assert edges.pool("p") is pool and pool.edges["a"] is state
            assert (state.standing.weight, state.standing.ttfb.value) == (7, 0.3)
            assert state.header_fields == [(b"x", b"y")]
            assert pool.budget.ratio == 0.5
            assert wait_for_leg(state.connections).at_once


async def test_a_removed_edge_finishes_what_it_has_and_is_gone_then() -> None:
    async with edge_peer() as peer, edge_set(pool_of(edge("a", peer.port), edge("b"))) as edges:
        pool = edges.pool("p")
        state = pool.edges["a"]
        state.begin(1.0)
        leg, _ = await wait_for_leg(state.connections).leg()
        edges.apply([pool_of(edge("b"))])
        assert pool.choose(2.0) == ["b"]
        assert [(v.id, v.state, v.reason) for v in edges.views()][1:] == [
            ("a", "draining", "removed from the configuration")
        ]
        assert pool.edges["a"] is state, "a request that chose it before the reload must be told no, not crash"
        assert (await wait_for_leg(state.connections).abort()).unprocessed
        assert await say(leg).over is None
        state.finish(None, 0.1, 3.0)
        await eventually(lambda: [v.id for v in edges.views()] == ["b"])


async def test_an_edge_that_moved_starts_anew() -> None:
    async with edge_set(pool_of(edge("a", free_port()))) as edges:
        old = edges.pool("p").edges["a"]
        edges.apply([pool_of(edge("a", free_port()))])
        assert edges.pool("p").edges["a"] is not old


async def test_weight_zero_drains_and_a_weight_brings_it_back() -> None:
    async with edge_set(pool_of(edge("a"), edge("b"), strategy="failover")) as edges:
        pool = edges.pool("p")
        edges.apply([pool_of(edge("a", weight=0), edge("b"), strategy="failover")])
        assert pool.choose(1.0) == ["b"]
        assert (edges.views()[0].state, edges.views()[0].reason) == ("draining", "weight 0")
        edges.apply([pool_of(edge("a"), edge("b"), strategy="failover")])
        assert pool.choose(1.0) == ["a", "b"]


async def test_a_removed_pool_is_gone() -> None:
    async with edge_set(pool_of(edge("a"))) as edges:
        edges.apply([])
        with pytest.raises(KeyError):
            edges.pool("p")
        await eventually(lambda: edges.views() == [])
