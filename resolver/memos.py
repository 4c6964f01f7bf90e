"""Keep whole replies by the exact bytes of their query: the shortest way from a datagram to its answer.

Theory: stubs send the same bytes again and again; only the id differs. A reply is good for those bytes until its entry holds
another answer, or until the time of prefetch (the hit that refreshes must be one that the cache counts); with each full
second of the entry's age its TTLs are written anew. So nothing is ever searched for or taken out: what is no
longer true is not used, and a full table is emptied, which costs each name one parse.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import NamedTuple

from resolver.answer import Answer
from resolver.cache import Entry
from resolver.question import Question

MOST, LARGEST = 16_384, 512
"""Replies, and bytes of query and of reply each: 16 MiB at the very most."""


class Memo(NamedTuple):
    """True as long as the time is before `until` and `entry` holds `answer`; each use is a hit of the entry."""

    until: float
    entry: Entry
    answer: Answer
    tail: bytes  # the reply behind its id


_made = tuple.__new__
_TTL = Struct("!I")
_unpack_ttl, _pack_ttl = _TTL.unpack_from, _TTL.pack_into


class Memos(dict[bytes, Memo]):
    """By the bytes of the query behind its id. `renewed` is told each entry whose reply is written anew: the first use in a
    second of its age, and so all that anybody can learn of uses without costing the others something."""

    renewed: Callable[[Entry, float], None]
    deaf_until = float("inf")
    """Before it nobody wants to be told."""
    hits = 0  # replies taken from here, counted by who takes them

    def find(self, key: bytes, now: float) -> Memo | None:
        """The reply that is true now, its TTLs written anew where a second has passed.

        One function with everything in locals: most names are asked less than once a second, so that this is their usual
        way, and each call it would make is code that a process which just slept has to fetch again: 18 us of waiting.
        """
        memo = self.get(key)
        if memo is None:
            return None
        until, entry, answer, tail = memo
        if entry.answer is not answer:
            return None
        if now < until:
            return memo
        soonest = entry.refresh_at if entry.refresh_at < entry.expires_at else entry.expires_at
        if now >= soonest:
            return None
        age_s = int(now - entry.stored_at)
        until = entry.stored_at + age_s + 1
        aged, wire = bytearray(tail), answer.wire
        for at in answer.ttl_at:
            left_s = _unpack_ttl(wire, at)[0] - age_s
            _pack_ttl(aged, at - 2, left_s if left_s > 0 else 0)
        self[key] = memo = _made(Memo, (until if until < soonest else soonest, entry, answer, bytes(aged)))
        if now >= self.deaf_until:
            self.renewed(entry, now)
        return memo

    def keep(self, wire: bytes, message: bytes, question: Question, entry: Entry, age_s: int) -> None:
        """Only for replies that every transport carries to this client, and for queries whose bytes will come again."""
        answer = entry.answer
        if answer is None or not question.repeatable or question.keepalive:
            return
        if len(message) < len(answer.wire):
            return  # it was cut for a datagram, and the same bytes over TCP ask for all of it
        if len(message) > min(question.size, LARGEST) or len(wire) > LARGEST:
            return
        if message[2] & 0x02:
            return  # cut for a datagram: over TCP the same bytes ask for all of it
        if len(self) >= MOST:
            self.clear()
        self[wire[2:]] = Memo(_until(entry, age_s), entry, answer, message[2:])


def _until(entry: Entry, age_s: int) -> float:
    until = entry.stored_at + age_s + 1
    soonest = entry.refresh_at if entry.refresh_at < entry.expires_at else entry.expires_at
    return until if until < soonest else soonest
