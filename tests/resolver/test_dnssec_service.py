"""DNSSEC as clients see it: the signed tree behind a real upstream, honest or not (D23, D24)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import dns.edns
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest

from config.model import DnsCache, Record, Resolver, Zone
from resolver.answer import Answer
from resolver.dnssec_answer import Security
from resolver.io.clock import now
from resolver.io.fetch import question_for
from resolver.io.service import ResolverService
from tests.patience import timed
from tests.peers.dns import Ask, Peer
from tests.peers.signed import DAY, SignedZone, Tree
from tests.resolver.scripted import ScriptedUpstreams, answer
from tests.resolver.signed_lab import BOGUS_NAMES, INSECURE_NAMES, SECURE_NAMES, lab_tree, recurse, validating

T = dns.rdatatype
PROOFS = {T.RRSIG, T.NSEC, T.NSEC3}


async def ask(
    service: ResolverService, name: str, rdtype: str = "A", *, do: bool = True, ad: bool = False, cd: bool = False
) -> dns.message.Message:
    query = dns.message.make_query(name, rdtype, use_edns=0, want_dnssec=do)
    query.flags |= (dns.flags.AD if ad else 0) | (dns.flags.CD if cd else 0)
    return dns.message.from_wire(await service.answer(query.to_wire(), 65535) or b"")


def make(name: str) -> dns.message.Message:
    return dns.message.make_query(name, "A", use_edns=0, want_dnssec=True)


def is_ad(reply: dns.message.Message) -> bool:
    return bool(reply.flags & dns.flags.AD)


def reasons(reply: dns.message.Message) -> list[int]:
    return [int(option.code) for option in reply.options if isinstance(option, dns.edns.EDEOption)]


def text(reply: dns.message.Message) -> str:
    return " ".join(str(option.text) for option in reply.options if isinstance(option, dns.edns.EDEOption))


def types(reply: dns.message.Message) -> set[int]:
    return {rrset.rdtype for section in (reply.answer, reply.authority, reply.additional) for rrset in section}


def lying(name: str, lie: Callable[[dns.message.Message], None], rdtype: str = "") -> Callable[[Ask], object]:
    """The honest tree, but for one name."""

    async def script(a: Ask) -> None:
        reply = lab_tree().recurse(a.message)
        if a.name == name + "." and rdtype in ("", a.rdtype):
            lie(reply)
        a.answer(reply)

    return script


def unsign(reply: dns.message.Message) -> None:
    for section in (reply.answer, reply.authority):
        section[:] = [rrset for rrset in section if rrset.rdtype not in PROOFS]


# --- verdicts -------------------------------------------------------------------------------------------------------


async def test_what_is_signed_down_from_the_root_is_given_with_ad(tmp_path: Path) -> None:
    async with Peer(recurse) as peer, validating(tmp_path, peer) as service:
        for name, rdtype in SECURE_NAMES:
            reply = await ask(service, name, rdtype)
            assert is_ad(reply) and reply.rcode() in (0, 3), (name, rdtype, text(reply))


async def test_what_is_provably_unsigned_is_given_without_ad(tmp_path: Path) -> None:
    async with Peer(recurse) as peer, validating(tmp_path, peer) as service:
        for name, rdtype in INSECURE_NAMES:
            reply = await ask(service, name, rdtype)
            assert not is_ad(reply) and reply.rcode() in (0, 3), (name, rdtype, text(reply))


@pytest.mark.parametrize(("name", "rdtype", "ede"), BOGUS_NAMES)
async def test_what_is_broken_is_a_servfail_that_says_why(tmp_path: Path, name: str, rdtype: str, ede: int) -> None:
    async with Peer(recurse) as peer, validating(tmp_path, peer) as service:
        reply = await ask(service, name, rdtype)
        assert (reply.rcode(), reply.answer, reply.authority) == (dns.rcode.SERVFAIL, [], [])
        assert reasons(reply) == [ede] and "DNSSEC" in text(reply)


@pytest.mark.parametrize(("name", "ede"), [("www.unknown.test", 1), ("www.digest.test", 2), ("nx.iter151.test", 27)])
async def test_what_we_cannot_compute_is_insecure_and_says_so_each_time(tmp_path: Path, name: str, ede: int) -> None:
    async with Peer(recurse) as peer, validating(tmp_path, peer) as service:
        first, cached = await ask(service, name), await ask(service, name)
        assert reasons(first) == reasons(cached) == [ede]
        assert len(peer.seen(name, "A")) == 1


# --- bits and records (D23) -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["www.good.test", "nx.good.test", "nx.nsec3.test", "a.wild.good.test", "www.plain.test"]
)
@pytest.mark.parametrize("first", [True, False])
async def test_only_clients_with_do_get_signatures_whoever_came_first(tmp_path: Path, name: str, first: bool) -> None:
    async with Peer(recurse) as peer, validating(tmp_path, peer) as service:
        for do in (first, not first):
            reply = await ask(service, name, do=do)
            assert bool(types(reply) & PROOFS) == (do and "plain" not in name)


async def test_an_asked_for_signature_type_is_given_without_do(tmp_path: Path) -> None:
    async with Peer(recurse) as peer, validating(tmp_path, peer) as service:
        assert types(await ask(service, "www.good.test", "NSEC", do=False)) == {T.NSEC}
        assert types(await ask(service, "www.good.test", "RRSIG", do=False)) == {T.RRSIG}


@pytest.mark.parametrize(("do", "ad", "told"), [(True, False, True), (False, True, True), (False, False, False)])
async def test_ad_is_for_those_who_ask_for_it(tmp_path: Path, do: bool, ad: bool, told: bool) -> None:
    async with Peer(recurse) as peer, validating(tmp_path, peer) as service:
        assert is_ad(await ask(service, "www.good.test", do=do, ad=ad)) == told


async def test_an_upstreams_ad_is_not_believed(tmp_path: Path) -> None:
    def claim(reply: dns.message.Message) -> None:
        reply.flags |= dns.flags.AD

    async with Peer(lying("www.plain.test", claim)) as peer, validating(tmp_path, peer) as service:  # type: ignore[arg-type]
        assert not is_ad(await ask(service, "www.plain.test"))


async def test_cd_gets_the_data_and_its_failures_are_its_own(tmp_path: Path) -> None:
    async with Peer(recurse) as peer, validating(tmp_path, peer) as service:
        for _ in range(2):
            assert (await ask(service, "www.forged.test")).rcode() == dns.rcode.SERVFAIL
            reply = await ask(service, "www.forged.test", cd=True)
            assert reply.rcode() == 0 and reply.answer and not is_ad(reply) and reply.flags & dns.flags.CD


async def test_under_cd_an_encrypted_upstreams_ad_is_not_passed_on_as_ours(tmp_path: Path) -> None:
    upstreams = ScriptedUpstreams(lambda query: answer(query, "60 A 192.0.2.1", flags=dns.flags.AD), encrypted=True)
    service = ResolverService(
        Resolver(dnssec="validate", hosts_files=(), cache=DnsCache(persist=False)),
        state_dir=tmp_path,
        upstreams=upstreams,
    )
    reply = await ask(service, "www.good.test", cd=True)
    await service.close()
    assert reply.answer and not is_ad(reply)


async def test_upstream_is_asked_with_do_and_cd(tmp_path: Path) -> None:
    async with Peer(recurse) as peer, validating(tmp_path, peer) as service:
        await ask(service, "www.good.test", do=False)
        assert all(a.message.ednsflags & dns.flags.DO and a.message.flags & dns.flags.CD for a in peer.asks)


async def test_off_asks_as_the_client_does_and_validates_nothing(tmp_path: Path) -> None:
    async with Peer(recurse) as peer, validating(tmp_path, peer, dnssec="off") as service:
        assert (await ask(service, "www.forged.test", do=False)).rcode() == 0
        assert [(a.rdtype, bool(a.message.ednsflags & dns.flags.DO)) for a in peer.asks] == [("A", False)]


async def test_unsigned_courtesies_do_not_ride_under_ad(tmp_path: Path) -> None:
    def courtesy(reply: dns.message.Message) -> None:
        reply.authority.append(dns.rrset.from_text("good.test.", 60, "IN", "NS", "ns.evil.example."))
        reply.additional.append(dns.rrset.from_text("ns.evil.example.", 60, "IN", "A", "192.0.2.66"))

    async with Peer(lying("www.good.test", courtesy)) as peer, validating(tmp_path, peer) as service:  # type: ignore[arg-type]
        reply = await ask(service, "www.good.test")
        assert is_ad(reply) and not reply.authority and not reply.additional


# --- liars ----------------------------------------------------------------------------------------------------------


def replace_address(reply: dns.message.Message) -> None:
    for index, rrset in enumerate(reply.answer):
        if rrset.rdtype == T.A:
            reply.answer[index] = dns.rrset.from_text(rrset.name, rrset.ttl, "IN", "A", "192.0.2.66")


def add_address(reply: dns.message.Message) -> None:
    reply.answer[0].add(dns.rdata.from_text("IN", "A", "192.0.2.66"))


def deny_with_another_proof(reply: dns.message.Message) -> None:
    other = lab_tree().recurse(dns.message.make_query("nx.good.test", "A", want_dnssec=True))
    reply.answer, reply.authority = [], other.authority
    reply.set_rcode(dns.rcode.NXDOMAIN)


def deny_with_the_parents_delegation(reply: dns.message.Message) -> None:
    """The NSEC at `good.test` in `test` covers all below it in order, and speaks of none of it (RFC 6840 4.1)."""
    proof = lab_tree().recurse(dns.message.make_query("good.test.test", "A", want_dnssec=True))
    zone = lab_tree().by_origin[dns.name.from_text("test.")]
    reply.answer = []
    reply.authority = [
        *zone.with_signatures(zone.origin, T.SOA),
        *zone.with_signatures(dns.name.from_text("good.test."), T.NSEC),
        *zone.with_signatures(zone.origin, T.NSEC),
    ]
    reply.set_rcode(dns.rcode.NXDOMAIN)
    assert proof


def sign_by_a_neighbour(reply: dns.message.Message) -> None:
    """A good signature, moved under a name of another zone."""
    other = lab_tree().recurse(dns.message.make_query("www.rsa.test", "A", want_dnssec=True))
    owner = reply.question[0].name
    reply.answer = [dns.rrset.from_rdata_list(owner, rrset.ttl, list(rrset)) for rrset in other.answer]


def expand_a_wildcard(reply: dns.message.Message) -> None:
    """The wildcard's records for a name that exists."""
    other = lab_tree().recurse(dns.message.make_query("a.wild.good.test", "A", want_dnssec=True))
    owner = reply.question[0].name
    reply.answer = [dns.rrset.from_rdata_list(owner, rrset.ttl, list(rrset)) for rrset in other.answer]
    reply.authority = other.authority


