"""What goes upstream and what is believed of the replies; dnspython is the oracle."""

from __future__ import annotations

import errno
from contextlib import suppress

import dns.edns
import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resolver import wire as w
from resolver.errors import Malformed
from resolver.io.channel import failure_of
from resolver.outgoing import (
    Match,
    aged,
    compose,
    fold,
    give_back,
    keepalive_s,
    match,
    mix_case,
    read,
    told_of_dnssec,
    unwillingness,
)
from resolver.standing import Fault

SUBNET = dns.edns.ECSOption("192.0.2.0", 24)


def query(name: str = "Www.Example.com", rdtype: str = "A", **kw: object) -> bytes:
    return dns.message.make_query(name, rdtype, id=7, **kw).to_wire()


def reply_to(wire: bytes, *records: str) -> dns.message.Message:
    made = dns.message.make_response(dns.message.from_wire(wire), recursion_available=True)
    made.answer = [dns.rrset.from_text(*record.split(" ", 4)) for record in records]
    return made


def test_only_question_and_known_bits_go_on() -> None:
    options = [SUBNET, dns.edns.GenericOption(10, b"cookie!!"), dns.edns.GenericOption(12, bytes(50))]
    out = read(query(use_edns=0, payload=4096, options=options, want_dnssec=True))
    sent = dns.message.from_wire(compose(out, 99, out.question))
    assert (sent.id, sent.payload, sent.options) == (99, 1232, ())
    assert sent.ednsflags & dns.flags.DO and sent.flags & dns.flags.RD
    assert str(sent.question[0]) == "Www.Example.com. IN A"


def test_the_subnet_goes_on_only_where_it_may() -> None:
    wire = query(use_edns=0, options=[SUBNET])
    assert not read(wire).subnet
    out = read(wire, pass_subnet=True)
    assert dns.message.from_wire(compose(out, 1, out.question)).options == (SUBNET,)


@pytest.mark.parametrize("name", ["a.test", "a" * 60 + ".test", "b" * 63 + "." + "c" * 63 + ".example"])
def test_encrypted_queries_are_padded_to_128_bytes(name: str) -> None:
    out = read(query(name))
    sent = compose(out, 1, out.question, padded=True, keepalive=True)
    assert len(sent) % 128 == 0
    assert [o.otype for o in dns.message.from_wire(sent).options] == [11, 12]


def test_without_edns_nothing_is_added() -> None:
    out = read(query(want_dnssec=True))
    assert dns.message.from_wire(compose(out, 1, out.question, edns=False)).edns == -1


def test_the_type_keeps_its_bytes_when_the_name_is_folded() -> None:
    question = read(query("WWW.EXAMPLE.COM", "HTTPS")).question
    assert fold(question)[-4:] == b"\0\x41\0\1"
    assert mix_case(question, b"\xff" * 64)[-4:] == b"\0\x41\0\1"


@given(st.from_regex(r"[a-zA-Z0-9_-]{1,30}(\.[a-zA-Z0-9-]{1,30}){0,4}", fullmatch=True), st.binary(min_size=255))
def test_mixing_the_case_changes_letters_only(name: str, draw: bytes) -> None:
    question = w.name_from_text(name) + b"\0\1\0\1"
    mixed = mix_case(question, draw)
    assert fold(mixed) == fold(question) and len(mixed) == len(question)


def test_every_letter_follows_its_bit() -> None:
    question = b"\3abc\0\0\1\0\1"
    assert mix_case(question, bytes([0xFF, 0xFF, 0, 0xFF, 0xFF])) == b"\3AbC\0\0\1\0\1"


def test_a_reply_must_match_in_id_qr_opcode_and_question() -> None:
    asked = query("aBc.test")
    question, good = read(asked).question, reply_to(asked).to_wire()
    assert match(good, 7, question) is Match.YES
    assert match(good, 8, question) is Match.OTHER
    assert match(asked, 7, question) is Match.OTHER, "QR=0"
    assert match(good, 7, read(query("aBd.test")).question) is Match.OTHER
    assert match(good, 7, read(query("aBc.test", "AAAA")).question) is Match.OTHER
    assert match(good, 7, read(query("abc.test")).question) is Match.OTHER_CASE
    assert match(good[:11], 7, question) is Match.OTHER
    assert match(good[:2] + bytes([good[2] | 0x28]) + good[3:], 7, question) is Match.OTHER, "opcode UPDATE"


