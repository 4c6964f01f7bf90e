"""Ageing, denials, bounds, eviction and prefetch, told as transcripts and held by one machine of random steps."""

from __future__ import annotations

import random
from collections import Counter

import dns.message
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from resolver import wire as w
from resolver.answer import Answer, Bounds, take
from resolver.cache import Cache, is_denial, key_of, name_of, scope_of
from resolver.question import Question, parse
from tests.resolver.messages import queries
from tests.resolver.scripted import answer as scripted


def asking(name: str, rdtype: str = "A", **options: object) -> Question:
    asked = parse(dns.message.make_query(name, rdtype, **options).to_wire())  # type: ignore[arg-type]
    assert isinstance(asked, Question)
    return asked


def said(question: Question, *records: str, rcode: str = "NOERROR", soa: str = "") -> Answer:
    query = dns.message.make_query(dns.name.from_wire(question.section, 0)[0], question.type)
    return take(scripted(query, *records, rcode=rcode, soa=soa), question, Bounds(), trusted=True)


def cache_of(entries: int = 1000, size: int = 1 << 24, **options: object) -> Cache:
    return Cache(entries=entries, size=size, **options)  # type: ignore[arg-type]


def test_an_entry_is_fresh_until_its_ttl_then_stale_then_gone() -> None:
    cache, q = cache_of(stale_s=100), asking("a.example")
    cache.put(q, said(q, "5 A 192.0.2.1"), now=10)
    assert cache.fresh(q, 14.9) is not None
    assert cache.fresh(q, 15) is None
    assert cache.stale(q, 114.9) is not None
    assert cache.stale(q, 115) is None


def test_what_has_no_time_is_kept_for_nobody() -> None:
    cache, q = cache_of(), asking("a.example")
    assert cache.put(q, said(q, "0 A 192.0.2.1"), now=0) is None
    assert cache.put(q, said(q, rcode="NXDOMAIN"), now=0) is None
    assert len(cache) == 0


def test_letters_do_not_matter_but_do_and_cd_and_type_do() -> None:
    cache, q = cache_of(), asking("a.example")
    cache.put(q, said(q, "5 A 192.0.2.1"), now=0)
    assert cache.fresh(asking("A.EXAMPLE"), 1) is not None
    assert cache.fresh(asking("a.example", "AAAA"), 1) is None
    assert cache.fresh(asking("a.example", use_edns=0, want_dnssec=True), 1) is None
    cd = asking("a.example")
    cd.flags |= w.CD
    assert cache.fresh(cd, 1) is None


def test_nxdomain_answers_every_type_and_every_name_below() -> None:
    cache, q = cache_of(), asking("gone.example")
    cache.put(q, said(q, rcode="NXDOMAIN", soa="example. 60 60"), now=0)
    assert cache.fresh(asking("gone.example", "TXT"), 1) is not None
    assert cache.denied_above(asking("deep.er.gone.example"), 1) is not None
    assert cache.denied_above(asking("notgone.example"), 1) is None
    assert cache.denied_above(asking("example"), 1) is None
    assert cache.denied_above(asking("deep.gone.example"), 60) is None
    assert cache.denied_above(asking("deep.gone.example", use_edns=0, want_dnssec=True), 1) is None


def test_a_proof_for_the_parent_is_none_for_the_child() -> None:
    cache, q = cache_of(), asking("gone.example", use_edns=0, want_dnssec=True)
    cache.put(q, said(q, rcode="NXDOMAIN", soa="example. 60 60"), now=0)
    assert cache.fresh(asking("gone.example", "TXT", use_edns=0, want_dnssec=True), 1) is not None
    assert cache.denied_above(asking("deep.gone.example", use_edns=0, want_dnssec=True), 1) is None


def test_nodata_answers_its_own_type_only() -> None:
    cache, q = cache_of(), asking("a.example", "AAAA")
    cache.put(q, said(q, soa="example. 60 60"), now=0)
    assert cache.fresh(q, 1) is not None
    assert cache.fresh(asking("a.example"), 1) is None


def test_a_live_answer_below_a_later_denial_stays() -> None:
    cache, below, q = cache_of(), asking("www.gone.example"), asking("gone.example")
    cache.put(below, said(below, "60 A 192.0.2.1"), now=0)
    cache.put(q, said(q, rcode="NXDOMAIN", soa="example. 60 60"), now=1)
    kept = cache.fresh(below, 2)
    assert kept is not None and kept.answer is not None and kept.answer.rcode == 0


