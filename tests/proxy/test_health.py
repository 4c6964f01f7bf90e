"""Whether an edge may take traffic: transcripts of probes and outcomes, and the state after each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.health import COOL_CAP_S, EdgeHealth, Outcome, State, Transition, retry_after_s
from proxy.messages import Abort, Cause, Party, Stage

LOST = Outcome(abort=Abort(Party.EDGE, Stage.HEAD, Cause.LOST, "connection reset"))
NO_DIAL = Outcome(abort=Abort(Party.EDGE, Stage.CONNECT, Cause.LOST, "connection refused", unprocessed=True))
OK = Outcome(200)


def edge(fall: int = 3, rise: int = 2) -> EdgeHealth:
    return EdgeHealth("a", fall=fall, rise=rise)


def ejected(at: float = 0.0) -> EdgeHealth:
    health = edge()
    for step in range(3):
        health.on_outcome(LOST, at + step * 0.2)
    assert health.state is State.EJECTED
    return health


def test_one_failed_probe_ejects_nobody_and_is_told() -> None:
    health = edge()
    assert health.on_probe(False, "connect 10.0.0.1:443: connection refused", 1.0) is None
    assert health.state is State.HEALTHY
    assert health.reason == "probe failed, 1 of 3: connect 10.0.0.1:443: connection refused"
    assert health.on_probe(True, "", 2.0) is None
    assert health.reason == ""


def test_fall_probes_in_a_row_put_an_edge_down_and_rise_good_ones_bring_it_back() -> None:
    health = edge()
    assert [health.on_probe(False, "timed out", t) for t in (1.0, 2.0)] == [None, None]
    assert health.on_probe(False, "timed out", 3.0) == Transition(
        "a", State.HEALTHY, State.DOWN, "3 probes failed: timed out", 3.0
    )
    assert health.on_probe(True, "", 4.0) is None
    assert health.on_probe(True, "", 5.0) == Transition("a", State.DOWN, State.HEALTHY, "recovered", 5.0)


def test_a_good_probe_between_failures_starts_the_count_again() -> None:
    health = edge()
    for ok in (False, False, True, False, False):
        health.on_probe(ok, "timed out", 1.0)
    assert health.state is State.HEALTHY


def test_a_failed_probe_while_down_starts_the_rise_again() -> None:
    health = edge()
    for ok in (False, False, False, True, False, True):
        health.on_probe(ok, "timed out", 1.0)
    assert health.state is State.DOWN


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 501])
def test_an_answer_about_the_request_never_counts_against_the_edge(status: int) -> None:
    health = edge()
    for t in range(50):
        assert health.on_outcome(Outcome(status), float(t)) is None
    assert health.failures == 0


def test_a_4xx_proves_that_the_edge_lives() -> None:
    health = edge()
    for t in range(20):
        health.on_outcome(Outcome(400) if t % 2 else LOST, float(t))
    assert health.state is State.HEALTHY


def test_three_transport_failures_in_a_row_eject() -> None:
    health = edge()
    assert health.on_outcome(LOST, 1.0) is None
    assert health.on_outcome(LOST, 2.0) is None
    transition = health.on_outcome(LOST, 3.0)
    assert transition is not None
    assert (transition.new, transition.reason) == (
        State.EJECTED,
        "out for 10 s after 3 failures in a row, last: connection reset",
    )


def test_five_5xx_in_a_row_eject() -> None:
    health = edge()
    assert [health.on_outcome(Outcome(500), float(t)) is None for t in range(5)] == [True] * 4 + [False]


def test_a_connection_with_forty_streams_dies_once() -> None:
    health = edge()
    for _ in range(40):
        health.on_outcome(LOST, 1.0)
    assert (health.state, health.failures) == (State.HEALTHY, 1)


def test_refused_dials_in_one_instant_each_count() -> None:
    health = edge()
    for _ in range(3):
        health.on_outcome(NO_DIAL, 1.0)
    assert health.state is State.EJECTED


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(abort=Abort(Party.CLIENT, Stage.BODY, Cause.CANCELLED)),
        Outcome(abort=Abort(Party.US, Stage.HEAD, Cause.REFUSED, "request body too large")),
        Outcome(abort=Abort(Party.EDGE, Stage.HEAD, Cause.LOST, "goaway", unprocessed=True)),
        Outcome(abort=LOST.abort, reused=True),
    ],
    ids=["client left", "our limit", "goaway", "stale connection"],
)
def test_what_says_nothing_of_the_edge_does_not_count(outcome: Outcome) -> None:
    health = edge()
    for t in range(20):
        health.on_outcome(outcome, float(t))
    assert (health.state, health.failures) == (State.HEALTHY, 0)


def test_our_timeout_on_an_edge_that_does_not_answer_counts() -> None:
    health = edge()
    silent = Outcome(abort=Abort(Party.US, Stage.HEAD, Cause.TIMED_OUT, "no answer within 120 s"))
    for t in range(3):
        health.on_outcome(silent, float(t))
    assert health.state is State.EJECTED


def test_nobody_is_ejected_while_half_of_the_pool_is_out() -> None:
    health = edge()
    for t in range(50):
        assert health.on_outcome(LOST, float(t), may_eject=False) is None


def test_an_ejection_ends_by_itself_and_doubles_each_time_up_to_a_cap() -> None:
    health = ejected(0.0)
    waits = []
    now = 0.4
    for _ in range(8):
        wait = health.back_in_s(now)
        assert wait is not None
        waits.append(round(wait))
        now += wait
        assert health.advance(now) is not None
        assert health.usable
        health.on_outcome(LOST, now)  # on trial: one failure is enough
        assert health.state is State.EJECTED
    assert waits == [10, 20, 40, 80, 160, 300, 300, 300]


def test_a_good_answer_ends_the_trial() -> None:
    health = ejected()
    health.advance(11.0)
    health.on_outcome(OK, 11.5)
    assert health.on_outcome(LOST, 12.0) is None


def test_ejections_are_forgotten_after_a_quiet_time() -> None:
    health = ejected(0.0)
    health.advance(11.0)
    health.on_outcome(OK, 11.0)
    for t in (500.0, 501.0, 502.0):
        health.on_outcome(LOST, t)
    assert health.back_in_s(502.0) == 10.0


@pytest.mark.parametrize(
    ("outcome", "wait"),
    [
        (Outcome(429, retry_after_s=7.5), 7.5),
        (Outcome(429), 2.0),
        (Outcome(429, retry_after_s=3600.0), COOL_CAP_S),
        (Outcome(503, retry_after_s=4.0), 4.0),
    ],
)
def test_an_edge_that_asks_for_a_pause_gets_it_within_a_bound(outcome: Outcome, wait: float) -> None:
    health = edge()
    transition = health.on_outcome(outcome, 100.0)
    assert transition is not None and transition.new is State.EJECTED
    assert f"cooling for {wait:.1f} s after {outcome.status}" in transition.reason
    assert health.advance(100.0 + wait - 0.01) is None
    back = health.advance(100.0 + wait)
    assert back is not None and back.new is State.HEALTHY


def test_cooling_is_no_failure_and_needs_no_slow_start() -> None:
    health = edge()
    for t in range(20):
        health.on_outcome(Outcome(429, retry_after_s=0.5), float(t))
    health.advance(30.0)
    assert health.usable and not health.is_outlier and health.failures == 0
    assert health.slow_start(30.0) == 1.0


def test_a_503_without_a_time_is_a_failure_like_any_other() -> None:
    health = edge()
    for t in range(5):
        health.on_outcome(Outcome(503), float(t))
    assert health.is_outlier


def test_a_recovered_edge_gets_its_share_slowly() -> None:
    health = edge()
    for ok in (False, False, False, True, True):
        health.on_probe(ok, "timed out", 100.0)
    shares = [health.slow_start(100.0 + t) for t in (0.0, 7.5, 15.0, 60.0)]
    assert shares == [0.25, 0.625, 1.0, 1.0]


def test_load_degrades_but_does_not_take_out() -> None:
    health = edge()
    transition = health.on_load("high load: 240 of 256 requests in flight", 1.0)
    assert transition is not None and transition.new is State.DEGRADED
    assert health.usable
    back = health.on_load("", 2.0)
    assert back is not None and back.new is State.HEALTHY


def test_the_worst_fact_is_the_state_and_the_others_are_not_forgotten() -> None:
    health = edge()
    health.on_load("slow", 1.0)
    for _ in range(3):
        health.on_probe(False, "timed out", 2.0)
    health.drain("removed from the configuration", 3.0)
    assert (health.state, health.reason) == (State.DRAINING, "removed from the configuration")
    health.drain("", 4.0)
    assert health.state is State.DOWN
    for _ in range(2):
        health.on_probe(True, "", 5.0)
    assert (health.state, health.reason) == (State.DEGRADED, "slow")


@pytest.mark.parametrize(
    ("fields", "wait"),
    [
        ([(b"retry-after", b"5")], 5.0),
        ([(b"retry-after", b"0.5")], 0.5),
        ([(b"retry-after-ms", b"250"), (b"retry-after", b"9")], 0.25),
        ([(b"retry-after", b"Wed, 21 Oct 2015 07:28:30 GMT"), (b"date", b"Wed, 21 Oct 2015 07:28:00 GMT")], 30.0),
        ([(b"retry-after", b"Thu, 01 Jan 1970 00:01:00 GMT")], 50.0),
        ([(b"retry-after", b"Wed, 21 Oct 1960 07:28:00 GMT")], 0.0),
        ([(b"retry-after", b"-3")], None),
        ([(b"retry-after", b"nan")], None),
        ([(b"retry-after", b"soon")], None),
        ([(b"retry-after", b"\xff")], None),
        ([(b"retry-after", b"Wed, 21 Oct 99999999999 07:28:00 GMT")], None),
        ([(b"retry-after", b"Wed, 21 Oct 2015 07:28:00 +999999999999")], None),
        ([], None),
    ],
)
def test_retry_after_is_read_in_all_its_forms(fields: list[tuple[bytes, bytes]], wait: float | None) -> None:
    assert retry_after_s(fields, wall_now=10.0) == wait


STEPS = st.one_of(
    st.tuples(st.just("probe"), st.booleans()),
    st.tuples(st.just("outcome"), st.sampled_from([OK, LOST, NO_DIAL, Outcome(500), Outcome(429), Outcome(404)])),
    st.tuples(st.just("load"), st.sampled_from(["", "slow"])),
    st.tuples(st.just("wait"), st.floats(0.0, 400.0)),
)


@given(st.lists(STEPS, max_size=80))
def test_every_change_of_state_is_one_transition_with_a_reason(steps: list[tuple[str, object]]) -> None:
    health, now, seen = edge(), 0.0, State.HEALTHY
    for kind, what in steps:
        now += what if isinstance(what, float) else 0.05
        if kind == "probe":
            transition = health.on_probe(bool(what), "" if what else "timed out", now)
        elif isinstance(what, Outcome):
            transition = health.on_outcome(what, now)
        elif isinstance(what, str):
            transition = health.on_load(what, now)
        else:
            transition = health.advance(now)
        if transition is not None:
            assert transition.old is seen and transition.new is not seen and transition.reason
            seen = transition.new
        assert health.state is seen
        assert 0.25 <= health.slow_start(now) <= 1.0
    assert health.advance(now + 1000.0) is None or health.state in (State.HEALTHY, State.DEGRADED)
    assert health.state is not State.EJECTED, "an ejection without an end"
