"""How the bound on requests in flight moves: S18's rule, sample by sample."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.limiter import CEILING, FLOOR, START, Limiter


def sample(limiter: Limiter, at: float, *, active: int, latency_s: float, used: float | None = None) -> int:
    """One whole sample: a peak of `active`, one answer, and the limit after it."""
    limiter.begun(active, at)
    limiter.answered(latency_s, at + 0.11, used=used)
    return limiter.limit


def learnt(usual_s: float = 0.1) -> Limiter:
    limiter = Limiter()
    sample(limiter, 0.0, active=1, latency_s=usual_s)
    return limiter


def test_slower_while_full_is_cut_by_a_fifth() -> None:
    assert sample(learnt(), 1.0, active=START, latency_s=0.12) == int(START * 0.8)


def test_slower_by_less_than_fifteen_percent_is_not_cut() -> None:
    assert sample(learnt(), 1.0, active=START, latency_s=0.114) >= START


def test_slower_on_a_limit_that_is_not_reached_is_not_cut() -> None:
    assert sample(learnt(), 1.0, active=int(START * 0.9), latency_s=0.5) == START


def test_after_a_cut_the_next_one_waits_for_the_answers_of_the_new_limit() -> None:
    limiter = learnt(1.0)
    assert sample(limiter, 10.0, active=START, latency_s=2.0) == 204
    assert sample(limiter, 10.5, active=204, latency_s=2.0) == 204
    assert sample(limiter, 12.5, active=204, latency_s=2.0) == 163


def test_steady_latency_while_the_limit_is_in_use_lifts_it() -> None:
    assert sample(learnt(), 1.0, active=int(START * 0.8), latency_s=0.1) == int(START * 1.1)


def test_a_quiet_edge_lifts_nothing() -> None:
    limiter = learnt()
    for step in range(100):
        sample(limiter, 1.0 + step, active=3, latency_s=0.1)
    assert limiter.limit == START


def test_the_edges_own_utilisation_is_believed_over_our_guess() -> None:
    assert sample(learnt(), 1.0, active=3, latency_s=0.1, used=0.5) == int(START * 1.1)
    assert sample(learnt(), 1.0, active=3, latency_s=0.5, used=0.95) == int(START * 0.8)
    assert sample(learnt(), 1.0, active=250, latency_s=0.1, used=0.8) == START


def test_a_failure_in_the_sample_stops_the_lift() -> None:
    limiter = learnt()
    limiter.begun(int(START * 0.8), 1.0)
    limiter.failed(1.05)
    limiter.answered(0.1, 1.11)
    assert limiter.limit == START


def test_a_configured_limit_never_moves() -> None:
    limiter = Limiter(4)
    for step in range(50):
        sample(limiter, float(step), active=4, latency_s=0.1 * (1 + step))
    assert limiter.limit == 4
    assert limiter.admits(3) and not limiter.admits(4)


@given(st.lists(st.tuples(st.integers(0, 6000), st.floats(0.001, 60.0), st.booleans()), max_size=200))
def test_the_limit_stays_in_its_bounds(steps: list[tuple[int, float, bool]]) -> None:
    limiter, now = Limiter(), 0.0
    for active, latency_s, fails in steps:
        now += 0.2
        if fails:
            limiter.failed(now)
        sample(limiter, now, active=active, latency_s=latency_s)
        assert FLOOR <= limiter.limit <= CEILING


def test_overload_becomes_the_usual_only_slowly() -> None:
    limiter, quiet = learnt(0.1), learnt(0.1)
    for number in range(1, 20):
        sample(limiter, float(number), active=START, latency_s=0.114)  # full, and not slow enough for a cut
        sample(quiet, float(number), active=1, latency_s=0.114)
        for each in (limiter, quiet):
            each._set(START)
    assert sample(limiter, 30.0, active=START, latency_s=0.12) == int(START * 0.8)
    assert sample(quiet, 30.0, active=START, latency_s=0.12) > START, "for an edge that was not full it is the usual"
