"""Join identical questions in flight: one goes upstream, all who asked are answered.

Theory: a flight is one question on its way and the clients that wait for it. It is owned by nobody who waits: a client
that goes away is one callback that writes to a closed socket, and the others never notice. A flight ends once, with a
verdict for all; each waiter gets a message of its own (id, letter case, size).

Most flights are a callback that lands them: `take_off`, then `land`. Only what must wait more than once is a task (`start`,
`carry_on`), which cost a usual miss a third of its time. Tasks are owned by `Flights` and cancelled by `close()`, and when
the flight is overdue; those who wait then get the verdict for it.
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
    overdue_at: float = float("inf")  # of the loop's time
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
        late: Callable[[Flight[V]], V] | None = None,
        most_flights: int = MOST_FLIGHTS,
        most_waiters: int = MOST_WAITERS,
    ) -> None:
        self.most_flights, self.most_waiters = most_flights, most_waiters
        self._fly = fly
        self._stopped = stopped
        self._late = late or stopped
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
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
        """A flight that is a task from the start: `fly` gives its verdict."""
        self._flights[flight.key] = flight
        self.carry_on(flight, self._fly)

    def take_off(self, flight: Flight[V], within_s: float) -> None:
        """A flight that somebody will `land`; when nobody does in time, it lands by itself with the late verdict."""
        if self._loop is None:  # before 3.12 to ask for it is a system call
            self._loop = asyncio.get_running_loop()
        loop = self._loop
        self._flights[flight.key] = flight
        flight.overdue_at = loop.time() + within_s
        if self._timer is None:
            self._timer = loop.call_later(within_s, self._look_for_overdue)

    def carry_on(self, flight: Flight[V], rest: Callable[[Flight[V]], Coroutine[Any, Any, V]]) -> None:
        """The flight goes on as a task that gives its verdict; `rest` must not raise but for cancellation."""
        flight.task = asyncio.get_running_loop().create_task(self._run(flight, rest))

    def land(self, flight: Flight[V], verdict: V) -> None:
        """Ends a flight, once; over before anybody is answered, for an answer may make its client ask again at once."""
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]
        if flight.bridge is not None:
            flight.bridge.cancel()
        flight.settle(verdict)

    async def _run(self, flight: Flight[V], rest: Callable[[Flight[V]], Coroutine[Any, Any, V]]) -> None:
        verdict: V | None = None
        try:
            verdict = await rest(flight)
        finally:
            # Also when cancelled, and when a bug raised: nobody may be left waiting for a flight that is over.
            self.land(flight, self._stopped(flight) if verdict is None else verdict)

    def _look_for_overdue(self) -> None:
        """One timer for all: flights stand in the order of their start, and all have about the same time."""
        loop, self._timer = asyncio.get_running_loop(), None
        for flight in list(self._flights.values()):
            if flight.overdue_at > loop.time():
                if flight.overdue_at < float("inf"):
                    self._timer = loop.call_at(flight.overdue_at, self._look_for_overdue)
                    return
                continue
            self.land(flight, self._late(flight))
            if flight.task is not None:
                flight.task.cancel()

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        flights = list(self._flights.values())
        tasks = [flight.task for flight in flights if flight.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for flight in flights:  # also those whose task was cancelled before its first step
            self.land(flight, self._stopped(flight))
