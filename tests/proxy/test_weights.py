"""In which order the edges of a pool are tried: each strategy's promise, and what cost reacts to."""

from __future__ import annotations

import math
from collections import Counter
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.weights import (
    LEADS,
    Ewma,
    Prior,
    Standing,
    Strategy,
    candidates,
    cost,
    live_weights,
    nth_draw,
    prior_of,
)

STRATEGIES: list[Strategy] = list(LEADS)


def measured(value: float, at: float = 0.0) -> Ewma:
    return Ewma(value=value, at=at)


def edge(edge_id: str, ttfb: float = 0.1, **facts: object) -> Standing:
    return Standing(edge_id, ttfb=measured(ttfb), **facts)  # type: ignore[arg-type]


def order(
    *edges: Standing,
    strategy: Strategy = "adaptive",
    draw: float = 0.0,
    now: float = 0.0,
    key: bytes = b"",
    all_down: Literal["best-effort", "reject"] = "best-effort",
) -> list[str]:
    return candidates(edges, strategy=strategy, now=now, draw=draw, key=key, all_down=all_down)


def leaders(*edges: Standing, strategy: Strategy, requests: int = 1000) -> Counter[str]:
    return Counter(order(*edges, strategy=strategy, draw=nth_draw(n))[0] for n in range(requests))


def test_the_formula_of_the_design() -> None:
    one = Standing(
        "a",
        weight=50,
        slow_start=0.5,
        inflight=3,
        queue=2.0,
        ttfb=measured(0.2),
        rtt=measured(0.04),
        tls=measured(0.06),
        p_new=measured(0.5),
        prefill_s_per_char=0.001,
    )
    expected = (0.2 + 0.5 * (0.04 + 0.06) + 0.001 * 100) * (3 + 2 + 1) / (50 * 0.5)
    assert cost(one, 0.0, Prior(), uncached_chars=100) == pytest.approx(expected)


def test_weight_zero_costs_infinitely_and_takes_nothing() -> None:
    assert cost(edge("a", weight=0), 0.0, Prior()) == math.inf
    assert order(edge("a", weight=0), edge("b")) == ["b"]
    assert order(edge("a", weight=0)) == []


def test_a_stale_queue_counts_as_the_peers_mean_and_not_as_zero() -> None:
    silent, busy = edge("a", queue=None), edge("b", queue=8.0)
    assert cost(silent, 0.0, prior_of([silent, busy])) > cost(edge("c", queue=2.0), 0.0, Prior())


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(
    weights=st.lists(st.tuples(st.floats(0, 500), st.booleans(), st.integers(0, 3), st.booleans()), max_size=6),
    draw=st.floats(0, 1, exclude_max=True),
    key=st.binary(max_size=8),
    all_down=st.sampled_from(["best-effort", "reject"]),
)
def test_whatever_the_strategy(
    strategy: Strategy,
    weights: list[tuple[float, bool, int, bool]],
    draw: float,
    key: bytes,
    all_down: Literal["best-effort", "reject"],
) -> None:
    edges = [
        edge(f"e{n}", weight=weight, standby=standby, badness=badness, full=full)
        for n, (weight, standby, badness, full) in enumerate(weights)
    ]
    chosen = order(*edges, strategy=strategy, draw=draw, key=key, all_down=all_down)
    assert chosen == order(*edges, strategy=strategy, draw=draw, key=key, all_down=all_down)
    by_id = {e.edge_id: e for e in edges}
    assert len(set(chosen)) == len(chosen)
    assert all(by_id[edge_id].weight > 0 for edge_id in chosen)
    usable = {e.edge_id for e in edges if e.takes_traffic}
    if usable:
        assert set(chosen) == usable
        assert [by_id[e].standby for e in chosen] == sorted(by_id[e].standby for e in chosen)
    elif all_down == "reject":
        assert chosen == []


def test_two_choices_take_the_cheaper_and_the_rest_follow_by_cost() -> None:
    fast, middle, slow = edge("fast", 0.1), edge("middle", 0.2), edge("slow", 0.9)
    seen = {tuple(order(fast, middle, slow, draw=n / 30)) for n in range(30)}
    assert seen == {("fast", "middle", "slow"), ("middle", "fast", "slow")}


def test_two_choices_do_not_herd() -> None:
    share = leaders(edge("fast", 0.1), edge("middle", 0.11), edge("slow", 0.12), strategy="adaptive")
    assert share["fast"] == pytest.approx(667, abs=10)
    assert share["middle"] == pytest.approx(333, abs=10)


def test_requests_in_flight_push_the_next_one_elsewhere() -> None:
    assert order(edge("a", 0.1, inflight=3), edge("b", 0.2)) == ["b", "a"]


def test_requests_that_wait_in_silence_cost_their_wait_before_any_timeout() -> None:
    hung = edge("hung", 0.1, inflight=1, waiting=1, silent_since=10.0)
    other = edge("other", 0.3, inflight=1)
    hung.ttfb.at = other.ttfb.at = 10.0
    assert order(hung, other, now=10.1) == ["hung", "other"]
    assert order(hung, other, now=12.0) == ["other", "hung"]