def test_a_denial_replaces_what_its_type_had_and_data_replaces_the_denial() -> None:
    cache, q = cache_of(), asking("a.example")
    cache.put(q, said(q, "60 A 192.0.2.1"), now=0)
    cache.put(q, said(q, rcode="NXDOMAIN", soa="example. 60 60"), now=1)
    entry = cache.fresh(q, 2)
    assert entry is not None and entry.answer is not None and entry.answer.rcode == w.NXDOMAIN
    cache.put(q, said(q, "60 A 192.0.2.1"), now=3)
    assert cache.fresh(asking("a.example", "TXT"), 4) is None
    assert len(cache) == 1


def test_a_refreshed_entry_is_the_same_object_with_the_new_answer() -> None:
    cache, q = cache_of(), asking("a.example")
    first = cache.put(q, said(q, "60 A 192.0.2.1"), now=0)
    again = cache.put(q, said(q, "60 A 192.0.2.2"), now=50)
    assert first is again and again is not None and again.expires_at == 110


def test_a_removed_entry_has_no_answer() -> None:
    cache, q = cache_of(), asking("a.example")
    entry = cache.put(q, said(q, "60 A 192.0.2.1"), now=0)
    assert entry is not None and cache.flush() == 1
    assert entry.answer is None and (len(cache), cache.used) == (0, 0)


def test_flush_of_a_name_takes_what_is_below_it_too() -> None:
    cache = cache_of()
    for name in ("a.example", "b.a.example", "ba.example"):
        q = asking(name)
        cache.put(q, said(q, "60 A 192.0.2.1"), now=0)
    assert cache.flush(w.name_from_text("a.example")) == 2
    assert cache.fresh(asking("ba.example"), 1) is not None


def test_a_zones_answers_are_nobody_elses() -> None:
    cache, q, scope = cache_of(), asking("a.corp.example"), w.name_from_text("corp.example")
    cache.put(q, said(q, "60 A 10.0.0.1"), now=0, scope=scope)
    assert cache.fresh(q, 1) is None
    assert cache.fresh(q, 1, scope) is not None


@given(queries(), st.sampled_from([b"", w.name_from_text("corp.example"), w.ROOT]))
def test_a_key_gives_its_name_and_scope_back(query: dns.message.Message, scope: bytes) -> None:
    asked = parse(query.to_wire())
    assert isinstance(asked, Question)
    key = key_of(asked, scope)
    assert (name_of(key), scope_of(key)) == (asked.name, scope)


def test_the_second_hit_in_the_last_tenth_refreshes_once() -> None:
    cache, q = cache_of(), asking("a.example")
    entry = cache.put(q, said(q, "20 A 192.0.2.1"), now=0)
    assert entry is not None
    assert [cache.hit(entry, now) for now in (1.0, 17.9, 18.0, 18.1, 19.0)] == [False, False, True, False, False]
    cache.put(q, said(q, "20 A 192.0.2.1"), now=18.2)
    assert not cache.hit(entry, 37.0), "its first use within the new TTL"
    assert cache.hit(entry, 37.1)


def test_nothing_is_refreshed_when_prefetch_is_off() -> None:
    cache, q = cache_of(prefetch=False), asking("a.example")
    entry = cache.put(q, said(q, "20 A 192.0.2.1"), now=0)
    assert entry is not None and not any(cache.hit(entry, 19.9) for _ in range(5))


def test_names_in_use_survive_a_flood_of_names_asked_once() -> None:
    """D35: the hit ratio of a Zipf load drops by less than a tenth."""

    def hit_ratio(flood: int) -> float:
        cache, draw, hits = cache_of(entries=1000), random.Random(7), 0
        weights = [1 / rank for rank in range(1, 2001)]
        for step, rank in enumerate(draw.choices(range(2000), weights, k=20_000)):
            for q in [asking_fast(rank)] + [asking_fast(10_000 + step * flood + i) for i in range(flood)]:
                entry = cache.fresh(q, 1)
                if entry is not None:
                    cache.hit(entry, 1)
                    hits += q.id == 0
                else:
                    cache.store(key_of(q), ANSWER, 0, 100, "")
        return hits / 20_000

    quiet = hit_ratio(0)
    assert hit_ratio(3) > quiet - 0.1