def lead_astray(reply: dns.message.Message) -> None:
    """A CNAME that claims to follow from the DNAME beside it, and leads to another signed name."""
    other = lab_tree().recurse(dns.message.make_query("www.rsa.test", "A", want_dnssec=True))
    dname = [rrset for rrset in reply.answer if T.DNAME in (rrset.rdtype, rrset.covers)]
    made = dns.rrset.from_text(reply.question[0].name, 300, "IN", "CNAME", "www.rsa.test.")
    reply.answer = [*dname, made, *other.answer]


LIES = [
    ("www.tree.nsec3.test", lead_astray),
    ("www.good.test", replace_address),
    ("www.good.test", add_address),
    ("www.good.test", unsign),
    ("www.good.test", deny_with_another_proof),
    ("www.good.test", deny_with_the_parents_delegation),
    ("www.good.test", sign_by_a_neighbour),
    ("www.good.test", expand_a_wildcard),
    ("www.nsec3.test", unsign),
    ("nx.good.test", unsign),
    ("nx.nsec3.test", unsign),
    ("a.wild.good.test", unsign),
    ("www.good.test", lambda reply: reply.answer.clear()),
    ("nx.good.test", lambda reply: reply.authority.clear()),
]


@pytest.mark.parametrize(("name", "lie"), LIES)
async def test_a_lie_about_a_signed_zone_is_not_passed_on(
    tmp_path: Path, name: str, lie: Callable[[dns.message.Message], None]
) -> None:
    async with Peer(lying(name, lie)) as peer, validating(tmp_path, peer) as service:  # type: ignore[arg-type]
        reply = await ask(service, name)
        assert reply.rcode() == dns.rcode.SERVFAIL and not reply.answer, reply


