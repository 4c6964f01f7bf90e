"""Write a cache as bytes and read it back, aged by the time in between; anything doubtful is dropped.

Format, big-endian: `headrace-dns 1\\n`, the wall-clock second of writing (8), then for each entry the seconds since it
was stored and until it expires (4 + 4, the second signed), and key, source and message, each with its length (2); last
the BLAKE2b-256 of all before. Offsets and TTL lists are not saved: they are found again by the walker, so a file can
never point outside of a message.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil, floor

from resolver import wire as w
from resolver.answer import Answer
from resolver.cache import Cache, Entry, is_denial, name_of
from resolver.errors import Malformed

MAGIC = b"headrace-dns 1\n"
_DIGEST = 32
_FUTURE_S = 300.0
"""A file from further in the future than this was written by a clock that was wrong: its ages mean nothing."""

_entry_head = struct.Struct("!IiHHH")


@dataclass(frozen=True, slots=True)
class Saved:
    """One entry as it was: ages in seconds at the time of reading."""

    key: bytes
    answer: Answer
    source: str
    age_s: float
    left_s: float


def write(entries: Iterable[Entry], now: float, wall: float) -> bytes:
    """The bytes of a file. `wall` is seconds since the epoch: the only clock that another boot shares."""
    parts = [MAGIC, struct.pack("!Q", int(wall))]
    for entry in entries:
        answer = entry.answer
        if answer is None:
            continue
        source = entry.source.encode()[:255]
        age_s, left_s = max(0, ceil(now - entry.stored_at)), floor(entry.expires_at - now)
        parts.append(_entry_head.pack(age_s, left_s, len(entry.key), len(source), len(answer.wire)))
        parts += (entry.key, source, answer.wire)
    body = b"".join(parts)
    return body + hashlib.blake2b(body, digest_size=_DIGEST).digest()


def read(content: bytes, wall: float) -> list[Saved]:
    """The entries, aged by the time since they were written. Raises Malformed for a file that is not whole and ours."""
    body, digest = content[:-_DIGEST], content[-_DIGEST:]
    if not body.startswith(MAGIC):
        raise Malformed(f"{len(content)} bytes that do not begin with {MAGIC!r}")
    if hashlib.blake2b(body, digest_size=_DIGEST).digest() != digest:
        raise Malformed(f"{len(content)} bytes with a wrong checksum")
    written = struct.unpack_from("!Q", body, len(MAGIC))[0]
    if written > wall + _FUTURE_S:
        raise Malformed(f"written {written - wall:.0f} s in the future")
    return list(_entries(body, len(MAGIC) + 8, max(0.0, wall - written)))


def _entries(body: bytes, at: int, off_s: float) -> Iterator[Saved]:
    while at < len(body):
        age_s, left_s, *lengths = _entry_head.unpack_from(body, at)
        at += _entry_head.size
        key_end, source_end, end = at + lengths[0], at + sum(lengths[:2]), at + sum(lengths)
        key, source = body[at:key_end], body[key_end:source_end].decode("utf-8", "replace")
        answer = _answer(key, body[source_end:end], age_s + left_s)
        yield Saved(key, answer, source, age_s + off_s, left_s - off_s)
        at = end


def _answer(key: bytes, message: bytes, ttl_s: int) -> Answer:
    found = w.scan(message)
    if found.opt is not None or found.questions != 1 or w.name_at(message, w.HEADER) != name_of(key):
        raise Malformed("an entry whose message is not the one of its key")
    denies = found.rcode == w.NXDOMAIN and is_denial(key)
    return Answer(message, tuple(r.rdata_at - 6 for r in found.records), max(1, ttl_s), found.rcode, denies)


def restore(cache: Cache, saved: Iterable[Saved], now: float) -> int:
    """Puts what is still of use (fresh, or stale within the cache's limit) back; how many entries that were."""
    count = 0
    for entry in saved:
        if entry.left_s + cache.stale_s > 0 and cache.peek(entry.key) is None:
            stored = cache.store(entry.key, entry.answer, now - entry.age_s, now + entry.left_s, entry.source)
            count += stored is not None
    return count
