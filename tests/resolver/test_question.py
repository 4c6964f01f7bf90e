"""Every query is either understood, refused in the words of the RFCs, or passed over in silence."""

from __future__ import annotations

import dns.edns
import dns.message
import dns.rcode
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resolver import wire as w
from resolver.question import SILENCE, Question, parse
from tests.resolver.messages import queries

BASE = dns.message.make_query("ok.example.", "A", id=0x1234).to_wire()
HEADER, QUESTION, TAIL = BASE[:12], BASE[12:], b"\0\1\0\1"
OPT = b"\0\0\x29\4\xd0\0\0\0\0\0\0"


@pytest.mark.parametrize("wire", [b"", BASE[:1], BASE[:11], BASE[:2] + b"\x81" + BASE[3:], b"\xff" * 12])
def test_silence_for_what_has_no_id_and_for_responses(wire: bytes) -> None:
    assert parse(wire) == SILENCE


@pytest.mark.parametrize(
    "wire",
    [
        HEADER,
        HEADER[:4] + b"\0\0" + HEADER[6:],
        HEADER[:4] + b"\0\2" + HEADER[6:] + QUESTION * 2,
        HEADER + b"\x40" + b"a" * 64 + b"\0" + TAIL,
        HEADER + b"\xbf" + b"a" * 191 + b"\0" + TAIL,
        HEADER + (b"\x3f" + b"a" * 63) * 4 + b"\0" + TAIL,
        HEADER + b"\xc0\x0c" + TAIL,
        HEADER + b"\xc0\x20" + TAIL,
        HEADER + b"\1a\xc0\x0c" + TAIL,
        HEADER[:6] + b"\xff" * 6 + QUESTION,
        HEADER[:6] + b"\0\1" + HEADER[8:] + QUESTION + b"\xc0\x0c\0\1\0\1\0\0\0\0\0\0",
        BASE[:-3],
        BASE + b"\1",
        BASE + b"\1\2\3\4",
        HEADER[:10] + b"\0\2" + QUESTION + OPT * 2,
        HEADER[:10] + b"\0\1" + QUESTION + OPT[:-1] + b"\3\0\x0c\0",
    ],
)
def test_formerr_with_the_same_id_for_what_breaks_the_rules(wire: bytes) -> None:
    reply = parse(wire)
    assert isinstance(reply, bytes)
    assert reply[:2] == wire[:2] and reply[2] & 0x80 and reply[3] & 15 == w.FORMERR


@pytest.mark.parametrize("opcode", [1, 2, 4, 5, 15])
def test_other_opcodes_are_not_implemented(opcode: int) -> None:
    reply = parse(BASE[:2] + bytes([opcode << 3 | 1]) + BASE[3:])
    assert isinstance(reply, bytes)
    assert (reply[:2], reply[2], reply[3] & 15) == (BASE[:2], 0x80 | opcode << 3 | 1, w.NOTIMP)


@pytest.mark.parametrize(
    ("rdtype", "rdclass"), [("TXT", "CH"), ("A", "HS"), ("AXFR", "IN"), ("IXFR", "IN"), ("TYPE0", "IN")]
)
def test_other_classes_transfers_and_meta_types_are_refused(rdtype: str, rdclass: str) -> None:
    reply = parse(dns.message.make_query("version.bind.", rdtype, rdclass, use_edns=0).to_wire())
    assert isinstance(reply, bytes)
    parsed = dns.message.from_wire(reply)
    assert parsed.rcode() == dns.rcode.REFUSED
    assert parsed.edns == 0 and parsed.question


def test_edns_version_1_is_badvers_with_our_version() -> None:
    reply = parse(dns.message.make_query("a.example.", "A", use_edns=1, payload=4096).to_wire())
    assert isinstance(reply, bytes)
    parsed = dns.message.from_wire(reply)
    assert (parsed.rcode(), parsed.edns, parsed.payload) == (dns.rcode.BADVERS, 0, 1232)


def test_an_unknown_option_and_z_bits_change_nothing() -> None:
    odd = dns.message.make_query(
        "a.example.", "A", use_edns=0, ednsflags=0x0040, options=[dns.edns.GenericOption(65001, b"hello")]
    )
    asked = parse(odd.to_wire())
    assert isinstance(asked, Question)
    assert not asked.repeatable


@pytest.mark.parametrize(("size", "taken"), [(0, 512), (511, 512), (512, 512), (1232, 1232), (65535, 65535)])
def test_an_edns_size_below_512_means_512(size: int, taken: int) -> None:
    asked = parse(dns.message.make_query("a.example.", "A", use_edns=0, payload=size).to_wire())
    assert isinstance(asked, Question) and asked.size == taken


@given(queries())
def test_a_well_formed_query_is_understood_as_dnspython_means_it(query: dns.message.Message) -> None:
    wire = query.to_wire()
    asked = parse(wire)
    assert isinstance(asked, Question)
    question = query.question[0]
    assert asked.id == query.id and asked.type == question.rdtype
    assert asked.name == question.name.to_wire().lower()
    assert wire[12 : 12 + len(asked.section)] == asked.section
    assert asked.edns == (query.edns == 0)
    assert asked.do == bool(query.ednsflags & 0x8000)
    assert asked.padded == any(o.otype == 12 for o in query.options)


@given(st.binary(max_size=120))
def test_random_bytes_get_a_verdict(wire: bytes) -> None:
    verdict = parse(wire)
    if isinstance(verdict, bytes) and verdict:
        assert len(wire) >= 12 and verdict[:2] == wire[:2]
        dns.message.from_wire(verdict)
