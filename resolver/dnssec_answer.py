"""Judge one answer: every RRset on the way from the question to its end, and the proof where that end is empty.

Theory: an answer is as good as its worst part. Bogus anywhere makes it bogus; a part in an unsigned zone makes it
insecure; only what is signed all the way, its denials included, is secure (RFC 4035 3.2.3, 5.3, 5.4).

    question --CNAME, DNAME: each RRset judged by the zone that signs it--> end
    end has data      -> nothing more; from a wildcard: proof that nothing closer exists
    end has no data   -> NSEC or NSEC3 of the end's zone: no such name, or no such type
    end is elsewhere  -> an unfinished chain: whoever finishes it has that part judged as well

Who signs is said by the signatures themselves; that cannot mislead, because a signer must be an ancestor of the owner and
a zone whose keys lead back to an anchor. Without signatures we walk down to the owner and need a proof that they may be
missing.
Rules for editing: 1. what an unsigned record says may make an answer bogus or insecure, never secure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

import dns.exception
import dns.name

from resolver import wire as w
from resolver.answer import LONGEST_CHAIN
from resolver.dnssec_chain import Bogus, Insecure, Secure, Steps, Walk
from resolver.dnssec_denial import Denials, Proof
from resolver.dnssec_records import DS_TYPE, RRSIG_TYPE, Key, Message, Name, Signed
from resolver.dnssec_signatures import (
    BOGUS,
    ITERATIONS,
    NO_NSEC,
    NO_RRSIG,
    Exhausted,
    Flaw,
    Verified,
    may_sign,
    verify,
)
from resolver.question import Question


class Security(Enum):
    """RFC 4033 5, without "indeterminate": no anchor above a name is insecure here."""

    SECURE = "secure"
    INSECURE = "insecure"
    BOGUS = "bogus"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`why`: what makes it bogus, or insecure for want of an algorithm; `zone` is whose fault that is. `ttls` holds the
    seconds for which each RRset is good (RFC 4035 5.3.3), by owner and type."""

    security: Security
    why: Flaw | None = None
    zone: Name = dns.name.root
    ttls: Mapping[Key, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Part:
    """What one RRset or one denial comes to."""

    security: Security
    zone: Name
    why: Flaw | None = None
    zone_state: Secure | None = None


def judge(question: Question, name: Name, message: Message, walk: Walk, *, unfinished: bool) -> Steps[Verdict]:
    """The verdict on `message`, the reply to `question` for `name`. Raises Missing, or Malformed for what it is brought.

    `unfinished`: its CNAME chain ends at a name that this message does not speak of.
    """
    try:
        return (yield from _Judgement(question, name, message, walk).run(unfinished))
    except Exhausted as exc:
        return Verdict(Security.BOGUS, Flaw(BOGUS, str(exc)), name)


@dataclass(slots=True)
class _Judgement:
    question: Question
    name: Name
    message: Message
    walk: Walk
    parts: list[_Part] = field(default_factory=list)
    ttls: dict[Key, int] = field(default_factory=dict)

    def run(self, unfinished: bool) -> Steps[Verdict]:
        rdtype, message = self.question.type, self.message
        if rdtype == RRSIG_TYPE and message.loose:
            return Verdict(Security.INSECURE, zone=self.name)  # nothing signs a signature
        for key, signed in message.answers.items():
            if self._synthesised(signed):
                self.ttls[key] = signed.ttl_s
                continue
            part = yield from self._positive(signed)
            self.parts.append(part)
            if part.security is Security.BOGUS:
                break
        else:
            end = self._end()
            denied = message.rcode == w.NXDOMAIN or (end, rdtype) not in message.answers
            if end is None:
                self.parts.append(_Part(Security.BOGUS, self.name, Flaw(BOGUS, "aliases that do not end")))
            elif message.rcode not in (w.NOERROR, w.NXDOMAIN):
                self.parts.append((yield from self._unwritable(end)))
            elif denied and not unfinished:
                self.parts.append((yield from self._negative(end)))
        return self._sum()

    def _sum(self) -> Verdict:
        for security in (Security.BOGUS, Security.INSECURE):
            worst = [part for part in self.parts if part.security is security]
            if worst:
                told = next((part for part in worst if part.why is not None), worst[0])
                return Verdict(security, told.why, told.zone)
        return Verdict(Security.SECURE, ttls=self.ttls)

    # --- data -------------------------------------------------------------------------------------------------------

    def _positive(self, signed: Signed) -> Steps[_Part]:
        signer = next((s.signer for s in signed.signatures if may_sign(signed.name, signed.type, s.signer)), None)
        part = yield from self._zone(signed.name, signed.type, signer)
        if part.zone_state is None:
            return part
        if signer is None:
            text = (
                f"{w.type_to_text(signed.type)} of {signed.name} has no signature, and its zone {part.zone} is signed"
            )
            return _bogus(part, NO_RRSIG, text)
        found = verify(signed, part.zone_state.keys, self.walk.wall, self.walk.budget)
        yield from self.walk.pause()
        if isinstance(found, Flaw):
            return _bogus(part, found.ede, found.text)
        self.ttls[signed.name, signed.type] = found.ttl_s
        if found.encloser is not None:
            return (yield from self._expanded(signed.name, found, part, part.zone_state))
        return part

    def _expanded(self, name: Name, found: Verified, part: _Part, zone: Secure) -> Steps[_Part]:
        """A record made from a wildcard stands for a name that must not exist."""
        assert found.encloser is not None
        denials = Denials(zone.zone, self.walk.budget)
        flaw = yield from self._collect(zone, denials)
        if flaw is not None:
            return _bogus(part, flaw.ede, flaw.text)
        proof = denials.no_closer(name, found.encloser)
        return _proven(part, proof, f"no proof that {name} does not exist beside *.{found.encloser}")

    def _synthesised(self, signed: Signed) -> bool:
        """Whether a CNAME follows from a DNAME of the same answer (RFC 6672 5.3.1): then the DNAME is what is signed."""
        if signed.type != w.CNAME or signed.signatures or len(signed.rrset) != 1 or signed.flaw:
            return False
        alias = _target(signed)
        for other in self.message.answers.values():
            if other.type == w.DNAME and signed.name != other.name and signed.name.is_subdomain(other.name):
                target = _target(other)
                try:
                    return target is not None and bool(signed.name.relativize(other.name) + target == alias)
                except dns.exception.DNSException:
                    return False
        return False

    def _end(self) -> Name | None:
        """Where the chain of aliases leads; None when it goes in circles."""
        end = self.name
        if self.question.type == w.CNAME:
            return end
        for _ in range(LONGEST_CHAIN + 1):
            alias = self.message.answer(end, w.CNAME)
            target = None if alias is None else _target(alias)
            if target is None:
                return end
            end = target
        return None

    def _unwritable(self, end: Name) -> Steps[_Part]:
        """YXDOMAIN stands for a name that a DNAME made too long (RFC 6672 2.2); no other rcode can be proven."""
        for other in self.message.answers.values():
            if other.type == w.DNAME and end != other.name and end.is_subdomain(other.name) and _overflows(end, other):
                return _Part(Security.SECURE, other.name)  # the DNAME itself was judged before
        part = yield from self._zone(end, self.question.type, None)
        if part.zone_state is None:
            return part
        return _bogus(part, BOGUS, f"rcode {self.message.rcode} for {end}, which nothing proves")

    # --- denials ----------------------------------------------------------------------------------------------------

    def _negative(self, end: Name) -> Steps[_Part]:
        rdtype = self.question.type
        signer = self._denier(end)
        part = yield from self._zone(end, rdtype, signer)
        zone = part.zone_state
        if zone is None:
            return part
        denials = Denials(zone.zone, self.walk.budget)
        flaw = yield from self._collect(zone, denials)
        if flaw is not None:
            return _bogus(part, flaw.ede, flaw.text)
        if self.message.rcode == w.NXDOMAIN:
            return _proven(part, denials.name_absent(end), f"no proof that {end} does not exist")
        kind = w.type_to_text(rdtype)
        return _proven(part, denials.type_absent(end, rdtype), f"no proof that {end} has no {kind}")

    def _denier(self, end: Name) -> Name | None:
        """Who signs the denial: the deepest zone among those that may speak of the name."""
        found = {
            signature.signer
            for signed in self.message.authorities.values()
            for signature in signed.signatures
            if signed.name.is_subdomain(signature.signer) and may_sign(end, self.question.type, signature.signer)
        }
        return max(found, key=len, default=None)

    def _collect(self, zone: Secure, denials: Denials) -> Steps[Flaw | None]:
        found = yield from self.walk.denials(self.message, zone, denials)
        if isinstance(found, Flaw):
            return found
        for key, signed in self.message.authorities.items():
            self.ttls[key] = min(signed.ttl_s, int(found))
        return None

    # --- zones ------------------------------------------------------------------------------------------------------

    def _zone(self, owner: Name, rdtype: int, signer: Name | None) -> Steps[_Part]:
        """The zone of an owner: secure with its keys, or what else is to be said of everything in it."""
        place = owner.parent() if rdtype == DS_TYPE and len(owner) > 1 else owner
        start = self.walk.trust.start(place)
        if start is None:
            return _Part(Security.INSECURE, place)
        if signer is not None and not signer.is_subdomain(start):
            return _Part(Security.BOGUS, start, Flaw(BOGUS, f"{owner} is signed by {signer}, above its trust anchor"))
        state = yield from self.walk.zone_of(place if signer is None else signer, signer=signer is not None)
        match state:
            case Bogus(zone, flaw):
                return _Part(Security.BOGUS, zone, flaw)
            case Insecure(zone, _, why):
                return _Part(Security.INSECURE, zone, why)
        if signer is not None and state.zone != signer:
            return _Part(Security.BOGUS, signer, Flaw(BOGUS, f"{owner} is signed by {signer}, which is no zone"))
        return _Part(Security.SECURE, state.zone, zone_state=state)


def _target(alias: Signed) -> Name | None:
    """Where a CNAME or DNAME leads; None when its RDATA is no name, and so came as mere bytes."""
    target: Name | None = getattr(alias.rrset[0], "target", None)
    return target


def _overflows(name: Name, dname: Signed) -> bool:
    target = _target(dname) or dns.name.root
    return len(name.to_wire() or b"") - len(dname.name.to_wire() or b"") + len(target.to_wire() or b"") > w.LONGEST_NAME


def _bogus(part: _Part, ede: int, text: str) -> _Part:
    return replace(part, security=Security.BOGUS, why=Flaw(ede, text))


def _proven(part: _Part, proof: Proof, text: str) -> _Part:
    match proof:
        case Proof.PROVEN:
            return part
        case Proof.OPT_OUT:
            return replace(part, security=Security.INSECURE)
        case Proof.TOO_MANY:
            why = Flaw(ITERATIONS, f"too many NSEC3 iterations in {part.zone}")
            return replace(part, security=Security.INSECURE, why=why)
    return _bogus(part, NO_NSEC, text)