def test_an_edge_that_was_never_measured_gets_its_try() -> None:
    assert order(edge("known", 0.1), Standing("new"))[0] == "new"


def test_an_edge_that_was_slow_once_is_asked_again() -> None:
    good, once_slow = edge("good", 0.1), edge("slow", 1.0)

    def now_good(now: float) -> Standing:
        good.ttfb.at = now  # traffic keeps it measured
        return good

    assert order(now_good(60.0), once_slow, now=60.0)[0] == "good"
    assert order(now_good(600.0), once_slow, now=600.0)[0] == "slow"


@pytest.mark.parametrize("requests", [8, 12, 40, 100])
def test_weighted_spreads_any_run_of_requests_by_weight(requests: int) -> None:
    edges = edge("a", weight=100), edge("b", 9.9, weight=50), edge("c", weight=50)
    for start in (0, 7, 1000):
        got = Counter(order(*edges, strategy="weighted", draw=nth_draw(start + n))[0] for n in range(requests))
        assert got["a"] == pytest.approx(requests / 2, abs=2)
        assert got["b"] == pytest.approx(requests / 4, abs=2)


def test_weighted_gives_a_recovering_edge_a_smaller_share() -> None:
    share = leaders(edge("a"), edge("b", slow_start=0.25), strategy="weighted")
    assert share["b"] == pytest.approx(200, abs=5)


def test_least_requests_counts_by_weight_and_takes_turns_when_idle() -> None:
    assert order(edge("a", inflight=2), edge("b", inflight=1), strategy="least-requests") == ["b", "a"]
    assert order(edge("a", inflight=2, weight=400), edge("b", inflight=1), strategy="least-requests") == ["a", "b"]
    assert set(leaders(edge("a"), edge("b"), strategy="least-requests", requests=10)) == {"a", "b"}


def test_failover_keeps_the_order_of_the_configuration() -> None:
    assert order(edge("a", 9.0), edge("b", 0.1), edge("c", 0.1), strategy="failover", draw=0.9) == ["a", "b", "c"]
    assert order(edge("a", badness=3), edge("b"), edge("c"), strategy="failover") == ["b", "c"]


def test_hash_keeps_a_key_at_its_edge_and_moves_only_the_keys_of_one_that_leaves() -> None:
    edges = [edge(name) for name in "abcd"]
    keys = [f"10.0.0.{n}".encode() for n in range(400)]
    before = {key: order(*edges, strategy="hash", key=key, draw=0.3) for key in keys}
    edges[1].badness = 3
    for key in keys:
        assert order(*edges, strategy="hash", key=key, draw=0.7) == [e for e in before[key] if e != "b"]


def test_hash_shares_the_keys_by_weight() -> None:
    edges = edge("a", weight=300), edge("b", weight=100)
    share = Counter(order(*edges, strategy="hash", key=str(n).encode())[0] for n in range(2000))
    assert share["a"] == pytest.approx(1500, abs=80)


def test_standby_edges_come_last_and_lead_when_no_active_one_is_usable() -> None:
    spare = edge("spare", 0.001, standby=True)
    assert order(edge("a"), spare) == ["a", "spare"]
    assert order(edge("a", badness=2), spare) == ["spare"]
    assert order(edge("a", full=True), spare) == ["spare"]


def test_when_all_are_out_the_least_bad_comes_first() -> None:
    edges = (
        edge("down", badness=3),
        edge("late", badness=2, back_in_s=60.0),
        edge("soon", badness=2, back_in_s=5.0),
        edge("cooling", badness=1, back_in_s=9.0),
        edge("leaving", badness=4),
    )
    assert order(*edges) == ["cooling", "soon", "late", "down"]
    assert order(*edges, all_down="reject") == []


def test_full_edges_shed_load_rather_than_push_it_onto_a_dead_one() -> None:
    assert order(edge("full", full=True), edge("down", badness=3)) == []


def test_live_weights_are_the_pools_weight_shared_by_inverse_cost() -> None:
    live = live_weights([edge("a", 0.1), edge("b", 0.3), edge("c", badness=3)], "adaptive", 0.0)
    assert live == pytest.approx({"a": 150.0, "b": 50.0, "c": 0.0})


def test_live_weights_of_a_weighted_pool_follow_its_weights() -> None:
    live = live_weights([edge("a", 0.1), edge("b", 9.0, slow_start=0.5)], "weighted", 0.0)
    assert live == pytest.approx({"a": 400 / 3, "b": 200 / 3})


def test_a_burst_of_samples_moves_an_average_and_old_ones_are_forgotten() -> None:
    average = Ewma(half_life_s=20.0)
    average.add(1.0, 0.0)
    for _ in range(30):
        average.add(3.0, 0.0)
    assert average.value == pytest.approx(3.0, abs=0.1)
    average.add(1.0, 1000.0)
    assert average.value == pytest.approx(1.0, abs=0.01)
