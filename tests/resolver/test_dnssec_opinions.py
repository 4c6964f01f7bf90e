"""What is not believed is asked of another upstream, once; who sets CD is told all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest

from config.model import DnsCache, Resolver
from resolver.io.service import ResolverService
from tests.peers.dns import Ask, Peer
from tests.resolver.scripted import ScriptedUpstreams, answer
from tests.resolver.signed_lab import lab_tree, recurse, validating
from tests.resolver.test_dnssec_service import (
    ask,
    is_ad,
    lying,
    reasons,
    replace_address,
    text,
    unsign,
)

GOOD, NO_DNSKEY, BOGUS = "www.good.test", 9, 6
TWO = {"strategy": "failover"}
Lie = Callable[[dns.message.Message], None]


async def strip(a: Ask) -> None:
    """A box on the way that takes every signature away, those of keys and DS too."""
    reply = lab_tree().recurse(a.message)
    unsign(reply)
    a.answer(reply)


def addresses(reply: dns.message.Message) -> list[str]:
    return [rdata.to_text() for rrset in reply.answer if rrset.rdtype == 1 for rdata in rrset]


async def test_what_one_upstream_forged_is_had_of_the_next(tmp_path: Path) -> None:
    forger = Peer(lying(GOOD, replace_address))  # type: ignore[arg-type]
    async with forger, Peer(recurse) as honest, validating(tmp_path, forger, honest, **TWO) as service:
        reply = await ask(service, GOOD)
        assert is_ad(reply) and "192.0.2.66" not in addresses(reply)
        assert len(forger.seen(GOOD, "A")) == len(honest.seen(GOOD, "A")) == 1
        assert is_ad(await ask(service, GOOD))
        assert len(honest.seen(GOOD, "A")) == 1


async def test_keys_that_one_upstream_spoilt_are_had_of_the_next(tmp_path: Path) -> None:
    async with Peer(strip) as box, Peer(recurse) as honest, validating(tmp_path, box, honest, **TWO) as service:
        for name in (GOOD, "www.nsec3.test"):
            reply = await ask(service, name)
            assert is_ad(reply), text(reply)


async def test_what_two_upstreams_forged_is_a_servfail_and_no_third_is_asked(tmp_path: Path) -> None:
    first, second = (Peer(lying(GOOD, replace_address)) for _ in range(2))  # type: ignore[arg-type]
    async with first, second, Peer(recurse) as third, validating(tmp_path, first, second, third, **TWO) as service:
        reply = await ask(service, GOOD)
        assert reply.rcode() == dns.rcode.SERVFAIL and reasons(reply) == [BOGUS]
        assert [str(peer.port) in text(reply) for peer in (first, second, third)] == [True, True, False]
        assert not third.seen(GOOD, "A")


async def test_with_one_upstream_it_is_asked_once(tmp_path: Path) -> None:
    async with Peer(lying(GOOD, replace_address)) as peer, validating(tmp_path, peer) as service:  # type: ignore[arg-type]
        reply = await ask(service, GOOD)
        assert reply.rcode() == dns.rcode.SERVFAIL and reasons(reply) == [BOGUS]
        assert len(peer.seen(GOOD, "A")) == 1


async def test_a_zone_that_two_upstreams_find_broken_is_not_doubted_again_at_once(tmp_path: Path) -> None:
    async with Peer(recurse) as first, Peer(recurse) as second, validating(tmp_path, first, second, **TWO) as service:
        for name in ("www.wrongds.test", "alias.wrongds.test", "nx.wrongds.test"):
            reply = await ask(service, name)
            assert reply.rcode() == dns.rcode.SERVFAIL and reasons(reply) == [NO_DNSKEY]
        for peer in (first, second):
            assert len(peer.seen("wrongds.test", "DNSKEY")) == 1


async def test_a_second_upstream_that_says_nothing_leaves_the_first_reason(tmp_path: Path) -> None:
    async def refuse(a: Ask) -> None:
        a.answer(a.reply(rcode="REFUSED"))

    forger = Peer(lying(GOOD, replace_address))  # type: ignore[arg-type]
    async with forger, Peer(refuse) as deaf, validating(tmp_path, forger, deaf, **TWO) as service:
        reply = await ask(service, GOOD)
        assert reply.rcode() == dns.rcode.SERVFAIL and reasons(reply) == [BOGUS]
        assert "DNSSEC" in text(reply) and "REFUSED" in text(reply)


# --- CD --------------------------------------------------------------------------------------------------------------


async def test_under_cd_what_is_proven_has_ad(tmp_path: Path) -> None:
    async with Peer(recurse) as peer, validating(tmp_path, peer) as service:
        for name in (GOOD, "nx.good.test"):
            for _ in range(2):
                reply = await ask(service, name, cd=True)
                assert is_ad(reply) and reply.flags & dns.flags.CD
        assert not is_ad(await ask(service, "www.plain.test", cd=True))
        assert not is_ad(await ask(service, GOOD, do=False, cd=True))


async def test_under_cd_too_the_true_answer_is_sought(tmp_path: Path) -> None:
    forger = Peer(lying(GOOD, replace_address))  # type: ignore[arg-type]
    async with forger, Peer(recurse) as honest, validating(tmp_path, forger, honest, **TWO) as service:
        reply = await ask(service, GOOD, cd=True)
        assert is_ad(reply) and "192.0.2.66" not in addresses(reply)


async def test_under_cd_what_is_not_believed_is_given_for_a_minute_with_the_reason(tmp_path: Path) -> None:
    async with Peer(recurse) as peer, validating(tmp_path, peer) as service:
        for _ in range(2):
            reply = await ask(service, "www.forged.test", cd=True)
            assert addresses(reply) and not is_ad(reply) and reasons(reply) == [BOGUS]
        (entry,) = [e for e in service.chain.cache if e.answer is not None and e.answer.reason]
        assert entry.expires_at - entry.stored_at == 60
        assert (await ask(service, "www.forged.test")).rcode() == dns.rcode.SERVFAIL


async def test_under_cd_keys_that_cannot_be_had_keep_no_data_back(tmp_path: Path) -> None:
    async def script(a: Ask) -> None:
        a.answer(a.reply(rcode="SERVFAIL") if a.rdtype == "DNSKEY" else lab_tree().recurse(a.message))

    async with Peer(script) as peer, validating(tmp_path, peer) as service:
        assert (await ask(service, GOOD)).rcode() == dns.rcode.SERVFAIL
        reply = await ask(service, GOOD, cd=True)
        assert addresses(reply) and not is_ad(reply) and "could not be fetched" in text(reply)


# --- reasons over a chain --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "told"), [("www.unknown.test.", [1]), ("www.digest.test.", [1, 2])])
async def test_the_reasons_of_both_halves_of_a_chain_are_told(tmp_path: Path, target: str, told: list[int]) -> None:
    async def script(a: Ask) -> None:
        reply = lab_tree().recurse(a.message)
        if a.name == "half.unknown.test.":
            reply.set_rcode(dns.rcode.NOERROR)
            reply.answer = [dns.rrset.from_text(a.name, 60, "IN", "CNAME", target)]
            reply.authority = []
        a.answer(reply)

    async with Peer(script) as peer, validating(tmp_path, peer) as service:
        for _ in range(2):
            reply = await ask(service, "half.unknown.test")
            assert addresses(reply) and reasons(reply) == told


async def test_a_name_below_a_denied_one_has_the_reason_too(tmp_path: Path) -> None:
    async with Peer(recurse) as peer, validating(tmp_path, peer) as service:
        assert reasons(await ask(service, "nx.iter151.test", do=False)) == [27]
        below = await ask(service, "below.nx.iter151.test", do=False)
        assert below.rcode() == dns.rcode.NXDOMAIN and reasons(below) == [27]
        assert not peer.seen("below.nx.iter151.test")


async def test_an_upstream_set_of_one_is_told_whom_to_avoid(tmp_path: Path) -> None:
    """The protocol between resolver and upstreams, without sockets: a second opinion of nobody is the first one's."""
    upstreams = ScriptedUpstreams(lambda query: answer(query, "60 A 192.0.2.1"))
    config = Resolver(dnssec="validate", hosts_files=(), cache=DnsCache(persist=False))
    service = ResolverService(config, state_dir=tmp_path, upstreams=upstreams)
    reply = await ask(service, "example.org")
    assert reply.rcode() == dns.rcode.SERVFAIL
    assert upstreams.asked.count(("example.org.", "A")) == 1
    await service.close()
