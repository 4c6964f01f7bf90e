"""Join identical questions in flight: one goes upstream, all who asked are answered.

Theory: a flight is one question on its way and the clients that wait for it. It is owned by nobody who waits: a client
that goes away is one callback that writes to a closed socket, and the others never notice. A flight ends once, with a
verdict for all; each waiter gets a message of its own (id, letter case, size).

Which task owns what: a flight's task is owned by `Flights` and is cancelled by `close()` alone; those who wait then get
the verdict for a resolver that stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from config.model import Zone
from resolver.cache import Entry
from resolver.question import Question

MOST_FLIGHTS = 4096
"""Questions upstream at once; as many more wait in no queue but are refused (a flood of random names, D35)."""
MOST_WAITERS = 4096
"""Clients that may wait for one question."""

V = TypeVar("V")


@dataclass(slots=True, eq=False)
class Flight(Generic[V]):
    key: bytes
    question: Question
    scope: bytes
    zone: Zone | None
    stale: Entry | None
    waiters: list[Callable[[V], None]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    bridge: asyncio.TimerHandle | None = None

    def settle(self, verdict: V) -> None:
        """Answers everybody who waits now. More may join while the flight goes on."""
        waiters, self.waiters = self.waiters, []
        for answer in waiters:
            answer(verdict)


class Flights(Generic[V]):
    """The flights of one resolver. `fly` turns a flight into its verdict and must not raise but for cancellation."""

    def __init__(
        self,
        fly: Callable[[Flight[V]], Coroutine[Any, Any, V]],
        stopped: Callable[[Flight[V]], V],
        *,
        most_flights: int = MOST_FLIGHTS,
        most_waiters: int = MOST_WAITERS,
    ) -> None:
        self.most_flights, self.most_waiters = most_flights, most_waiters
        self._fly = fly
        self._stopped = stopped
        self._flights: dict[bytes, Flight[V]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def waiting(self) -> int:
        return sum(len(flight.waiters) for flight in self._flights.values())

    def find(self, key: bytes) -> Flight[V] | None:
        return self._flights.get(key)

    def full(self, flight: Flight[V] | None) -> bool:
        """Whether one more question, or one more client of this flight, is too many."""
        return len(flight.waiters) >= self.most_waiters if flight else len(self._flights) >= self.most_flights

    def start(self, flight: Flight[V]) -> None:
        self._flights[flight.key] = flight
        flight.task = asyncio.get_running_loop().create_task(self._run(flight))

    async def _run(self, flight: Flight[V]) -> None:
        verdict: V | None = None
        try:
            verdict = await self._fly(flight)
        finally:
            # Also when cancelled, and when a bug raised: nobody may be left waiting for a flight that is over.
            self._land(flight)
            flight.settle(self._stopped(flight) if verdict is None else verdict)

    def _land(self, flight: Flight[V]) -> None:
        """Before anybody is answered: an answer may make its client ask again at once."""
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]
        if flight.bridge is not None:
            flight.bridge.cancel()

    async def close(self) -> None:
        flights = list(self._flights.values())
        tasks = [flight.task for flight in flights if flight.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for flight in flights:  # a task that is cancelled before its first step never reaches its `finally`
            self._land(flight)
            flight.settle(self._stopped(flight))
