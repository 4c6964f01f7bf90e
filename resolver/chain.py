"""Look for an answer where nobody must be asked: the visible part of the order in which a query is served.

The order, and what forces each place:

    1 memo        the same bytes came before: flow 1, no parse; only ever filled from step 6 (memos.py, before this file)
    2 ANY         before any data: it must neither amplify nor be answered from other types (RFC 8482)
    3 local       hosts and records: the user's own words win over lists, caches and the world
    4 special     localhost, .onion, private reverse zones: before the cache, or an old answer could make them leave
    5 blocklist   before the cache: a name blocked today may be cached since yesterday
    6 cache       fresh answers, then denials of a parent name
    7 stale       inside the recheck time: at once, without a new try (RFC 8767 5)
    8 failures    a question that just failed is not asked again at once (RFC 9520)
    9 flight      what is left: join the identical question, or start it (io/flights.py, behind this file)

Rules for editing: 1. a step may look and count, never wait; 2. `now` is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from resolver import wire as w
from resolver.answer import Answer, compose, denial_below
from resolver.blocklist import Blocklist
from resolver.cache import RECHECK_S, Cache, Entry, flags_of, key_of, name_of, type_of
from resolver.failures import Failures
from resolver.foresight import Foresight
from resolver.hosts import LocalNames, soa
from resolver.question import Question, reason
from resolver.zones import Zones, any_refused

OTHER, STALE, NOT_READY, BLOCKED, FILTERED, PROHIBITED, STALE_NXDOMAIN = 0, 3, 14, 15, 17, 18, 19  # RFC 8914 4
REFUSED_CONTENT_S = 30.0
"""How long an answer that may not be given is not asked for again."""
EVERY_SUBNET = b"*"
"""Stands for the subnet in the key of an answer whose scope is 0; no ECS option is one byte long."""


class Found(NamedTuple):
    """An answer and how it is to be given.

    `source`: `cache`, `stale`, `local`, `policy`, `failure` or an upstream's URL. `entry` when the reply may be memoised
    until that entry changes; `refresh` when this use should also start a prefetch; `shared` for every subnet.
    """

    answer: Answer
    source: str
    age_s: int = 0
    options: bytes = b""
    stale: bool = False
    entry: Entry | None = None
    refresh: bool = False
    shared: bool = False


@dataclass(slots=True)
class Chain:
    """What is known here. A reload replaces names, zones and lists; cache and failures go on."""

    cache: Cache
    local: LocalNames = field(default_factory=LocalNames)
    zones: Zones = field(default_factory=Zones)
    blocklist: Blocklist = field(default_factory=Blocklist)
    failures: Failures[Found] = field(default_factory=Failures)
    foresight: Foresight = field(init=False)
    proven: bool = False  # DNSSEC is validated
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("cache", "stale", "local", "policy", "failed"), 0)
    )

    def __post_init__(self) -> None:
        self.foresight = Foresight(self.cache)

    def look(self, question: Question, now: float) -> Found | None:
        """The answer that needs nobody; None when somebody must be asked, also for a local CNAME that leads outside."""
        if question.type == w.ANY:
            return self._count("policy", Found(any_refused(question), "policy"))
        local = self.local.answer(question)
        if local is not None:
            return None if local.unfinished else self._count("local", Found(local, "local"))
        special = self.zones.stays(question)
        if special is not None:
            return self._count("local", Found(special, "local"))
        if self.blocklist.blocks(question.name):
            blocked = compose(question, w.NXDOMAIN, (), [soa(question.name)])
            return self._count("policy", Found(blocked, "policy", options=reason(BLOCKED, "on a blocklist")))
        scope, _ = self.zones.zone_of(question.name)
        return self._cached(question, now, scope) or self._after_failure(question, now, scope)

    def _count(self, step: str, found: Found) -> Found:
        self.counts[step] += 1
        return found

    def _cached(self, question: Question, now: float, scope: bytes) -> Found | None:
        entry = self.cache.fresh(question, now, scope)
        if entry is not None and entry.answer is not None:
            refresh = self.cache.hit(entry, now)
            age_s, told = int(now - entry.stored_at), entry.answer.reason
            found = Found(entry.answer, "cache", age_s, told, entry=entry, refresh=refresh)
            return self._count("cache", found)
        if question.ecs and question.ecs != EVERY_SUBNET:
            shared = self._cached(replace(question, ecs=EVERY_SUBNET), now, scope)
            return shared._replace(shared=True) if shared is not None else None
        above = self.cache.denied_above(question, now, scope)
        if above is None or above.answer is None:
            return None
        denial = denial_below(above.answer, question)
        return self._count("cache", Found(denial, "cache", int(now - above.stored_at), above.answer.reason))

    def _after_failure(self, question: Question, now: float, scope: bytes) -> Found | None:
        entry = self.cache.stale(question, now, scope)
        if entry is not None and now < entry.recheck_at:
            return self._stale(entry)
        # Another client's verdict: it names nobody, and the question's bytes are replaced on the way out.
        return self.failures.find(key_of(question, scope), now) if len(self.failures) else None

    def _stale(self, entry: Entry) -> Found:
        assert entry.answer is not None
        code = STALE_NXDOMAIN if entry.answer.rcode == w.NXDOMAIN else STALE
        found = Found(entry.answer, "stale", options=reason(code, "no fresh answer in time"), stale=True)
        return self._count("stale", found)

    def again(self, key: bytes) -> Question | None:
        """The question that this key stands for, to be asked upstream without a client; None when what stands before the
        cache would answer it today, or when it has another key today: a zone came or went, or it depends on a subnet."""
        (do, cd), name, rdtype = flags_of(key), name_of(key), type_of(key)
        section = name + rdtype.to_bytes(2) + w.IN.to_bytes(2)
        question = Question(0, w.RD | w.AD | (w.CD if cd else 0), name, rdtype, section, edns=True, do=do)
        question.proven = self.proven
        scope, _ = self.zones.zone_of(name)
        if key_of(question, scope) != key or self.local.answer(question) is not None:
            return None
        return None if self.zones.stays(question) is not None or self.blocklist.blocks(name) else question

    # --- what a flight brings home ----------------------------------------------------------------------------------

    def bridge(self, entry: Entry | None, now: float) -> Found | None:
        """Old data in place of fresh data that is late or will not come; for 30 s it is then given at once (RFC 8767 5).

        None when there is none. An entry that is fresh after all (a prefetch failed) is given as it is.
        """
        if entry is None or entry.answer is None:
            return None
        if now < entry.expires_at:
            return Found(entry.answer, "cache", int(now - entry.stored_at), entry=entry)
        entry.recheck_at = now + RECHECK_S
        return self._stale(entry)

    def store(
        self, question: Question, scope: bytes, answer: Answer, source: str, now: float, *, shared: bool
    ) -> Found:
        """A good answer: kept for those it is good for, and the failures before it forgotten."""
        if len(self.failures):
            self.failures.forget(key_of(question, scope))
        kept_for = replace(question, ecs=EVERY_SUBNET) if shared else question
        self.cache.put(kept_for, answer, now, scope=scope, source=source)
        return Found(answer, source, options=answer.reason, shared=shared)

    def fail(self, question: Question, scope: bytes, ede: int, text: str, now: float) -> Found:
        """Nobody answered, and nothing old bridges it."""
        found = failure(question, ede, text)
        self.failures.failed(key_of(question, scope), found, now)
        return self._count("failed", found)

    def refuse(self, question: Question, scope: bytes, rcode: int, ede: int, text: str, now: float) -> Found:
        """An answer came that may not be given."""
        found = Found(compose(question, rcode), "policy", options=reason(ede, text))
        self.failures.keep(key_of(question, scope), found, now + REFUSED_CONTENT_S)
        return self._count("policy", found)


def failure(question: Question, ede: int, text: str) -> Found:
    return Found(compose(question, w.SERVFAIL), "failure", options=reason(ede, text))


def subnet_option(question: Question, found: Found) -> bytes:
    """The client's subnet back, with the scope that the answer is good for (RFC 7871 7.2.1); nothing when it is stripped."""
    ecs = question.ecs
    if not ecs or found.source in ("local", "policy", "failure"):
        return b""
    return w.option(w.ECS, ecs[:3] + (b"\0" if found.shared else ecs[2:3]) + ecs[4:])
