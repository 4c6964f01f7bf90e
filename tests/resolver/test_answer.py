"""What an upstream said, kept once and given to each client in its own words."""

from __future__ import annotations

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resolver import wire as w
from resolver.answer import Answer, Bounds, Rr, compose, denial_below, reply, take
from resolver.errors import Malformed
from resolver.question import Question, parse, reason
from tests.resolver.messages import queries, replies
from tests.resolver.scripted import answer as scripted

LOOSE = Bounds(0, 0x7FFFFFFF, 0x7FFFFFFF)


def asking(name: str, rdtype: str = "A", **options: object) -> Question:
    asked = parse(dns.message.make_query(name, rdtype, **options).to_wire())  # type: ignore[arg-type]
    assert isinstance(asked, Question)
    return asked


def taken(name: str, *records: str, rdtype: str = "A", bounds: Bounds = LOOSE, **said: str) -> Answer:
    query = dns.message.make_query(name, rdtype)
    asked = parse(query.to_wire())
    assert isinstance(asked, Question)
    return take(scripted(query, *records, **said), asked, bounds, trusted=True)  # type: ignore[arg-type]


def given_to(
    kept: Answer, question: Question, age_s: int = 0, limit: int = 65535, **how: object
) -> dns.message.Message:
    return dns.message.from_wire(reply(kept, question, age_s, limit, **how))  # type: ignore[arg-type]


@given(replies(), queries(padded=False), st.integers(0, 300_000))
def test_each_ttl_ages_by_itself_and_everything_else_passes(
    upstream: dns.message.Message, query: dns.message.Message, age_s: int
) -> None:
    query.question = upstream.question
    asked = parse(query.to_wire())
    assert isinstance(asked, Question)
    kept = take(upstream.to_wire(max_size=65535), asked, LOOSE, trusted=True)
    message = given_to(kept, asked, age_s)
    assert message.id == query.id and message.question == query.question
    for section, original in ((message.answer, upstream.answer), (message.authority, upstream.authority)):
        stored = {(s.name, s.rdtype): s for s in original}
        for rrset in section:
            before = stored[(rrset.name, rrset.rdtype)]
            assert rrset == before
            assert rrset.ttl == max(0, before.ttl - age_s)


@given(replies(), queries(), st.integers(512, 1232))
def test_a_reply_never_exceeds_what_the_client_takes(
    upstream: dns.message.Message, query: dns.message.Message, limit: int
) -> None:
    query.question = upstream.question
    asked = parse(query.to_wire())
    assert isinstance(asked, Question)
    kept = take(upstream.to_wire(max_size=65535), asked, LOOSE, trusted=True)
    wire = reply(kept, asked, 0, limit)
    assert len(wire) <= limit
    message = dns.message.from_wire(wire)
    assert message.question == query.question
    assert message.edns == query.edns
    if not message.flags & dns.flags.TC:
        assert message.answer == upstream.answer and message.authority == upstream.authority


def test_opt_of_the_upstream_is_never_kept() -> None:
    query = dns.message.make_query("a.example", "A", use_edns=0, payload=4096)
    said = dns.message.make_response(query, our_payload=1400)
    said.answer.append(dns.rrset.from_text("a.example.", 60, "IN", "A", "192.0.2.1"))
    asked = asking("a.example", use_edns=False)
    kept = take(said.to_wire(), asked, LOOSE, trusted=True)
    assert given_to(kept, asked).edns == -1
    ours = given_to(kept, asking("a.example", use_edns=0, want_dnssec=True))
    assert (ours.edns, ours.payload, bool(ours.ednsflags & dns.flags.DO), ours.options) == (0, 1232, True, ())


def test_records_behind_opt_are_left_out_rather_than_moved() -> None:
    query = dns.message.make_query("a.example", "A", use_edns=0)
    said = dns.message.make_response(query)
    said.answer.append(dns.rrset.from_text("a.example.", 60, "IN", "A", "192.0.2.1"))
    wire = bytearray(said.to_wire())
    wire[11] += 1
    wire += b"\xc0\x0c\0\1\0\1\0\0\0\x05\0\4\1\2\3\4"
    kept = take(bytes(wire), asking("a.example"), LOOSE, trusted=True)
    message = given_to(kept, asking("a.example"))
    assert len(message.answer) == 1 and not message.additional


def test_question_comes_back_in_the_letters_of_each_client() -> None:
    kept = taken("a.Example", "60 A 192.0.2.1")
    for text in ("a.example.", "A.EXAMPLE.", "a.eXaMpLe."):
        assert given_to(kept, asking(text)).question[0].name.to_text() == text


