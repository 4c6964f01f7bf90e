"""An upstream set that answers by script: what was asked is kept, what is said is written in zone-file words."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

from config.model import Zone
from resolver.errors import UpstreamsFailed
from resolver.outgoing import Outgoing, compose
from resolver.wire import Scan


@dataclass(frozen=True)
class Reply:
    wire: bytes
    upstream: str = "tls://peer"
    encrypted: bool = True
    layout: Scan | None = None


def answer(
    query: bytes | dns.message.Message, *records: str, rcode: str = "NOERROR", soa: str = "", flags: int = 0
) -> bytes:
    """A reply to `query`: records are "TTL TYPE RDATA" of the name asked or "NAME TTL TYPE RDATA"; soa "ZONE TTL MINIMUM"."""
    message = dns.message.from_wire(query) if isinstance(query, bytes) else query
    reply = dns.message.make_response(message, recursion_available=True)
    reply.flags |= flags
    reply.set_rcode(dns.rcode.from_text(rcode))
    for record in records:
        owner, rest = record.split(" ", 1)
        if owner.isdigit():
            owner, rest = message.question[0].name.to_text(), record
        ttl, rdtype, rdata = rest.split(" ", 2)
        rrset = dns.rrset.from_text(owner, int(ttl), "IN", rdtype, rdata)
        reply.find_rrset(reply.answer, rrset.name, rrset.rdclass, rrset.rdtype, create=True).update(rrset)
    if soa:
        zone, ttl, minimum = soa.split()
        rdata = f"ns.{zone} mail.{zone} 1 7200 3600 86400 {minimum}"
        reply.authority.append(dns.rrset.from_text(zone, int(ttl), "IN", "SOA", rdata))
    return reply.to_wire(max_size=65535)


Script = Callable[[dns.message.Message], Awaitable[bytes] | bytes]


@dataclass
class ScriptedUpstreams:
    """`script` turns a query into a reply; `down` fails every question, `held` keeps them until it is set."""

    script: Script = lambda query: answer(query, "60 A 192.0.2.1")
    encrypted: bool = True
    down: bool = False
    held: asyncio.Event | None = None
    asked: list[tuple[str, str]] = field(default_factory=list)
    zones: list[Zone | None] = field(default_factory=list)
    queries: list[dns.message.Message] = field(default_factory=list)
    begun: set[asyncio.Task[None]] = field(default_factory=set)

    async def ask(self, query: bytes, *, zone: Zone | None, deadline: float, avoid: str = "") -> Reply:
        """The one upstream there is; nobody is left when it is to be avoided."""
        if avoid == Reply.upstream:
            raise UpstreamsFailed(())
        message = dns.message.from_wire(query)
        question = message.question[0]
        self.asked.append((question.name.to_text(), dns.rdatatype.to_text(question.rdtype)))
        self.zones.append(zone)
        self.queries.append(message)
        if self.held is not None:
            await self.held.wait()
        if self.down:
            raise UpstreamsFailed((("tls://peer", "connection refused"),), ede=23)
        said = self.script(message)
        return Reply(said if isinstance(said, bytes) else await said, encrypted=self.encrypted)

    def begin(
        self,
        out: Outgoing,
        *,
        zone: Zone | None,
        deadline: float,
        heard: Callable[[Reply | UpstreamsFailed], None],
        avoid: str = "",
    ) -> object:
        """Its task ends with the test's loop."""

        async def ask() -> None:
            try:
                reply = await self.ask(compose(out, out.id, out.question), zone=zone, deadline=deadline, avoid=avoid)
            except UpstreamsFailed as exc:
                heard(exc)
            else:
                heard(reply)

        task = asyncio.ensure_future(ask())
        self.begun.add(task)
        task.add_done_callback(self.begun.discard)
        return task
