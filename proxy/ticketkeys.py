"""Decide which keys seal and open TLS session tickets at a moment: rotation as a list operation.

Theory: a ring is a frozen list, newest first. The first key seals, every key opens. `advance` puts a fresh key in
front; the one that was in front has then *retired* and opens for one ticket lifetime more, because the last ticket
it sealed lives that long (RFC 8446 4.6.1). After that it is dropped: a key that is gone cannot be stolen, and with
it goes the forward secrecy debt of every ticket it ever sealed.

      advance(now, fresh)      [fresh | k2 k1]  ->  [fresh | k2 k1] minus what is older than it may open, minus what
                                                    is beyond `keep`
      merge(now, theirs)       the same list on every worker that has seen the same keys

A 80-byte key is what OpenSSL's own format says: 16 bytes of name that travel in clear in each ticket, 32 of
HMAC-SHA256, 32 of AES-256-CBC.

Rules for editing: 1. `now` is wall time in seconds since 1970, because rings outlive a boot and cross machines;
2. secrets are bytearrays, so that io can wipe them: nothing here copies one into bytes except `to_bytes`;
3. nothing here prints a secret: ids are hashes of the name.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

NAME_BYTES = 16
SECRET_BYTES = 64
KEY_BYTES = NAME_BYTES + SECRET_BYTES
MAX_KEYS = 64
"""More keys than any configuration keeps: a longer list in a file is damage, not a ring."""

TICK_S = 0.001
"""The least time between two keys of a ring."""

MAGIC = b"headrace ticket keys 1\n"
_COUNT = struct.Struct("!H")
_AGE = struct.Struct("!d")
_CHECK_BYTES = 32


class BrokenRing(ValueError):
    """Stored keys that cannot be used; says which rule they break, never a byte of them."""


@dataclass(frozen=True, slots=True)
class TicketKey:
    """One key. `made_at` is wall time: it began to seal then. Two keys are the same when their bytes are."""

    name: bytes
    secret: bytearray = field(repr=False, hash=False)
    made_at: float = field(compare=False)

    @property
    def hmac(self) -> bytearray:
        return self.secret[:32]

    @property
    def aes(self) -> bytearray:
        return self.secret[32:]

    @property
    def id(self) -> str:
        """Eight hex digits for people and logs. The name itself is public, but a hash keeps it out of greps."""
        return hashlib.sha256(self.name).hexdigest()[:8]

    @classmethod
    def made(cls, fresh: bytes | bytearray, now: float) -> TicketKey:
        """A key from 80 random bytes; ValueError for any other number."""
        if len(fresh) != KEY_BYTES:
            raise ValueError(f"a ticket key has {KEY_BYTES} bytes, not {len(fresh)}")
        return cls(bytes(fresh[:NAME_BYTES]), bytearray(fresh[NAME_BYTES:]), now)

    def wipe(self) -> None:
        """Overwrite the secret. The key opens nothing afterwards; only its owner may call this, once it is dropped."""
        self.secret[:] = bytes(len(self.secret))


@dataclass(frozen=True, slots=True)
class KeyView:
    """What people may see of a key."""

    id: str
    age_s: float
    seals: bool
    opens_for_s: float
    """Until it is dropped; for the key that seals: until it is due to retire, plus a lifetime."""


@dataclass(frozen=True, slots=True)
class TicketKeys:
    """The ring at a moment. Newest first; at most one that seals and `keep` that only open."""

    keys: tuple[TicketKey, ...] = ()
    lifetime_s: float = 3600.0
    rotate_every_s: float = 43_200.0
    keep: int = 3

    @property
    def current(self) -> TicketKey | None:
        """The key that seals; None only before the first advance."""
        return self.keys[0] if self.keys else None

    def find(self, name: bytes) -> TicketKey | None:
        """The key that a ticket names, or None: then the client gets a full handshake, never an error."""
        for key in self.keys:
            if key.name == name:
                return key
        return None

    def advance(self, now: float, fresh: bytes | bytearray) -> TicketKeys:
        """The ring with a fresh key in front, and without what may no longer open."""
        return self._holding(_in_order((TicketKey.made(fresh, now), *self.keys), now), now)

    def merge(self, now: float, theirs: Iterable[TicketKey]) -> TicketKeys:
        """This ring and another's keys: whoever has seen the same keys holds the same list, in the same order."""
        known: dict[bytes, TicketKey] = {}
        for key in (*self.keys, *theirs):
            # The first one stays, ours: a reload must not swap a secret that OpenSSL's callback is reading.
            seen = known.setdefault(key.name, key)
            made_at = min(key.made_at, seen.made_at, now)
            if made_at < seen.made_at:
                known[key.name] = replace(seen, made_at=made_at)
        newest_first = sorted(known.values(), key=lambda key: (key.made_at, key.name), reverse=True)
        return self._holding(tuple(newest_first), now)

    def pruned(self, now: float) -> TicketKeys:
        """The ring without what may no longer open; itself when nothing is to be dropped."""
        held = self._holding(self.keys, now)
        return self if len(held.keys) == len(self.keys) else held

    def configured(self, now: float, *, lifetime_s: float, rotate_every_s: float, keep: int) -> TicketKeys:
        """The same keys under other rules, applied at once."""
        changed = replace(self, lifetime_s=lifetime_s, rotate_every_s=rotate_every_s, keep=keep)
        return changed.pruned(now)

    def due(self, now: float) -> bool:
        """A fresh key is wanted: there is none, the first one is old enough, or it comes from the future."""
        # A clock that was set back would otherwise keep one key sealing for as long as the clock had been wrong.
        return not self.keys or not 0 <= now - self.keys[0].made_at < self.rotate_every_s

    def next_at(self, now: float) -> float:
        """When to look again: the next rotation or the next drop, whichever comes first; `now` when it is due."""
        if self.due(now):
            return now
        drops = (self._opens_until(index) for index in range(1, len(self.keys)))
        return max(now, min((self.keys[0].made_at + self.rotate_every_s, *drops)))

    def views(self, now: float) -> list[KeyView]:
        """Ids and ages, newest first."""
        return [
            KeyView(key.id, max(0.0, now - key.made_at), index == 0, max(0.0, self._opens_until(index) - now))
            for index, key in enumerate(self.keys)
        ]

    def to_bytes(self) -> bytes:
        """For a file that only its owner can read: magic, count, keys with the time each was made, SHA-256 of it all."""
        parts = [MAGIC, _COUNT.pack(len(self.keys))]
        for key in self.keys:
            parts += [_AGE.pack(key.made_at), key.name, bytes(key.secret)]
        body = b"".join(parts)
        return body + hashlib.sha256(body).digest()

    def _holding(self, keys: tuple[TicketKey, ...], now: float) -> TicketKeys:
        whole = replace(self, keys=keys[: self.keep + 1])
        open_still = (key for index, key in enumerate(whole.keys) if index == 0 or now < whole._opens_until(index))
        return replace(self, keys=tuple(open_still))

    def _opens_until(self, index: int) -> float:
        """A key retired when its successor was made; the last ticket it sealed dies a lifetime later."""
        retired_at = self.keys[index - 1].made_at if index else self.keys[0].made_at + self.rotate_every_s
        return retired_at + self.lifetime_s


