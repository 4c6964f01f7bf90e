"""The walker agrees with dnspython about every message, and no bytes make it loop, raise anything else or read outside."""

from __future__ import annotations

import struct

import dns.message
import dns.name
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from resolver import wire as w
from resolver.errors import Malformed
from tests.resolver.messages import names, queries, replies


def header(questions: int = 0, answers: int = 0, authorities: int = 0, additionals: int = 0) -> bytes:
    return struct.pack("!HHHHHH", 7, 0x8180, questions, answers, authorities, additionals)


@given(replies())
def test_walker_finds_what_dnspython_finds(reply: dns.message.Message) -> None:
    wire = reply.to_wire(max_size=65535)
    found = w.scan(wire)
    parsed = dns.message.from_wire(wire, one_rr_per_rrset=True)
    expected = [(s.rdtype, s.ttl) for section in (parsed.answer, parsed.authority, parsed.additional) for s in section]
    assert [(r.type, r.ttl_s) for r in found.records] == expected
    assert (found.answers, found.authorities) == (len(parsed.answer), len(parsed.authority))
    assert (found.opt is not None) == (parsed.edns >= 0)
    assert found.end == len(wire)
    owners = [s.name for section in (parsed.answer, parsed.authority, parsed.additional) for s in section]
    for record, owner in zip(found.records, owners, strict=True):
        assert w.name_at(wire, record.start) == owner.to_wire().lower()


@given(st.binary(max_size=300))
@example(header(1, 0xFFFF, 0xFFFF, 0xFFFF) + b"\0\0\1\0\1")
@example(header(0, 1) + b"\xc0\x0c" + bytes(10))
@example(header(0, 1) + b"\1a\xc0\x0c" + bytes(10))
@example(header(0, 1) + b"\xc0\x20" + bytes(30))
def test_no_bytes_make_the_walker_raise_anything_but_malformed(wire: bytes) -> None:
    try:
        found = w.scan(wire)
    except Malformed:
        return
    assert found.end <= len(wire)


@given(replies(), st.data())
def test_one_changed_byte_never_leads_outside(reply: dns.message.Message, data: st.DataObject) -> None:
    wire = bytearray(reply.to_wire(max_size=65535))
    at = data.draw(st.integers(0, len(wire) - 1))
    wire[at] = data.draw(st.integers(0, 255))
    try:
        found = w.scan(wire)
    except Malformed:
        return
    assert all(r.rdata_at + r.rdata_len <= len(wire) for r in found.records)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (b"\x40" + b"a" * 64 + b"\0", "label type"),
        (b"\x80" + b"a" * 128 + b"\0", "label type"),
        ((b"\x3f" + b"a" * 63) * 4 + b"\0", "more than 255"),
        (b"\xc0\x0c", "pointer"),
        (b"\xc0\x20", "pointer"),
        (b"\1a\xc0\x0c", "pointer"),
        (b"\xc0\x00", "pointer"),
    ],
)
def test_names_that_break_rfc_1035_are_named(name: bytes, what: str) -> None:
    with pytest.raises(Malformed, match=what):
        w.scan(header(1) + name + b"\0\1\0\1" + bytes(64))


def test_a_name_of_255_bytes_is_a_name() -> None:
    longest = (b"\x3f" + b"a" * 63) * 3 + b"\x3d" + b"a" * 61 + b"\0"
    assert len(longest) == 255
    assert w.skip_name(longest, 0) == 255


def test_a_second_opt_is_refused() -> None:
    opt = b"\0\0\x29\4\xd0\0\0\0\0\0\0"
    with pytest.raises(Malformed, match="OPT"):
        w.scan(header(0, 0, 0, 2) + opt * 2)


def test_opt_outside_the_additional_section_is_refused() -> None:
    with pytest.raises(Malformed, match="OPT"):
        w.scan(header(0, 1) + b"\0\0\x29\4\xd0\0\0\0\0\0\0")


@given(names)
def test_suffixes_are_the_parents_by_whole_labels(name: dns.name.Name) -> None:
    expected = []
    at = name
    while True:
        expected.append(at.to_wire().lower())
        if at == dns.name.root:
            break
        at = at.parent()
    assert list(w.suffixes(name.to_wire().lower())) == expected


@given(names)
def test_text_of_a_name_has_no_raw_byte_and_means_the_same_name(name: dns.name.Name) -> None:
    text = w.name_to_text(name.to_wire())
    assert text.isascii() and text.isprintable()
    assert dns.name.from_text(text) == name


@pytest.mark.parametrize("text", ["a..b", "x" * 64, ".".join(["a" * 60] * 5)])
def test_a_text_that_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"label|name"):
        w.name_from_text(text)


@pytest.mark.parametrize(("text", "number"), [("A", 1), ("https", 65), ("TYPE65280", 65280), ("type1", 1)])
def test_types_by_word_and_by_number(text: str, number: int) -> None:
    assert w.type_from_text(text) == number


@given(queries())
def test_options_fill_opt_exactly(query: dns.message.Message) -> None:
    found = w.scan(query.to_wire())
    if found.opt is not None:
        assert [code for code, _ in w.options(found.opt.options)] == [int(o.otype) for o in query.options]


def test_a_cut_option_is_malformed() -> None:
    for rdata in (b"\0\x0c\0", b"\0\x0c\0\5abc"):
        with pytest.raises(Malformed, match="option"):
            list(w.options(rdata))
