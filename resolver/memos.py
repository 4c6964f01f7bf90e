"""Keep whole replies by the exact bytes of their query: the shortest way from a datagram to its answer.

Theory: stubs send the same bytes again and again; only the id differs. A reply is good for those bytes until its entry holds
another answer, or until the time of prefetch (the hit that refreshes must be one that the cache counts); with each full
second of the entry's age its TTLs are written anew. So nothing is ever searched for or taken out: what is no
longer true is not used, and a full table is emptied, which costs each name one parse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from resolver.answer import Answer, at_age
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


class Memos(dict[bytes, Memo]):
    """By the bytes of the query behind its id. `renewed` is told each entry whose reply is written anew: the first use in a
    second of its age, and so all that anybody can learn of uses without costing the others something."""

    renewed: Callable[[Entry, float], None] | None = None

    def find(self, key: bytes, now: float) -> Memo | None:
        """The reply that is true now. Without the renewal ten thousand names were parsed anew once a second each."""
        memo = self.get(key)
        if memo is None or memo.entry.answer is not memo.answer:
            return None
        return memo if now < memo.until else self._renewed(key, memo, now)

    def _renewed(self, key: bytes, memo: Memo, now: float) -> Memo | None:
        _, entry, answer, tail = memo
        if now >= entry.expires_at or now >= entry.refresh_at:
            return None
        age_s = int(now - entry.stored_at)
        self[key] = memo = Memo(_until(entry, age_s), entry, answer, at_age(tail, answer, age_s))
        if self.renewed is not None:
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
    return min(entry.stored_at + age_s + 1, entry.expires_at, entry.refresh_at)