def _in_order(keys: tuple[TicketKey, ...], now: float) -> tuple[TicketKey, ...]:
    """The same keys in the same order, each dated before the one in front of it and none in the future.

    A clock that was set back would otherwise date retired keys after fresh ones, and a merge would let them seal again.
    """
    dated: list[TicketKey] = []
    latest = now
    for key in keys:
        dated.append(key if key.made_at <= latest else replace(key, made_at=latest))
        latest = dated[-1].made_at - TICK_S
    return tuple(dated)


def keys_from_bytes(stored: bytes) -> tuple[TicketKey, ...]:
    """What `to_bytes` wrote; BrokenRing when a byte is missing, added or changed."""
    body, check = stored[:-_CHECK_BYTES], stored[-_CHECK_BYTES:]
    if not body.startswith(MAGIC):
        raise BrokenRing(f"no ticket keys of this version: {len(stored)} bytes that begin otherwise")
    if not hmac.compare_digest(hashlib.sha256(body).digest(), check):
        raise BrokenRing(f"checksum of {len(stored)} bytes does not match: cut short or damaged")
    at, each = len(MAGIC) + _COUNT.size, _AGE.size + KEY_BYTES
    (count,) = _COUNT.unpack(body[len(MAGIC) : at])
    if count > MAX_KEYS or len(body) != at + count * each:
        raise BrokenRing(f"{count} keys do not fit {len(stored)} bytes")
    return tuple(_key_at(body, start) for start in range(at, len(body), each))


def _key_at(body: bytes, start: int) -> TicketKey:
    (made_at,) = _AGE.unpack_from(body, start)
    if not made_at >= 0:  # NaN too
        raise BrokenRing("a key without a time")
    at = start + _AGE.size
    key = TicketKey.made(body[at : at + KEY_BYTES], made_at)
    if not any(key.secret):
        # Anyone could forge tickets under it.
        raise BrokenRing("a key that was wiped")
    return key
