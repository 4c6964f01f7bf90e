"""Read a message as DNSSEC sees it: RRsets, each with the signatures that claim to cover it (RFC 4035 5.3).

Theory: a signature covers a whole RRset in canonical form, so the records of one owner and type must come together
whatever their order in the message. Only what is looked at becomes an object; names are dnspython's, whose order is the
canonical one (RFC 4034 6.1).
Rules for editing: 1. a record that dnspython cannot read stays as bytes, it is only an error where it must be verified;
2. nothing here believes anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import dns.exception
import dns.name
import dns.rdata
import dns.rdataclass
import dns.rdatatype
import dns.rrset
from dns.rdtypes.ANY.RRSIG import RRSIG

from resolver import wire as w
from resolver.errors import Malformed

RRSIG_TYPE, NSEC_TYPE, DS_TYPE, DNSKEY_TYPE, NSEC3_TYPE = 46, 47, 43, 48, 50
MOST_RRSETS = 64
"""Of one message. A chain of 16 CNAMEs with its denial has 22; what is larger is made to cost us time."""

Name = dns.name.Name
Key = tuple[Name, int]


@dataclass(slots=True)
class Signed:
    """An RRset and what claims to sign it. `ttl_s` is the smallest of the message; `flaw` why it cannot be an RRset."""

    name: Name
    type: int
    ttl_s: int
    rrset: dns.rrset.RRset
    signatures: list[RRSIG] = field(default_factory=list)
    flaw: str = ""


@dataclass(slots=True)
class Message:
    """The two sections that DNSSEC speaks of, by owner and type, in the order of the message."""

    rcode: int
    answers: dict[Key, Signed]
    authorities: dict[Key, Signed]
    loose: bool  # the answer holds signatures that sign nothing in it: a reply to a question for RRSIG

    def answer(self, name: Name, rdtype: int) -> Signed | None:
        return self.answers.get((name, rdtype))


def read(wire: bytes, *, most_records: int = 65_535) -> Message:
    """Raises Malformed, also for more RRsets than MOST_RRSETS, or records than `most_records`: each costs 0.1 ms."""
    found = w.scan(wire)
    if len(found.records) > most_records:
        raise Malformed(f"{len(found.records)} records where {most_records} are plenty")
    answers, loose = _section(wire, found.records[: found.answers])
    authorities, _ = _section(wire, found.records[found.answers : found.answers + found.authorities])
    return Message(found.rcode, answers, authorities, loose)


def _section(wire: bytes, records: Iterable[w.Record]) -> tuple[dict[Key, Signed], bool]:
    sets: dict[Key, Signed] = {}
    signatures: list[tuple[Name, RRSIG]] = []
    for record in records:
        name = _name(wire, record.start)
        rdata = _rdata(wire, record)
        if isinstance(rdata, RRSIG):
            signatures.append((name, rdata))
        else:
            _add(sets, name, record, rdata)
    loose = False
    for name, signature in signatures:
        covered = sets.get((name, signature.type_covered))
        if covered is None:
            loose = True
        else:
            covered.signatures.append(signature)
    return sets, loose


def _add(sets: dict[Key, Signed], name: Name, record: w.Record, rdata: dns.rdata.Rdata) -> None:
    one = sets.get((name, record.type))
    if one is None:
        if len(sets) >= MOST_RRSETS:
            raise Malformed(f"more than {MOST_RRSETS} RRsets")
        rrset = dns.rrset.RRset(name, dns.rdataclass.IN, dns.rdatatype.RdataType.make(record.type))
        one = sets[name, record.type] = Signed(name, record.type, record.ttl_s, rrset)
    elif dns.rdatatype.is_singleton(one.rrset.rdtype) and rdata not in one.rrset:
        # dnspython would keep the last one only: a forged second CNAME would pass beside the signed one.
        one.flaw = f"more than one {w.type_to_text(record.type)} record"
    one.ttl_s = min(one.ttl_s, record.ttl_s)
    one.rrset.add(rdata, record.ttl_s)


def _name(wire: bytes, at: int) -> Name:
    try:
        return dns.name.from_wire(wire, at)[0]
    except dns.exception.DNSException as exc:
        raise Malformed(f"name at {at}: {exc}".lower()) from exc


def _rdata(wire: bytes, record: w.Record) -> dns.rdata.Rdata:
    rdtype = dns.rdatatype.RdataType.make(record.type)
    try:
        return dns.rdata.from_wire(dns.rdataclass.IN, rdtype, wire, record.rdata_at, record.rdata_len)
    except (dns.exception.DNSException, ValueError, IndexError):
        rdata = wire[record.rdata_at : record.rdata_at + record.rdata_len]
        return dns.rdata.GenericRdata(dns.rdataclass.IN, rdtype, rdata)


def name_of(wire: bytes) -> Name:
    """A name of the resolver (uncompressed wire labels) as one of dnspython's."""
    return dns.name.from_wire(wire, 0)[0]


def rdata_wire(name: Name) -> bytes:
    """A name as the resolver's wire labels, lower case."""
    return name.canonicalize().to_wire() or w.ROOT
