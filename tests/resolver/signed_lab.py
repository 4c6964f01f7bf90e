"""The signed tree that validation is tried on: every way to be right, to be unsigned and to be wrong, one zone each."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from config.model import DnsCache, Resolver
from resolver.io.service import ResolverService
from resolver.io.upstream_set import UpstreamSet
from tests.peers.dns import Ask, Peer
from tests.peers.signed import DAY, SignedZone, Tree

COMMON = """\
www A 192.0.2.1
www TXT "some text"
alias CNAME www
deep.ent A 192.0.2.2
*.wild A 192.0.2.3
*.wildalias CNAME www
out CNAME www.plain.test.
away CNAME www.good.test.
gone CNAME nothing.good.test.
sick CNAME www.forged.test.
tree DNAME good.test.
@ MX 10 www
_svc SRV 1 1 443 WWW"""


def zone(label: str, **how: object) -> SignedZone:
    return SignedZone(f"{label}.test.", COMMON, **how)  # type: ignore[arg-type]


@functools.cache
def lab_tree() -> Tree:
    chain = "\n".join(f"c{n} CNAME c{n + 1}.{'good' if n % 2 else 'nsec3'}.test." for n in range(8))
    good = SignedZone("good.test.", COMMON + "\n" + chain + "\nc8 A 192.0.2.8")
    nsec3 = SignedZone("nsec3.test.", COMMON + "\n" + chain + "\nc8 A 192.0.2.8", denial="nsec3", salt=b"\xab\xcd")
    return Tree(
        [
            SignedZone("."),
            SignedZone("test."),
            good,
            nsec3,
            zone("optout", denial="optout"),
            SignedZone("unsigned.optout.test.", COMMON, signed=False),
            SignedZone("signed.optout.test.", COMMON),
            SignedZone("plain.test.", COMMON, signed=False),
            SignedZone("island.plain.test.", COMMON, number=1),
            zone("expired", inception=-9 * DAY, expiration=-2 * DAY),
            zone("future", inception=3 * DAY),
            zone("forged", forged=frozenset({"www A"})),
            zone("stripped", stripped=frozenset({"*"})),
            zone("bare", stripped=frozenset({"www A", "www TXT"})),
            zone("wrongds", wrong_ds=True),
            zone("nosoasig", stripped=frozenset({"@ SOA"})),
            zone("noproof", unlisted=frozenset({"nx A", "www AAAA", "a.wild A"})),
            zone("rsa", algorithm=8, number=2),
            zone("rsa512", algorithm=10),
            zone("rsa1", algorithm=5, number=2),
            zone("p384", algorithm=14),
            zone("ed25519", algorithm=15),
            zone("ed448", algorithm=16),
            zone("unknown", claimed_algorithm=200),
            zone("digest", claimed_digest=99),
            zone("iter150", denial="nsec3", iterations=150),
            zone("iter151", denial="nsec3", iterations=151),
        ]
    )


async def recurse(ask: Ask) -> None:
    ask.answer(lab_tree().recurse(ask.message))


SECURE_NAMES = [
    ("www.good.test", "A"), ("www.good.test", "TXT"), ("alias.good.test", "A"), ("good.test", "MX"), ("good.test", "SOA"),
    ("good.test", "DNSKEY"), ("good.test", "DS"), ("good.test", "NS"), ("test", "DNSKEY"), (".", "DNSKEY"), (".", "NS"),
    ("deep.ent.good.test", "A"), ("ent.good.test", "A"), ("a.wild.good.test", "A"), ("a.b.wild.good.test", "A"),
    ("a.wild.good.test", "AAAA"), ("x.wildalias.good.test", "A"), ("nx.good.test", "A"), ("a.b.nx.good.test", "A"),
    ("www.good.test", "AAAA"), ("www.good.test", "DS"), ("alias.good.test", "CNAME"), ("gone.nsec3.test", "A"),
    ("away.nsec3.test", "A"), ("www.tree.nsec3.test", "A"), ("_svc.good.test", "SRV"), ("c0.good.test", "A"),
    ("www.nsec3.test", "A"), ("a.wild.nsec3.test", "A"), ("a.wild.nsec3.test", "AAAA"), ("nx.nsec3.test", "A"),
    ("ent.nsec3.test", "A"), ("www.nsec3.test", "AAAA"), ("nsec3.test", "DS"), ("www.optout.test", "A"),
    ("www.optout.test", "AAAA"), ("www.signed.optout.test", "A"), ("www.rsa.test", "A"), ("www.rsa512.test", "A"),
    ("www.p384.test", "A"), ("www.ed25519.test", "A"), ("www.ed448.test", "A"), ("nx.iter150.test", "A"),
    ("nx.test", "A"), ("nothing", "A"), ("plain.test", "DS"),
]  # fmt: skip
INSECURE_NAMES = [
    ("www.plain.test", "A"), ("nx.plain.test", "A"), ("www.plain.test", "AAAA"), ("out.good.test", "A"),
    ("www.unsigned.optout.test", "A"), ("nx.unsigned.optout.test", "A"), ("www.island.plain.test", "A"),
    ("www.unknown.test", "A"), ("www.digest.test", "A"), ("nx.iter151.test", "A"), ("nx.optout.test", "A"),
]  # fmt: skip
BOGUS_NAMES = [
    ("www.expired.test", "A", 7), ("www.future.test", "A", 8), ("www.forged.test", "A", 6), ("www.stripped.test", "A", 10),
    ("www.bare.test", "A", 10), ("www.wrongds.test", "A", 9), ("nx.noproof.test", "A", 12), ("www.noproof.test", "AAAA", 12),
    ("a.wild.noproof.test", "A", 12), ("nx.nosoasig.test", "A", 10), ("sick.good.test", "A", 6),
]  # fmt: skip


@asynccontextmanager
async def validating(directory: Path, *peers: Peer, **changes: Any) -> AsyncIterator[ResolverService]:
    """A resolver that trusts the tree's root and forwards to the peers."""
    anchors = directory / "anchors"
    anchors.write_text(changes.pop("anchors", "") or lab_tree().anchors())
    wall = changes.pop("wall", time.time)
    settings = {"dnssec": "validate", "trust_anchors": str(anchors), "cache": DnsCache(persist=False)} | changes
    config = Resolver(upstreams=tuple(p.upstream for p in peers), bootstrap=(), hosts_files=(), **settings)
    upstreams = UpstreamSet(config)
    service = ResolverService(config, state_dir=directory, upstreams=upstreams, wall=wall)
    try:
        yield service
    finally:
        await service.close()
        await upstreams.close()
