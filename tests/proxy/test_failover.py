"""When a request moves to another edge: the table of `proxy.failover`, row by row, and what must never happen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.model import Retry
from proxy.failover import NO_EDGE, Attempts, Dial, GiveUp, RetryBudget
from proxy.messages import Abort, Cause, Party, Stage

REFUSED_DIAL = Abort(
    Party.EDGE, Stage.CONNECT, Cause.LOST, "connect 10.0.0.1:443: connection refused", unprocessed=True
)
LOST = Abort(Party.EDGE, Stage.HEAD, Cause.LOST, "connection reset")
GOAWAY = Abort(Party.EDGE, Stage.HEAD, Cause.LOST, "goaway, last stream 7", code=0, unprocessed=True)
REFUSED_STREAM = Abort(Party.EDGE, Stage.HEAD, Cause.REFUSED, "stream refused", code=7, unprocessed=True)
SLOW = Abort(Party.US, Stage.HEAD, Cause.TIMED_OUT, "no answer within 120 s")
LEFT = Abort(Party.CLIENT, Stage.HEAD, Cause.CANCELLED)
CUT = Abort(Party.EDGE, Stage.BODY, Cause.LOST, "connection reset")


def budget(ratio: float = 0.2, floor_per_s: float = 1.0) -> RetryBudget:
    return RetryBudget(ratio, floor_per_s)


def attempts(*edges: str, moves: int = 2, hops: int = 3, spend: RetryBudget | None = None) -> Attempts:
    made = Attempts(
        retry=Retry(attempts=moves),
        budget=spend or budget(),
        candidates=edges or ("a", "b", "c"),
        follow_redirects=hops,
    )
    made.first(0.0)
    return made


def failed(
    of: Attempts, edge: str, abort: Abort, *, reused: bool = False, replayable: bool = True, method: bytes = b"POST"
) -> Dial | GiveUp:
    return of.on_failed(edge, abort, reused=reused, replayable=replayable, method=method, now=1.0)


def test_the_first_dial_is_to_the_best_candidate() -> None:
    fresh = Attempts(retry=Retry(), budget=budget(), candidates=["a", "b"], follow_redirects=3)
    assert fresh.first(0.0) == Dial("a")


def test_without_a_candidate_the_request_is_given_up_and_may_be_sent_again_by_its_sender() -> None:
    nobody = Attempts(retry=Retry(), budget=budget(), candidates=[], follow_redirects=3)
    assert nobody.first(0.0) == GiveUp(NO_EDGE)
    assert NO_EDGE.unprocessed


def test_row_1_nothing_is_tried_for_a_client_that_left() -> None:
    assert failed(attempts(), "a", LEFT, method=b"GET") == GiveUp(LEFT)


def test_row_3_an_edge_that_is_out_is_dialled_when_no_other_could_be_reached() -> None:
    made = Attempts(
        retry=Retry(attempts=3),
        budget=budget(),
        candidates=["a", "b"],
        follow_redirects=3,
        last_resort=lambda: ["out", "a"],
    )
    made.first(0.0)
    assert failed(made, "a", REFUSED_DIAL) == Dial("b")
    assert failed(made, "b", REFUSED_DIAL) == Dial("out")
    assert failed(made, "out", REFUSED_DIAL) == GiveUp(REFUSED_DIAL)


def test_no_answer_is_left_for_an_edge_that_is_out() -> None:
    made = Attempts(retry=Retry(), budget=budget(), candidates=["a"], follow_redirects=3, last_resort=lambda: ["out"])
    made.first(0.0)
    assert failed(made, "a", LOST, method=b"GET") == GiveUp(LOST)
    assert made.on_status("a", 503, replayable=True, idempotent=True, now=1.0) is None


def test_row_2_after_the_first_response_byte_nothing_is_tried() -> None:
    assert failed(attempts(), "a", CUT, method=b"GET") == GiveUp(CUT)


def test_row_3_a_dial_that_failed_moves_a_post_on_even_with_an_unheld_body_and_an_empty_budget() -> None:
    post = attempts(spend=budget(0.0, 0.0))
    assert failed(post, "a", REFUSED_DIAL, replayable=False) == Dial("b")
    assert failed(post, "b", REFUSED_DIAL, replayable=False) == Dial("c")
    assert failed(post, "c", REFUSED_DIAL, replayable=False) == GiveUp(REFUSED_DIAL)


def test_row_3_moves_are_bounded_by_retry_attempts() -> None:
    post = attempts("a", "b", "c", "d", moves=1)
    assert failed(post, "a", REFUSED_DIAL) == Dial("b")
    assert failed(post, "b", REFUSED_DIAL) == GiveUp(REFUSED_DIAL)


@pytest.mark.parametrize("abort", [LOST, GOAWAY, REFUSED_STREAM, SLOW])
def test_row_4_a_body_that_is_no_longer_held_is_never_sent_in_part(abort: Abort) -> None:
    assert failed(attempts(), "a", abort, reused=True, replayable=False, method=b"GET") == GiveUp(abort)


def test_row_5_a_goaway_moves_any_method_free_of_budget() -> None:
    assert failed(attempts(spend=budget(0.0, 0.0)), "a", GOAWAY) == Dial("b")


def test_row_5_with_one_edge_the_same_one_is_dialled_again() -> None:
    assert failed(attempts("a"), "a", GOAWAY) == Dial("a")


def test_row_6_a_refused_stream_moves_any_method_but_spends_budget() -> None:
    assert failed(attempts(), "a", REFUSED_STREAM) == Dial("b")
    assert failed(attempts(spend=budget(0.0, 0.0)), "a", REFUSED_STREAM) == GiveUp(REFUSED_STREAM)


def test_row_7_a_stale_connection_is_replaced_once_by_a_fresh_one_to_the_same_edge() -> None:
    post = attempts(spend=budget(0.0, 0.0), moves=0)
    assert failed(post, "a", LOST, reused=True) == Dial("a", fresh=True)
    assert (post.moves, post.replays) == (1, 1)


def test_row_7_a_second_loss_is_reported() -> None:
    post = attempts()
    failed(post, "a", LOST, reused=True)
    assert failed(post, "a", LOST, reused=True) == GiveUp(LOST)


def test_row_7_every_dial_after_a_stale_connection_is_fresh() -> None:
    post = attempts()
    failed(post, "a", LOST, reused=True)
    assert failed(post, "a", REFUSED_DIAL) == Dial("b", fresh=True)


def test_row_8_a_safe_method_moves_on_within_the_budget() -> None:
    assert failed(attempts(), "a", LOST, method=b"GET") == Dial("b")
    assert failed(attempts(), "a", SLOW, method=b"HEAD") == Dial("b")
    assert failed(attempts(spend=budget(0.0, 0.0)), "a", LOST, method=b"GET") == GiveUp(LOST)
    assert failed(attempts("a"), "a", LOST, method=b"GET") == GiveUp(LOST)


@pytest.mark.parametrize("method", [b"POST", b"PUT", b"DELETE", b"PATCH"])
def test_row_9_a_request_that_may_have_started_is_not_repeated(method: bytes) -> None:
    assert failed(attempts(), "a", LOST, method=method) == GiveUp(LOST)
    assert failed(attempts(), "a", SLOW, reused=True, method=method) == GiveUp(SLOW)


def test_a_misdirected_request_is_sent_once_more_on_its_own_connection() -> None:
    post = attempts()
    assert post.on_status("a", 421, replayable=True, idempotent=False, now=1.0) == Dial("a", fresh=True)
    assert post.on_status("a", 421, replayable=True, idempotent=False, now=1.0) is None


def test_a_too_early_request_is_sent_once_more() -> None:
    post = attempts()
    assert post.on_status("a", 425, replayable=True, idempotent=False, now=1.0) == Dial("a")
    assert post.on_status("a", 425, replayable=True, idempotent=False, now=1.0) is None


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504, 529])
def test_no_error_answer_to_a_post_is_retried(status: int) -> None:
    assert attempts().on_status("a", status, replayable=True, idempotent=False, now=1.0) is None


def test_an_idempotent_request_goes_elsewhere_after_an_overloaded_answer() -> None:
    get = attempts("a", "b")
    assert get.on_status("a", 503, replayable=True, idempotent=True, now=1.0) == Dial("b")
    assert get.on_status("b", 503, replayable=True, idempotent=True, now=1.0) is None


def test_a_status_is_no_reason_to_send_half_a_body() -> None:
    assert attempts().on_status("a", 421, replayable=False, idempotent=True, now=1.0) is None


def test_a_redirect_to_an_edge_of_the_pool_is_followed_free_of_budget_and_moves() -> None:
    post = attempts(moves=0, spend=budget(0.0, 0.0))
    assert post.on_redirect("b", replayable=True, now=1.0) == Dial("b")


def test_a_redirect_elsewhere_or_without_the_body_is_not_followed() -> None:
    assert attempts().on_redirect(None, replayable=True, now=1.0) is None
    assert attempts().on_redirect("b", replayable=False, now=1.0) is None


def test_a_redirect_loop_ends_at_the_first_edge_that_comes_again() -> None:
    post = attempts(hops=20)
    assert post.on_redirect("b", replayable=True, now=1.0) == Dial("b")
    assert post.on_redirect("a", replayable=True, now=1.0) is None


def test_an_edge_may_redirect_to_itself_until_hops_run_out() -> None:
    post = attempts(hops=2)
    assert [post.on_redirect("a", replayable=True, now=1.0) for _ in range(3)] == [Dial("a"), Dial("a"), None]


def test_after_a_redirect_a_failed_dial_does_not_go_back_to_the_edge_that_sent_it_away() -> None:
    post = attempts("a", "b", "c")
    post.on_redirect("b", replayable=True, now=1.0)
    assert failed(post, "b", REFUSED_DIAL) == Dial("c")


def test_a_budget_grants_a_share_of_the_requests_of_the_last_ten_seconds_and_a_floor() -> None:
    shared = RetryBudget(0.2, min_per_s=0.1)  # floor: one in the window
    for _ in range(20):
        shared.note_request(5.0)
    assert [shared.spend(5.5) for _ in range(6)] == [True] * 5 + [False]
    assert shared.spend(15.9) is False
    assert shared.spend(16.1) is True  # the floor is left, the requests are forgotten
    assert shared.spend(16.2) is False


def test_a_budget_keeps_at_most_eleven_seconds() -> None:
    shared = budget()
    for second in range(1000):
        shared.note_request(float(second))
    assert len(shared._seconds) <= 12


FAILURES = st.sampled_from([REFUSED_DIAL, LOST, GOAWAY, REFUSED_STREAM, SLOW, CUT])
EVENTS = st.one_of(
    st.tuples(st.just("failed"), FAILURES, st.booleans(), st.booleans()),
    st.tuples(st.just("status"), st.sampled_from([421, 425, 429, 503]), st.booleans(), st.booleans()),
    st.tuples(st.just("redirect"), st.sampled_from(["a", "b", "c", None]), st.booleans(), st.booleans()),
)


@given(st.lists(EVENTS, max_size=60), st.integers(0, 4), st.integers(0, 5), st.integers(1, 3))
def test_no_history_repeats_a_post_that_may_have_started_nor_goes_on_for_ever(
    events: list[tuple[str, object, bool, bool]], moves: int, hops: int, edges: int
) -> None:
    post = Attempts(
        retry=Retry(attempts=moves), budget=budget(), candidates=["a", "b", "c"][:edges], follow_redirects=hops
    )
    command: Dial | GiveUp | None = post.first(0.0)
    dials, unvouched = 0, 0  # unvouched: sent, lost, and nobody says that it was not processed
    for kind, what, reused, replayable in events:
        if not isinstance(command, Dial):
            break
        dials += 1
        assert unvouched <= 1, "sent again after a loss that only one replay is allowed for"
        if kind == "failed":
            assert isinstance(what, Abort)
            was_reused = reused and not command.fresh
            started = what.stage is Stage.HEAD and not what.unprocessed
            if started:
                unvouched += 1
            command = post.on_failed(
                command.edge_id, what, reused=was_reused, replayable=replayable, method=b"POST", now=1.0
            )
            if started and isinstance(command, Dial):
                assert was_reused and what is LOST and command.fresh and command.edge_id
        elif kind == "status":
            assert isinstance(what, int)
            command = post.on_status(command.edge_id, what, replayable=replayable, idempotent=False, now=1.0)
            assert command is None or what in (421, 425)
        else:
            assert what is None or isinstance(what, str)
            command = post.on_redirect(what, replayable=replayable, now=1.0)
    assert dials <= 1 + moves + hops + 3


def test_requests_that_were_only_noted_earn_their_share_in_their_own_second() -> None:
    noted, counted = RetryBudget(0.5, min_per_s=0.0), RetryBudget(0.5, min_per_s=0.0)
    for _ in range(8):
        noted.uncounted += 1
        noted.last_at = 100.0
        counted.note_request(100.0)
    assert [noted.spend(101.0) for _ in range(5)] == [counted.spend(101.0) for _ in range(5)] == [True] * 4 + [False]

    for _ in range(8):
        noted.uncounted += 1
        noted.last_at = 200.0
    assert not noted.spend(230.0), "what was earned is forgotten after the window, though it was counted only now"
