"""Check the signatures over one RRset, with a bound on the work that a hostile zone can cause (RFC 4035 5.3).

Theory: one good signature is enough. What an attacker controls is how many bad ones come first, and how many keys share
a key tag: n signatures times m keys is KeyTrap (CVE-2023-50387). Both are cut here, per RRset and per answer, and what
does not validate within the bound is bogus, not slow.
Rules for editing: 1. every check is paid from the budget before it is made; 2. the extended error is that of the
signature which came furthest: "expired" says more than "unknown key".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import dns.dnssec
import dns.exception
import dns.node
import dns.rdataset
import dns.rdatatype
from dns.rdtypes.ANY.DNSKEY import DNSKEY
from dns.rdtypes.ANY.RRSIG import RRSIG

from resolver import wire as w
from resolver.dnssec_records import DNSKEY_TYPE, DS_TYPE, Name, Signed

BOGUS, EXPIRED, NOT_YET, NO_DNSKEY, NO_RRSIG, NO_ZONE_KEY, NO_NSEC = 6, 7, 8, 9, 10, 11, 12  # RFC 8914 4
UNSUPPORTED_KEY, UNSUPPORTED_DIGEST, ITERATIONS = 1, 2, 27

ALGORITHMS = frozenset((5, 7, 8, 10, 13, 14, 15, 16))
"""RSA with SHA-1, -256, -512; ECDSA P-256, P-384; Ed25519, Ed448 (RFC 8624 3.1: what a validator must or should know)."""
DIGESTS = frozenset((1, 2, 4))

MOST_KEYS_PER_TAG = 2
"""Keys tried for one signature. Two keys of a zone with one tag are chance; more are KeyTrap."""
MOST_SIGNATURES = 8  # looked at for one RRset: two algorithms in a key roll-over make four


class Exhausted(Exception):
    """The budget of one answer is spent: no more work is done for it."""


@dataclass(slots=True)
class Budget:
    """What one answer may cost, its chain of trust included. The usual cold answer takes 6 checks and no failure.

    A check is 0.1 to 2 ms (measured; P-384 is the dearest), a hash of 150 iterations 0.1 ms. `since_pause` lets the rim
    breathe: no more than MOST_AT_ONCE checks are made in one step of the loop.
    """

    checks: int = 96
    failures: int = 8
    hashes: int = 64
    since_pause: int = 0

    def check(self) -> None:
        if self.checks <= 0:
            raise Exhausted("more signatures than one answer may cost")
        self.checks -= 1
        self.since_pause += 1

    def failed(self) -> None:
        self.failures -= 1
        if self.failures <= 0:
            raise Exhausted("too many signatures that do not verify")

    def hash(self, count: int = 1) -> None:
        self.hashes -= count
        if self.hashes < 0:
            raise Exhausted("more NSEC3 hashes than one answer may cost")


MOST_AT_ONCE = 4
"""Checks in one step: at most 8 ms of P-384, usually less than 1 ms."""


@dataclass(frozen=True, slots=True)
class Flaw:
    """Why something is not to be believed: the extended error and words for people."""

    ede: int
    text: str


@dataclass(frozen=True, slots=True)
class Verified:
    """A good signature: for how long by TTL and expiry (RFC 4035 5.3.3), and the wildcard's parent if it was one."""

    ttl_s: int
    encloser: Name | None = None


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one zone that may sign, ready to be looked up by (tag, algorithm)."""

    zone: Name
    by_tag: dict[tuple[int, int], tuple[DNSKEY, ...]] = field(hash=False)


def keys_of(zone: Name, keys: Iterable[DNSKEY]) -> Keys:
    found: dict[tuple[int, int], tuple[DNSKEY, ...]] = {}
    for key in keys:
        at = (key.key_id(), int(key.algorithm))
        found[at] = (*found.get(at, ()), key)
    return Keys(zone, found)


def may_sign(name: Name, rdtype: int, signer: Name) -> bool:
    """Whether a zone of that name could hold the RRset: a DS stands above its cut, everything else at or below it."""
    return name.is_subdomain(signer) and not (rdtype == DS_TYPE and name == signer and len(name) > 1)


def verify(signed: Signed, keys: Keys, wall: float, budget: Budget) -> Verified | Flaw:
    """Whether the zone of `keys` signed this at `wall` (seconds since the epoch). Raises Exhausted."""
    what = f"{w.type_to_text(signed.type)} of {signed.name}"
    if signed.flaw:
        return Flaw(BOGUS, f"{what}: {signed.flaw}")
    ours = [s for s in signed.signatures if s.signer == keys.zone and may_sign(signed.name, signed.type, s.signer)]
    if not ours:
        return Flaw(NO_RRSIG, f"{what} has no signature by {keys.zone}")
    worst = Flaw(NO_DNSKEY, f"{what} is signed with key {ours[0].key_tag}, which {keys.zone} does not have")
    for signature in ours[:MOST_SIGNATURES]:
        found = _verify_one(signed, signature, keys, wall, budget, what)
        if isinstance(found, Verified):
            return found
        if found is not None and (worst.ede == NO_DNSKEY or found.ede in (EXPIRED, NOT_YET)):
            worst = found
    return worst


def _verify_one(
    signed: Signed, signature: RRSIG, keys: Keys, wall: float, budget: Budget, what: str
) -> Verified | Flaw | None:
    """None when the zone has no key for it."""
    candidates: Sequence[DNSKEY] = keys.by_tag.get((signature.key_tag, int(signature.algorithm)), ())
    if not candidates or int(signature.algorithm) not in ALGORITHMS:
        return None
    if signature.expiration < wall:
        return Flaw(EXPIRED, f"signature over {what} expired {_span(wall - signature.expiration)} ago")
    if signature.inception > wall:
        return Flaw(NOT_YET, f"signature over {what} is valid in {_span(signature.inception - wall)} only")
    for key in candidates[:MOST_KEYS_PER_TAG]:
        budget.check()
        try:
            one: dict[Name, dns.node.Node | dns.rdataset.Rdataset] = {keys.zone: dns.rdataset.from_rdata(0, key)}
            dns.dnssec.validate_rrsig(signed.rrset, signature, one, now=wall)
        except (dns.exception.DNSException, ValueError):
            budget.failed()
            continue
        left_s = int(signature.expiration - wall)
        return Verified(min(signed.ttl_s, signature.original_ttl, left_s), _encloser(signed.name, signature))
    return Flaw(BOGUS, f"signature over {what} does not verify")


def _encloser(name: Name, signature: RRSIG) -> Name | None:
    """The parent of the wildcard that the name was made from (RFC 4035 5.3.4), None for a name that exists."""
    labels = len(name) - 1 - name.is_wild()
    return name.split(signature.labels + 1)[1] if signature.labels < labels else None


def _span(seconds: float) -> str:
    if seconds >= 2 * 86_400:
        return f"{seconds / 86_400:.0f} days"
    return f"{seconds / 3600:.0f} h" if seconds >= 7200 else f"{seconds:.0f} s"


def may_be_zone_key(key: DNSKEY) -> bool:
    """Zone bit, protocol 3, not revoked (RFC 4034 2.1.1, 2.1.2; RFC 5011 2.1)."""
    return bool(key.flags & 0x0100) and key.protocol == 3 and not key.flags & 0x0080


__all__ = ["DNSKEY_TYPE", "Budget", "Exhausted", "Flaw", "Keys", "Verified", "keys_of", "may_sign", "verify"]
