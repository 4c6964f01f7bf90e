"""Signed zones in memory, and the answers an honest recursive or authoritative server would give from them.

A `SignedZone` is written as zone-file lines and signed when it is made: NSEC, NSEC3 or NSEC3 with opt-out, any algorithm,
any validity. What is wrong with a zone is said in its arguments (`expired`, `forged`, `stripped`, `wrong_ds`, ...), so that a
tree of zones is a list of test cases. `Tree.recurse` gives whole answers with their proofs; `Tree.ask_zone` what one zone's
server says, referrals included.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import dns.dnssec
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdata
import dns.rdataclass
import dns.rdatatype
import dns.rrset
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from dns.rdtypes.ANY.NSEC import NSEC, Bitmap
from dns.rdtypes.ANY.NSEC3 import NSEC3

from resolver.dnssec_denial import nsec3_hash

Name = dns.name.Name
T = dns.rdatatype
DAY = 86_400
B32 = "0123456789abcdefghijklmnopqrstuv"


@functools.cache
def private_key(algorithm: int, number: int) -> Any:
    """Made once for each (algorithm, number): RSA keys take long."""
    if algorithm in (5, 7, 8, 10):
        return rsa.generate_private_key(65537, 2048 if algorithm != 10 else 1024 * 3)
    if algorithm in (13, 14):
        return ec.generate_private_key(ec.SECP256R1() if algorithm == 13 else ec.SECP384R1())
    return ed25519.Ed25519PrivateKey.generate() if algorithm == 15 else ed448.Ed448PrivateKey.generate()


def name(text: str | Name) -> Name:
    return text if isinstance(text, Name) else dns.name.from_text(text)


def base32(digest: bytes) -> bytes:
    number = int.from_bytes(digest)
    return "".join(B32[number >> shift & 31] for shift in range(155, -1, -5)).encode()


@dataclass(eq=False)
class SignedZone:
    """`lines` are "OWNER TYPE RDATA", owner relative to `origin` or "@". `signed` False: no keys at all."""

    origin_text: str
    lines: str = ""
    algorithm: int = 13
    number: int = 0
    denial: str = "nsec"  # nsec | nsec3 | optout
    iterations: int = 0
    salt: bytes = b""
    signed: bool = True
    inception: int = -DAY
    expiration: int = 7 * DAY
    forged: frozenset[str] = frozenset()  # "OWNER TYPE" whose signature is broken
    stripped: frozenset[str] = frozenset()  # "OWNER TYPE" without signature; "*" for all of the zone
    unlisted: frozenset[str] = frozenset()  # "OWNER TYPE" whose denial records are left out
    claimed_algorithm: int = 0  # what its DS and DNSKEY say instead
    digest_type: str = "SHA256"
    claimed_digest: int = 0
    wrong_ds: bool = False
    at: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self.origin = name(self.origin_text)
        self.sets: dict[tuple[Name, int], dns.rrset.RRset] = {}
        self.signatures: dict[tuple[Name, int], list[dns.rdata.Rdata]] = {}
        self.add("@ SOA ns mail 1 7200 3600 86400 60", 60)
        self.add("@ NS ns")
        self.add("ns A 192.0.2.53")
        for line in self.lines.strip().splitlines():
            self.add(line.strip())
        self.denials: list[Name] = []
        if self.signed:
            self.key = private_key(self.algorithm, self.number)
            self.dnskey = dns.dnssec.make_dnskey(self.key.public_key(), self.algorithm, flags=257)
            published = self.dnskey
            if self.claimed_algorithm:
                published = published.replace(algorithm=self.claimed_algorithm)
            self._put(dns.rrset.from_rdata(self.origin, 300, published))
            self.published = published

    def add(self, line: str, ttl: int = 300) -> None:
        owner, kind, value = line.split(" ", 2)
        at = self.origin if owner == "@" else dns.name.from_text(owner, self.origin)
        rdata = dns.rdata.from_text("IN", kind, value, origin=self.origin, relativize=False)
        self._put(dns.rrset.from_rdata(at, ttl, rdata))

    def _put(self, rrset: dns.rrset.RRset) -> None:
        have = self.sets.setdefault((rrset.name, rrset.rdtype), rrset)
        if have is not rrset:
            have.update(rrset)

    def ds(self) -> dns.rdata.Rdata:
        policy = dns.dnssec.allow_all_policy
        made = dns.dnssec.make_ds(self.origin, self.published, self.digest_type, policy=policy)
        if self.claimed_digest:
            made = made.replace(digest_type=self.claimed_digest)
        return made.replace(digest=bytes(32)) if self.wrong_ds else made

    def delegate(self, child: SignedZone) -> None:
        self._put(dns.rrset.from_text(child.origin, 300, "IN", "NS", "ns." + child.origin_text))
        if child.signed:
            self._put(dns.rrset.from_rdata(child.origin, 300, child.ds()))

    # --- signing ----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Once everything was added: denial records, then signatures."""
        if not self.signed:
            return
        self._make_denials()
        for key, rrset in self.sets.items():
            if self._is_ours(*key):
                self._sign(rrset)

    def _is_ours(self, owner: Name, rdtype: int) -> bool:
        cut = self.cut(owner)
        return cut is None or (owner == cut and rdtype in (T.DS, T.NSEC))

    def cut(self, owner: Name) -> Name | None:
        """The delegation at or above a name of this zone."""
        for depth in range(len(self.origin) + 1, len(owner) + 1):
            above = owner.split(depth)[1]
            if (above, T.NS) in self.sets:
                return above
        return None

    def _word(self, owner: Name, rdtype: int) -> str:
        relative = "@" if owner == self.origin else owner.relativize(self.origin).to_text()
        return f"{relative.lower()} {T.to_text(rdtype)}"

    def _sign(self, rrset: dns.rrset.RRset) -> None:
        word = self._word(rrset.name, rrset.rdtype)
        if word in self.stripped or "*" in self.stripped:
            return
        signature = dns.dnssec.sign(
            rrset,
            self.key,
            self.origin,
            self.dnskey,
            inception=int(self.at + self.inception),
            expiration=int(self.at + self.expiration),
            policy=dns.dnssec.allow_all_policy,
        )
        if self.claimed_algorithm:
            signature = signature.replace(algorithm=self.claimed_algorithm, key_tag=self.published.key_id())
        if word in self.forged:
            signature = signature.replace(signature=bytes(len(signature.signature) - 1) + b"\1")
        self.signatures[rrset.name, rrset.rdtype] = [signature]

    def _make_denials(self) -> None:
        existing: dict[Name, set[int]] = {}
        for owner, rdtype in self.sets:
            cut = self.cut(owner)
            if cut is None or (owner == cut and rdtype in (T.NS, T.DS)):
                existing.setdefault(owner, set()).add(rdtype)
        if self.denial == "nsec":
            owners = sorted(existing)
            for owner, following in zip(owners, [*owners[1:], self.origin], strict=True):
                windows = Bitmap.from_rdtypes([T.RdataType.make(t) for t in (*existing[owner], T.RRSIG, T.NSEC)])
                nsec = NSEC(dns.rdataclass.IN, T.NSEC, following, windows.windows)  # type: ignore[no-untyped-call]
                self._put(dns.rrset.from_rdata(owner, 60, nsec))
            self.denials = owners
            return
        for owner in list(existing):
            for depth in range(len(self.origin), len(owner)):
                existing.setdefault(owner.split(depth)[1], set())  # empty non-terminals
        if self.denial == "optout":
            existing = {n: t for n, t in existing.items() if t != {T.NS}}
        hashes = sorted((self.hash(owner), types) for owner, types in existing.items())
        for (hashed, types), (following, _) in zip(hashes, [*hashes[1:], hashes[0]], strict=True):
            owner = dns.name.Name((base32(hashed), *self.origin.labels))
            listed = [T.RdataType.make(t) for t in types] + ([T.RRSIG] if types and types != {T.NS} else [])
            flags = int(self.denial == "optout")
            windows = Bitmap.from_rdtypes(listed)
            nsec3 = NSEC3(dns.rdataclass.IN, T.NSEC3, 1, flags, self.iterations, self.salt, following, windows.windows)  # type: ignore[no-untyped-call]
            self._put(dns.rrset.from_rdata(owner, 60, nsec3))
            self.denials.append(owner)
        self.hashes = [hashed for hashed, _ in hashes]

    def hash(self, owner: Name) -> bytes:
        return nsec3_hash(owner, self.salt, self.iterations)

    # --- answering --------------------------------------------------------------------------------------------------

    def exists(self, owner: Name) -> bool:
        return any(n.is_subdomain(owner) for n, t in self.sets if t != T.NSEC3)

    def wildcard(self, owner: Name) -> Name | None:
        encloser = owner.parent()
        while not self.exists(encloser):
            encloser = encloser.parent()
        star = dns.name.Name((b"*", *encloser.labels))
        return star if self.exists(star) else None

    def with_signatures(self, owner: Name, rdtype: int, as_name: Name | None = None) -> list[dns.rrset.RRset]:
        """The RRset and its RRSIGs, under another name when it comes from a wildcard."""
        rrset = self.sets[owner, rdtype]
        shown = as_name or owner
        out = [dns.rrset.from_rdata_list(shown, rrset.ttl, list(rrset))]
        if (owner, rdtype) in self.signatures:
            out.append(dns.rrset.from_rdata_list(shown, rrset.ttl, self.signatures[owner, rdtype]))
        return out

    def all_signatures(self, owner: Name) -> list[dns.rdata.Rdata]:
        return [one for (at, _), several in self.signatures.items() if at == owner for one in several]

    def proof(self, owner: Name, rdtype: int, *, wildcard: bool = False) -> list[dns.rrset.RRset]:
        """The denial records for a name or one of its types; `wildcard`: that nothing closer than its wildcard exists."""
        if not self.signed or self._word(owner, rdtype) in self.unlisted:
            return []
        wanted: dict[Name, None] = {}
        for one in self._proof_owners(owner, wildcard):
            wanted[one] = None
        kind = T.NSEC if self.denial == "nsec" else T.NSEC3
        return [rrset for one in wanted for rrset in self.with_signatures(one, kind)]

    def _proof_owners(self, owner: Name, wildcard: bool) -> Iterable[Name]:
        encloser = owner
        while not self.exists(encloser):
            encloser = encloser.parent()
        star = dns.name.Name((b"*", *encloser.labels))
        if self.denial == "nsec":
            yield max((d for d in self.denials if d <= owner), default=self.denials[-1])
            if encloser != owner and not wildcard:
                yield max((d for d in self.denials if d <= star), default=self.denials[-1])
            return
        if self.hash(owner) in self.hashes:
            yield self._nsec3(owner)
            return
        while encloser != self.origin and self.hash(encloser) not in self.hashes:  # below opt-out
            encloser = encloser.parent()
        star = dns.name.Name((b"*", *encloser.labels))
        if not wildcard:
            yield self._nsec3(encloser)
            yield self._nsec3(star)
        yield self._nsec3(owner.split(len(encloser) + 1)[1])

    def _nsec3(self, owner: Name) -> Name:
        hashed = self.hash(owner)
        below = [i for i, h in enumerate(self.hashes) if h <= hashed]
        return self.denials[below[-1] if below else -1]


