"""Answer queries: the chain from a client's bytes to a reply, in the one order that is safe.

The order, and what forces each place:

    1 memo        the same bytes came before: flow 1, no parse; only ever filled from step 7
    2 parse       nothing is looked up for a message that breaks the rules (D7)
    3 ANY         before any data: it must neither amplify nor be answered from other types (RFC 8482)
    4 local       hosts and records: the user's own words win over lists, caches and the world
    5 special     localhost, .onion, private reverse zones: before the cache, or an old answer could make them leave
    6 blocklist   before the cache: a name blocked today may be cached since yesterday
    7 cache       fresh answers, then denials of a parent name
    8 failures    a question that just failed is not asked again at once (RFC 9520)
    9 stale       inside the recheck time: at once, without a new try (RFC 8767 5)
   10 flight      join the identical question, or start it; after `stale_answer_after` old data bridges the wait

Who calls: listeners call `answer_cached` first and `ask` when it gives None. `ask` calls back exactly once, at the latest
`timeout` plus 100 ms later, whatever upstreams do. `b""` means that nothing may be said.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from config import model
from resolver import hosts, zones
from resolver import wire as w
from resolver.answer import Answer, Bounds, compose, denial_below, reply
from resolver.blocklist import Blocklist
from resolver.cache import RECHECK_S, Cache, Entry, key_of, name_of, scope_of
from resolver.endpoints import Endpoints
from resolver.errors import UpstreamsFailed
from resolver.failures import Failures
from resolver.io import files
from resolver.io.clock import now as boottime
from resolver.io.fetch import BLOCKED, EVERY_SUBNET, ContentRefused, Fetched, Fetcher, Upstreams, question_for
from resolver.io.flights import Flight, Flights
from resolver.io.lookup import Resolved, dial_endpoints, read_reply
from resolver.io.saved_cache import SLICE, SavedCache
from resolver.memos import Memos
from resolver.question import SILENCE, Question, parse, reason, refuse
from resolver.ratelimit import RateLimit

STREAM_LIMIT = 65_535
DATAGRAM_LIMIT = 1232
STALE_ANSWER, NOT_READY, PROHIBITED, STALE_NXDOMAIN = 3, 14, 18, 19  # RFC 8914 4
_REFUSED_CONTENT_S = 30.0
_GRACE_S = 0.05  # past the deadline given to the upstream set, which keeps it: a belt
_SAVE_EVERY_S, _LOOK_EVERY_S = 300.0, 10.0
_START_PATIENCE_S = 1.0
"""How long `start` waits for lists and the saved cache. A million names or a huge cache come while we already serve: no
name at all for seconds would be worse than a few names unblocked or asked again."""

Done = Callable[[bytes, str], None]
"""Called once with the reply and where it came from: `cache`, `stale`, `local`, `policy`, an upstream's URL, `failure`."""


