"""Remember answers: for how long, for whom, how many, and when one should be asked again before it ends.

Theory: an entry is fresh until the smallest of its TTLs ends, then stale for `serve_stale`, then gone. Keys are the
lower-cased question with DO and CD (and the scope: a zone's answers are nobody else's). A denied name is kept once, for
all its types, and looked for at every parent of a name (RFC 8020).

     put -> probation (a tenth) --seen again--> protected --seen since--> protected again
       |          |                                 ^                |
       |          +--never seen: out, leaves a hash |                +--not seen since: out
       +--its hash is still known-------------------+

Eviction is S3-FIFO (Yang et al., SOSP 2023): a flood of names that are asked once passes through the probation queue
and leaves the others alone, and a hit is one increment, no reordering. `cachetools` was weighed: its LRU relinks on
every hit and a flood empties it, and its TTL caches drop what has expired, which is just what serve-stale needs.

Rules for editing: 1. `now` is an argument; 2. whatever is stored keeps `size <= bound` in entries and in bytes before the call
returns; 3. an entry is replaced in place, so whoever holds it sees the new answer; 4. a removed entry has `answer` None.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from resolver import wire as w
from resolver.answer import Answer
from resolver.question import Question

ENTRY_BYTES = 640
"""What an entry costs besides its message and key: measured with tracemalloc over 100 000 entries, rounded up."""
RECHECK_S = 30.0
"""After a failed refresh a stale answer is given at once for so long (RFC 8767 5)."""
PREFETCH_SHARE = 0.1
"""The last part of a TTL in which a hit may refresh the entry: unbound's tenth."""
_MOST_HITS = 3  # what one entry can save up: more would make a once hot name immovable

_NO_TYPE = b"\0\0"
_FLAGS = tuple(bytes((0x80 | flags,)) for flags in range(8))  # DO, then CD (0x10 of the header's flags), then proven


@dataclass(slots=True, eq=False)
class Entry:
    """One kept answer. `refresh_at` is when a hit should ask again; infinite once it was tried for this TTL."""

    key: bytes
    answer: Answer | None
    source: str
    stored_at: float
    expires_at: float
    refresh_at: float
    recheck_at: float = 0.0
    hits: int = 0  # since stored: the prefetch rule
    seen: int = 0  # since last looked at by the eviction
    size: int = 0
    protected: bool = False


def key_of(question: Question, scope: bytes = b"") -> bytes:
    """Scope, DO, CD and proven, type, name, subnet. The first byte tells a scope (a label's length) from the flags."""
    keys = question.keys
    if keys is None or keys[0] != scope:
        keys = _keys(question, scope)
    return keys[1]


def _denials_of(question: Question, scope: bytes) -> bytes:
    """How the key of every denial begins that this question may use; the denied name follows."""
    keys = question.keys
    if keys is None or keys[0] != scope:
        keys = _keys(question, scope)
    return keys[2]


def _keys(question: Question, scope: bytes) -> tuple[bytes, bytes, bytes]:
    """Made once for a question, which is looked for up to seven times on its way through a miss."""
    begin = scope + _FLAGS[question.do | question.flags >> 3 & 2 | question.proven << 2]
    key = begin + question.section[-4:-2] + question.name + question.ecs
    question.keys = keys = (scope, key, begin + _NO_TYPE)
    return keys