@pytest.mark.parametrize("lie", [unsign, lambda reply: reply.answer.clear(), deny_with_another_proof])
async def test_a_zone_cannot_be_made_unsigned_by_hiding_its_ds(
    tmp_path: Path, lie: Callable[[dns.message.Message], None]
) -> None:
    async def script(a: Ask) -> None:
        reply = lab_tree().recurse(a.message)
        if a.name == "good.test." and a.rdtype == "DS":
            lie(reply)
        elif a.name == "www.good.test.":
            replace_address(reply)
            unsign(reply)
        a.answer(reply)

    async with Peer(script) as peer, validating(tmp_path, peer) as service:
        assert (await ask(service, "www.good.test")).rcode() == dns.rcode.SERVFAIL


async def test_a_second_cname_beside_the_signed_one_is_no_answer(tmp_path: Path) -> None:
    """dnspython keeps the last of two CNAMEs, so the message is written by hand."""

    async def script(a: Ask) -> None:
        reply = lab_tree().recurse(a.message)
        if a.name != "alias.good.test.":
            a.answer(reply)
            return
        wire = bytearray(reply.to_wire())
        evil = b"\xc0\x0c\0\5\0\1\0\0\0\x3c\0\6\4evil\0"
        end = len(a.wire) - 11  # behind the question: the query ends with its OPT, which our padding-free UDP has bare
        wire[end:end] = evil
        wire[7] += 1
        a.answer(bytes(wire))

    async with Peer(script) as peer, validating(tmp_path, peer) as service:
        reply = await ask(service, "alias.good.test", "CNAME")
        assert reply.rcode() == dns.rcode.SERVFAIL


