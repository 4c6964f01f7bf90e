"""Prove that something does not exist: NSEC (RFC 4035 5.4) and NSEC3 (RFC 5155 8).

Theory: a denial record says "between this name and the next there is nothing" and which types its own name has. A proof
puts two or three of them together:

    no such name      one covers the name, one covers the wildcard that could have made it
    no such type      one matches the name, without the type; or the name and its wildcard are covered and matched
    wildcard answer   one covers the name, so nothing closer than the wildcard exists
    no DS             one matches the cut, without DS; or opt-out covers it

NSEC3 does the same with hashes, from the closest encloser that exists downwards.
Rules for editing: 1. what comes in here was verified: records and owner belong to `zone`; 2. a record from the parent
side of a cut, or one with DNAME, says nothing about the names below it (RFC 6840 4.1): never use one for that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import dns.name
import dns.rdata
import dns.rdatatype
from dns.rdtypes.ANY.NSEC import NSEC
from dns.rdtypes.ANY.NSEC3 import NSEC3

from resolver import wire as w
from resolver.dnssec_records import DS_TYPE, Name, rdata_wire
from resolver.dnssec_signatures import Budget

MOST_ITERATIONS = 150
"""RFC 9276 3.2: above, an answer is insecure. unbound's figure too."""
_OPT_OUT = 1
_SHA1 = 1
_B32 = bytes.maketrans(b"0123456789ABCDEFGHIJKLMNOPQRSTUV", bytes(range(32)))


class Proof(Enum):
    """`OPT_OUT`: proven as far as opt-out can, which is not for sure: insecure (RFC 5155 9.2)."""

    PROVEN = "proven"
    OPT_OUT = "proven but for unsigned delegations"
    TOO_MANY = "more iterations than are computed"
    MISSING = "not proven"


class Cut(Enum):
    """What the absence of a DS means for a name."""

    UNSIGNED = "an unsigned zone begins here"
    INSIDE = "no zone begins here"
    TOO_MANY = "more iterations than are computed"
    MISSING = "not proven"


@dataclass(slots=True)
class Denials:
    """The verified denial records of one answer, all of one zone."""

    zone: Name
    budget: Budget
    nsec: list[tuple[Name, NSEC]] = field(default_factory=list)
    nsec3: list[tuple[bytes, NSEC3]] = field(default_factory=list)  # by the hash that its owner is
    too_many: bool = False
    _hashes: dict[Name, bytes] = field(default_factory=dict)

    def add(self, owner: Name, rdata: dns.rdata.Rdata) -> None:
        """Takes what can be used; NSEC3 of unknown algorithms or flags, or of a second set of parameters, cannot."""
        if isinstance(rdata, NSEC):
            self.nsec.append((owner, rdata))
        elif isinstance(rdata, NSEC3) and rdata.algorithm == _SHA1 and not rdata.flags & ~_OPT_OUT:
            if rdata.iterations > MOST_ITERATIONS:
                self.too_many = True
            elif owner.parent() == self.zone and self._same_parameters(rdata) and (hashed := _unhex(owner[0])):
                self.nsec3.append((hashed, rdata))

    def _same_parameters(self, rdata: NSEC3) -> bool:
        if not self.nsec3:
            return True
        first = self.nsec3[0][1]
        return (rdata.iterations, rdata.salt) == (first.iterations, first.salt)

    # --- the four proofs --------------------------------------------------------------------------------------------

    def name_absent(self, name: Name) -> Proof:
        """NXDOMAIN."""
        encloser = self._nsec_encloser(name)
        if encloser is not None:
            return Proof.PROVEN if self._nsec_encloser(_wildcard(encloser)) is not None else Proof.MISSING
        found = self._closest(name)
        if found is None:
            return self._missing()
        encloser, cover = found
        if self._covering(_wildcard(encloser)) is None:
            return Proof.MISSING
        return _by_opt_out(cover)

    def type_absent(self, name: Name, rdtype: int) -> Proof:
        """NODATA."""
        for owner, rdata in self.nsec:
            if owner == name and _lacks(rdata.windows, name, rdtype):
                return Proof.PROVEN
            if owner != name and rdata.next.is_subdomain(name) and self._covers(owner, rdata, name):
                return Proof.PROVEN  # an empty non-terminal: it exists because of what is below it
        encloser = self._nsec_encloser(name)
        if encloser is not None:
            star = _wildcard(encloser)
            lacking = any(owner == star and _lacks(rdata.windows, star, rdtype) for owner, rdata in self.nsec)
            return Proof.PROVEN if lacking else Proof.MISSING
        return self._type_absent_nsec3(name, rdtype)

    def _type_absent_nsec3(self, name: Name, rdtype: int) -> Proof:
        own = self._matching(name)
        if own is not None:
            return Proof.PROVEN if _lacks(own.windows, name, rdtype) else Proof.MISSING
        found = self._closest(name)
        if found is None:
            return self._missing()
        encloser, cover = found
        star = self._matching(_wildcard(encloser))
        if star is not None and _lacks(star.windows, _wildcard(encloser), rdtype):
            return _by_opt_out(cover)
        # A DS below opt-out, or an empty non-terminal that only unsigned delegations make (RFC 5155 8.6, erratum 3441).
        return Proof.OPT_OUT if cover.flags & _OPT_OUT else Proof.MISSING

    def no_closer(self, name: Name, encloser: Name) -> Proof:
        """That the wildcard below `encloser` was the closest match for `name` (RFC 4035 5.3.4, RFC 5155 8.8)."""
        if self._nsec_encloser(name) == encloser:
            return Proof.PROVEN
        cover = self._covering(_next_closer(name, encloser))
        return _by_opt_out(cover) if cover is not None else self._missing()

    def no_ds(self, name: Name) -> Cut:
        """What it means that the parent has no DS for `name`."""
        for owner, rdata in self.nsec:
            if owner == name:
                return _cut(rdata.windows)
            if self._covers(owner, rdata, name):
                return Cut.INSIDE
        own = self._matching(name)
        if own is not None:
            return _cut(own.windows)
        found = self._closest(name)
        if found is None:
            return Cut.TOO_MANY if self.too_many else Cut.MISSING
        return Cut.UNSIGNED if found[1].flags & _OPT_OUT else Cut.INSIDE

    def _missing(self) -> Proof:
        return Proof.TOO_MANY if self.too_many else Proof.MISSING

    # --- NSEC -------------------------------------------------------------------------------------------------------

    def _covers(self, owner: Name, rdata: NSEC, name: Name) -> bool:
        """Whether `name` lies strictly between the record's owner and its next name (the last one leads to the apex)."""
        if not owner < name or (name.is_subdomain(owner) and _leads_away(rdata.windows)):
            return False
        return bool(name < rdata.next or rdata.next == self.zone)

    def _nsec_encloser(self, name: Name) -> Name | None:
        """The closest encloser of a name that an NSEC proves absent; None when none does."""
        for owner, rdata in self.nsec:
            if self._covers(owner, rdata, name) and not rdata.next.is_subdomain(name):
                return max(_common(name, owner), _common(name, rdata.next), key=len)
        return None

    # --- NSEC3 ------------------------------------------------------------------------------------------------------

    def _closest(self, name: Name) -> tuple[Name, NSEC3] | None:
        """The closest encloser and the record that covers the next closer name (RFC 5155 8.3)."""
        if not self.nsec3 or not name.is_subdomain(self.zone):
            return None
        below = name
        encloser = name
        while encloser != self.zone:
            below, encloser = encloser, encloser.parent()
            own = self._matching(encloser)
            if own is not None:
                cover = None if _leads_away(own.windows) else self._covering(below)
                return None if cover is None else (encloser, cover)
        return None

    def _matching(self, name: Name) -> NSEC3 | None:
        return self._find(name, lambda hashed, own, _next: hashed == own)

    def _covering(self, name: Name) -> NSEC3 | None:
        return self._find(name, _between)

    def _find(self, name: Name, fits: Callable[[bytes, bytes, bytes], bool]) -> NSEC3 | None:
        if not self.nsec3:
            return None
        hashed = self._hash(name)
        return next((rdata for own, rdata in self.nsec3 if fits(hashed, own, rdata.next)), None)

    def _hash(self, name: Name) -> bytes:
        hashed = self._hashes.get(name)
        if hashed is None:
            self.budget.hash()
            first = self.nsec3[0][1]
            hashed = self._hashes[name] = nsec3_hash(name, first.salt, first.iterations)
        return hashed


