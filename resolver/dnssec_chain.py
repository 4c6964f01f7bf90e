"""Follow the chain of trust from an anchor down to the zone that holds a name (RFC 4035 5.1, 5.2).

Theory: a machine that asks for records and is given messages. Each step looks at one more label:

    anchor --DNSKEY--> Secure --DS for the next label--+--> DS, DNSKEY match ----> Secure, one zone further down
                                                       +--> proof: no zone here -> Inside, same zone, next label
                                                       +--> proof: no DS here ---> Insecure, and all below
                                                       +--> anything else -------> Bogus, and all below

What was found is kept (`Trust`), so that a usual answer asks for nothing, and a first one under a known TLD for two.
The machine is a generator: it yields `Ask` (records to bring, all at once) or `Pause` (let others run), is sent the
messages for an `Ask` in its order, and returns its verdict. Whoever drives it owns sockets and clocks.

Rules for editing: 1. only what a key verified may move the state; 2. every state has an end; 3. a zone may only be
insecure by proof, never by silence: silence is `Missing`, and whoever asked hears that the network failed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import dns.dnssec
import dns.exception
import dns.name
import dns.rdata
from dns.rdtypes.ANY.DNSKEY import DNSKEY
from dns.rdtypes.ANY.DS import DS

from resolver import wire as w
from resolver.dnssec_denial import Cut, Denials
from resolver.dnssec_records import DNSKEY_TYPE, DS_TYPE, NSEC3_TYPE, NSEC_TYPE, Message, Name, read
from resolver.dnssec_signatures import (
    ALGORITHMS,
    BOGUS,
    DIGESTS,
    ITERATIONS,
    MOST_AT_ONCE,
    NO_DNSKEY,
    NO_NSEC,
    NO_RRSIG,
    NO_ZONE_KEY,
    UNSUPPORTED_DIGEST,
    UNSUPPORTED_KEY,
    Budget,
    Flaw,
    Keys,
    Verified,
    keys_of,
    may_be_zone_key,
    verify,
)

MOST_ZONES = 8192
"""Names whose state is kept; a state with keys is about 3 KiB, so 24 MiB at the very most."""
LONGEST_S, SHORTEST_S, BOGUS_S = 3600.0, 5.0, 5.0
"""How long a state may be kept: an hour is one more chain an hour, and a DS that was just put right counts soon."""
MOST_KEYS, MOST_DS = 24, 8
MOST_RECORDS = 128  # of a reply to a question for keys or DS
MOST_AHEAD = 6  # DS asked for at once on the way to a known signer


class Need(NamedTuple):
    """Records to bring: asked for with DO and CD set (RFC 6840 5.9)."""

    name: Name
    type: int


@dataclass(frozen=True, slots=True)
class Ask:
    needs: tuple[Need, ...]


@dataclass(frozen=True, slots=True)
class Pause:
    """Enough computed for one step of the loop."""


class Missing(Exception):
    """Records that could not be brought."""

    def __init__(self, need: Need) -> None:
        self.need = need
        super().__init__(f"{w.type_to_text(need.type)} of {need.name} could not be fetched")


Command = Ask | Pause
V = TypeVar("V")
Steps = Generator[Command, Sequence[bytes | None], V]


@dataclass(frozen=True, slots=True)
class Secure:
    zone: Name
    keys: Keys
    until: float


@dataclass(frozen=True, slots=True)
class Insecure:
    """No chain leads here; `why` when that is because of something we cannot compute."""

    zone: Name
    until: float
    why: Flaw | None = None


@dataclass(frozen=True, slots=True)
class Bogus:
    """`confirmed`: a second source said the same, so that a third is not asked while this is kept."""

    zone: Name
    flaw: Flaw
    until: float
    confirmed: bool = False


@dataclass(frozen=True, slots=True)
class Inside:
    """The name is no zone of its own."""

    until: float


State = Secure | Insecure | Bogus
Kept = State | Inside


@dataclass(slots=True)
class Trust:
    """Where chains begin, and what is known of the zones below: at most MOST_ZONES, the longest unused give way.

    `anchors` are DS and DNSKEY by zone; names at or below `insecure` are not validated (RFC 7646), unless an anchor
    stands between.
    """

    anchors: Mapping[Name, Sequence[dns.rdata.Rdata]]
    insecure: frozenset[Name] = frozenset()
    _kept: OrderedDict[Name, Kept] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._kept)

    def start(self, name: Name) -> Name | None:
        """The closest anchor at or above a name; None when an insecure name is closer, or there is none."""
        for depth in range(len(name), 0, -1):
            above = name.split(depth)[1]
            if above in self.anchors:
                return above
            if above in self.insecure:
                return None
        return None

    def find(self, name: Name, now: float) -> Kept | None:
        kept = self._kept.get(name)
        if kept is None or kept.until <= now:
            return None
        # In place of move_to_end, which fails when another answer's thread dropped the name in this moment.
        self._kept[name] = self._kept.pop(name, kept)
        return kept

    def keep(self, name: Name, state: Kept) -> None:
        self._kept[name] = state
        self._kept.move_to_end(name)
        if len(self._kept) > MOST_ZONES:
            self._kept.popitem(last=False)

    def forget(self) -> None:
        self._kept.clear()


@dataclass(slots=True)
class Walk:
    """What belongs to one answer: the two clocks, the budget, and messages that were brought ahead of need.

    `now` is the resolver's clock (for how long states are kept), `wall` seconds since the epoch (for signatures).
    `doubting`: the messages come from another source than those that something was found bogus by, which is looked at anew.
    """

    trust: Trust
    now: float
    wall: float
    budget: Budget = field(default_factory=Budget)
    doubting: bool = False
    _ahead: dict[Need, bytes] = field(default_factory=dict)

    def zone_of(self, name: Name, *, signer: bool = False) -> Steps[State]:
        """The state of the zone that holds `name`. `signer`: the name is said to be a zone, so all records between the
        last known zone and it are asked for at once. Raises Missing, Malformed or Exhausted."""
        start = self.trust.start(name)
        if start is None:
            return Insecure(name, self.now + LONGEST_S)
        state = yield from self._enter_anchor(start)
        if signer and isinstance(state, Secure):
            yield from self._bring_ahead(name, len(start) + 1)
        for depth in range(len(start) + 1, len(name) + 1):
            if not isinstance(state, Secure):
                break
            below = name.split(depth)[1]
            kept = self._known(below)
            if kept is None:
                kept = yield from self._descend(state, below)
                self.trust.keep(below, kept)
            if not isinstance(kept, Inside):
                state = kept
        return state

    def _known(self, name: Name) -> Kept | None:
        kept = self.trust.find(name, self.now)
        return None if self.doubting and isinstance(kept, Bogus) and not kept.confirmed else kept

    def _bring_ahead(self, name: Name, depth: int) -> Steps[None]:
        names = [name.split(d)[1] for d in range(depth, len(name) + 1)]
        unknown = [below for below in names if self._known(below) is None][:MOST_AHEAD]
        if not unknown:
            return
        needs = (*(Need(below, DS_TYPE) for below in unknown), Need(name, DNSKEY_TYPE))
        replies = yield Ask(needs)
        self._ahead |= {need: reply for need, reply in zip(needs, replies, strict=True) if reply is not None}

    def _bring(self, name: Name, rdtype: int) -> Steps[Message]:
        need = Need(name, rdtype)
        reply = self._ahead.pop(need, None)
        if reply is None:
            (reply,) = yield Ask((need,))
        if reply is None:
            raise Missing(need)
        return read(reply, most_records=MOST_RECORDS)

    def pause(self) -> Steps[None]:
        if self.budget.since_pause >= MOST_AT_ONCE:
            self.budget.since_pause = 0
            yield Pause()

    # --- one zone ---------------------------------------------------------------------------------------------------

    def _enter_anchor(self, zone: Name) -> Steps[State]:
        kept = self._known(zone)
        if kept is not None and not isinstance(kept, Inside):
            return kept
        state = yield from self._enter(zone, self.trust.anchors[zone], LONGEST_S)
        if isinstance(state, Bogus):
            state = replace(state, flaw=Flaw(state.flaw.ede, f"{state.flaw.text} (trust anchor)"))
        self.trust.keep(zone, state)
        return state

    def _enter(self, zone: Name, trusted: Sequence[dns.rdata.Rdata], ttl_s: float) -> Steps[State]:
        """The zone's keys, given the DS or DNSKEY that its parent or an anchor vouches for (RFC 4035 5.2)."""
        usable = _usable(trusted)
        if isinstance(usable, Flaw):
            return Insecure(zone, self._until(ttl_s), usable)
        message = yield from self._bring(zone, DNSKEY_TYPE)
        signed = message.answer(zone, DNSKEY_TYPE)
        if signed is None:
            return self._bogus(zone, Flaw(NO_DNSKEY, f"{zone} has no DNSKEY, but its parent has a DS for it"))
        keys = [rdata for rdata in signed.rrset if isinstance(rdata, DNSKEY)][:MOST_KEYS]
        vouched = [key for key in keys if any(_vouches(one, key, zone) for one in usable)]
        if not vouched:
            tags = ", ".join(str(_tag(one)) for one in usable)
            return self._bogus(zone, Flaw(NO_DNSKEY, f"no DNSKEY of {zone} matches DS {tags}"))
        if not any(map(may_be_zone_key, vouched)):
            return self._bogus(zone, Flaw(NO_ZONE_KEY, f"the key of {zone} that its DS names is no zone key"))
        found = verify(signed, keys_of(zone, filter(may_be_zone_key, vouched)), self.wall, self.budget)
        yield from self.pause()
        if isinstance(found, Flaw):
            return self._bogus(zone, found)
        return Secure(zone, keys_of(zone, filter(may_be_zone_key, keys)), self._until(min(ttl_s, found.ttl_s)))

    def _descend(self, parent: Secure, below: Name) -> Steps[Kept]:
        """One label further down: what the parent says about a zone of that name."""
        message = yield from self._bring(below, DS_TYPE)
        ds = message.answer(below, DS_TYPE)
        if ds is not None:
            found = verify(ds, parent.keys, self.wall, self.budget)
            yield from self.pause()
            if isinstance(found, Flaw):
                return self._bogus(below, found)
            if found.encloser is not None:
                return self._bogus(below, Flaw(BOGUS, f"DS of {below} was made from a wildcard"))
            return (yield from self._enter(below, [*ds.rrset], found.ttl_s))
        alias = message.answer(below, w.CNAME)
        if alias is not None:
            # A CNAME stands alone at its name: no zone can begin there.
            found = verify(alias, parent.keys, self.wall, self.budget)
            return self._bogus(below, found) if isinstance(found, Flaw) else Inside(self._until(found.ttl_s))
        return (yield from self._no_ds(parent, below, message))

    def _no_ds(self, parent: Secure, below: Name, message: Message) -> Steps[Kept]:
        denials = Denials(parent.zone, self.budget)
        found = yield from self.denials(message, parent, denials)
        if isinstance(found, Flaw):
            return self._bogus(below, found)
        until = self._until(found)
        match denials.no_ds(below):
            case Cut.INSIDE:
                return Inside(until)
            case Cut.UNSIGNED:
                return Insecure(below, until)
            case Cut.TOO_MANY:
                return Insecure(below, until, Flaw(ITERATIONS, f"too many NSEC3 iterations in {parent.zone}"))
        return self._bogus(below, Flaw(NO_NSEC, f"{parent.zone} does not prove that {below} has no DS"))

    def denials(self, message: Message, zone: Secure, into: Denials) -> Steps[float | Flaw]:
        """Verifies the denial of a message by `zone`: what it proves goes into `into`; seconds that it holds, or a flaw."""
        relevant = [s for s in message.authorities.values() if s.type in (w.SOA, NSEC_TYPE, NSEC3_TYPE)]
        if not any(s.signatures for s in relevant):
            missing = "no signatures" if relevant else "no records"
            return Flaw(NO_RRSIG if relevant else NO_NSEC, f"denial by {zone.zone} has {missing}")
        ttl_s = LONGEST_S
        for signed in relevant:
            found = verify(signed, zone.keys, self.wall, self.budget)
            yield from self.pause()
            if isinstance(found, Flaw):
                return found
            ttl_s = min(ttl_s, found.ttl_s)
            # An NSEC made from a wildcard would deny what its real owner does not speak of.
            if found.encloser is None and signed.type != w.SOA:
                for rdata in signed.rrset:
                    into.add(signed.name, rdata)
        return ttl_s

    def _until(self, ttl_s: float) -> float:
        return self.now + min(LONGEST_S, max(SHORTEST_S, ttl_s))

    def _bogus(self, zone: Name, flaw: Flaw) -> Bogus:
        return Bogus(zone, flaw, self.now + BOGUS_S, self.doubting)