# --- cost -----------------------------------------------------------------------------------------------------------


async def test_a_known_zone_costs_no_further_look_up_and_a_cached_answer_no_judgement(tmp_path: Path) -> None:
    async with Peer(recurse) as peer, validating(tmp_path, peer) as service:
        await ask(service, "www.good.test")
        before = len(peer.asks)
        await ask(service, "deep.ent.good.test")
        assert len(peer.asks) == before + 1
        assert service.stats()["dnssec_secure"] == 2
        await ask(service, "deep.ent.good.test")
        assert len(peer.asks) == before + 1 and service.stats()["dnssec_secure"] == 2


async def test_a_cold_chain_is_six_questions(tmp_path: Path) -> None:
    async with Peer(recurse) as peer, validating(tmp_path, peer) as service:
        assert is_ad(await ask(service, "www.good.test"))
        assert sorted((a.name, a.rdtype) for a in peer.asks) == [
            (".", "DNSKEY"), ("good.test.", "DNSKEY"), ("good.test.", "DS"),
            ("test.", "DNSKEY"), ("test.", "DS"), ("www.good.test.", "A"),
        ]  # fmt: skip


async def test_answers_that_need_the_same_keys_ask_for_them_once(tmp_path: Path) -> None:
    async with Peer(recurse) as peer, validating(tmp_path, peer) as service:
        names = ["www", "alias", "deep.ent", "a.wild", "nx", "x.wildalias"]
        replies = await asyncio.gather(*(ask(service, f"{n}.good.test") for n in names))
        assert all(map(is_ad, replies))
        assert len(peer.seen("good.test", "DNSKEY")) == 1 and len(peer.seen("", "DNSKEY")) <= 1