class Found(NamedTuple):
    """An answer and how it is to be given. `entry` when it may be memoised until that entry changes."""

    answer: Answer
    source: str
    age_s: int = 0
    options: bytes = b""
    stale: bool = False
    entry: Entry | None = None
    shared: bool = False  # good for every subnet (RFC 7871 7.3.1, scope 0)


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
        self._clock = clock
        self._blocklist = Blocklist()
        self._cache = Cache(
            entries=config.cache.entries,
            size=config.cache.size_bytes,
            stale_s=config.cache.serve_stale_s,
            prefetch=config.cache.prefetch,
        )
        self._saved = SavedCache(state_dir, self._cache, clock, wall)
        self._memos = (Memos(), Memos())  # plain, sealed
        self._failures: Failures[Found] = Failures()
        self._flights: Flights[Found] = Flights(self._fly, self._stopped)
        self._housekeeping: asyncio.Task[None] | None = None
        self._loaded = asyncio.Event()
        self._policy_changed = asyncio.Event()
        self._hosts_stamps: tuple[tuple[int, int], ...] = ()
        self._counts = dict.fromkeys(("queries", "cache", "stale", "local", "policy", "failed", "upstream"), 0)
        self._memo_hits = 0
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
        self._zones = zones.Zones(config.zones)
        self._read_hosts()
        bounds = Bounds(int(cache.min_ttl_s), int(cache.max_ttl_s), int(cache.max_negative_ttl_s))
        self._fetcher = Fetcher(self._upstreams, self._zones, bounds, config.rebind_protection, self._blocklist)
        self.rate_limit = RateLimit(config.rate_limit_per_s) if config.rate_limit_per_s else None
        self._forget_memos()
        self._failures.forget()

    def _read_hosts(self) -> None:
        self._hosts_stamps = files.stamps(self._config.hosts_files)
        self._local = hosts.LocalNames(files.read_hosts(self._config.hosts_files), self._config.records)
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
        self._blocklist = await asyncio.to_thread(files.read_blocklists, self._config.blocklists)
        self._fetcher = replace(self._fetcher, blocklist=self._blocklist)
        self._forget_memos()
        for number, entry in enumerate(self._cache):
            if entry.answer is not None and not self._allowed(entry.key, entry.answer):
                self._cache.remove(entry.key)
            if number % SLICE == SLICE - 1:
                await asyncio.sleep(0)

    def _allowed(self, key: bytes, answer: Answer) -> bool:
        """Whether a kept answer may still be given: its zone is there, and its content would pass today."""
        scope, zone = self._zones.zone_of(name_of(key))
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
        memo = self._memos[sealed].get(wire[2:])
        if memo is not None:
            until, entry, answer, tail = memo
            if self._clock() < until and entry.answer is answer:
                entry.hits += 1
                self._memo_hits += 1
                return wire[:2] + tail
        asked = parse(wire)
        if isinstance(asked, bytes):
            return asked
        self._prepare(asked)
        found = self._look(asked, self._clock())
        if found is None:
            return None
        return self._write(found, asked, wire, limit, sealed=sealed, options=_keepalive(asked, keepalive_s))

    def ask(self, wire: bytes, limit: int, done: Done, *, sealed: bool = False, keepalive_s: float = 0.0) -> None:
        """The whole chain. `done` is called exactly once, before this returns when the answer is at hand.

        `keepalive_s`: the idle limit to tell a client that asks for it over TCP or TLS (RFC 7828), 0: none.
        """
        asked = parse(wire)
        if isinstance(asked, bytes):
            done(asked, "policy")
            return
        self._prepare(asked)
        options = _keepalive(asked, keepalive_s)

        def give(found: Found) -> None:
            done(self._write(found, asked, wire, limit, sealed=sealed, options=options), found.source)

        self._answer(asked, give)

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

    def _prepare(self, question: Question) -> None:
        self._counts["queries"] += 1
        if self._config.ecs == "strip" or len(question.ecs) < 4:
            question.ecs = b""

    def _answer(self, question: Question, give: Callable[[Found], None]) -> None:
        now = self._clock()
        found = self._look(question, now)
        if found is None:
            self._wait(question, now, give)
        else:
            give(found)

    def _look(self, question: Question, now: float) -> Found | None:
        """Steps 3 to 9: what can be said without asking anybody; None also for a local CNAME that leads outside."""
        if question.type == w.ANY:
            return Found(zones.any_refused(question), "policy")
        local = self._local.answer(question)
        if local is not None:
            self._counts["local"] += 1
            return Found(local, "local") if not local.unfinished else None
        special = self._zones.stays(question)
        if special is not None:
            self._counts["local"] += 1
            return Found(special, "local")
        if self._blocklist.blocks(question.name):
            self._counts["policy"] += 1
            blocked = compose(question, w.NXDOMAIN, (), [hosts.soa(question.name)])
            return Found(blocked, "policy", options=reason(BLOCKED, "on a blocklist"))
        scope, zone = self._zones.zone_of(question.name)
        return self._cached(question, now, scope, zone) or self._kept_failure(question, now, scope)

    def _cached(self, question: Question, now: float, scope: bytes, zone: model.Zone | None) -> Found | None:
        entry = self._cache.fresh(question, now, scope)
        if entry is not None and entry.answer is not None:
            self._counts["cache"] += 1
            if self._cache.hit(entry, now):
                self._refresh(question, scope, zone)
            return Found(entry.answer, "cache", int(now - entry.stored_at), entry=entry)
        if question.ecs and question.ecs != EVERY_SUBNET:
            found = self._cached(replace(question, ecs=EVERY_SUBNET), now, scope, zone)
            return found._replace(shared=True) if found is not None else None
        above = self._cache.denied_above(question, now, scope)
        if above is not None and above.answer is not None:
            self._counts["cache"] += 1
            return Found(denial_below(above.answer, question), "cache", int(now - above.stored_at))
        return None

    def _kept_failure(self, question: Question, now: float, scope: bytes) -> Found | None:
        stale = self._cache.stale(question, now, scope)
        if stale is not None and now < stale.recheck_at:
            return self._stale(stale)
        # Another client's verdict: it names nobody, and the question's bytes are replaced on the way out.
        return self._failures.find(key_of(question, scope), now)

    def _stale(self, entry: Entry) -> Found:
        self._counts["stale"] += 1
        assert entry.answer is not None
        denied = entry.answer.rcode == w.NXDOMAIN
        code = STALE_NXDOMAIN if denied else STALE_ANSWER
        return Found(entry.answer, "stale", options=reason(code, "no fresh answer in time"), stale=True)

    # --- waiting ----------------------------------------------------------------------------------------------------

    def _wait(self, question: Question, now: float, give: Callable[[Found], None]) -> None:
        scope, zone = self._zones.zone_of(question.name)
        key = key_of(question, scope)
        flight = self._flights.find(key)
        if self._flights.full(flight):
            give(_failed(question, 0, "too many questions in flight"))
            return
        if flight is None:
            flight = Flight(key, question, scope, zone, self._cache.stale(question, now, scope))
            flight.waiters.append(give)
            self._flights.start(flight)
            if flight.stale is not None:
                loop = asyncio.get_running_loop()
                flight.bridge = loop.call_later(self._config.cache.stale_answer_after_s, self._bridge, flight)
        else:
            flight.waiters.append(give)

    def _refresh(self, question: Question, scope: bytes, zone: model.Zone | None) -> None:
        """Prefetch: nobody waits, and a failure changes nothing."""
        key = key_of(question, scope)
        if self._flights.find(key) is None and not self._flights.full(None):
            self._flights.start(Flight(key, question, scope, zone, None))

    def _bridge(self, flight: Flight[Found]) -> None:
        """Fresh data is late: those who wait get old data, those who come in the next 30 s get it at once (RFC 8767 5)."""
        entry = flight.stale
        if entry is not None and entry.answer is not None and self._clock() >= entry.expires_at:
            entry.recheck_at = self._clock() + RECHECK_S
            flight.settle(self._stale(entry))

    async def _fly(self, flight: Flight[Found]) -> Found:
        question, timeout_s = flight.question, self._config.timeout_s
        started = self._clock()
        self._counts["upstream"] += 1
        try:
            async with asyncio.timeout(timeout_s + _GRACE_S):
                fetched = await self._fetch(question, flight.zone, started + timeout_s)
        except ContentRefused as exc:
            found = Found(compose(question, exc.rcode), "policy", options=reason(exc.ede, str(exc)))
            self._failures.keep(flight.key, found, self._clock() + _REFUSED_CONTENT_S)
            return found
        except UpstreamsFailed as exc:
            return self._fail(flight, exc)
        except TimeoutError:
            return self._fail(flight, UpstreamsFailed((("upstreams", f"no answer in {timeout_s:g} s"),)))
        self._failures.forget(flight.key)
        answer, upstream, shared = fetched
        kept_for = replace(question, ecs=EVERY_SUBNET) if shared else question
        self._cache.put(kept_for, answer, self._clock(), scope=flight.scope, source=upstream)
        return Found(answer, upstream, shared=shared)

    async def _fetch(self, question: Question, zone: model.Zone | None, deadline: float) -> Fetched:
        local = self._local.answer(question)
        if local is None or not local.unfinished:
            return await self._fetcher.fetch(question, zone, deadline)
        finished = await self._fetcher.finish(local, question, deadline)
        # Kept by nobody: the local half may change with the next reload.
        return finished._replace(answer=replace(finished.answer, ttl_s=0))

    def _fail(self, flight: Flight[Found], exc: UpstreamsFailed) -> Found:
        entry = flight.stale or self._cache.stale(flight.question, self._clock(), flight.scope)
        if entry is not None and entry.answer is not None:
            now = self._clock()
            if now < entry.expires_at:  # a prefetch failed: the entry still holds
                return Found(entry.answer, "cache", int(now - entry.stored_at), entry=entry)
            entry.recheck_at = now + RECHECK_S
            return self._stale(entry)
        self._counts["failed"] += 1
        found = _failed(flight.question, exc.ede, str(exc))
        self._failures.failed(flight.key, found, self._clock())
        return found

    def _stopped(self, flight: Flight[Found]) -> Found:
        return _failed(flight.question, NOT_READY, "the resolver gave this question up")

    # --- writing ----------------------------------------------------------------------------------------------------

    def _write(
        self, found: Found, question: Question, wire: bytes, limit: int, *, sealed: bool, options: bytes = b""
    ) -> bytes:
        room = limit if limit > DATAGRAM_LIMIT else min(limit, question.size)
        options = found.options + options + _subnet(question, found)
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
            **self._counts,
            "queries": self._counts["queries"] + self._memo_hits,
            "memo": self._memo_hits,
            "entries": len(self._cache),
            "bytes": self._cache.used,
            "evicted": self._cache.evicted,
            "in_flight": len(self._flights),
            "waiting": self._flights.waiting,
        }

    def now(self) -> float:
        return self._clock()

    def flush(self, name: str | None = None) -> int:
        """Forgets everything, or a name and all below it; how many answers that were. Raises ValueError for no name."""
        self._forget_memos()
        self._failures.forget()
        return self._cache.flush(None if name is None else w.name_from_text(name))

    def network_changed(self) -> None:
        """The failures of the old network say nothing about the new one; stale answers are tried afresh."""
        self._failures.forget()
        for entry in self._cache:
            entry.recheck_at = 0.0


def _failed(question: Question, ede: int, text: str) -> Found:
    return Found(compose(question, w.SERVFAIL), "failure", options=reason(ede, text))


async def _within(event: asyncio.Event, seconds: float) -> None:
    """Returns when the event is set or the time is over. Not wait_for(): before 3.12 it loses a cancellation that comes
    together with the event, and whoever closes would wait for ever."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def _subnet(question: Question, found: Found) -> bytes:
    """The client's subnet back, with the scope that the answer is good for (RFC 7871 7.2.1); nothing when it is stripped."""
    if not question.ecs or found.source in ("local", "policy", "failure"):
        return b""
    ecs = question.ecs
    return w.option(w.ECS, ecs[:3] + (b"\0" if found.shared else ecs[2:3]) + ecs[4:])


def _keepalive(question: Question, idle_s: float) -> bytes:
    if not question.keepalive or not idle_s:
        return b""
    return w.option(w.KEEPALIVE, min(65_535, int(idle_s * 10)).to_bytes(2, "big"))


__all__ = ["DATAGRAM_LIMIT", "SILENCE", "STREAM_LIMIT", "Done", "Found", "ResolverService"]