def _usable(trusted: Iterable[dns.rdata.Rdata]) -> list[DS | DNSKEY] | Flaw:
    """The DS and DNSKEY that we can compute with. None of them means insecure, not bogus (RFC 4035 5.2)."""
    known: list[DS | DNSKEY] = []
    why = Flaw(UNSUPPORTED_KEY, "no algorithm of its DS is known here")
    for one in trusted:
        if isinstance(one, DNSKEY) and int(one.algorithm) in ALGORITHMS:
            known.append(one)
        elif isinstance(one, DS) and int(one.algorithm) in ALGORITHMS:
            if int(one.digest_type) in DIGESTS:
                known.append(one)
            else:
                why = Flaw(UNSUPPORTED_DIGEST, f"DS digest type {int(one.digest_type)} is not known here")
    # RFC 4509 3: with a better digest at hand, SHA-1 proves nothing.
    better = [one for one in known if not (isinstance(one, DS) and one.digest_type == 1)]
    return (better or known)[:MOST_DS] or why


def _vouches(one: DS | DNSKEY, key: DNSKEY, zone: Name) -> bool:
    if isinstance(one, DNSKEY):
        return bool(one == key)
    if one.key_tag != key.key_id() or one.algorithm != key.algorithm:
        return False
    try:
        return bool(dns.dnssec.make_ds(zone, key, one.digest_type, validating=True) == one)
    except (dns.exception.DNSException, ValueError):
        return False


def _tag(one: DS | DNSKEY) -> int:
    return one.key_tag if isinstance(one, DS) else one.key_id()


__all__ = ["Ask", "Bogus", "Insecure", "Inside", "Missing", "Need", "Pause", "Secure", "Trust", "Verified", "Walk"]