@dataclass(eq=False)
class Tree:
    """Zones from the root down, each delegated by the closest one above it."""

    zones: Sequence[SignedZone]

    def __post_init__(self) -> None:
        self.by_origin = {zone.origin: zone for zone in self.zones}
        for zone in self.zones:
            if len(zone.origin) > 1:
                self.above(zone.origin.parent()).delegate(zone)
        for zone in self.zones:
            zone.finish()

    def above(self, owner: Name) -> SignedZone:
        for depth in range(len(owner), 0, -1):
            zone = self.by_origin.get(owner.split(depth)[1])
            if zone is not None:
                return zone
        raise KeyError(owner)

    def anchors(self, origin: str = ".") -> str:
        zone = self.by_origin[name(origin)]
        return f"{origin} IN DS {zone.ds().to_text()}\n"

    def zone_for(self, owner: Name, rdtype: int) -> SignedZone:
        """Who answers: a DS is asked of the parent."""
        return self.above(owner.parent() if rdtype == T.DS and len(owner) > 1 else owner)

    def recurse(self, query: dns.message.Message) -> dns.message.Message:
        reply = dns.message.make_response(query, recursion_available=True)
        question = query.question[0]
        owner, rdtype = question.name, question.rdtype
        for _ in range(12):
            target = self._answer(reply, self.zone_for(owner, rdtype), owner, rdtype)
            if target is None:
                break
            owner = target
        return trimmed(reply, query)

    def _answer(self, reply: dns.message.Message, zone: SignedZone, owner: Name, rdtype: int) -> Name | None:
        """Adds what one zone says; the target of an alias that leads on."""
        source = owner
        if not zone.exists(owner):
            alias = self._dname(reply, zone, owner)
            if alias is not None:
                return alias
            star = zone.wildcard(owner)
            if star is None:
                reply.set_rcode(dns.rcode.NXDOMAIN)
                self._deny(reply, zone, owner, rdtype)
                return None
            source = star
        if rdtype == T.RRSIG and (signatures := zone.all_signatures(source)):
            reply.answer += [dns.rrset.from_rdata_list(owner, 300, [one]) for one in signatures]
            return None
        for kind in (rdtype, T.CNAME):
            if (source, kind) in zone.sets:
                reply.answer += zone.with_signatures(source, kind, owner)
                if source != owner:
                    reply.authority += zone.proof(owner, rdtype, wildcard=True)
                if kind == rdtype:
                    return None
                target: Name = zone.sets[source, kind][0].target
                return target
        self._deny(reply, zone, owner, rdtype)
        return None

    def _dname(self, reply: dns.message.Message, zone: SignedZone, owner: Name) -> Name | None:
        for depth in range(len(zone.origin), len(owner)):
            above = owner.split(depth)[1]
            if (above, T.DNAME) in zone.sets:
                target: Name = owner.relativize(above) + zone.sets[above, T.DNAME][0].target
                reply.answer += zone.with_signatures(above, T.DNAME)
                reply.answer.append(dns.rrset.from_text(owner, 300, "IN", "CNAME", target.to_text()))
                return target
        return None

    def _deny(self, reply: dns.message.Message, zone: SignedZone, owner: Name, rdtype: int) -> None:
        reply.authority += zone.with_signatures(zone.origin, T.SOA)
        proofs = zone.proof(owner, rdtype)
        have = {(r.name, r.rdtype, r.covers) for r in reply.authority}
        reply.authority += [r for r in proofs if (r.name, r.rdtype, r.covers) not in have]

    def ask_zone(self, origin: Name, query: dns.message.Message, glue: dict[Name, str]) -> dns.message.Message:
        """What the server of one zone says: its own data, or a referral with DS or the proof that there is none."""
        zone = self.by_origin[origin]
        question = query.question[0]
        owner, rdtype = question.name, question.rdtype
        reply = dns.message.make_response(query)
        cut = zone.cut(owner)
        if cut is None or (owner == cut and rdtype == T.DS):
            reply.flags |= dns.flags.AA
            self._answer(reply, zone, owner, rdtype)
            return trimmed(reply, query)
        reply.authority += zone.with_signatures(cut, T.NS)
        if (cut, T.DS) in zone.sets:
            reply.authority += zone.with_signatures(cut, T.DS)
        else:
            reply.authority += zone.proof(cut, T.DS)
        reply.additional.append(dns.rrset.from_text(zone.sets[cut, T.NS][0].target, 300, "IN", "A", glue[cut]))
        return trimmed(reply, query)


def trimmed(reply: dns.message.Message, query: dns.message.Message) -> dns.message.Message:
    """Without what only those with DO get (RFC 4035 3.1)."""
    if not query.ednsflags & dns.flags.DO:
        asked = query.question[0].rdtype
        for section in (reply.answer, reply.authority):
            section[:] = [r for r in section if r.rdtype == asked or r.rdtype not in (T.RRSIG, T.NSEC, T.NSEC3)]
    return reply
