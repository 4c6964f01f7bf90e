"""A resolver service with a clock and upstreams that a test sets by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import dns.edns
import dns.flags
import dns.message
import dns.rcode

from config.model import DnsCache, Resolver
from resolver.io.service import ResolverService
from tests.patience import no_hang
from tests.resolver.scripted import ScriptedUpstreams

QUIET = Resolver(hosts_files=(), cache=DnsCache(persist=False))


class Clock:
    """Time that stands still until it is told to pass."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Lab:
    """A resolver over a script, asked the way a client asks."""

    def __init__(self, tmp_path: Path, config: Resolver = QUIET) -> None:
        self.clock = Clock()
        self.upstreams = ScriptedUpstreams()
        self.service = ResolverService(config, state_dir=tmp_path, upstreams=self.upstreams, clock=self.clock)

    async def ask(self, name: str, rdtype: str = "A", *, limit: int = 65535, **options: object) -> dns.message.Message:
        query = dns.message.make_query(name, rdtype, **{"use_edns": 0, **options})  # type: ignore[arg-type]
        return await self.send(query, limit)

    async def send(self, query: dns.message.Message, limit: int = 65535) -> dns.message.Message:
        wire = await self.service.answer(query.to_wire(), limit)
        assert wire is not None
        reply = dns.message.from_wire(wire)
        assert reply.id == query.id
        return reply


def configured(tmp_path: Path, **changes: object) -> Lab:
    return Lab(tmp_path, replace(QUIET, **changes))  # type: ignore[arg-type]


def addresses(reply: dns.message.Message) -> list[str]:
    return [rdata.to_text() for rrset in reply.answer for rdata in rrset if rrset.rdtype in (1, 28)]


def reasons(reply: dns.message.Message) -> list[int]:
    return [int(option.code) for option in reply.options if isinstance(option, dns.edns.EDEOption)]


def reason_texts(reply: dns.message.Message) -> str:
    return " ".join(str(option.text) for option in reply.options if isinstance(option, dns.edns.EDEOption))


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    async with no_hang():
        while not condition():
            await asyncio.sleep(0.002)