def asking_fast(number: int) -> Question:
    name = b"\x08%08d\0" % number
    return Question(0 if number < 10_000 else 1, 0, name, w.A, name + b"\0\1\0\1")


ANSWER = said(asking("a.example"), "100 A 192.0.2.1")


def test_large_answers_asked_once_do_not_push_out_small_ones_in_use() -> None:
    cache = cache_of(entries=100_000, size=2_000_000)
    small = [asking_fast(i) for i in range(500)]
    for q in small:
        entry = cache.store(key_of(q), ANSWER, 0, 100, "")
        assert entry is not None
        cache.hit(entry, 1)
        cache.hit(entry, 1)
    large = Answer(bytes(60_000), (), 100, 0)
    for i in range(300):
        cache.store(key_of(asking_fast(20_000 + i)), large, 0, 100, "")
        for q in small[i % 10 :: 10]:
            kept = cache.fresh(q, 1)
            if kept:
                cache.hit(kept, 1)
    assert sum(cache.fresh(q, 1) is not None for q in small) > 450
    assert cache.used <= 2_000_000


class CacheMachine(RuleBasedStateMachine):
    """For every sequence of steps: bounds hold, TTLs only fall, and what was removed is gone until it is put again."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.cache = cache_of(entries=8, size=7000, stale_s=20)
        self.put_at: dict[bytes, tuple[float, int]] = {}

    @rule(number=st.integers(0, 30), ttl=st.integers(0, 30), extra=st.integers(0, 3000))
    def put(self, number: int, ttl: int, extra: int) -> None:
        q = asking_fast(number)
        self.cache.put(q, Answer(q.section + bytes(extra), (), ttl, 0), self.now)
        if ttl:
            self.put_at[q.name] = (self.now, ttl)

    @rule(number=st.integers(0, 30), ttl=st.integers(1, 30))
    def deny(self, number: int, ttl: int) -> None:
        q = asking_fast(number)
        self.cache.put(q, Answer(q.section, (), ttl, w.NXDOMAIN, denies=True), self.now)
        self.put_at[q.name] = (self.now, ttl)

    @rule(number=st.integers(0, 30))
    def get(self, number: int) -> None:
        q = asking_fast(number)
        entry = self.cache.fresh(q, self.now)
        if entry is not None:
            self.cache.hit(entry, self.now)
            at, ttl = self.put_at[q.name]
            assert entry.answer is not None and self.now < at + ttl
            left_s = entry.answer.ttl_s - int(self.now - entry.stored_at)
            assert 0 < left_s < ttl - (self.now - at) + 1

    @rule(number=st.integers(0, 30))
    def remove(self, number: int) -> None:
        q = asking_fast(number)
        self.cache.remove(key_of(q))
        left = self.cache.stale(q, self.now)
        assert left is None or is_denial(left.key)

    @rule(step=st.floats(0.1, 15))
    def wait(self, step: float) -> None:
        self.now += step

    @invariant()
    def bounds_hold(self) -> None:
        entries = list(self.cache)
        assert len(entries) == len(self.cache) <= 8
        assert sum(e.size for e in entries) == self.cache.used <= 7000

    @invariant()
    def no_denial_is_overlooked(self) -> None:
        """The short cut past the look-up of denials goes by the lengths of those that are held."""
        held = Counter(len(e.key) for e in self.cache if is_denial(e.key))
        assert self.cache._denials == dict(held)


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase


def test_who_left_a_moment_ago_is_known_when_it_comes_back_and_a_flush_forgets_that_too() -> None:
    cache = cache_of(entries=2)
    for name in ("a.example", "b.example", "c.example"):
        cache.put(asking(name), said(asking(name), "60 A 192.0.2.1"), now=0)
    again = cache.put(asking("a.example"), said(asking("a.example"), "60 A 192.0.2.1"), now=1)
    assert again is not None and again.protected
    cache.flush()
    again = cache.put(asking("b.example"), said(asking("b.example"), "60 A 192.0.2.1"), now=2)
    assert again is not None and not again.protected


def test_no_more_of_those_that_left_are_known_than_entries_fit() -> None:
    cache = cache_of(entries=4)
    for number in range(100):
        cache.put(asking(f"n{number}.example"), said(asking(f"n{number}.example"), "60 A 192.0.2.1"), now=0)
    assert len(cache._ghosts) == 4
