"""Bring home what nobody here knows: fly, bridge with old data what is late, and give one verdict to all who wait.

      wait --> flight --> fetch --> store --> verdict
                 | late: stale data for those who wait     (flights.py joins them, fetch.py gets the answer)

Nearly every flight is a call that lands it (`_heard`); only what must ask more than once is a task (`_fly`). A flight ends
under the configuration that it began with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from resolver.cache import key_of
from resolver.chain import NOT_READY, OTHER, Chain, Found, failure
from resolver.errors import NotBelieved, UpstreamsFailed
from resolver.io.fetch import ContentRefused, Fetched, Fetcher, UpstreamReply
from resolver.io.flights import Flight, Flights
from resolver.question import Question

_GRACE_S = 0.05  # past the deadline given to the upstream set, which keeps it: a belt


class Asking:
    """The flights of one resolver. `fetcher` and the two times are set by whoever reads the configuration."""

    fetcher: Fetcher
    timeout_s: float
    stale_after_s: float

    def __init__(self, chain: Chain, clock: Callable[[], float]) -> None:
        self.flights: Flights[Found] = Flights(self._fly, self._stopped, late=self._late)
        self.begun = 0
        self._chain = chain
        self._clock = clock

    async def close(self) -> None:
        """Those who wait get SERVFAIL."""
        await self.flights.close()

    # --- who wants it -----------------------------------------------------------------------------------------------

    def wait(self, question: Question, now: float, give: Callable[[Found], None]) -> None:
        """Joins the same question in flight, or starts it. `give` is called once, at once when there are too many."""
        scope, zone = self._chain.zones.zone_of(question.name)
        key = key_of(question, scope)
        flight = self.flights.find(key)
        if self.flights.full(flight):
            give(failure(question, OTHER, "too many questions in flight"))
            return
        begun = flight is not None
        flight = flight or Flight(key, question, scope, zone, None)
        flight.waiters.append(give)
        if flight.stale is None:
            # Also of a prefetch under way: its entry was fresh when it began, and is what bridges now.
            flight.stale = self._chain.cache.stale(question, now, scope)
            if flight.stale is not None:
                loop = asyncio.get_running_loop()
                flight.bridge = loop.call_later(self.stale_after_s, self._bridge, flight)
        if not begun:
            self._depart(flight, now)

    def refresh(self, question: Question) -> None:
        """Prefetch: nobody waits, and a failure changes nothing."""
        scope, zone = self._chain.zones.zone_of(question.name)
        key = key_of(question, scope)
        if self.flights.find(key) is None and not self.flights.full(None):
            self._depart(Flight(key, question, scope, zone, None), self._clock())

    def _bridge(self, flight: Flight[Found]) -> None:
        """Fresh data is late: those who wait get old data, and the flight goes on for those who come later."""
        found = self._chain.bridge(flight.stale, self._clock())
        if found is not None:
            flight.settle(found)

    # --- the way ----------------------------------------------------------------------------------------------------

    def _depart(self, flight: Flight[Found], now: float) -> None:
        self.begun += 1
        local = self._chain.local.answer(flight.question)
        if (local is not None and local.unfinished) or self.fetcher.judge_by_dnssec is not None:
            self.flights.start(flight)
            return
        self.flights.take_off(flight, self.timeout_s + _GRACE_S)
        heard = partial(self._heard, flight, self.fetcher)
        self.fetcher.begin(flight.question, flight.zone, now + self.timeout_s, heard)

    def _heard(self, flight: Flight[Found], fetcher: Fetcher, said: UpstreamReply | UpstreamsFailed) -> None:
        """The end of nearly every flight. What an upstream said is judged at once; only a chain that goes on is a task."""
        if self.flights.find(flight.key) is not flight:
            return  # it is over: the resolver stopped, or the answer came when nobody waited any more
        try:
            fetched = fetcher.read(said, flight.question, flight.zone)
            if fetched.answer.unfinished:
                self.flights.carry_on(flight, partial(self._fly, begun=fetched))
            else:
                self.flights.land(flight, self._keep(flight, fetched))
        except (ContentRefused, UpstreamsFailed) as exc:
            self.flights.land(flight, self._without(flight, exc))

    async def _fly(self, flight: Flight[Found], begun: Fetched | None = None) -> Found:
        """What needs more than one ask: a chain that upstream began, one of our own that leads outside, a proof."""
        try:
            async with asyncio.timeout(self.timeout_s + _GRACE_S):
                fetched = await self._fetch(flight, begun, self._clock() + self.timeout_s)
        except (ContentRefused, UpstreamsFailed) as exc:
            return self._without(flight, exc)
        except TimeoutError:
            return self._late(flight)
        return self._keep(flight, fetched)

    async def _fetch(self, flight: Flight[Found], begun: Fetched | None, deadline: float) -> Fetched:
        question = flight.question
        if begun is not None:
            return await self.fetcher.go_on(begun, question, flight.zone, deadline)
        local = self._chain.local.answer(question)
        if local is None or not local.unfinished:  # a reload took it away in this very moment
            return await self.fetcher.fetch(question, flight.zone, deadline)
        finished = await self.fetcher.finish(local, question, deadline)
        # Kept by nobody: the local half may change with the next reload.
        return finished._replace(answer=replace(finished.answer, ttl_s=0))

    # --- the verdict ------------------------------------------------------------------------------------------------

    def _keep(self, flight: Flight[Found], fetched: Fetched) -> Found:
        answer, upstream, shared = fetched
        return self._chain.store(flight.question, flight.scope, answer, upstream, self._clock(), shared=shared)

    def _without(self, flight: Flight[Found], exc: ContentRefused | UpstreamsFailed) -> Found:
        """The verdict when there is no answer to keep: refused content is refused, a failure may be bridged."""
        question, scope, now = flight.question, flight.scope, self._clock()
        if isinstance(exc, ContentRefused):
            return self._chain.refuse(question, scope, exc.rcode, exc.ede, str(exc), now)
        if isinstance(exc, NotBelieved):
            return self._chain.fail(question, scope, exc.ede, str(exc), now)
        old = flight.stale or self._chain.cache.stale(question, now, scope)
        return self._chain.bridge(old, now) or self._chain.fail(question, scope, exc.ede, str(exc), now)

    def _late(self, flight: Flight[Found]) -> Found:
        return self._without(flight, UpstreamsFailed((("upstreams", f"no answer in {self.timeout_s:g} s"),)))

    @staticmethod
    def _stopped(flight: Flight[Found]) -> Found:
        return failure(flight.question, NOT_READY, "the resolver gave this question up")