async def test_keys_that_cannot_be_fetched_are_a_failed_upstream_not_a_bogus_zone(tmp_path: Path) -> None:
    async def script(a: Ask) -> None:
        if a.rdtype == "DNSKEY" and a.name == "good.test.":
            a.answer(a.reply(rcode="SERVFAIL"))
        else:
            a.answer(lab_tree().recurse(a.message))

    async with Peer(script) as peer, validating(tmp_path, peer) as service:
        reply = await ask(service, "www.good.test")
        assert reply.rcode() == dns.rcode.SERVFAIL and reasons(reply) == [23]
        assert "DNSKEY of good.test." in text(reply)


@timed
async def test_a_huge_answer_is_judged_without_holding_up_others(tmp_path: Path) -> None:
    zone = SignedZone("z.", "\n".join(f"big A 10.1.{n >> 8}.{n & 255}" for n in range(1500)) + "\nwww A 192.0.2.1")
    tree = Tree([SignedZone("."), zone])

    async def script(a: Ask) -> None:
        a.answer(tree.recurse(a.message))

    beats = 0

    async def heartbeat() -> None:
        nonlocal beats
        while True:
            await asyncio.sleep(0.001)
            beats += 1

    async with (
        Peer(script) as peer,
        validating(tmp_path, peer, anchors=tree.anchors(), rebind_protection=False) as service,
    ):
        answer = Answer(tree.recurse(make("big.z")).to_wire(max_size=65535), tuple(range(1501)), 300, 0)
        await ask(service, "www.z")
        judging = service._validator._judge(answer, question_for(b"\3big\1z\0", 1, do=True), now() + 5)  # type: ignore[union-attr]
        beating = asyncio.ensure_future(heartbeat())
        verdict = await judging
        beating.cancel()
        assert verdict.security is Security.SECURE
        assert beats >= 5  # on the loop it would be one: the pause after reading


# --- modes, islands, clocks -----------------------------------------------------------------------------------------


async def test_log_lets_everything_pass_and_says_it_once_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Peer(recurse) as peer, validating(tmp_path, peer, dnssec="log") as service:
        with caplog.at_level(logging.WARNING, "headrace.resolver"):
            for name in ("www", "alias", "a.wild"):
                reply = await ask(service, f"{name}.expired.test")
                assert reply.rcode() == 0 and reply.answer and not is_ad(reply)
        assert is_ad(await ask(service, "www.good.test"))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1 and "expired.test. is bogus" in lines[0] and "only logged" in lines[0]


async def test_a_clock_that_is_years_off_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def then() -> float:
        return time.time() - 2 * 365 * DAY

    async with Peer(recurse) as peer, validating(tmp_path, peer, wall=then) as service:
        with caplog.at_level(logging.WARNING, "headrace.resolver"):
            for name in ("www.good.test", "www.rsa.test", "nothing"):
                reply = await ask(service, name)
                assert reply.rcode() == dns.rcode.SERVFAIL and reasons(reply) == [8]
    assert ["clock says" in record.getMessage() for record in caplog.records] == [True]


async def test_an_island_of_trust_is_validated_below_an_unsigned_zone(tmp_path: Path) -> None:
    anchors = lab_tree().anchors() + lab_tree().anchors("island.plain.test.")
    async with Peer(recurse) as peer, validating(tmp_path, peer, anchors=anchors) as service:
        assert is_ad(await ask(service, "www.island.plain.test"))
        assert not is_ad(await ask(service, "www.plain.test"))


