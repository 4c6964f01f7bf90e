"""Answer queries: from a client's bytes to a reply, joining what is in flight and bridging what is late.

      bytes -> memo -> parse -> chain.look -> reply
                                   | nothing here
                                   +-> flight -> fetch -> store -> reply for each who waits
                                          | late: stale data for those who wait     (io/flights.py, io/fetch.py)

The order of the steps, each with its reason, stands in `resolver/chain.py`.

Who calls: listeners `look`, and `wait` for what that did not find; `ask` is both in one. They call back exactly once, at the
latest `timeout` plus 100 ms later, whatever upstreams do. `b""` means that nothing may be said.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from config import model
from resolver import wire as w
from resolver.answer import Answer, Bounds, Rr, reply
from resolver.cache import Cache, key_of, name_of, scope_of
from resolver.chain import NOT_READY, OTHER, PROHIBITED, Chain, Found, failure, subnet_option
from resolver.endpoints import Endpoints
from resolver.errors import NotBelieved, UpstreamsFailed
from resolver.hosts import LocalNames
from resolver.io import files
from resolver.io.clock import now as boottime
from resolver.io.fetch import ContentRefused, Fetched, Fetcher, UpstreamReply, Upstreams, question_for
from resolver.io.flights import Flight, Flights
from resolver.io.lookup import Resolved, dial_endpoints, read_reply
from resolver.io.query_log import QueryLog
from resolver.io.saved_cache import SLICE, SavedCache
from resolver.memos import Memo, Memos
from resolver.question import SILENCE, Question, parse, refuse
from resolver.ratelimit import RateLimit
from resolver.zones import Zones

STREAM_LIMIT = 65_535
DATAGRAM_LIMIT = 1232
_GRACE_S = 0.05  # past the deadline given to the upstream set, which keeps it: a belt
_SAVE_EVERY_S, _LOOK_EVERY_S = 300.0, 10.0
_START_PATIENCE_S = 1.0
"""How long `start` waits for lists and the saved cache. A million names or a huge cache come while we already serve: no
name at all for seconds would be worse than a few names unblocked or asked again."""

Done = Callable[[bytes, str], None]
"""Called once with the reply and where it came from: `cache`, `stale`, `local`, `policy`, an upstream's URL, `failure`."""


if TYPE_CHECKING:
    from resolver.io.validation import Validator


class Wanted(NamedTuple):
    """A query that was read and is not to be answered from memory."""

    question: Question
    wire: bytes
    limit: int
    sealed: bool
    options: bytes


