"""An answer speaks of what was asked; whatever stands beside it stays here."""

from __future__ import annotations

from typing import Any

import dns.message
import dns.rrset
import pytest

from resolver import wire as w
from resolver.io.fetch import question_for
from resolver.scrub import only_strangers, strangers, without_strangers
from tests.peers.dns import Ask, Peer
from tests.resolver.service_lab import addresses
from tests.resolver.stage import CLIENTS, ede, query

NAME = w.name_from_text("a.test")


def reply(*records: str, authority: tuple[str, ...] = (), asked: str = "a.test") -> bytes:
    made = dns.message.make_response(dns.message.make_query(asked, "A"))
    for section, texts in ((made.answer, records), (made.authority, authority)):
        for text in texts:
            section.append(dns.rrset.from_text(*text.split(" ", 4)))
    return made.to_wire()


def found(*records: str, asked: str = "a.test") -> list[int]:
    wire = reply(*records, asked=asked)
    return strangers(wire, w.scan(wire), w.name_from_text(asked))


def test_what_the_question_leads_to_passes_in_any_order() -> None:
    chain = ("a.test. 60 IN CNAME B.test.", "b.test. 60 IN CNAME c.test.", "c.test. 60 IN A 192.0.2.1")
    assert found(*chain) == found(*reversed(chain)) == []
    tree = ("test. 60 IN DNAME other.", "a.test. 60 IN CNAME a.other.", "a.other. 60 IN A 192.0.2.1")
    assert found(*tree) == []
    signed = "test. 60 IN RRSIG DNAME 13 1 60 20300101000000 20200101000000 1 test. " + "A" * 88
    assert found(*tree, signed) == []


def test_records_of_other_names_are_strangers() -> None:
    assert found("evil.test. 60 IN A 192.0.2.66") == [0]
    assert found("a.test. 60 IN A 192.0.2.1", "b.a.test. 60 IN A 192.0.2.66", "test. 60 IN A 192.0.2.66") == [1, 2]
    assert found("a.test. 60 IN CNAME b.test.", "b.test. 60 IN A 192.0.2.1", "c.test. 60 IN CNAME b.test.") == [2]
    assert found("sub.a.test. 60 IN DNAME other.", "a.test. 60 IN A 192.0.2.1") == [0]


def test_a_loop_of_aliases_ends() -> None:
    assert found("a.test. 60 IN CNAME b.test.", "b.test. 60 IN CNAME a.test.", "c.test. 60 IN A 192.0.2.66") == [2]


def test_an_answer_keeps_its_records_and_its_authority_whole() -> None:
    wire = reply(
        "evil.test. 60 IN A 192.0.2.66",
        "a.test. 60 IN CNAME Mail.b.test.",
        "mail.b.test. 7 IN MX 10 mx.b.test.",
        authority=("b.test. 60 IN SOA ns.b.test. h.b.test. 1 2 3 4 5",),
    )
    kept = dns.message.from_wire(without_strangers(wire, w.scan(wire), question_for(NAME, 15)))
    assert [rrset.to_text() for rrset in (*kept.answer, *kept.authority)] == [
        "a.test. 60 IN CNAME Mail.b.test.",
        "Mail.b.test. 7 IN MX 10 mx.b.test.",
        "b.test. 60 IN SOA ns.b.test. h.b.test. 1 2 3 4 5",
    ]


@pytest.mark.parametrize(
    ("records", "only"),
    [
        ((), False),
        (("a.test. 60 IN A 192.0.2.1", "evil.test. 60 IN A 192.0.2.66"), False),
        (("evil.test. 60 IN A 192.0.2.66", "a.test. 60 IN A 192.0.2.1"), False),
        (("evil.test. 60 IN A 192.0.2.66",), True),
    ],
)
def test_an_answer_for_other_names_alone_is_told_from_one_with_strangers(records: tuple[str, ...], only: bool) -> None:
    wire = reply(*records)
    assert only_strangers(wire, w.scan(wire)) is only


# --- through the resolver --------------------------------------------------------------------------------------------


def speaking(*texts: str) -> Any:
    async def script(a: Ask) -> None:
        made = a.reply()
        made.answer = [dns.rrset.from_text(*text.split(" ", 4)) for text in texts]
        a.answer(made)

    return script


@pytest.mark.parametrize("by", CLIENTS)
async def test_clients_and_cache_see_no_stranger(by: str, chain_of: Any) -> None:
    liar = speaking("evil.test. 60 IN A 10.0.0.1", "a.test. 60 IN A 192.0.2.1")
    async with Peer(liar) as peer, chain_of(peer) as chain:
        for _ in range(2):
            said = await chain.ask(query("a.test"), by)
            assert addresses(said) == ["192.0.2.1"] and len(said.answer) == 1
        assert len(peer.asks) == 1


async def test_an_answer_for_another_name_is_none_and_the_next_upstream_is_asked(chain_of: Any) -> None:
    liar, honest = speaking("evil.test. 60 IN A 192.0.2.66"), speaking("a.test. 60 IN A 192.0.2.1")
    async with Peer(liar) as first, Peer(honest) as second:
        async with chain_of(first, second) as chain:
            assert addresses(await chain.ask(query("a.test"))) == ["192.0.2.1"]
        async with chain_of(first) as chain:
            said = await chain.ask(query("a.test"))
            assert said.rcode() == 2 and not said.answer
            assert "other names" in ede(said)[23]
