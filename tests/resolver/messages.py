"""Generated DNS messages for properties: names with any bytes, records of known and unknown types, EDNS or none."""

from __future__ import annotations

import dns.edns
import dns.flags
import dns.message
import dns.name
import dns.rdata
import dns.rdataclass
import dns.rdatatype
import dns.rrset
from hypothesis import strategies as st

labels = st.one_of(
    st.sampled_from([b"a", b"WWW", b"example", b"Com", b"*", b"_tcp", b"a.b", b"\0", b"\xc3\xa9", b"x" * 63]),
    st.binary(min_size=1, max_size=12),
)


def _fits(parts: list[bytes]) -> bool:
    return sum(len(p) + 1 for p in parts) + 1 <= 255


names = st.lists(labels, max_size=6).filter(_fits).map(lambda parts: dns.name.Name([*parts, b""]))
types = st.sampled_from(["A", "AAAA", "TXT", "MX", "NS", "HTTPS", "TYPE65280"])
ttls = st.integers(0, 200_000) | st.sampled_from([0, 1, 0x7FFFFFFF])


@st.composite
def rrsets(draw: st.DrawFn, owner: dns.name.Name | None = None) -> dns.rrset.RRset:
    name = owner if owner is not None else draw(names)
    kind = draw(types)
    target = draw(names)
    text = {
        "A": "192.0.2.1",
        "AAAA": "2001:db8::1",
        "TXT": '"some text"',
        "MX": "10 mail.example.",
        "NS": "ns.example.",
        "HTTPS": "1 . alpn=h3,h2 ipv4hint=192.0.2.7",
        "TYPE65280": r"\# 3 010203",
    }[kind]
    rdata = dns.rdata.from_text("IN", kind, text)
    if kind in ("MX", "NS"):
        rdata = rdata.replace(**{"exchange" if kind == "MX" else "target": target})
    rrset = dns.rrset.from_rdata(name, draw(ttls), rdata)
    assert isinstance(rrset, dns.rrset.RRset)
    return rrset


@st.composite
def queries(draw: st.DrawFn, *, padded: bool = True) -> dns.message.Message:
    """Any well-formed query of class IN that is looked up: no transfers and no meta types."""
    edns = draw(st.booleans())
    query = dns.message.make_query(
        draw(names), draw(types), use_edns=0 if edns else False, id=draw(st.integers(0, 65535))
    )
    if edns:
        options = (
            [dns.edns.GenericOption(12, bytes(draw(st.integers(0, 40))))] if padded and draw(st.booleans()) else []
        )
        size = draw(st.sampled_from([0, 100, 512, 1232, 4096, 65535]))
        query.use_edns(0, dns.flags.DO if draw(st.booleans()) else 0, size, options=options)
    for flag in (dns.flags.RD, dns.flags.CD, dns.flags.AD):
        query.flags = query.flags | flag if draw(st.booleans()) else query.flags & ~flag
    return query


@st.composite
def replies(draw: st.DrawFn, query: dns.message.Message | None = None) -> dns.message.Message:
    """A positive answer: records at the name asked, and anything in authority and additional."""
    asked = query if query is not None else draw(queries())
    reply = dns.message.make_response(asked, recursion_available=True)
    question = asked.question[0]
    count = draw(st.integers(1, 12))
    text = {
        "A": "192.0.2.%d",
        "AAAA": "2001:db8::%d",
        "TXT": '"text %d"',
        "MX": "%d mail.example.",
        "NS": "ns%d.example.",
    }
    kind = dns.rdatatype.to_text(question.rdtype)
    pattern = text.get(kind, r"%d . alpn=h2" if kind == "HTTPS" else r"\# 1 %02x")
    rdatas = [dns.rdata.from_text("IN", question.rdtype, pattern % (i + 1)) for i in range(count)]
    reply.answer.append(dns.rrset.from_rdata_list(question.name, draw(ttls), rdatas))
    reply.authority.extend(draw(st.lists(rrsets(), max_size=2, unique_by=lambda r: (r.name, r.rdtype))))
    reply.additional.extend(draw(st.lists(rrsets(), max_size=3, unique_by=lambda r: (r.name, r.rdtype))))
    return reply