def test_an_owner_written_out_in_our_mixed_case_is_not_shown() -> None:
    asked = asking("a.example")
    said = bytearray(scripted(dns.message.make_query("a.example", "A"), "60 A 192.0.2.1"))
    at = w.scan(said).records[0].start
    said[at : at + 2] = b"\1A\7eXaMpLe\0"
    kept = take(bytes(said), asked, LOOSE, trusted=True)
    assert given_to(kept, asked).answer[0].name.to_text() == "a.example."


@pytest.mark.parametrize(
    ("ttl", "bounds", "kept_s"),
    [
        (5, Bounds(0, 100, 10), 5),
        (5, Bounds(30, 100, 10), 30),
        (500, Bounds(0, 100, 10), 100),
        (0, Bounds(0, 100, 10), 0),
        (0x7FFFFFFF, Bounds(0, 86400, 10), 86400),
    ],
)
def test_ttl_is_clamped_when_stored(ttl: int, bounds: Bounds, kept_s: int) -> None:
    kept = taken("a.example", f"{ttl} A 192.0.2.1", bounds=bounds)
    assert kept.ttl_s == kept_s
    assert given_to(kept, asking("a.example")).answer[0].ttl == kept_s


def test_a_ttl_with_its_top_bit_set_is_large_then_capped() -> None:
    said = bytearray(scripted(dns.message.make_query("a.example", "A"), "60 A 192.0.2.1"))
    at = w.scan(said).records[0].rdata_at - 6
    said[at] = 0x80
    assert take(bytes(said), asking("a.example"), Bounds(), trusted=True).ttl_s == 86_400


@pytest.mark.parametrize(
    ("soa", "bounds", "kept_s"),
    [
        ("example. 3600 2", Bounds(), 2),
        ("example. 2 3600", Bounds(), 2),
        ("example. 3600 3600", Bounds(max_negative_ttl_s=60), 60),
        ("example. 3600 0", Bounds(), 0),
        ("example. 3600 2", Bounds(min_ttl_s=300), 2),
    ],
)
@pytest.mark.parametrize("rcode", ["NXDOMAIN", "NOERROR"])
def test_a_denial_is_kept_by_the_smaller_of_soa_ttl_and_minimum(
    soa: str, bounds: Bounds, kept_s: int, rcode: str
) -> None:
    kept = taken("a.example", soa=soa, rcode=rcode, bounds=bounds)
    assert kept.ttl_s == kept_s
    assert given_to(kept, asking("a.example")).authority[0].ttl == kept_s
    assert kept.denies == (rcode == "NXDOMAIN")


@pytest.mark.parametrize("rcode", ["NXDOMAIN", "NOERROR", "SERVFAIL", "REFUSED"])
def test_without_soa_or_data_nothing_is_kept(rcode: str) -> None:
    assert taken("a.example", rcode=rcode).ttl_s == 0


def test_a_chain_is_kept_as_long_as_its_shortest_link() -> None:
    kept = taken("a.example", "300 CNAME b.example.", "b.example. 2 CNAME c.example.", "c.example. 60 A 192.0.2.1")
    assert (kept.ttl_s, kept.unfinished) == (2, b"")
    order = [s.rdtype for s in given_to(kept, asking("a.example")).answer]
    assert order == [dns.rdatatype.CNAME, dns.rdatatype.CNAME, dns.rdatatype.A]


def test_a_chain_without_its_end_names_where_it_stopped() -> None:
    kept = taken("a.example", "300 CNAME b.example.", "b.example. 2 CNAME c.example.")
    assert kept.unfinished == w.name_from_text("c.example")


def test_a_cname_itself_is_an_answer_to_cname() -> None:
    kept = taken("a.example", "300 CNAME b.example.", rdtype="CNAME")
    assert (kept.ttl_s, kept.unfinished) == (300, b"")


def test_nxdomain_at_the_end_of_a_chain_does_not_deny_its_beginning() -> None:
    kept = taken("a.example", "300 CNAME b.example.", rcode="NXDOMAIN", soa="example. 60 60")
    assert (kept.rcode, kept.denies, kept.ttl_s) == (w.NXDOMAIN, False, 60)


@pytest.mark.parametrize(("links", "good"), [(12, True), (40, False)])
def test_a_chain_of_12_passes_and_of_40_does_not(links: int, good: bool) -> None:
    records = [f"n{i}.example. 60 CNAME n{i + 1}.example." for i in range(links)] + [
        f"n{links}.example. 60 A 192.0.2.1"
    ]
    if good:
        assert taken("n0.example", *records).ttl_s == 60
    else:
        with pytest.raises(Malformed, match="CNAME"):
            taken("n0.example", *records)


def test_a_loop_of_cnames_is_no_answer() -> None:
    with pytest.raises(Malformed, match="CNAME"):
        taken("a.example", "60 CNAME b.example.", "b.example. 60 CNAME a.example.")


