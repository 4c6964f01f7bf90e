"""A walk from the root over scripted servers on loopback addresses of their own, and the comparison beside it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict

import dns.flags
import dns.message
import dns.rrset
import pytest

from config.model import Resolver
from resolver.io.trace import MAX_ALIASES, trace
from resolver.io.upstream_set import UpstreamSet
from resolver.trace import ROOT_HINTS, Hop, Server, Trace, read_reply
from tests.patience import timed
from tests.peers.dns import Ask, Peer, Script

ROOT, TLD, LEAF = "127.0.0.1", "127.0.0.2", "127.0.0.3"
ROOTS = (Server("root.test.", (ROOT,)),)


def refer(a: Ask, zone: str, server: str, glue: str = "", *, ds: bool = False) -> None:
    reply = a.reply()
    reply.authority.append(dns.rrset.from_text(zone, 60, "IN", "NS", server))
    if ds:
        reply.authority.append(dns.rrset.from_text(zone, 60, "IN", "DS", "1 13 2 " + "ab" * 32))
    if glue:
        reply.additional.append(dns.rrset.from_text(server, 60, "IN", "A", glue))
    a.answer(reply)


async def root(a: Ask) -> None:
    refer(a, "example.", "ns.example.", TLD, ds=True)


async def tld(a: Ask) -> None:
    if a.name.startswith("ns.glueless"):
        a.answer(a.reply(f"60 A {LEAF}"))
    elif a.name.endswith("far.example."):
        refer(a, "far.example.", "ns.glueless.example.")
    else:
        refer(a, "leaf.example.", "ns.leaf.example.", LEAF)


async def leaf(a: Ask) -> None:
    if a.name.startswith("alias"):
        a.answer(a.reply("60 CNAME www.leaf.example."))
    elif a.name.startswith("loop"):
        a.answer(a.reply("60 CNAME loop.leaf.example."))
    elif a.name.startswith("chain"):
        number = int(a.name.split(".")[0][5:])
        a.answer(a.reply(f"60 CNAME chain{number + 1}.leaf.example."))
    elif a.name.startswith("gone"):
        a.answer(a.reply(rcode="NXDOMAIN", soa="leaf.example. 60 60"))
    elif a.name.startswith("empty"):
        a.answer(a.reply(soa="leaf.example. 60 60"))
    elif a.name.startswith("up"):
        refer(a, "example.", "ns.example.", TLD)
    else:
        a.answer(a.reply("60 A 192.0.2.9"))


@asynccontextmanager
async def servers(*scripts: Script) -> AsyncIterator[int]:
    """The scripts on 127.0.0.1, .2, .3, all on one port."""
    async with AsyncExitStack() as stack:
        port = 0
        for script, host in zip(scripts, (ROOT, TLD, LEAF), strict=False):
            peer = await stack.enter_async_context(Peer(script, host=host, port=port))
            port = peer.port
        yield port


async def walk(name: str, rdtype: str = "A") -> Trace:
    async with servers(root, tld, leaf) as port:
        return await trace(name, rdtype, roots=ROOTS, port=port, timeout_s=10.0)


async def test_a_walk_shows_every_hop_from_the_root_to_the_answer() -> None:
    found = await walk("www.leaf.example")
    assert [(h.zone, h.server, h.address, h.kind, h.signed) for h in found.hops] == [
        (".", "root.test.", ROOT, "referral", True),
        ("example.", "ns.example.", TLD, "referral", False),
        ("leaf.example.", "ns.leaf.example.", LEAF, "answer", False),
    ]
    assert found.answer == ("www.leaf.example. 60 IN A 192.0.2.9",) and found.outcome == "answer"
    assert all(h.rtt_s > 0 for h in found.hops) and found.took_s >= sum(h.rtt_s for h in found.hops)


async def test_servers_are_asked_without_recursion() -> None:
    flags: list[int] = []

    async def only(a: Ask) -> None:
        flags.append(a.message.flags)
        a.answer(a.reply("60 A 192.0.2.9"))

    async with servers(only) as port:
        await trace("a.test", roots=ROOTS, port=port)
    assert flags and not flags[0] & dns.flags.RD


async def test_an_alias_starts_a_new_walk_and_the_chain_is_the_answer() -> None:
    found = await walk("alias.leaf.example")
    assert [h.kind for h in found.hops] == ["referral", "referral", "alias", "referral", "referral", "answer"]
    assert [line.split()[3] for line in found.answer] == ["CNAME", "A"]


async def test_a_loop_of_aliases_ends() -> None:
    found = await walk("loop.leaf.example")
    assert found.outcome == "lame: aliases that lead back to the name"


async def test_a_long_chain_of_aliases_ends() -> None:
    found = await walk("chain0.leaf.example")
    assert found.outcome == f"failed: more than {MAX_ALIASES} aliases"


@pytest.mark.parametrize(("name", "outcome"), [("gone.leaf.example", "nxdomain"), ("empty.leaf.example", "nodata")])
async def test_a_denial_is_an_end_with_its_soa(name: str, outcome: str) -> None:
    found = await walk(name)
    assert found.outcome == outcome and not found.answer
    assert "SOA" in found.hops[-1].records[0]


async def test_a_referral_upwards_is_lame_not_a_loop() -> None:
    found = await walk("up.leaf.example")
    assert found.outcome.startswith("lame: referral to example.") and len(found.hops) == 3


async def test_a_server_without_glue_is_found_by_a_walk_of_its_own() -> None:
    found = await walk("www.far.example")
    assert found.answer == ("www.far.example. 60 IN A 192.0.2.9",)
    assert [h.kind for h in found.hops].count("answer") == 2


async def test_a_dead_server_is_a_hop_and_the_next_one_is_tried() -> None:
    async with servers(root, tld, leaf) as port:
        found = await trace("www.leaf.example", roots=(Server("dead.test.", ("127.0.0.9", ROOT)),), port=port)
    assert [h.kind for h in found.hops][:2] == ["failed", "referral"]
    assert "refused" in found.hops[0].detail and found.outcome == "answer"


@timed
async def test_the_configured_upstreams_are_compared_beside_the_walk() -> None:
    async def fine(a: Ask) -> None:
        a.answer(a.reply("60 A 192.0.2.9"))

    async with servers(root, tld, leaf) as port, Peer(fine) as one, Peer(fine) as two:
        two.dark = True
        of = UpstreamSet(Resolver(upstreams=(one.upstream, two.upstream), bootstrap=()))
        found = await trace("www.leaf.example", roots=ROOTS, port=port, timeout_s=0.3, upstreams=of)
        await of.close()
    well, ill = found.upstreams
    assert (well.upstream, well.rcode, well.records) == (
        one.upstream.url,
        "NOERROR",
        ("www.leaf.example. A 192.0.2.9",),
    )
    assert ill.failure.startswith("no answer") and not ill.records


async def test_a_trace_is_plain_values() -> None:
    found = await walk("www.leaf.example")
    assert json.loads(json.dumps(asdict(found)))["hops"][0]["zone"] == "."
    assert isinstance(found.hops[0], Hop)


@pytest.mark.parametrize(("name", "rdtype"), [("a" * 64 + ".test", "A"), ("a.test", "NOTYPE")])
async def test_what_is_no_name_or_type_is_a_value_error(name: str, rdtype: str) -> None:
    with pytest.raises(ValueError, match="a"):
        await trace(name, rdtype, roots=ROOTS)


def test_the_thirteen_roots_are_known_with_both_families() -> None:
    assert len(ROOT_HINTS) == 13
    assert all("." in s.addresses[0] and ":" in s.addresses[1] for s in ROOT_HINTS)


def test_a_servfail_says_its_rcode() -> None:
    reply = dns.message.make_response(dns.message.make_query("a.test", "A"))
    reply.set_rcode(2)
    assert read_reply(reply, ".").detail == "SERVFAIL"
