"""The resolver between clients and scripted upstreams, for the cases: every client transport, every upstream transport."""

from __future__ import annotations

import asyncio
import base64
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dns.edns
import dns.flags
import dns.message

from config.model import DnsCache, DnsUpstream, Listen, Resolver, Tickets
from resolver.io.channel import Clock
from resolver.io.clock import now as boottime
from resolver.io.doh_server import DohReply, DohService
from resolver.io.doq_listener import listen_doq
from resolver.io.listen import listen_dns
from resolver.io.service import ResolverService
from resolver.io.tls_client import client_context
from resolver.io.upstream_set import UpstreamSet
from tests.patience import HANG_S
from tests.peers.authority import Authority
from tests.peers.dns import HOST, Ask, Peer
from tests.peers.doq_client import doq_client

GOOD = "60 A 198.51.100.1"
GOOD_IP = ["198.51.100.1"]
EVIL = "60 A 203.0.113.66"
KINDS = ["udp", "tcp", "tls", "https", "quic"]
"""Transports to an upstream."""
CLIENTS = ["udp", "tcp", "tls"]
EVERY_CLIENT = [*CLIENTS, "https", "quic"]
"""Transports of a client; `https` is the DoH resource without the HTTP around it, which has tests of its own."""
QUICK_S = 0.5


async def good(ask: Ask) -> None:
    ask.answer(ask.reply(GOOD))


def query(name: str, rdtype: str = "A", **kw: Any) -> dns.message.Message:
    return dns.message.make_query(name, rdtype, **{"use_edns": 0, **kw})


@dataclass
class Stream:
    """A client's TCP or TLS connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, *wires: bytes) -> None:
        self.writer.write(b"".join(struct.pack("!H", len(wire)) + wire for wire in wires))

    async def receive(self, within_s: float = HANG_S) -> bytes:
        async with asyncio.timeout(within_s):
            (size,) = struct.unpack("!H", await self.reader.readexactly(2))
            return await self.reader.readexactly(size)

    async def close(self) -> None:
        self.writer.close()
        await asyncio.wait([asyncio.ensure_future(self.writer.wait_closed())], timeout=1)


class Inbox(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self.got: asyncio.Queue[bytes] = asyncio.Queue()

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.got.put_nowait(data)


@dataclass
class Chain:
    """The resolver under test and its clients."""

    ports: dict[str, int]
    trust: ssl.SSLContext
    service: ResolverService
    upstreams: UpstreamSet
    doh: DohService
    ca_file: str
    config: Resolver

    async def ask(self, asked: dns.message.Message, by: str = "udp", within_s: float = HANG_S) -> dns.message.Message:
        wire = await self.ask_wire(asked.to_wire(), by, within_s)
        reply = dns.message.from_wire(wire)
        assert reply.id == asked.id and reply.flags & dns.flags.QR
        return reply

    async def ask_wire(self, wire: bytes, by: str = "udp", within_s: float = HANG_S) -> bytes:
        if by == "https":
            return await self._over_https(wire, within_s)
        if by == "quic":
            return await self._over_quic(wire, within_s)
        if by != "udp":
            stream = await self.stream(by)
            stream.send(wire)
            reply = await stream.receive(within_s)
            await stream.close()
            return reply
        transport, inbox = await self.datagrams()
        try:
            transport.sendto(wire)
            async with asyncio.timeout(within_s):
                return await inbox.got.get()
        finally:
            transport.close()

    async def _over_https(self, wire: bytes, within_s: float) -> bytes:
        encoded = base64.urlsafe_b64encode(wire).rstrip(b"=")
        async with asyncio.timeout(within_s):
            reply = await self.http(b"GET", b"/dns-query?dns=" + encoded)
        assert reply.status == 200, reply
        return reply.body

    async def http(self, method: bytes, target: bytes, kind: bytes | None = None, body: bytes = b"") -> DohReply:
        future: asyncio.Future[DohReply] = asyncio.get_running_loop().create_future()
        self.doh.respond(method, target, kind, body, future.set_result, HOST)
        return await future

    async def _over_quic(self, wire: bytes, within_s: float) -> bytes:
        async with doq_client(self.ports["quic"], self.ca_file) as client:
            return wire[:2] + (await client.ask(b"\0\0" + wire[2:], within_s))[2:]

    def reconfigure(self, **changed: Any) -> None:
        """A reload with other keys of the resolver."""
        self.config = replace(self.config, **changed)
        self.upstreams.reconfigure(self.config)
        self.service.reconfigure(self.config)

    async def datagrams(self) -> tuple[asyncio.DatagramTransport, Inbox]:
        loop = asyncio.get_running_loop()
        return await loop.create_datagram_endpoint(Inbox, remote_addr=(HOST, self.ports["udp"]))

    async def stream(self, by: str = "tcp") -> Stream:
        tls = {"ssl": self.trust, "server_hostname": "localhost"} if by == "tls" else {}
        return Stream(*await asyncio.open_connection(HOST, self.ports[by], **tls))


def chains(authority: Authority, folder: Path) -> Any:
    """What the fixture `chain_of` gives: a context manager that starts a resolver with these upstreams."""

    @asynccontextmanager
    async def opened(
        *peers: Peer | DnsUpstream, stale_s: float = 0.0, timeout_s: float = 10.0, clock: Clock = boottime, **kw: Any
    ) -> AsyncIterator[Chain]:
        listens = tuple(Listen(scheme, HOST, 0) for scheme in CLIENTS)
        cache = kw.pop("cache", None) or DnsCache(serve_stale_s=stale_s, prefetch=False, persist=False)
        config = Resolver(
            listen=listens,
            strategy=kw.pop("strategy", "failover"),
            bootstrap=(),
            hosts_files=kw.pop("hosts_files", ()),
            timeout_s=timeout_s,
            upstreams=tuple(p.upstream if isinstance(p, Peer) else p for p in peers),
            cache=cache,
            **kw,
        )
        upstreams = UpstreamSet(config, clock=clock)
        service = ResolverService(config, state_dir=folder, upstreams=upstreams, clock=clock)
        await service.start()
        listeners = await listen_dns(listens, service, tls=authority.server_context(["dot"]))
        ports = {listen.scheme: listen.port for listen in listeners.addresses}
        pem = authority.issue()
        doq = listen_doq(Listen("quic", HOST, 0), service, cert_file=pem, key_file=pem, tickets=Tickets())
        ports["quic"] = doq.address[1]
        try:
            trust = client_context(authority.ca_file, ["dot"])
            yield Chain(ports, trust, service, upstreams, DohService(service), authority.ca_file, config)
        finally:
            doq.close()
            await listeners.close()
            await service.close()
            await upstreams.close()

    return opened


def ips(reply: dns.message.Message) -> list[str]:
    return [r.to_text() for rrset in reply.answer for r in rrset]


def ede(reply: dns.message.Message) -> dict[int, str]:
    return {int(o.code): o.text or "" for o in reply.options if isinstance(o, dns.edns.EDEOption)}