class ResolverService:
    """The resolver. `start` before use, `close` after; everything else may be called from the loop's thread only."""

    def __init__(
        self,
        config: model.Resolver,
        *,
        state_dir: Path,
        upstreams: Upstreams,
        clock: Callable[[], float] = boottime,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._upstreams = upstreams
        self._clock, self._wall = clock, wall
        self._cache = Cache(
            entries=config.cache.entries,
            size=config.cache.size_bytes,
            stale_s=config.cache.serve_stale_s,
            prefetch=config.cache.prefetch,
        )
        self._chain = Chain(self._cache)
        self._saved = SavedCache(state_dir, self._cache, clock, wall)
        self._memos = (Memos(), Memos())  # plain, sealed
        self._flights: Flights[Found] = Flights(self._fly, self._stopped, late=self._late)
        self._housekeeping: asyncio.Task[None] | None = None
        self._loaded = asyncio.Event()
        self._policy_changed = asyncio.Event()
        self._hosts_stamps: tuple[tuple[int, int], ...] = ()
        self._queries = self._memo_hits = self._fetches = 0
        self._designated: tuple[Rr, ...] = ()
        self.replies: dict[str, list[int]] = {}
        self.query_log: QueryLog | None = None
        self._validator: Validator | None = None
        self._apply(config)

    # --- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Reads blocklists and the saved cache, waiting a second at most; then keeps house until `close`."""
        self._housekeeping = asyncio.create_task(self._keep_house())
        await _within(self._loaded, _START_PATIENCE_S)

    async def close(self) -> None:
        """Ends flights (those who wait get SERVFAIL), and saves the cache. May be called twice."""
        if self._housekeeping is not None:
            self._housekeeping.cancel()
            await asyncio.gather(self._housekeeping, return_exceptions=True)
            self._housekeeping = None
            # A cache that was not read back yet must not take the place of the one on disk.
            if self._loaded.is_set() and self._config.cache.persist:
                await self._saved.save()
        await self._flights.close()
        if self._validator is not None:
            await self._validator.close()

    def reconfigure(self, config: model.Resolver) -> None:
        """Takes a new configuration for all that is asked from now on; flights end under the old one.

        A changed blocklist is read in the background: until it is there the old one goes on blocking.
        """
        old, self._config = self._config, config
        self._cache.entries, self._cache.size = config.cache.entries, config.cache.size_bytes
        self._cache.stale_s, self._cache.prefetch = config.cache.serve_stale_s, config.cache.prefetch
        self._apply(config)
        if (config.blocklists, config.rebind_protection) != (old.blocklists, old.rebind_protection):
            self._policy_changed.set()

    def _apply(self, config: model.Resolver) -> None:
        cache = config.cache
        self._chain.zones = Zones(config.zones, self._designated)
        self._read_hosts()
        bounds = Bounds(int(cache.min_ttl_s), int(cache.max_ttl_s), int(cache.max_negative_ttl_s))
        self._fetcher = Fetcher(
            self._upstreams,
            self._chain.zones,
            bounds,
            config.rebind_protection,
            self._chain.blocklist,
            self._validating(config),
        )
        self.query_log = QueryLog(config.query_log) if config.query_log != "off" else None
        self.rate_limit = RateLimit(config.rate_limit_per_s) if config.rate_limit_per_s else None
        self._forget_memos()
        self._chain.failures.forget()

    def _validating(self, config: model.Resolver) -> Validator | None:
        """Who judges answers by DNSSEC. What an earlier one found out about zones is kept where it may be."""
        self._proven = config.dnssec == "validate"
        if config.dnssec == "off":
            return None
        if self._validator is None:
            from resolver.io.validation import Validator  # 0.1 s, for those who want it

            self._validator = Validator(config, self._upstreams, self._chain.zones, clock=self._clock, wall=self._wall)
        elif self._validator.reconfigure(config, self._chain.zones):
            self._cache.flush()  # judged from other anchors
        return self._validator

    def designate(self, records: Sequence[Rr]) -> None:
        """What `_dns.resolver.arpa` answers from now on (RFC 9462); nothing: no data."""
        if tuple(records) != self._designated:
            self._designated = tuple(records)
            self._apply(self._config)

    def _read_hosts(self) -> None:
        self._hosts_stamps = files.stamps(self._config.hosts_files)
        self._chain.local = LocalNames(files.read_hosts(self._config.hosts_files), self._config.records)
        self._forget_memos()

    def _forget_memos(self) -> None:
        for memos in self._memos:
            memos.clear()

    async def _keep_house(self) -> None:
        """Owned by this service and cancelled by `close`; a save that is cut short leaves the old file."""
        await self._take_policy()
        if self._config.cache.persist:
            await self._saved.restore(lambda saved: self._allowed(saved.key, saved.answer))
        self._loaded.set()
        saved_at = self._clock()
        while True:
            await _within(self._policy_changed, _LOOK_EVERY_S)
            if self._policy_changed.is_set():
                await self._take_policy()
            if files.stamps(self._config.hosts_files) != self._hosts_stamps:
                self._read_hosts()
            if self._config.cache.persist and self._clock() - saved_at >= _SAVE_EVERY_S:
                saved_at = self._clock()
                await self._saved.save()

    async def _take_policy(self) -> None:
        """Reads the blocklists, then forgets what today's policy would have refused, a slice for each turn of the loop."""
        self._policy_changed.clear()
        self._chain.blocklist = await asyncio.to_thread(files.read_blocklists, self._config.blocklists)
        self._fetcher = replace(self._fetcher, blocklist=self._chain.blocklist)
        self._forget_memos()
        for number, entry in enumerate(self._cache):
            if entry.answer is not None and not self._allowed(entry.key, entry.answer):
                self._cache.remove(entry.key)
            if number % SLICE == SLICE - 1:
                await asyncio.sleep(0)

    def _allowed(self, key: bytes, answer: Answer) -> bool:
        """Whether a kept answer may still be given: its zone is there, and its content would pass today."""
        scope, zone = self._chain.zones.zone_of(name_of(key))
        if scope != scope_of(key):
            return False
        try:
            self._fetcher.judge(answer, zone)
        except ContentRefused:
            return False
        return True

    # --- the chain --------------------------------------------------------------------------------------------------

    def answer_cached(self, wire: bytes, limit: int, *, sealed: bool = False, keepalive_s: float = 0.0) -> bytes | None:
        """The reply when nothing must be waited for, `SILENCE` when nothing may be said, else None.

        A query whose bytes after the id came before costs one dictionary look-up. `limit` is what the transport carries;
        a datagram's reply also keeps to what the client says it takes. `sealed`: the way to the client is encrypted.
        """
        memo = self._memos[sealed].find(wire[2:], self._clock())
        if memo is not None:
            memo.entry.hits += 1
            self._memo_hits += 1
            return wire[:2] + memo.tail
        found = self._read(wire, limit, sealed, keepalive_s)
        return found if isinstance(found, bytes) else None

    def look(self, wire: bytes, limit: int, *, sealed: bool = False, keepalive_s: float = 0.0) -> bytes | Wanted:
        """As `answer_cached`, but what must be waited for comes back read, for `wait`: nothing is parsed or looked up twice."""
        memo = self._memos[sealed].find(wire[2:], self._clock())
        if memo is not None:
            memo.entry.hits += 1
            self._memo_hits += 1
            return wire[:2] + memo.tail
        return self._read(wire, limit, sealed, keepalive_s)

    def memo(self, wire: bytes, *, sealed: bool) -> Memo | None:
        """The ready reply to exactly these bytes, for those who keep it at hand; each use is told by `used`."""
        return self._memos[sealed].find(wire[2:], self._clock())

    def used(self, memo: Memo) -> None:
        memo.entry.hits += 1
        self._memo_hits += 1

    def known(self, *, sealed: bool = False) -> Memos:
        """Ready replies by the bytes of the query behind its id, for loops that cannot afford a call; see `Memo` for what
        makes one true, `count_known` for what to tell."""
        return self._memos[sealed]

    def count_known(self, hits: int) -> None:
        """So many replies were taken from `known`; each counted a hit of its entry there."""
        self._memo_hits += hits

    def _read(self, wire: bytes, limit: int, sealed: bool, keepalive_s: float) -> bytes | Wanted:
        asked = parse(wire)
        if isinstance(asked, bytes):
            return asked
        options = _keepalive(asked, keepalive_s)
        found = self._look(asked, self._clock())
        if found is None:
            return Wanted(asked, wire, limit, sealed, options)
        return self._write(found, asked, wire, limit, sealed=sealed, options=options)

    def wait(self, wanted: Wanted, done: Done) -> None:
        """Asks for what `look` did not find. `done` is called exactly once, before this returns when asking fails at once."""

        def give(found: Found) -> None:
            message = self._write(
                found, wanted.question, wanted.wire, wanted.limit, sealed=wanted.sealed, options=wanted.options
            )
            done(message, found.source)

        self._wait(wanted.question, self._clock(), give)

    def ask(self, wire: bytes, limit: int, done: Done, *, sealed: bool = False, keepalive_s: float = 0.0) -> None:
        """The whole chain. `done` is called exactly once, before this returns when the answer is at hand.

        `keepalive_s`: the idle limit to tell a client that asks for it over TCP or TLS (RFC 7828), 0: none.
        """
        asked = parse(wire)
        if isinstance(asked, bytes):
            done(asked, "policy")
            return
        options = _keepalive(asked, keepalive_s)
        found = self._look(asked, self._clock())
        if found is None:
            self.wait(Wanted(asked, wire, limit, sealed, options), done)
        else:
            done(self._write(found, asked, wire, limit, sealed=sealed, options=options), found.source)

    def refuse_rate(self, wire: bytes) -> bytes:
        """The reply to a client above its rate: short, at once, and it says so; `SILENCE` where nothing may be said."""
        asked = parse(wire)
        return asked if isinstance(asked, bytes) else refuse(asked, w.REFUSED, ede=PROHIBITED, text="rate limit")

    async def answer(
        self, wire: bytes, limit: int, *, client: str = "", sealed: bool = False, keepalive_s: float = 0.0
    ) -> bytes | None:
        """`ask` for those who can wait; None: stay silent. Cancelling it leaves others who asked the same undisturbed."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def done(message: bytes, _source: str) -> None:
            if not future.done():
                future.set_result(message)

        self.ask(wire, limit, done, sealed=sealed, keepalive_s=keepalive_s)
        return await future or None

    def _answer(self, question: Question, give: Callable[[Found], None]) -> None:
        now = self._clock()
        found = self._look(question, now)
        if found is None:
            self._wait(question, now, give)
        else:
            give(found)

    def _look(self, question: Question, now: float) -> Found | None:
        self._queries += 1
        question.proven = self._proven
        if self._config.ecs == "strip" or len(question.ecs) < 4:
            question.ecs = b""
        found = self._chain.look(question, now)
        if found is not None and found.refresh:
            self._refresh(question)
        return found

    # --- waiting ----------------------------------------------------------------------------------------------------

    def _wait(self, question: Question, now: float, give: Callable[[Found], None]) -> None:
        scope, zone = self._chain.zones.zone_of(question.name)
        key = key_of(question, scope)
        flight = self._flights.find(key)
        if self._flights.full(flight):
            give(failure(question, OTHER, "too many questions in flight"))
            return
        begun = flight is not None
        flight = flight or Flight(key, question, scope, zone, None)
        flight.waiters.append(give)
        if flight.stale is None:
            # Also of a prefetch under way: its entry was fresh when it began, and is what bridges now.
            flight.stale = self._cache.stale(question, now, scope)
            if flight.stale is not None:
                loop = asyncio.get_running_loop()
                flight.bridge = loop.call_later(self._config.cache.stale_answer_after_s, self._bridge, flight)
        if not begun:
            self._depart(flight, now)

    def _refresh(self, question: Question) -> None:
        """Prefetch: nobody waits, and a failure changes nothing."""
        scope, zone = self._chain.zones.zone_of(question.name)
        key = key_of(question, scope)
        if self._flights.find(key) is None and not self._flights.full(None):
            self._depart(Flight(key, question, scope, zone, None), self._clock())

    def _bridge(self, flight: Flight[Found]) -> None:
        """Fresh data is late: those who wait get old data, and the flight goes on for those who come later."""
        found = self._chain.bridge(flight.stale, self._clock())
        if found is not None:
            flight.settle(found)

    def _depart(self, flight: Flight[Found], now: float) -> None:
        self._fetches += 1
        local = self._chain.local.answer(flight.question)
        if (local is not None and local.unfinished) or self._fetcher.judge_by_dnssec is not None:
            self._flights.start(flight)
            return
        timeout_s = self._config.timeout_s
        self._flights.take_off(flight, timeout_s + _GRACE_S)
        self._fetcher.begin(flight.question, flight.zone, now + timeout_s, partial(self._heard, flight, self._fetcher))

    def _heard(self, flight: Flight[Found], fetcher: Fetcher, said: UpstreamReply | UpstreamsFailed) -> None:
        """The end of nearly every flight. What an upstream said is judged at once; only a chain that goes on is a task."""
        if self._flights.find(flight.key) is not flight:
            return  # it is over: the resolver stopped, or the answer came when nobody waited any more
        try:
            fetched = fetcher.read(said, flight.question, flight.zone)
            if fetched.answer.unfinished:
                self._flights.carry_on(flight, partial(self._fly, begun=fetched))
            else:
                self._flights.land(flight, self._keep(flight, fetched))
        except (ContentRefused, UpstreamsFailed) as exc:
            self._flights.land(flight, self._without(flight, exc))

    async def _fly(self, flight: Flight[Found], begun: Fetched | None = None) -> Found:
        """What needs more than one ask: a chain that upstream began, or one of our own that leads outside."""
        timeout_s = self._config.timeout_s
        try:
            async with asyncio.timeout(timeout_s + _GRACE_S):
                fetched = await self._fetch(flight, begun, self._clock() + timeout_s)
        except (ContentRefused, UpstreamsFailed) as exc:
            return self._without(flight, exc)
        except TimeoutError:
            return self._late(flight)
        return self._keep(flight, fetched)

    async def _fetch(self, flight: Flight[Found], begun: Fetched | None, deadline: float) -> Fetched:
        question = flight.question
        if begun is not None:
            return await self._fetcher.go_on(begun, question, flight.zone, deadline)
        local = self._chain.local.answer(question)
        if local is None or not local.unfinished:  # a reload took it away in this very moment
            return await self._fetcher.fetch(question, flight.zone, deadline)
        finished = await self._fetcher.finish(local, question, deadline)
        # Kept by nobody: the local half may change with the next reload.
        return finished._replace(answer=replace(finished.answer, ttl_s=0))

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
        old = flight.stale or self._cache.stale(question, now, scope)
        return self._chain.bridge(old, now) or self._chain.fail(question, scope, exc.ede, str(exc), now)

    def _late(self, flight: Flight[Found]) -> Found:
        return self._without(flight, UpstreamsFailed((("upstreams", f"no answer in {self._config.timeout_s:g} s"),)))

    @staticmethod
    def _stopped(flight: Flight[Found]) -> Found:
        return failure(flight.question, NOT_READY, "the resolver gave this question up")

    # --- writing ----------------------------------------------------------------------------------------------------

    def _write(
        self, found: Found, question: Question, wire: bytes, limit: int, *, sealed: bool, options: bytes = b""
    ) -> bytes:
        room = limit if limit > DATAGRAM_LIMIT else min(limit, question.size)
        options = found.options + options + subnet_option(question, found)
        message = reply(found.answer, question, found.age_s, room, options=options, stale=found.stale, sealed=sealed)
        if found.entry is not None:
            self._memos[sealed].keep(wire, message, question, found.entry, found.age_s)
        return message

    # --- for the proxy and for people -----------------------------------------------------------------------------

    async def resolve(self, name: str, rdtype: str) -> Resolved:
        """Looks `name` up as any client would. Raises ValueError for what is no name or type; failures are rcodes."""
        return await self._resolve(w.name_from_text(name), w.type_from_text(rdtype))

    async def _resolve(self, name: bytes, rdtype: int) -> Resolved:
        question = question_for(name, rdtype)
        future: asyncio.Future[Found] = asyncio.get_running_loop().create_future()

        def give(found: Found) -> None:
            if not future.done():
                future.set_result(found)

        started = self._clock()
        self._answer(question, give)
        found = await future
        message = self._write(found, question, b"", STREAM_LIMIT, sealed=False)
        return read_reply(message, found.source, self._clock() - started)

    async def endpoints(self, host: str, port: int) -> Endpoints:
        """Where to dial `host`: addresses in RFC 8305 order and what its HTTPS record promises. Raises NoAddress."""
        return await dial_endpoints(self._resolve, host, port)

    def stats(self) -> dict[str, int | float]:
        return {
            **self._chain.counts,
            "queries": self._queries + self._memo_hits,
            "memo": self._memo_hits,
            "upstream": self._fetches,
            "entries": len(self._cache),
            "bytes": self._cache.used,
            "evicted": self._cache.evicted,
            "in_flight": len(self._flights),
            "waiting": self._flights.waiting,
            **(self._validator.counts if self._validator is not None else {}),
        }

    @property
    def chain(self) -> Chain:
        """For those who look into it (`inspection.py`); they change nothing."""
        return self._chain

    def counter(self, transport: str) -> list[int]:
        """Replies over a transport by the lower four bits of their rcode: a listener adds to it, metrics read it."""
        return self.replies.setdefault(transport, [0] * 16)

    def now(self) -> float:
        return self._clock()

    def flush(self, name: str | None = None) -> int:
        """Forgets everything, or a name and all below it; how many answers that were. Raises ValueError for no name."""
        self._forget_memos()
        self._chain.failures.forget()
        if self._validator is not None:
            self._validator.forget()
        return self._cache.flush(None if name is None else w.name_from_text(name))

    def network_changed(self) -> None:
        """The failures of the old network say nothing about the new one; stale answers are tried afresh."""
        self._chain.failures.forget()
        for entry in self._cache:
            entry.recheck_at = 0.0


async def _within(event: asyncio.Event, seconds: float) -> None:
    """Returns when the event is set or the time is over. Not wait_for(): before 3.12 it loses a cancellation that comes
    together with the event, and whoever closes would wait for ever."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def _keepalive(question: Question, idle_s: float) -> bytes:
    if not question.keepalive or not idle_s:
        return b""
    return w.option(w.KEEPALIVE, min(65_535, int(idle_s * 10)).to_bytes(2, "big"))


__all__ = ["DATAGRAM_LIMIT", "SILENCE", "STREAM_LIMIT", "Done", "Found", "ResolverService", "Wanted"]
