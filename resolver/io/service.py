"""Answer queries: from a client's bytes to a reply.

      bytes -> memo -> parse -> chain.look -> reply
                                   | nothing here
                                   +-> asking.wait -> reply for each who waits

The order of the steps, each with its reason, stands in `resolver/chain.py`; what is not known here is asked in `asking.py`.

Who calls: listeners `look`, and `wait` for what that did not find; `ask` is both in one. They call back exactly once, at the
latest `timeout` plus 100 ms later, whatever upstreams do. `b""` means that nothing may be said.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from config import model
from resolver import wire as w
from resolver.answer import Bounds, Rr, reply
from resolver.cache import Cache
from resolver.chain import PROHIBITED, Chain, Found, subnet_option
from resolver.endpoints import Endpoints
from resolver.io.ahead import Ahead
from resolver.io.asking import Asking
from resolver.io.clock import now as boottime
from resolver.io.fetch import Fetcher, Upstreams, question_for
from resolver.io.housekeeping import Housekeeping, within
from resolver.io.lookup import Resolved, dial_endpoints, read_reply
from resolver.io.query_log import QueryLog
from resolver.io.saved_cache import SavedCache
from resolver.memos import Memo, Memos
from resolver.question import SILENCE, Question, parse, refuse
from resolver.ratelimit import RateLimit
from resolver.zones import Zones

STREAM_LIMIT = 65_535
DATAGRAM_LIMIT = 1232
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
        self._memos = (Memos(), Memos())  # plain, sealed
        self._asking = Asking(self._chain, clock)
        self._ahead = Ahead(self._chain, self._asking, clock, self._memos)
        saved = SavedCache(state_dir, self._cache, clock, wall)
        self._house = Housekeeping(self._chain, self._asking, saved, clock, self._forget_memos)
        self._housekeeping: asyncio.Task[None] | None = None
        self._queries = 0
        self.now = clock
        self._designated: tuple[Rr, ...] = ()
        self.replies: dict[str, list[int]] = {}
        self.query_log: QueryLog | None = None
        self._validator: Validator | None = None
        self._apply(config)

    # --- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Reads blocklists and the saved cache, waiting a second at most; then keeps house until `close`."""
        self._housekeeping = asyncio.create_task(self._house.run())
        await within(self._house.loaded, _START_PATIENCE_S)

    async def close(self) -> None:
        """Ends flights (those who wait get SERVFAIL), and saves the cache. May be called twice."""
        if self._housekeeping is not None:
            self._housekeeping.cancel()
            await asyncio.gather(self._housekeeping, return_exceptions=True)
            self._housekeeping = None
            await self._house.save()
        self._ahead.close()
        await self._asking.close()
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
            self._house.policy_changed()

    def _apply(self, config: model.Resolver) -> None:
        cache = config.cache
        self._chain.zones = Zones(config.zones, self._designated)
        self._house.config = config
        self._house.read_hosts()
        bounds = Bounds(int(cache.min_ttl_s), int(cache.max_ttl_s), int(cache.max_negative_ttl_s))
        self._ahead.listen(cache.prefetch and cache.serve_stale_s > 0)
        self._asking.timeout_s, self._asking.stale_after_s = config.timeout_s, cache.stale_answer_after_s
        self._asking.fetcher = Fetcher(
            self._upstreams,
            self._chain.zones,
            bounds,
            config.rebind_protection,
            self._chain.blocklist,
            self._validating(config),
        )
        self.query_log = QueryLog(config.query_log) if config.query_log != "off" else None
        self.rate_limit = RateLimit(config.rate_limit_per_s) if config.rate_limit_per_s else None
        self._chain.failures.forget()

    def _validating(self, config: model.Resolver) -> Validator | None:
        """Who judges answers by DNSSEC. What an earlier one found out about zones is kept where it may be."""
        self._proven = self._chain.proven = config.dnssec == "validate"
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

    def _forget_memos(self) -> None:
        for memos in self._memos:
            memos.clear()

    # --- the chain --------------------------------------------------------------------------------------------------

    def answer_cached(self, wire: bytes, limit: int, *, sealed: bool = False, keepalive_s: float = 0.0) -> bytes | None:
        """The reply when nothing must be waited for, `SILENCE` when nothing may be said, else None.

        A query whose bytes after the id came before costs one dictionary look-up. `limit` is what the transport carries;
        a datagram's reply also keeps to what the client says it takes. `sealed`: the way to the client is encrypted.
        """
        memo = self._memos[sealed].find(wire[2:], self._clock())
        if memo is not None:
            self.used(memo)
            return wire[:2] + memo.tail
        found = self._read(wire, limit, sealed, keepalive_s)
        return found if isinstance(found, bytes) else None

    def look(self, wire: bytes, limit: int, *, sealed: bool = False, keepalive_s: float = 0.0) -> bytes | Wanted:
        """As `answer_cached`, but what must be waited for comes back read, for `wait`: nothing is parsed or looked up twice."""
        memo = self._memos[sealed].find(wire[2:], self._clock())
        if memo is not None:
            self.used(memo)
            return wire[:2] + memo.tail
        return self._read(wire, limit, sealed, keepalive_s)

    def memo(self, wire: bytes, *, sealed: bool) -> Memo | None:
        """The ready reply to exactly these bytes, for those who keep it at hand; each use is told by `used`."""
        return self._memos[sealed].find(wire[2:], self._clock())

    def used(self, memo: Memo) -> None:
        memo.entry.hits += 1
        self._memos[False].hits += 1

    def known(self, *, sealed: bool = False) -> Memos:
        """Ready replies by the bytes of the query behind its id, for loops that cannot afford a call; see `Memo` for what
        makes one true, `count_known` for what to tell."""
        return self._memos[sealed]

    def count_known(self, hits: int) -> None:
        """So many replies were taken from `known`; each counted a hit of its entry there."""
        self._memos[False].hits += hits

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

        self._asking.wait(wanted.question, self._clock(), give)

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
            self._asking.wait(question, now, give)
        else:
            give(found)

    def _look(self, question: Question, now: float) -> Found | None:
        self._queries += 1
        question.proven = self._proven
        if self._config.ecs == "strip" or len(question.ecs) < 4:
            question.ecs = b""
        found = self._chain.look(question, now)
        if found is not None and found.refresh:
            self._asking.refresh(question)
        self._ahead.asked(question, now)
        return found

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
        memo_hits = sum(memos.hits for memos in self._memos)
        return {
            **self._chain.counts,
            "queries": self._queries + memo_hits,
            "memo": memo_hits,
            "upstream": self._asking.begun,
            "entries": len(self._cache),
            "bytes": self._cache.used,
            "evicted": self._cache.evicted,
            "in_flight": len(self._asking.flights),
            "waiting": self._asking.flights.waiting,
            "foreseen": self._chain.foresight.refreshed,
            "foreseen_used": self._chain.foresight.used,
            **(self._validator.counts if self._validator is not None else {}),
        }

    @property
    def chain(self) -> Chain:
        """For those who look into it (`inspection.py`); they change nothing."""
        return self._chain

    def counter(self, transport: str) -> list[int]:
        """Replies over a transport by the lower four bits of their rcode: a listener adds to it, metrics read it."""
        return self.replies.setdefault(transport, [0] * 16)

    def flush(self, name: str | None = None) -> int:
        """Forgets everything, or a name and all below it; how many answers that were. Raises ValueError for no name."""
        self._forget_memos()
        self._chain.failures.forget()
        if self._validator is not None:
            self._validator.forget()
        wire_name = None if name is None else w.name_from_text(name)
        self._chain.foresight.forget(wire_name)
        return self._cache.flush(wire_name)

    def network_changed(self) -> None:
        """The failures of the old network say nothing about the new one; stale answers are tried afresh."""
        self._chain.failures.forget()
        for entry in self._cache:
            entry.recheck_at = 0.0


def _keepalive(question: Question, idle_s: float) -> bytes:
    if not question.keepalive or not idle_s:
        return b""
    return w.option(w.KEEPALIVE, min(65_535, int(idle_s * 10)).to_bytes(2, "big"))


__all__ = ["DATAGRAM_LIMIT", "SILENCE", "STREAM_LIMIT", "Done", "Found", "ResolverService", "Wanted"]