def nsec3_hash(name: Name, salt: bytes, iterations: int) -> bytes:
    """RFC 5155 5. dnspython's gives base32 text; the raw digest sorts the same and needs no coding."""
    digest = hashlib.sha1(rdata_wire(name) + salt, usedforsecurity=False).digest()
    for _ in range(iterations):
        digest = hashlib.sha1(digest + salt, usedforsecurity=False).digest()
    return digest


def _between(hashed: bytes, own: bytes, following: bytes) -> bool:
    if own < following:
        return own < hashed < following
    return hashed > own or hashed < following  # the last one of the ring, or the only one


def _unhex(label: bytes) -> bytes:
    """The digest that a label stands for (base32hex, RFC 4648 7); empty when it is none."""
    text = label.upper()
    if len(text) != 32 or text.strip(b"0123456789ABCDEFGHIJKLMNOPQRSTUV"):
        return b""
    number = 0
    for value in text.translate(_B32):
        number = number << 5 | value
    return number.to_bytes(20)


def _has(windows: Sequence[tuple[int, bytes]], rdtype: int) -> bool:
    window, at = rdtype >> 8, rdtype & 255
    return any(
        number == window and at >> 3 < len(bits) and bits[at >> 3] & 0x80 >> (at & 7) for number, bits in windows
    )


def _leads_away(windows: Sequence[tuple[int, bytes]]) -> bool:
    """Whether the names below belong to somebody else: a zone cut seen from above, or a DNAME."""
    return _has(windows, w.DNAME) or (_has(windows, w.NS) and not _has(windows, w.SOA))


def _lacks(windows: Sequence[tuple[int, bytes]], name: Name, rdtype: int) -> bool:
    """Whether the bitmap denies the type, and comes from the side of the cut that may (RFC 6840 4.1, 4.4)."""
    if _has(windows, rdtype) or _has(windows, w.CNAME):
        return False
    if rdtype == DS_TYPE:
        return not _has(windows, w.SOA) or len(name) == 1
    return not _has(windows, w.NS) or _has(windows, w.SOA)


def _cut(windows: Sequence[tuple[int, bytes]]) -> Cut:
    if _has(windows, DS_TYPE) or _has(windows, w.SOA):
        return Cut.MISSING  # it has a DS, or speaks from below the cut
    return Cut.UNSIGNED if _has(windows, w.NS) else Cut.INSIDE


def _by_opt_out(cover: NSEC3) -> Proof:
    return Proof.OPT_OUT if cover.flags & _OPT_OUT else Proof.PROVEN


def _wildcard(encloser: Name) -> Name:
    try:
        return dns.name.Name((b"*", *encloser.labels))
    except dns.name.NameTooLong:
        return encloser  # no wildcard fits: the encloser exists, so nothing will be proven by it


def _next_closer(name: Name, encloser: Name) -> Name:
    return name.split(min(len(encloser) + 1, len(name)))[1]


def _common(one: Name, other: Name) -> Name:
    return one.split(one.fullcompare(other)[2])[1]
