"""Walk from the root to the answer, one server a hop, and put the same question to the configured upstreams beside it.

Theory: the walk is one task of its caller, strictly in sequence, bounded in hops and time. Servers of one zone are tried
in turn until one gives a usable reply; a zone whose servers have no glue costs a walk for the server's address.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import dns.exception
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype

from resolver import wire as w
from resolver.io.addresses import AddressBook
from resolver.io.channel import Clock, Failure
from resolver.io.clock import now as boottime
from resolver.io.tcp import tcp_channel
from resolver.io.udp import UdpChannel
from resolver.io.upstream_set import UpstreamSet
from resolver.outgoing import Outgoing, give_back
from resolver.trace import ROOT_HINTS, Hop, Reading, Sample, Server, Trace, read_reply, sample

if TYPE_CHECKING:
    from resolver.dnssec_chain import Need, Trust

MAX_HOPS = 48  # of one trace, its side walks for server addresses included
MAX_ALIASES = 8
MAX_DEPTH = 3  # walks within walks
SERVERS_TRIED = 3  # of one zone


async def trace(
    name: str,
    rdtype: str = "A",
    *,
    roots: Sequence[Server] = ROOT_HINTS,
    port: int = 53,
    timeout_s: float = 2.0,
    upstreams: UpstreamSet | None = None,
    trust: Trust | None = None,
    clock: Clock = boottime,
    wall: Clock = time.time,
) -> Trace:
    """The way from the root to the answer for `name`. `timeout_s` is for each server, and for each of `upstreams`.

    With `trust` each hop is judged by DNSSEC at the time of `wall`, which asks the servers met for their DS and DNSKEY.
    Raises ValueError for what is no name or type; everything that the network does is told in the hops.
    """
    try:
        target = dns.name.from_text(name)
        dns.rdatatype.from_text(rdtype)
    except (dns.exception.DNSException, ValueError) as exc:
        raise ValueError(f"{name} {rdtype}: {exc}".lower()) from exc
    begin = clock()
    walk = _Walk(tuple(roots), port, timeout_s, clock)
    side_by_side = asyncio.ensure_future(_compare(upstreams, target, rdtype, clock() + timeout_s))
    try:
        end = await walk.follow(target.to_text(), rdtype, 0)
        if trust is not None:
            await walk.judge(trust, wall())
        samples = await side_by_side
    finally:
        side_by_side.cancel()
    took_s = clock() - begin
    return Trace(target.to_text(), rdtype.upper(), tuple(walk.hops), end.records, _outcome(end), took_s, samples)


@dataclass
class _Walk:
    roots: tuple[Server, ...]
    port: int
    timeout_s: float
    clock: Clock
    hops: list[Hop] = field(default_factory=list)
    asked: list[tuple[str, str, bytes]] = field(default_factory=list)  # of each hop: name, type, reply
    served: dict[dns.name.Name, str] = field(default_factory=dict)

    async def judge(self, trust: Trust, wall: float) -> None:
        """Adds to each hop what DNSSEC says of it."""
        from resolver.io.trace_security import TraceSecurity  # 0.1 s, for those who want it

        async def exchange(address: str, need: Need) -> bytes | None:
            reply = await self._exchange(
                address, need.name.to_text(), dns.rdatatype.to_text(dns.rdatatype.RdataType.make(need.type))
            )
            return None if isinstance(reply, Failure) else reply

        security = TraceSecurity(trust, exchange, self.served, self.clock(), wall)
        for index, (hop, asked) in enumerate(zip(self.hops, self.asked, strict=True)):
            if hop.kind not in ("failed", "lame"):
                self.hops[index] = await security.of(hop, asked)

    async def follow(self, name: str, rdtype: str, depth: int) -> Reading:
        """The last reading, aliases followed; its records are the whole chain."""
        chain: tuple[str, ...] = ()
        for _ in range(MAX_ALIASES):
            end = await self._descend(name, rdtype, depth)
            chain += end.records if end.kind in ("answer", "alias") else ()
            if end.kind != "alias":
                return replace(end, records=chain)
            name = end.target
        return Reading("failed", chain, detail=f"more than {MAX_ALIASES} aliases")

    async def _descend(self, name: str, rdtype: str, depth: int) -> Reading:
        zone, servers = ".", self.roots
        while len(self.hops) < MAX_HOPS:
            reading = await self._ask_zone(zone, servers, name, rdtype, depth)
            if reading.kind != "referral":
                return reading
            zone, servers = reading.zone, reading.servers
        return Reading("failed", detail=f"more than {MAX_HOPS} servers asked")

    async def _ask_zone(self, zone: str, servers: Sequence[Server], name: str, rdtype: str, depth: int) -> Reading:
        """The first usable reply of a zone's servers; those with addresses at hand come first."""
        reading = Reading("failed", detail=f"no server of {zone} could be asked")
        for server in sorted(servers, key=lambda s: not s.addresses)[:SERVERS_TRIED]:
            addresses = server.addresses or await self._addresses(server.name, depth)
            for address in addresses[:2]:
                reading = await self._ask(zone, server.name, address, name, rdtype)
                if reading.kind not in ("failed", "lame"):
                    return reading
        return reading

    async def _addresses(self, server: str, depth: int) -> tuple[str, ...]:
        if depth >= MAX_DEPTH or len(self.hops) >= MAX_HOPS:
            return ()
        end = await self.follow(server, "A", depth + 1)
        return tuple(line.rsplit(" ", 1)[1] for line in end.records if " A " in line)

    async def _ask(self, zone: str, server: str, address: str, name: str, rdtype: str) -> Reading:
        begin = self.clock()
        reply = await self._exchange(address, name, rdtype)
        rtt_s = self.clock() - begin
        wire = b"" if isinstance(reply, Failure) else reply
        reading, rcode = self._read(reply, zone)
        if reading.kind not in ("failed", "lame"):
            self.served[dns.name.from_text(zone)] = address
        self.asked.append((name, rdtype, wire))
        self.hops.append(
            Hop(zone, server, address, rtt_s, reading.kind, rcode, reading.records, reading.signed, reading.detail)
        )
        return reading

    @staticmethod
    def _read(reply: bytes | Failure, zone: str) -> tuple[Reading, str]:
        """The reading of a reply, and its rcode."""
        if isinstance(reply, Failure):
            return Reading("failed", detail=reply.reason), ""
        try:
            message = dns.message.from_wire(reply)
        except dns.exception.DNSException as exc:
            return Reading("failed", detail=f"malformed reply: {exc}".lower()), ""
        return read_reply(message, zone), dns.rcode.to_text(message.rcode())

    async def _exchange(self, address: str, name: str, rdtype: str) -> bytes | Failure:
        """One question without recursion; the channel resends, falls back to TCP and to no EDNS by itself."""
        book = AddressBook(address, (address,), _literals_only, self.clock)
        channel = UdpChannel(book, self.port, tcp_channel(book, self.port, clock=self.clock), clock=self.clock)
        heard: asyncio.Future[bytes | Failure] = asyncio.get_running_loop().create_future()
        question = dns.name.from_text(name).to_wire() or b""
        question += dns.rdatatype.from_text(rdtype).to_bytes(2) + w.IN.to_bytes(2)
        out = Outgoing(0, 0, question, do=True)
        try:
            channel.ask(out, self.clock() + self.timeout_s, _into(heard))
            result = await heard
            return result if isinstance(result, Failure) else give_back(result, out)
        finally:
            await channel.close()


async def _compare(
    upstreams: UpstreamSet | None, target: dns.name.Name, rdtype: str, deadline: float
) -> tuple[Sample, ...]:
    if upstreams is None:
        return ()
    query = dns.message.make_query(target, rdtype, use_edns=0).to_wire()
    return tuple(_sample(*heard) for heard in await upstreams.each(query, deadline=deadline))


def _sample(upstream: str, took_s: float, result: bytes | Failure) -> Sample:
    if isinstance(result, Failure):
        return Sample(upstream, took_s, failure=result.reason)
    try:
        return sample(upstream, took_s, dns.message.from_wire(result))
    except dns.exception.DNSException as exc:
        return Sample(upstream, took_s, failure=f"malformed reply: {exc}".lower())


def _outcome(end: Reading) -> str:
    return f"{end.kind}: {end.detail}" if end.detail else end.kind


def _into(heard: asyncio.Future[bytes | Failure]) -> Callable[[bytes | Failure], None]:
    def done(result: bytes | Failure) -> None:
        if not heard.done():
            heard.set_result(result)

    return done


async def _literals_only(host: str) -> tuple[str, ...]:
    raise OSError(f"{host} is no address")
