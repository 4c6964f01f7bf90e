"""Who sends next of those who wait."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.priority import Priority
from proxy.turns import SHARE, Turns


def serve(turns: Turns[str], count: int, again: dict[str, tuple[int, Priority]]) -> str:
    """Who was served in `count` turns, each asking again at once."""
    served = ""
    for _ in range(count):
        name = turns.next()
        assert name is not None
        served += name
        turns.add(again[name][0], name, again[name][1])
    return served


def waiting(**names: tuple[int, int, bool]) -> tuple[Turns[str], dict[str, tuple[int, Priority]]]:
    turns: Turns[str] = Turns()
    places = {name: (key, Priority(urgency, incremental)) for name, (key, urgency, incremental) in names.items()}
    for name, (key, priority) in places.items():
        turns.add(key, name, priority)
    return turns, places


def test_incremental_equals_take_turns() -> None:
    turns, places = waiting(a=(1, 3, True), b=(3, 3, True), c=(5, 3, True))
    assert serve(turns, 7, places) == "abcabca"


def test_equals_that_are_not_incremental_are_served_in_the_order_of_their_ids() -> None:
    turns, places = waiting(b=(3, 3, False), a=(1, 3, False))
    assert serve(turns, 4, places) == "aaaa"


def test_those_in_order_are_one_more_in_the_ring() -> None:
    turns, places = waiting(a=(1, 3, True), x=(3, 3, False), y=(5, 3, False), b=(7, 3, True))
    assert serve(turns, 7, places) == "axbaxba"


def test_a_more_urgent_one_goes_first_and_leaves_one_turn_of_sixteen() -> None:
    turns, places = waiting(low=(1, 5, True), high=(3, 0, False))
    served = serve(turns, 3 * SHARE, places).replace("high", "h").replace("low", "l")
    assert served == ("h" * (SHARE - 1) + "l") * 3


def test_each_level_below_gets_its_share() -> None:
    turns, places = waiting(a=(1, 0, True), b=(3, 3, True), c=(5, 7, True))
    served = serve(turns, 10 * SHARE, places)
    assert served.count("b") >= 9 and served.count("c") >= 9
    assert served.count("a") > 8 * SHARE


def test_who_waits_keeps_its_place_and_can_be_taken_out() -> None:
    turns, places = waiting(a=(1, 3, True), b=(3, 3, True))
    turns.add(1, "a", places["a"][1])
    assert sorted(turns) == ["a", "b"]
    assert turns.remove(1) and not turns.remove(1)
    assert turns.next() == "b"
    assert turns.next() is None and not turns


@given(st.lists(st.tuples(st.integers(0, 7), st.booleans(), st.booleans()), max_size=40))
def test_everyone_who_waits_is_served_exactly_once(steps: list[tuple[int, bool, bool]]) -> None:
    # Given any waiters, some of them taken out again
    turns: Turns[int] = Turns()
    left = set()
    for key, (urgency, incremental, removed) in enumerate(steps):
        turns.add(key, key, Priority(urgency, incremental))
        if removed:
            assert turns.remove(key)
        else:
            left.add(key)
    # When the turns are played to their end, Then each comes up once
    assert set(turns) == left
    served = [turns.next() for _ in left]
    assert sorted(x for x in served if x is not None) == sorted(left)
    assert turns.next() is None