class Cache:
    """Bounded in entries and bytes. All methods take `now` in seconds of one clock that never goes back."""

    def __init__(self, *, entries: int, size: int, stale_s: float = 86_400.0, prefetch: bool = True) -> None:
        self.entries = entries
        self.size = size
        self.stale_s = stale_s
        self.prefetch = prefetch
        self.used = 0
        self._on_probation = 0
        self.evicted = 0
        self._probation: OrderedDict[bytes, Entry] = OrderedDict()
        self._protected: OrderedDict[bytes, Entry] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()  # hashes of keys that left probation, at most `entries`
        self._denials: dict[int, int] = {}  # by the length of their keys how many: most look-ups for one end here

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __iter__(self) -> Iterator[Entry]:
        """Longest kept first; the order in which `put` would rebuild this cache."""
        yield from list(self._protected.values())
        yield from list(self._probation.values())

    def peek(self, key: bytes) -> Entry | None:
        return self._protected.get(key) or self._probation.get(key)

    def known(self, key: bytes) -> Entry | None:
        """What is held for the question of this key, fresh or not: its own entry, or the denial of its name."""
        entry = self.peek(key)
        if entry is None:
            at = _flags_at(key) + 1
            entry = self.peek(key[:at] + _NO_TYPE + key[at + 2 :])
        return entry

    def fresh(self, question: Question, now: float, scope: bytes = b"") -> Entry | None:
        """The entry that answers now, or None. A live answer wins over a later denial above it (RFC 8020 2)."""
        key = key_of(question, scope)
        entry = self._protected.get(key) or self._probation.get(key)
        if entry is not None and now < entry.expires_at:
            return entry
        entry = self._denial(question, scope)
        return entry if entry is not None and now < entry.expires_at else None

    def _denial(self, question: Question, scope: bytes) -> Entry | None:
        if not self._denials:
            return None
        key = _denials_of(question, scope) + question.name
        return self.peek(key) if len(key) in self._denials else None

    def denied_above(self, question: Question, now: float, scope: bytes = b"") -> Entry | None:
        """The denial of a parent of this name. Not for DO: the proof of the parent does not name the child."""
        lengths = self._denials
        if question.do or not lengths:
            return None
        begin, name = _denials_of(question, scope), question.name
        whole = len(begin) + len(name)
        at = name[0] + 1 if name[0] else 1  # the name itself is `fresh`'s
        while at < len(name):
            if whole - at in lengths:
                entry = self.peek(begin + name[at:])
                if entry is not None and now < entry.expires_at:
                    return entry
            at += name[at] + 1
        return None

    def stale(self, question: Question, now: float, scope: bytes = b"") -> Entry | None:
        """An expired entry young enough to bridge an outage."""
        key = key_of(question, scope)
        entry = self._protected.get(key) or self._probation.get(key)
        if entry is not None and entry.expires_at > now - self.stale_s:
            return entry
        entry = self._denial(question, scope)
        return entry if entry is not None and entry.expires_at > now - self.stale_s else None

    def hit(self, entry: Entry, now: float) -> bool:
        """Counts one use; true when this hit should refresh the entry: its TTL is nearly over and it was used before."""
        entry.hits += 1
        if entry.seen < _MOST_HITS:
            entry.seen += 1
        if now < entry.refresh_at or entry.hits < 2:
            return False
        entry.refresh_at = float("inf")  # one try for each TTL: a failed one leaves the entry as it is
        return True

    def put(
        self, question: Question, answer: Answer, now: float, *, scope: bytes = b"", source: str = ""
    ) -> Entry | None:
        """Stores and returns the entry; None when the answer may not be kept. A denial replaces what its type had."""
        if answer.ttl_s <= 0 or answer.unfinished:
            return None
        key = key_of(question, scope)
        if answer.denies:
            self.remove(key)
            key = _denials_of(question, scope) + question.name
        elif self._denials:
            # The name exists: a denial that is still held for it was true once and is not any more.
            self.remove(_denials_of(question, scope) + question.name)
        return self.store(key, answer, now, now + answer.ttl_s, source)

    def store(self, key: bytes, answer: Answer, stored_at: float, expires_at: float, source: str) -> Entry | None:
        """The entry under `key`, new or replaced in place; None when it found no room."""
        size = len(answer.wire) + 2 * len(key) + 32 * len(answer.ttl_at) + ENTRY_BYTES
        if size > self.size or self.entries < 1:
            self.remove(key)
            return None
        refresh_at = expires_at - (expires_at - stored_at) * PREFETCH_SHARE if self.prefetch else float("inf")
        entry = self._protected.get(key) or self._probation.get(key)
        if entry is None:
            if is_denial(key):
                self._denials[len(key)] = self._denials.get(len(key), 0) + 1
            known = self._ghosts.pop(hash(key), self) is None
            entry = Entry(key, answer, source, stored_at, expires_at, refresh_at, protected=known)
            (self._protected if known else self._probation)[key] = entry
        else:
            self._account(entry, -entry.size)
            entry.answer, entry.source, entry.stored_at = answer, source, stored_at
            entry.expires_at, entry.refresh_at, entry.recheck_at, entry.hits = expires_at, refresh_at, 0.0, 0
        entry.size = size
        self._account(entry, size)
        while len(self._protected) + len(self._probation) > self.entries or self.used > self.size:
            self._evict()
        return entry if entry.answer is not None else None

    def _account(self, entry: Entry, size: int) -> None:
        self.used += size
        if not entry.protected:
            self._on_probation += size

    def _evict(self) -> None:
        """Drops one entry or moves one on. Each step lowers somebody's `seen` or shortens a queue, so this ends."""
        queue = self._probation if self._probation_is_full() else self._protected
        key, entry = queue.popitem(last=False)
        if not entry.seen:
            if not entry.protected:
                self._remember(key)
            self._drop(entry)
            return
        entry.seen = entry.seen - 1 if entry.protected else 0
        if not entry.protected:
            self._on_probation -= entry.size
            entry.protected = True
        self._protected[key] = entry

    def _remember(self, key: bytes) -> None:
        self._ghosts[hash(key)] = None
        if len(self._ghosts) > self.entries:
            self._ghosts.popitem(last=False)

    def _probation_is_full(self) -> bool:
        """A tenth of either bound: large answers asked once must not push out small ones that are used."""
        if not self._protected:
            return True
        return len(self._probation) > 1 and (
            len(self._probation) * 10 > self.entries or self._on_probation * 10 > self.size
        )

    def _drop(self, entry: Entry) -> None:
        self._account(entry, -entry.size)
        if is_denial(entry.key):
            self._forget_denial(len(entry.key))
        self.evicted += 1
        entry.answer = None
        entry.expires_at = entry.refresh_at = float("-inf")

    def _forget_denial(self, length: int) -> None:
        self._denials[length] -= 1
        if not self._denials[length]:
            del self._denials[length]

    def remove(self, key: bytes) -> bool:
        entry = self._protected.pop(key, None) or self._probation.pop(key, None)
        if entry is None:
            return False
        self._drop(entry)
        self.evicted -= 1
        return True

    def flush(self, name: bytes | None = None) -> int:
        """Forgets everything, or every type of `name` and of all names below it; how many entries that were."""
        self._ghosts.clear()
        victims = [e.key for e in self if name is None or name in w.suffixes(name_of(e.key))]
        return sum(self.remove(key) for key in victims)


def name_of(key: bytes) -> bytes:
    """The name inside a key."""
    at = _flags_at(key) + 3
    return key[at : w.skip_name(key, at)]


def type_of(key: bytes) -> int:
    """The type inside a key; 0 for a denial."""
    at = _flags_at(key) + 1
    return int.from_bytes(key[at : at + 2])


def scope_of(key: bytes) -> bytes:
    """The zone whose answer the key stands for; empty for the public ones."""
    return key[: _flags_at(key)]


def flags_of(key: bytes) -> tuple[bool, bool]:
    """DO and CD inside a key."""
    flags = key[_flags_at(key)]
    return bool(flags & 1), bool(flags & 2)


def is_denial(key: bytes) -> bool:
    """Whether the key stands for a name that does not exist, rather than for one type of it."""
    if key[0] >= 0x80:  # of no zone
        return key[1:3] == _NO_TYPE
    at = _flags_at(key)
    return key[at + 1 : at + 3] == _NO_TYPE


def _flags_at(key: bytes) -> int:
    return 0 if key[0] >= 0x80 else w.skip_name(key, 0)