def test_another_question_or_a_truncated_reply_is_no_answer() -> None:
    said = scripted(dns.message.make_query("b.example", "A"), "60 A 192.0.2.1")
    with pytest.raises(Malformed, match="another question"):
        take(said, asking("a.example"), LOOSE, trusted=True)
    said = scripted(dns.message.make_query("a.example", "TYPE97"), r"60 TYPE97 \# 0")
    with pytest.raises(Malformed, match="another question"):
        take(said, asking("a.example", "HTTPS"), LOOSE, trusted=True)
    said = scripted(dns.message.make_query("a.example", "A"), "60 A 192.0.2.1", flags=dns.flags.TC)
    with pytest.raises(Malformed, match="not a whole reply"):
        take(said, asking("a.example"), LOOSE, trusted=True)


@pytest.mark.parametrize(
    ("trusted", "options", "shown"),
    [
        (True, {"flags": dns.flags.RD | dns.flags.AD}, True),
        (True, {"use_edns": 0, "want_dnssec": True, "flags": dns.flags.RD}, True),
        (True, {"flags": dns.flags.RD}, False),
        (False, {"flags": dns.flags.RD | dns.flags.AD}, False),
    ],
)
def test_ad_is_for_those_who_ask_and_never_from_plain_udp(
    trusted: bool, options: dict[str, object], shown: bool
) -> None:
    query = dns.message.make_query("a.example", "A")
    asked = asking("a.example", **options)
    kept = take(scripted(query, "60 A 192.0.2.1", flags=dns.flags.AD), asked, LOOSE, trusted=trusted)
    assert bool(given_to(kept, asked).flags & dns.flags.AD) == shown


@pytest.mark.parametrize("edns", [False, 0])
def test_too_long_a_reply_keeps_whole_records_and_says_so(edns: bool | int) -> None:
    kept = taken("a.example", *(f"60 A 192.0.2.{i}" for i in range(1, 100)))
    cut = given_to(kept, asking("a.example", use_edns=edns), limit=512)
    assert cut.flags & dns.flags.TC and 20 < len(cut.answer[0]) < 99
    assert cut.edns == (0 if edns == 0 and edns is not False else -1)


def test_losing_only_additional_records_is_no_truncation() -> None:
    query = dns.message.make_query("a.example", "A")
    said = dns.message.make_response(query)
    said.answer.append(dns.rrset.from_text("a.example.", 60, "IN", "A", "192.0.2.1"))
    said.additional.append(dns.rrset.from_text("b.example.", 60, "IN", "TXT", *(f'"{"x" * 200}{i}"' for i in range(3))))
    kept = take(said.to_wire(), asking("a.example"), LOOSE, trusted=True)
    cut = given_to(kept, asking("a.example"), limit=512)
    assert not cut.flags & dns.flags.TC
    assert cut.answer == said.answer


def test_a_stale_reply_lives_30_seconds_at_most_and_says_why() -> None:
    kept = taken("a.example", "300 A 192.0.2.1", "300 A 192.0.2.2")
    message = given_to(kept, asking("a.example", use_edns=0), 9999, options=reason(3, "late"), stale=True)
    assert message.answer[0].ttl == 30
    assert [o.to_text() for o in message.options] == ["EDE 3 (Stale Answer): late"]


def test_padded_queries_get_replies_in_blocks_of_468_over_tls_only() -> None:
    kept = taken("a.example", "300 A 192.0.2.1")
    asked = asking("a.example", use_edns=0, pad=128)
    assert len(reply(kept, asked, 0, 65535, sealed=True)) % 468 == 0
    assert len(reply(kept, asked, 0, 65535)) < 100
    assert len(reply(kept, asking("a.example", use_edns=0), 0, 65535, sealed=True)) < 100


def test_a_denial_is_valid_for_the_names_below() -> None:
    kept = taken("gone.example", rcode="NXDOMAIN", soa="example. 60 60")
    below = asking("deep.er.gone.example")
    message = given_to(denial_below(kept, below), below, 10)
    assert message.rcode() == dns.rcode.NXDOMAIN
    assert message.question[0].name.to_text() == "deep.er.gone.example."
    assert message.authority[0].to_text() == "example. 50 IN SOA ns.example. mail.example. 1 7200 3600 86400 60"


def test_an_answer_of_our_own_reads_as_any_other() -> None:
    asked = asking("a.example", use_edns=0)
    own = compose(asked, w.NOERROR, [Rr(b"", w.A, 60, bytes([192, 0, 2, 1])), Rr(b"\1b\0", w.A, 5, bytes(4))])
    message = given_to(own, asked)
    assert [s.to_text() for s in message.answer] == ["a.example. 60 IN A 192.0.2.1", "b. 5 IN A 0.0.0.0"]