def test_formerr_may_come_without_the_question_and_nothing_else_may() -> None:
    bare = b"\0\7\x80%c" + bytes(8)
    assert match(bare % 1, 7, b"\1a\0\0\1\0\1") is Match.YES
    assert match(bare % 0, 7, b"\1a\0\0\1\0\1") is Match.OTHER


@given(st.binary(max_size=60))
def test_no_bytes_make_the_judge_raise(junk: bytes) -> None:
    match(b"\0\7" + junk, 7, b"\1a\0\0\1\0\1")


def test_the_caller_gets_its_own_id_and_letters_and_pointers_stay_right() -> None:
    out = read(query("WwW.exAmple.com"))
    sent = compose(out, 99, fold(out.question))
    reply = reply_to(sent, "www.example.com. 60 IN A 192.0.2.1").to_wire()
    back = dns.message.from_wire(give_back(reply, out))
    assert back.id == 7 and str(back.question[0].name) == "WwW.exAmple.com."
    assert str(back.answer[0].name) == "WwW.exAmple.com." and back.answer[0].ttl == 60


def test_an_http_age_is_taken_from_every_ttl_and_never_below_zero() -> None:
    reply = reply_to(query("a.test"), "a.test. 60 IN A 192.0.2.1", "b.test. 10 IN A 192.0.2.2").to_wire()
    assert [r.ttl for r in dns.message.from_wire(aged(reply, 40)).answer] == [20, 0]


def test_unwillingness_names_the_rcode_and_the_peers_reason() -> None:
    made = reply_to(query(use_edns=0))
    made.set_rcode(dns.rcode.SERVFAIL)
    made.use_edns(0, options=[dns.edns.EDEOption(6, "bad\x1b[31m signature")])
    wire = made.to_wire()
    assert unwillingness(wire, w.scan(wire)) == "SERVFAIL, EDE 6 bad?[31m signature"
    fine = reply_to(query()).to_wire()
    assert unwillingness(fine, w.scan(fine)) == ""


def test_nxdomain_is_an_answer() -> None:
    made = reply_to(query())
    made.set_rcode(dns.rcode.NXDOMAIN)
    assert unwillingness(made.to_wire(), w.scan(made.to_wire())) == ""


def test_the_named_idle_limit_is_read() -> None:
    made = reply_to(query(use_edns=0))
    made.use_edns(0, options=[dns.edns.GenericOption(11, b"\0\x64")])
    assert keepalive_s(w.scan(made.to_wire())) == 10.0
    assert keepalive_s(w.scan(reply_to(query()).to_wire())) is None


@given(st.binary(max_size=80))
def test_no_bytes_make_the_reader_raise_anything_but_malformed(junk: bytes) -> None:
    for counts in (bytes(6), b"\0\0\0\0\0\1"):
        with suppress(Malformed):
            out = read(b"\0\7\1\0\0\1" + counts + junk, pass_subnet=True)
            assert len(out.question) >= 5 and match(compose(out, 1, out.question), 1, out.question) is Match.OTHER


@given(st.binary(max_size=120))
def test_no_reply_makes_the_judges_raise_anything_but_malformed(junk: bytes) -> None:
    reply = b"\0\7\x81\x80\0\1\0\1\0\0\0\1\1a\0\0\1\0\1" + junk
    with suppress(Malformed):
        found = w.scan(reply)
        unwillingness(reply, found)
        keepalive_s(found)
        aged(reply, 5)


def test_a_shortage_of_ours_says_nothing_about_the_upstream() -> None:
    assert failure_of(OSError(errno.EMFILE, "Too many open files")).fault is Fault.UNWILLING
    assert failure_of(OSError(errno.ECONNREFUSED, "Connection refused")).fault is Fault.UNREACHABLE


def test_what_is_no_query_with_one_question_cannot_be_asked() -> None:
    with pytest.raises(Malformed):
        read(b"\0" * 12)


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("SERVFAIL, EDE 9 no DNSKEY", 9),
        ("SERVFAIL, EDE 22, EDE 6", 6),
        ("SERVFAIL, EDE 3 stale", 0),
        ("SERVFAIL, EDE 23 network", 0),
        ("SERVFAIL, EDE 15 blocked", 0),
        ("SERVFAIL", 0),
    ],
)
def test_what_an_upstream_said_of_dnssec_is_found_in_its_reason(reason: str, code: int) -> None:
    assert told_of_dnssec(reason) == code
