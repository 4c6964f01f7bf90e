"""The relay's table: whole, closed, and without a way to retry or end cleanly past the commit point."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from proxy.exchange import TABLE, TRANSITIONS, Event, Phase, Step

RELAY = Path(__file__).parents[2] / "docs" / "relay.md"
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
    assert TABLE[Phase.OVER, event] == (Phase.OVER, Step.NOTHING)


def test_every_phase_can_be_left_by_a_deadline_a_refusal_and_the_client() -> None:
    for phase, event in itertools.product(
        set(Phase) - {Phase.OVER}, (Event.TIMED_OUT, Event.REFUSED, Event.CLIENT_LOST)
    ):
        assert TABLE[phase, event][0] is Phase.OVER


def test_an_impossible_pair_is_an_error_not_a_guess() -> None:
    with pytest.raises(KeyError):
        TABLE[Phase.DIALING, Event.EDGE_ENDED]


LIMITED = "a limit, a policy or a deadline"  # two events, one row


def documented() -> dict[tuple[Phase, Event], tuple[Phase, Step]]:
    """The table as docs/relay.md has it."""
    section = RELAY.read_text().split("## The table", 1)[1].split("\n## ", 1)[0]
    found = {}
    for row in section.splitlines():
        if not row.startswith("| ") or row.startswith("| phase"):
            continue
        phases, event, after, step = (cell.strip() for cell in row.replace("**", "").strip("|").split("|"))
        befores = set(Phase) - {Phase.OVER} if phases == "any" else {Phase(name) for name in phases.split(", ")}
        events = [Event.REFUSED, Event.TIMED_OUT] if event == LIMITED else [Event(event)]
        found |= {pair: (Phase(after), Step(step)) for pair in itertools.product(befores, events)}
    return found


def test_the_page_on_the_relay_has_every_row_of_the_table_and_no_other() -> None:
    assert documented() == TRANSITIONS
