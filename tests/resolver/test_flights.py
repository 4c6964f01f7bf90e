"""Joined questions: bounds, one ending for all, and nobody left waiting."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from resolver.io.fetch import question_for
from resolver.io.flights import Flight, Flights
from resolver.wire import A


def flight(name: bytes) -> Flight[str]:
    return Flight(name, question_for(name, A), b"", None, None)


def gone(_: Flight[str]) -> str:
    return "given up"


async def test_one_verdict_for_all_and_the_flight_is_over_before_anybody_hears_it() -> None:
    landed: list[tuple[str, int]] = []

    async def fly(_: Flight[str]) -> str:
        await asyncio.sleep(0)
        return "answer"

    flights = Flights(fly, gone)
    one = flight(b"\1a\0")
    flights.start(one)
    for _ in range(3):
        one.waiters.append(lambda verdict: landed.append((verdict, len(flights))))
    assert one.task is not None
    await one.task
    assert landed == [("answer", 0)] * 3


async def test_flights_and_waiters_are_bounded() -> None:
    async def fly(_: Flight[str]) -> str:
        await asyncio.Event().wait()
        return ""

    flights = Flights(fly, gone, most_flights=2, most_waiters=2)
    one, two = flight(b"\1a\0"), flight(b"\1b\0")
    flights.start(one)
    assert not flights.full(None)
    flights.start(two)
    assert flights.full(None)
    one.waiters += [print, print]
    assert flights.full(one) and not flights.full(two)
    one.waiters.clear()
    await flights.close()
    assert len(flights) == 0


@pytest.mark.parametrize("close_early", [True, False])
async def test_whoever_waits_is_told_when_a_flight_is_cancelled_or_breaks(close_early: bool) -> None:
    heard: list[str] = []

    async def fly(_: Flight[str]) -> str:
        if not close_early:
            raise LookupError("a bug")
        await asyncio.Event().wait()
        return ""

    flights = Flights(fly, gone)
    one = flight(b"\1a\0")
    one.waiters.append(heard.append)
    flights.start(one)
    await asyncio.sleep(0)
    assert one.task is not None
    if close_early:
        await flights.close()
    else:
        with pytest.raises(LookupError):
            await one.task
    assert heard == ["given up"]


async def test_settling_early_leaves_the_flight_for_those_who_come_later() -> None:
    heard: list[str] = []
    held = asyncio.Event()

    async def fly(_: Flight[str]) -> str:
        await held.wait()
        return "fresh"

    flights = Flights(fly, gone)
    one = flight(b"\1a\0")
    one.waiters.append(heard.append)
    flights.start(one)
    asyncio.get_running_loop().call_soon(partial(one.settle, "stale"))
    await asyncio.sleep(0.01)
    one.waiters.append(heard.append)
    held.set()
    assert one.task is not None
    await one.task
    assert heard == ["stale", "fresh"]
