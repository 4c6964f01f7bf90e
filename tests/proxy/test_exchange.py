"""The relay's table: whole, closed, and without a way to retry or end cleanly past the commit point."""

from __future__ import annotations

import itertools

import pytest

from proxy.exchange import TRANSITIONS, Event, Phase, Step, decide, picture

COMMITTED = {Phase.ANSWERING, Phase.TUNNEL}


def test_nothing_is_dialled_or_answered_by_us_after_the_commit_point() -> None:
    for (phase, event), (_, step) in TRANSITIONS.items():
        if phase in COMMITTED:
            assert step not in {Step.DIAL, Step.SEND, Step.ANSWER, Step.FAIL, Step.CANCEL_AND_FAIL}, (phase, event)


def test_a_lost_edge_is_never_a_clean_end_for_the_client() -> None:
    for (phase, event), (_, step) in TRANSITIONS.items():
        if event in {Event.EDGE_LOST, Event.TIMED_OUT, Event.REFUSED} and phase in COMMITTED:
            assert step in {Step.CUT, Step.CANCEL_AND_CUT}, (phase, event)


def test_a_lost_client_always_cancels_the_edge() -> None:
    rows = {phase: step for (phase, event), (_, step) in TRANSITIONS.items() if event is Event.CLIENT_LOST}
    assert rows == dict.fromkeys([Phase.DIALING, Phase.ASKED, Phase.ANSWERING, Phase.TUNNEL], Step.CANCEL)


@pytest.mark.parametrize("event", list(Event))
def test_what_comes_late_means_nothing(event: Event) -> None:
    assert decide(Phase.OVER, event) == (Phase.OVER, Step.NOTHING)


def test_every_phase_can_be_left_by_a_deadline_a_refusal_and_the_client() -> None:
    for phase, event in itertools.product(
        set(Phase) - {Phase.OVER}, (Event.TIMED_OUT, Event.REFUSED, Event.CLIENT_LOST)
    ):
        assert decide(phase, event)[0] is Phase.OVER


def test_an_impossible_pair_is_an_error_not_a_guess() -> None:
    with pytest.raises(KeyError):
        decide(Phase.DIALING, Event.EDGE_ENDED)


def test_the_picture_shows_every_row() -> None:
    assert picture().count("->") == len(TRANSITIONS)