async def test_a_split_horizon_zone_is_insecure_unless_it_says_otherwise(tmp_path: Path) -> None:
    async def private(a: Ask) -> None:
        a.answer(a.reply("60 A 10.0.0.1"))

    async with Peer(recurse) as peer, Peer(private) as inside:
        zone = Zone("good.test", (inside.upstream,))
        async with validating(tmp_path, peer, zones=(zone,)) as service:
            reply = await ask(service, "www.good.test")
            assert reply.rcode() == 0 and reply.answer and not is_ad(reply)
        async with validating(tmp_path, peer, zones=(replace(zone, dnssec="validate"),)) as service:
            assert (await ask(service, "www.good.test")).rcode() == dns.rcode.SERVFAIL


async def test_the_ds_of_a_split_horizon_zone_is_asked_of_the_parents_servers(tmp_path: Path) -> None:
    async with Peer(recurse) as peer, Peer(recurse) as inside:
        zone = Zone("good.test", (inside.upstream,), "validate")
        async with validating(tmp_path, peer, zones=(zone,)) as service:
            assert is_ad(await ask(service, "www.good.test"))
        assert peer.seen("good.test", "DS") and not inside.seen("good.test", "DS")
        assert inside.seen("good.test", "DNSKEY") and not peer.seen("good.test", "DNSKEY")


async def test_a_local_alias_into_a_signed_zone_is_judged_and_has_no_ad(tmp_path: Path) -> None:
    records = (Record("mine.test", "CNAME", "www.good.test"), Record("bad.test", "CNAME", "www.forged.test"))
    async with Peer(recurse) as peer, validating(tmp_path, peer, records=records) as service:
        reply = await ask(service, "mine.test")
        assert reply.rcode() == 0 and len(reply.answer) >= 2 and not is_ad(reply)
        assert (await ask(service, "bad.test")).rcode() == dns.rcode.SERVFAIL


async def test_a_bogus_answer_is_not_bridged_by_an_old_one(tmp_path: Path) -> None:
    honest = True

    async def script(a: Ask) -> None:
        reply = lab_tree().recurse(a.message)
        if a.name == "www.good.test." and not honest:
            replace_address(reply)
        a.answer(reply)

    cache = DnsCache(persist=False, max_ttl_s=1)
    async with Peer(script) as peer, validating(tmp_path, peer, cache=cache) as service:
        assert is_ad(await ask(service, "www.good.test"))
        honest = False
        await asyncio.sleep(1.1)
        assert (await ask(service, "www.good.test")).rcode() == dns.rcode.SERVFAIL


async def test_answers_taken_on_trust_are_not_given_once_validation_is_on(tmp_path: Path) -> None:
    async with Peer(recurse) as peer, validating(tmp_path, peer, dnssec="off") as service:
        assert (await ask(service, "www.forged.test")).rcode() == 0
        service.reconfigure(replace(service._config, dnssec="validate"))
        assert (await ask(service, "www.forged.test")).rcode() == dns.rcode.SERVFAIL


async def test_what_was_judged_from_other_anchors_is_judged_again(tmp_path: Path) -> None:
    more = tmp_path / "more"
    more.write_text(lab_tree().anchors() + lab_tree().anchors("island.plain.test."))
    async with Peer(recurse) as peer, validating(tmp_path, peer) as service:
        assert not is_ad(await ask(service, "www.island.plain.test"))
        service.reconfigure(replace(service._config, trust_anchors=str(more)))
        assert is_ad(await ask(service, "www.island.plain.test"))


async def test_a_ttl_never_outlives_its_signature(tmp_path: Path) -> None:
    signed_at = lab_tree().by_origin[dns.name.root].at

    def wall() -> float:
        return signed_at + 7 * DAY - 20

    async with Peer(recurse) as peer, validating(tmp_path, peer, wall=wall) as service:
        reply = await ask(service, "www.good.test")
        assert is_ad(reply) and all(rrset.ttl <= 20 for rrset in reply.answer)
