"""Whom to ask, when to hedge, what a failure means: transcripts of attempts, and the memories beside them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resolver.quirks import IdleLimit, Intolerance
from resolver.standing import HEDGE_MAX_S, HEDGE_MIN_S, PATIENCE_MAX_S, Fault, Standing
from resolver.upstreams import HEDGE_BURST, Answered, Ask, Attempt, Deliver, Failed, GiveUp, Group, Ticked, WakeAt

A, B, C = "https://a.test", "tls://b.test", "udp://c.test"


def measured(rtt_s: float, now: float = 0.0) -> Standing:
    standing = Standing()
    standing.asked = 1
    standing.answered(rtt_s, now)
    return standing


def group(strategy: str = "failover", **rtts: float) -> Group:
    """Upstreams A, B, C with these RTTs, or never measured."""
    urls = {"a": A, "b": B, "c": C}
    standings = {urls[k]: measured(v) if v else Standing() for k, v in rtts.items()}
    return Group(standings, {A: 100, B: 50, C: 0}, strategy)


def begun(of: Group, now: float = 0.0, deadline: float = 2.0, draw: float = 0.0) -> tuple[Attempt, list[object]]:
    attempt = of.plan(now, deadline, draw)
    return attempt, attempt.start(now)


# --- transcripts -----------------------------------------------------------------------------------------------------


def test_a_good_answer_is_delivered_and_a_later_one_only_teaches() -> None:
    g = group(a=0.1, b=0.1)
    attempt, commands = begun(g)
    assert commands == [Ask(A), WakeAt(0.1)]
    assert attempt.on(Ticked(0.1)) == [Ask(B), WakeAt(2.0)]
    assert attempt.on(Answered(B, 0.02, 0.12)) == [Deliver(B)]
    assert attempt.on(Answered(A, 0.3, 0.3)) == []
    assert g.standings[A].rtt_s == pytest.approx(0.1 + 0.2 / 8)


def test_a_failure_asks_the_next_at_once_and_the_last_one_gives_up_with_every_cause() -> None:
    attempt, _ = begun(group(a=0.1, b=0.1))
    assert attempt.on(Failed(A, Fault.UNREACHABLE, "refused", 0.01)) == [Ask(B), WakeAt(2.0)]
    assert attempt.on(Failed(B, Fault.UNWILLING, "SERVFAIL", 0.02)) == [GiveUp(((A, "refused"), (B, "SERVFAIL")))]


def test_an_alone_upstream_is_waited_for_until_the_deadline() -> None:
    attempt, commands = begun(group(a=0.1))
    assert commands == [Ask(A), WakeAt(2.0)]
    assert attempt.on(Ticked(2.0)) == [GiveUp(((A, "no answer in 2.00 s"),))]
    assert attempt.on(Answered(A, 2.1, 2.1)) == []


def test_without_hedge_budget_the_next_is_asked_only_when_the_first_is_late() -> None:
    g = group(a=0.1, b=0.1)
    g.hedge_tokens = 0.0
    attempt, _ = begun(g)
    assert attempt.on(Ticked(0.1)) == [WakeAt(pytest.approx(0.125))]
    assert attempt.on(Ticked(0.28)) == [WakeAt(pytest.approx(0.3))]
    assert attempt.on(Ticked(0.31)) == [Ask(B), WakeAt(2.0)]
    assert g.standings[A].failures_in_row == 1, "late counts once"
    assert attempt.on(Failed(A, Fault.SILENT, "timeout", 2.0)) == []
    assert g.standings[A].failures_in_row == 1


def outrun(g: Group, now: float) -> None:
    """B, asked beside A after its hedge time, answers and A does not."""
    attempt, _ = begun(g, now, now + 2.0)
    assert Ask(B) in attempt.on(Ticked(now + 0.1))
    assert attempt.on(Answered(B, 0.02, now + 0.12)) == [Deliver(B)]


def test_after_two_lost_races_a_silent_upstream_is_hedged_free_of_the_budget() -> None:
    g = group(a=0.1, b=0.1)
    waiting, _ = begun(g)
    outrun(g, 0.0)
    g.hedge_tokens = 1.0
    outrun(g, 0.01)
    g.hedge_tokens = 0.0
    assert Ask(B) in waiting.on(Ticked(0.13))
    assert g.standings[A].down_until == 0.0, "it may only be slow: patience judges that"


def test_one_lost_race_or_one_that_was_answered_after_all_frees_no_hedge() -> None:
    for answers in (False, True):
        g = group(a=0.1, b=0.1)
        waiting, _ = begun(g)
        outrun(g, 0.0)
        if answers:
            outrun(g, 0.01)
            g.standings[A].answered(0.13, 0.13)
        g.hedge_tokens = 0.0
        assert waiting.on(Ticked(0.13)) == [WakeAt(pytest.approx(0.155))]


def test_the_fastest_is_another_one_once_it_was_outrun() -> None:
    g = group("fastest", a=0.100, b=0.101)
    assert g.ranked(0.0, 0.0) == [A, B]
    outrun(g, 0.0)
    assert g.ranked(0.2, 0.0) == [B, A]


def test_a_hedge_does_not_push_the_first_ones_lateness_on() -> None:
    attempt, _ = begun(group(a=0.1, b=0.1, c=0.1))
    assert attempt.on(Ticked(0.1)) == [Ask(B), WakeAt(pytest.approx(0.3))]
    assert attempt.on(Ticked(0.301)) == [Ask(C), WakeAt(2.0)]


def test_a_failed_hedge_leaves_the_first_in_flight() -> None:
    attempt, _ = begun(group(a=0.1, b=0.1))
    attempt.on(Ticked(0.1))
    assert attempt.on(Failed(B, Fault.UNREACHABLE, "refused", 0.2)) == []
    assert attempt.on(Answered(A, 0.4, 0.4)) == [Deliver(A)]


def test_race_asks_three_at_once() -> None:
    _, commands = begun(group("race", a=0.1, b=0.2, c=0.3))
    assert commands == [Ask(A), Ask(B), Ask(C), WakeAt(2.0)]


# --- ranking ---------------------------------------------------------------------------------------------------------


def test_fastest_prefers_a_low_rtt_and_loss_weighs_four_times() -> None:
    g = group("fastest", a=0.030, b=0.020)
    assert g.ranked(0.0, 0.5) == [B, A]
    g.standings[B].loss = 0.2
    assert g.ranked(0.0, 0.5) == [A, B]


def test_fastest_asks_an_unmeasured_upstream_beside_the_best_once() -> None:
    g = group("fastest", a=0.0, b=0.0)
    assert begun(g)[1][:2] == [Ask(A), Ask(B)]
    assert begun(g)[1][1:] == [WakeAt(HEDGE_MAX_S)]


def test_fastest_measures_anew_what_was_not_measured_for_a_minute() -> None:
    g = group("fastest", a=0.01, b=0.02)
    g.standings[A].measured_at = 100.0
    assert begun(g, now=100.0, deadline=102.0)[1][:2] == [Ask(A), Ask(B)]


def test_a_bad_hour_is_forgotten() -> None:
    slow, others = measured(1.0), 0.1
    assert slow.score(0.0, others) == pytest.approx(1.0)
    assert slow.score(60.0, others) == pytest.approx(0.55)
    assert slow.score(3600.0, others) == pytest.approx(0.1)


def test_failover_keeps_the_configured_order() -> None:
    assert group("failover", a=0.9, b=0.1).ranked(0.0, 0.9) == [A, B]


def test_weighted_draws_by_weight_and_weight_0_is_a_last_resort() -> None:
    g = group("weighted", a=0.1, b=0.1, c=0.1)
    firsts = [g.ranked(0.0, i / 300)[0] for i in range(300)]
    assert firsts.count(A) == 200 and firsts.count(B) == 100
    assert g.ranked(0.0, 0.99)[-1] == C


# --- falling and rising ----------------------------------------------------------------------------------------------


def test_one_lost_datagram_takes_nobody_down_two_do() -> None:
    standing = measured(0.1)
    standing.lost(Fault.SILENT, "timeout", 1.0)
    assert not standing.is_down(1.0)
    standing.lost(Fault.SILENT, "timeout", 2.0)
    assert standing.is_down(2.0) and standing.state(2.0) == "down"


def test_backoff_doubles_from_one_second_to_a_minute() -> None:
    standing, waits = Standing(), []
    for _ in range(9):
        standing.lost(Fault.UNREACHABLE, "refused", 0.0)
        waits.append(standing.down_until)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_servfail_takes_nobody_down() -> None:
    g = group(a=0.1, b=0.1)
    for _ in range(20):
        begun(g)[0].on(Failed(A, Fault.UNWILLING, "SERVFAIL", 0.0))
    assert not g.standings[A].is_down(0.0) and g.ranked(0.0, 0.0) == [A, B]


def test_what_is_down_is_asked_last_and_all_down_means_soonest_back_first() -> None:
    g = group(a=0.1, b=0.1)
    g.standings[A].lost(Fault.LYING, "portal", 0.0)
    assert begun(g)[1][0] == Ask(B)
    g.standings[B].lost(Fault.LYING, "portal", 0.5)
    assert begun(g)[1][0] == Ask(A)


def test_after_its_backoff_an_upstream_is_tried_beside_another_once_and_then_trusted() -> None:
    g = group(a=0.1, b=0.1)
    g.standings[A].lost(Fault.UNREACHABLE, "refused", 0.0)
    attempt, commands = begun(g, now=1.5, deadline=3.5)
    assert commands[:2] == [Ask(B), Ask(A)]
    assert Ask(A) not in begun(g, now=1.6, deadline=3.6)[1], "one try per backoff"
    attempt.on(Answered(A, 0.01, 1.6))
    assert g.ranked(1.7, 0.0) == [A, B]


def test_hedges_stay_within_their_budget() -> None:
    g, hedges = group(a=0.1, b=0.1), 0
    for i in range(1000):
        attempt, _ = begun(g, now=float(i), deadline=i + 2.0)
        hedges += Ask(B) in attempt.on(Ticked(i + 0.1))
        attempt.on(Answered(A, 0.1, i + 0.15))
    assert hedges <= 1000 * 0.1 + HEDGE_BURST


def test_the_hedge_time_is_the_90th_percentile_within_bounds() -> None:
    standing = Standing()
    assert standing.hedge_after_s() == HEDGE_MAX_S and standing.patience_s() == PATIENCE_MAX_S
    for i in range(64):
        standing.asked += 1
        standing.answered(0.1 if i % 16 else 0.2, 0.0)
    assert standing.hedge_after_s() == pytest.approx(0.1)
    for _ in range(64):
        standing.asked += 1
        standing.answered(0.001, 0.0)
    assert standing.hedge_after_s() == HEDGE_MIN_S


events = st.lists(
    st.tuples(st.sampled_from(["answer", "silent", "unwilling", "unreachable", "tick"]), st.floats(0.0, 0.5)),
    max_size=30,
)


@given(st.sampled_from(["fastest", "race", "failover", "weighted"]), events, st.floats(0, 1, exclude_max=True))
def test_every_attempt_asks_each_upstream_at_most_once_and_ends_once(
    strategy: str, steps: list[tuple[str, float]], draw: float
) -> None:
    g = group(strategy, a=0.1, b=0.2, c=0.0)
    attempt, commands = begun(g, draw=draw)
    now, heard, flight = 0.0, list(commands), [c.url for c in commands if isinstance(c, Ask)]
    for step, wait in steps:
        now = min(now + wait, 2.0)
        if step == "tick":
            commands = attempt.on(Ticked(now))
        elif not flight:
            continue
        elif step == "answer":
            commands = attempt.on(Answered(flight.pop(), 0.1, now))
        else:
            commands = attempt.on(Failed(flight.pop(), Fault(step), step, now))
        heard += commands
        flight += [c.url for c in commands if isinstance(c, Ask)]
    heard += attempt.on(Ticked(2.0))
    asked = [c.url for c in heard if isinstance(c, Ask)]
    assert len(asked) == len(set(asked))
    assert len([c for c in heard if isinstance(c, Deliver | GiveUp)]) == 1
    assert all(s.down_until <= 2.0 + 120 for s in g.standings.values())


# --- memories --------------------------------------------------------------------------------------------------------


def test_an_intolerance_is_spared_five_minutes_then_tried_doubling_to_six_hours() -> None:
    memory, now, waits = Intolerance(), 0.0, []
    for _ in range(9):
        memory.broke(now)
        start = now
        while memory.spares(now):
            now += 60.0
        waits.append(now - start)
    assert waits == [300, 600, 1200, 2400, 4800, 9600, 19200, 21600, 21600]
    memory.worked()
    memory.broke(now)
    assert memory.spares(now + 299) and not memory.spares(now + 300)


def test_breaking_twice_at_once_counts_once() -> None:
    memory = Intolerance()
    memory.broke(0.0)
    memory.broke(0.1)
    assert not memory.spares(300.0)


def test_the_idle_limit_is_learned_from_the_peer_and_undercut() -> None:
    limit = IdleLimit()
    assert limit.close_after_s == pytest.approx(24.0)
    limit.closed_by_peer(10.0)
    assert limit.close_after_s == pytest.approx(8.0)
    limit.closed_by_us()
    assert limit.close_after_s == pytest.approx(8.4)
    limit.closed_by_peer(0.05)
    assert limit.close_after_s == pytest.approx(8.4), "a restart is not a limit"


def test_a_named_limit_is_believed_within_bounds() -> None:
    limit = IdleLimit()
    limit.told(5.0)
    assert limit.close_after_s == pytest.approx(4.0)
    limit.told(1e6)
    limit.closed_by_us()
    assert limit.close_after_s == pytest.approx(96.0)


def test_losses_are_forgiven_answer_by_answer() -> None:
    standing = measured(0.1)
    standing.lost(Fault.SILENT, "no answer", 1.0)
    after_loss = standing.score(1.0, 0.1)
    scores = []
    for _ in range(20):
        standing.answered(0.1, 1.0)
        scores.append(standing.score(1.0, 0.1))
    assert after_loss > scores[0] and scores == sorted(scores, reverse=True)
    assert scores[-1] == pytest.approx(0.1, rel=0.05)
