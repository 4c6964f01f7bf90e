"""Upstreams that are played by peers of the tests, and questions to them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import dns.edns
import dns.flags
import dns.message

from config.model import DnsUpstream, Resolver
from resolver.io.clock import now
from resolver.io.run import Reply
from resolver.io.upstream_set import UpstreamSet
from tests.peers.dns import Ask, Peer

GOOD = "60 A 192.0.2.1"
KINDS = ["udp", "tcp", "tls", "https", "quic", "h3"]
STREAMS = ["tcp", "tls", "https", "quic", "h3"]
SEALED = ("tls", "https", "quic", "h3")


async def good(ask: Ask) -> None:
    ask.answer(ask.reply(GOOD))


def query(name: str, rdtype: str = "A", **kw: Any) -> bytes:
    return dns.message.make_query(name, rdtype, use_edns=0, **kw).to_wire()


@asynccontextmanager
async def asking(*peers: Peer | DnsUpstream, **kw: Any) -> AsyncIterator[UpstreamSet]:
    upstreams = tuple(p.upstream if isinstance(p, Peer) else p for p in peers)
    made = UpstreamSet(Resolver(upstreams=upstreams, strategy=kw.pop("strategy", "failover"), bootstrap=(), **kw))
    try:
        yield made
    finally:
        await made.close()


async def ask(of: UpstreamSet, name: str, rdtype: str = "A", within_s: float = 20.0, **kw: Any) -> Reply:
    return await of.ask(query(name, rdtype, **kw), zone=None, deadline=now() + within_s)


def addresses(reply: Reply) -> list[str]:
    return [r.to_text() for rrset in dns.message.from_wire(reply.wire).answer for r in rrset]
