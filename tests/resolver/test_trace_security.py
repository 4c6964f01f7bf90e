"""A walk over the signed tree: each hop says whether DNSSEC vouches for it, down from the anchor (S9)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import dns.name
import pytest

from headrace.commands import trace as command
from resolver.dnssec_chain import Trust
from resolver.io.trace import trace
from resolver.trace import Server, Trace
from tests.peers.dns import Ask
from tests.resolver.signed_lab import lab_tree
from tests.resolver.test_trace import LEAF, ROOTS, TLD, servers

N = dns.name.from_text


async def root(a: Ask) -> None:
    a.answer(lab_tree().ask_zone(N("."), a.message, {N("test."): TLD}))


async def tld(a: Ask) -> None:
    glue = {zone.origin: LEAF for zone in lab_tree().zones}
    a.answer(lab_tree().ask_zone(N("test."), a.message, glue))


async def leaf(a: Ask) -> None:
    origin = lab_tree().above(N(a.name)).origin
    a.answer(lab_tree().ask_zone(origin, a.message, {}))


def anchors() -> Trust:
    return Trust({N("."): [lab_tree().by_origin[N(".")].ds()]})


async def walk(name: str, rdtype: str = "A") -> Trace:
    async with servers(root, tld, leaf) as port:
        return await trace(name, rdtype, roots=ROOTS, port=port, timeout_s=10.0, trust=anchors())


@pytest.mark.parametrize("name", ["www.good.test", "nx.good.test", "a.wild.nsec3.test", "www.ed25519.test"])
async def test_a_signed_zone_is_secure_hop_by_hop(name: str) -> None:
    found = await walk(name)
    assert [hop.security for hop in found.hops] == ["secure", "secure", "secure"], found.hops


@pytest.mark.parametrize(
    ("name", "states", "why"),
    [
        ("www.forged.test", ["secure", "secure", "bogus"], "does not verify"),
        ("www.bare.test", ["secure", "secure", "bogus"], "has no signature"),
        ("www.expired.test", ["secure", "bogus", "bogus"], "expired 2 days ago"),
        ("www.wrongds.test", ["secure", "bogus", "bogus"], "no DNSKEY of wrongds.test. matches DS"),
    ],
)
async def test_a_broken_zone_is_bogus_from_the_hop_that_broke(name: str, states: list[str], why: str) -> None:
    found = await walk(name)
    assert [hop.security for hop in found.hops] == states
    assert why in found.hops[-1].why and found.outcome == "answer"


async def test_an_unsigned_zone_is_insecure_by_proof() -> None:
    found = await walk("www.plain.test")
    assert [hop.security for hop in found.hops] == ["secure", "insecure", "insecure"]


async def test_the_judgement_adds_no_hop_and_without_trust_there_is_none() -> None:
    async with servers(root, tld, leaf) as port:
        plain = await trace("www.good.test", roots=ROOTS, port=port, timeout_s=10.0)
    assert [(hop.zone, hop.security) for hop in plain.hops] == [(".", ""), ("test.", ""), ("good.test.", "")]
    assert [hop.zone for hop in (await walk("www.good.test")).hops] == [hop.zone for hop in plain.hops]


async def test_keys_that_cannot_be_had_leave_a_hop_unjudged() -> None:
    async def silent(a: Ask) -> None:
        if a.rdtype != "DNSKEY":
            await leaf(a)

    async with servers(root, tld, silent) as port:
        found = await trace("www.good.test", roots=ROOTS, port=port, timeout_s=0.2, trust=anchors())
    assert [hop.security for hop in found.hops] == ["secure", "", ""]
    assert "DNSKEY of good.test." in found.hops[-1].why


async def test_the_command_says_it_beside_each_hop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "anchors").write_text(lab_tree().anchors())
    config = tmp_path / "headrace.toml"
    config.write_text('[resolver]\ntrust_anchors = "anchors"\nupstream = []\n')
    roots = (Server("root.test.", ("127.0.0.1",)),)
    async with servers(root, tld, leaf) as port:
        loaded = command.load_or_fail(str(config))
        args = argparse.Namespace(name="www.forged.test", type="A", root=roots[0].addresses[0], port=port)
        walked = await command._walk(loaded, args)
    command._show(walked)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("secure") and "bogus: signature over A of www.forged.test." in lines[3]
    assert json.loads(json.dumps(walked.hops[2].security)) == "bogus"
