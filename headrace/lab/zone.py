"""The lab's zone and the answers of a recursive resolver that knows this zone alone.

Pure: a query's bytes in, an answer's bytes out. Names live under `lab.example`: RFC 6761 6.5 asks resolvers to treat
`example` like any other name, where `test`, `invalid` and `localhost` get special answers.
"""

from __future__ import annotations

from collections.abc import Sequence

import dns.edns
import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset
import dns.zone

ORIGIN = dns.name.from_text("lab.example.")
MAX_CHAIN = 8
PAD_BLOCK = 468  # RFC 8467 4.1: the block length of answers
MIN_UDP = 512

BASE = """
@        300  IN SOA   dns hostmaster 1 3600 600 86400 60
@        300  IN NS    dns
@        300  IN TXT   "the headrace lab"
dns      300  IN A     127.0.0.1
answer   300  IN A     192.0.2.10
answer   300  IN A     192.0.2.11
answer   300  IN AAAA  2001:db8::10
quick    1    IN A     192.0.2.20
www      120  IN CNAME hop
hop      60   IN CNAME answer
loop-a   60   IN CNAME loop-b
loop-b   60   IN CNAME loop-a
v4only   300  IN A     192.0.2.30
text     300  IN TXT   "one" "two"
deep.ent 300  IN A     192.0.2.40
alias    300  IN HTTPS 0 answer
h3       300  IN HTTPS 1 . alpn=h3,h2 ipv4hint=192.0.2.10
"""


def lab_zone(edges: Sequence[tuple[str, int]]) -> dns.zone.Zone:
    """The zone with an A and two HTTPS records for each edge (host, port): at its name, and where RFC 9460 2.3 puts
    a service on another port than 443, `_port._https.host`. A TXT record at `big` does not fit a UDP answer."""
    lines = [BASE]
    for host, port in edges:
        label = host.removesuffix(".lab.example")
        lines.append(f"{label} 60 IN A 127.0.0.1")
        lines.append(f"{label} 60 IN HTTPS 1 . alpn=h3,h2 port={port} ipv4hint=127.0.0.1")
        lines.append(f"_{port}._https.{label} 60 IN HTTPS 1 {label} alpn=h3,h2 port={port} ipv4hint=127.0.0.1")
    lines += [f'big 300 IN TXT "{index:02d}{"x" * 200}"' for index in range(20)]
    return dns.zone.from_text("\n".join(lines), origin=ORIGIN, relativize=False)


def respond(zone: dns.zone.Zone, wire: bytes, *, limit: int) -> bytes | None:
    """The answer to one query, truncated (TC) to `limit` bytes; None for what is no query (RFC 9619: one question)."""
    try:
        query = dns.message.from_wire(wire)
    except dns.exception.DNSException:
        return None
    if query.flags & dns.flags.QR or len(query.question) != 1:
        return None
    answer = dns.message.make_response(query, recursion_available=True, our_payload=1232)
    question = query.question[0]
    if question.name.is_subdomain(ORIGIN):
        _fill(zone, question.name, question.rdtype, answer)
    else:
        answer.set_rcode(dns.rcode.REFUSED)
    return _packed(query, answer, limit)


def udp_limit(wire: bytes) -> int:
    """The answer size that a UDP query allows: its EDNS payload size, or 512."""
    try:
        query = dns.message.from_wire(wire)
    except dns.exception.DNSException:
        return MIN_UDP
    return max(MIN_UDP, query.payload) if query.edns >= 0 else MIN_UDP


def _fill(
    zone: dns.zone.Zone, name: dns.name.Name, rdtype: dns.rdatatype.RdataType, answer: dns.message.Message
) -> None:
    """Follow CNAMEs from `name`; end with the records, or with the SOA that makes a negative answer cacheable."""
    for _ in range(MAX_CHAIN):
        found = zone.get_rrset(name, rdtype)
        if found is not None:
            answer.answer.append(found)
            return
        alias = zone.get_rrset(name, dns.rdatatype.CNAME)
        if alias is None:
            break
        answer.answer.append(alias)
        name = alias[0].target
    else:
        answer.set_rcode(dns.rcode.SERVFAIL)
        return
    if not _exists(zone, name):
        answer.set_rcode(dns.rcode.NXDOMAIN)
    soa = zone.get_rrset(ORIGIN, dns.rdatatype.SOA)
    assert soa is not None
    answer.authority.append(soa)


def _exists(zone: dns.zone.Zone, name: dns.name.Name) -> bool:
    # An empty non-terminal exists though it owns nothing (RFC 8020): NODATA, not NXDOMAIN.
    return any(each.is_subdomain(name) for each in zone.nodes)


def _packed(query: dns.message.Message, answer: dns.message.Message, limit: int) -> bytes:
    padded = any(option.otype == dns.edns.OptionType.PADDING for option in query.options)
    try:
        wire = answer.to_wire(max_size=limit)
    except dns.exception.TooBig:
        return _truncated(query, answer)
    if not padded:
        return wire
    room = -(len(wire) + 4) % PAD_BLOCK
    answer.use_edns(0, 0, 1232, options=[dns.edns.GenericOption(dns.edns.OptionType.PADDING, bytes(room))])
    return answer.to_wire(max_size=65535)


def _truncated(query: dns.message.Message, answer: dns.message.Message) -> bytes:
    short = dns.message.make_response(query, recursion_available=True, our_payload=1232)
    short.set_rcode(answer.rcode())
    short.flags |= dns.flags.TC
    return short.to_wire()
