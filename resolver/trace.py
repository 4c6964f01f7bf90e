"""Read the hops of a delegation walk: what each server on the way from the root said, as `dig +trace` shows it.

Theory: a walk asks a server of a zone without recursion; the reply is a referral to a zone below, an answer, an alias
whose target starts a new walk, or a dead end. This file reads replies and keeps the record; `io/trace.py` walks.
Rules for editing: 1. the values are what `headrace trace --json` prints: plain types only, units in the names;
2. a referral must lead downwards, else two servers could keep a walk going for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset

Kind = Literal["referral", "answer", "alias", "nodata", "nxdomain", "lame", "failed"]


@dataclass(frozen=True, slots=True)
class Server:
    """A name server. `addresses` is empty when the referral brought none (no glue)."""

    name: str
    addresses: tuple[str, ...] = ()


ROOT_HINTS: tuple[Server, ...] = (
    Server("a.root-servers.net.", ("198.41.0.4", "2001:503:ba3e::2:30")),
    Server("b.root-servers.net.", ("170.247.170.2", "2801:1b8:10::b")),
    Server("c.root-servers.net.", ("192.33.4.12", "2001:500:2::c")),
    Server("d.root-servers.net.", ("199.7.91.13", "2001:500:2d::d")),
    Server("e.root-servers.net.", ("192.203.230.10", "2001:500:a8::e")),
    Server("f.root-servers.net.", ("192.5.5.241", "2001:500:2f::f")),
    Server("g.root-servers.net.", ("192.112.36.4", "2001:500:12::d0d")),
    Server("h.root-servers.net.", ("198.97.190.53", "2001:500:1::53")),
    Server("i.root-servers.net.", ("192.36.148.17", "2001:7fe::53")),
    Server("j.root-servers.net.", ("192.58.128.30", "2001:503:c27::2:30")),
    Server("k.root-servers.net.", ("193.0.14.129", "2001:7fd::1")),
    Server("l.root-servers.net.", ("199.7.83.42", "2001:500:9f::42")),
    Server("m.root-servers.net.", ("202.12.27.33", "2001:dc3::35")),
)
"""The IANA root hints as of 2023-11-27, when b.root got its present address."""


@dataclass(frozen=True, slots=True)
class Hop:
    """One server asked. `records` are in presentation form: NS of a referral, the answer, or the SOA of a denial.

    `signed`: a referral with DS, or an answer with RRSIG; None where the reply says nothing about it. `security`: secure,
    insecure or bogus down from the trust anchor, with `why`; empty where it was not judged.
    """

    zone: str
    server: str
    address: str
    rtt_s: float
    kind: Kind
    rcode: str = ""
    records: tuple[str, ...] = ()
    signed: bool | None = None
    detail: str = ""
    security: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """The same question put to one configured upstream. `records` without TTL, sorted: equal answers compare equal."""

    upstream: str
    took_s: float
    rcode: str = ""
    records: tuple[str, ...] = ()
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """The whole: from the root to the answer, then what the configured upstreams say to the same question."""

    name: str
    rdtype: str
    hops: tuple[Hop, ...]
    answer: tuple[str, ...]
    outcome: str
    took_s: float
    upstreams: tuple[Sample, ...] = ()


@dataclass(frozen=True, slots=True)
class Reading:
    """What a reply means for the walk. `zone` and `servers` of a referral, `target` of an alias."""

    kind: Kind
    records: tuple[str, ...] = ()
    zone: str = ""
    servers: tuple[Server, ...] = ()
    target: str = ""
    signed: bool | None = None
    detail: str = ""


def read_reply(reply: dns.message.Message, zone: str) -> Reading:
    """What `reply`, by a server of `zone`, means."""
    question = reply.question[0]
    if reply.rcode() == dns.rcode.NXDOMAIN:
        return Reading("nxdomain", _lines(reply.authority, "SOA"), signed=_has(reply.authority, "RRSIG"))
    if reply.rcode() != dns.rcode.NOERROR:
        return Reading("failed", detail=dns.rcode.to_text(reply.rcode()))
    if reply.answer:
        return _read_answer(reply, question)
    delegation = [rrset for rrset in reply.authority if rrset.rdtype == dns.rdatatype.NS]
    if delegation and not _has(reply.authority, "SOA"):
        return _read_referral(reply, delegation[0], question.name, dns.name.from_text(zone))
    if reply.flags & dns.flags.AA or _has(reply.authority, "SOA"):
        return Reading("nodata", _lines(reply.authority, "SOA"), signed=_has(reply.authority, "RRSIG"))
    return Reading("lame", detail="neither an answer nor a referral")


def _read_answer(reply: dns.message.Message, question: dns.rrset.RRset) -> Reading:
    records, signed = _lines(reply.answer), _has(reply.answer, "RRSIG")
    owner = question.name
    aliases = {rrset.name: rrset[0].target for rrset in reply.answer if rrset.rdtype == dns.rdatatype.CNAME}
    for _ in range(len(aliases)):
        owner = aliases.get(owner, owner)
    direct = any(rrset.name == owner and rrset.rdtype == question.rdtype for rrset in reply.answer)
    if direct or question.rdtype in (dns.rdatatype.CNAME, dns.rdatatype.ANY):
        return Reading("answer", records, signed=signed)
    if owner == question.name:
        return Reading("lame", records, detail="aliases that lead back to the name" if aliases else "another's records")
    return Reading("alias", records, target=owner.to_text(), signed=signed)


def _read_referral(
    reply: dns.message.Message, delegation: dns.rrset.RRset, name: dns.name.Name, above: dns.name.Name
) -> Reading:
    below = delegation.name
    if not (name.is_subdomain(below) and below.is_subdomain(above) and below != above):
        return Reading("lame", _lines([delegation]), detail=f"referral to {below} does not lead down from {above}")
    servers = tuple(Server(ns.target.to_text(), _glue(reply, ns.target)) for ns in delegation)
    signed = _has(reply.authority, "DS")
    return Reading("referral", _lines([delegation]), below.to_text(), servers, signed=signed)


def _glue(reply: dns.message.Message, name: dns.name.Name) -> tuple[str, ...]:
    """IPv4 first: a walk is a diagnosis, and a host without IPv6 should not wait for each server in turn."""
    found = [
        (rrset.rdtype, rdata.address)
        for rrset in reply.additional
        if rrset.name == name and rrset.rdtype in (dns.rdatatype.A, dns.rdatatype.AAAA)
        for rdata in rrset
    ]
    return tuple(address for _, address in sorted(found))


def _has(section: Sequence[dns.rrset.RRset], rdtype: str) -> bool:
    return any(rrset.rdtype == dns.rdatatype.from_text(rdtype) for rrset in section)


def _lines(section: Sequence[dns.rrset.RRset], rdtype: str = "") -> tuple[str, ...]:
    return tuple(
        line
        for rrset in section
        if not rdtype or rrset.rdtype == dns.rdatatype.from_text(rdtype)
        for line in rrset.to_text().splitlines()
    )


def sample(upstream: str, took_s: float, reply: dns.message.Message) -> Sample:
    records = sorted(
        f"{rrset.name} {dns.rdatatype.to_text(rrset.rdtype)} {rdata.to_text()}"
        for rrset in reply.answer
        for rdata in rrset
    )
    return Sample(upstream, took_s, dns.rcode.to_text(reply.rcode()), tuple(records))
