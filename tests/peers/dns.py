"""Scripted DNS upstreams on loopback that answer, lie, stall and hang up as told: UDP with TCP, DoT, DoH, DoH3, DoQ.

A `Peer` hands every query to its script as an `Ask`; each ask runs in a task of its own, so that answers leave in any
order. Connections are listed in `peer.connections`, for tests that close, reset, freeze or say GOAWAY.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import dns.edns
import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import h2.config
import h2.connection
import h2.events
import h2.settings

from config.model import DnsUpstream
from tests.peers import dns_quic
from tests.peers.authority import Authority
from tests.peers.ports import free_port

HOST = "127.0.0.1"
Address = tuple[str, int]


@dataclass(eq=False)
class Ask:
    """One query as it reached the peer. `stream_id` is set for DoH."""

    peer: Peer
    wire: bytes
    message: dns.message.Message
    source: Address
    connection: Connection | None
    stream_id: int = 0
    at: float = field(default_factory=lambda: asyncio.get_running_loop().time())

    @property
    def name(self) -> str:
        return self.message.question[0].name.to_text().lower()

    @property
    def written_name(self) -> str:
        return self.message.question[0].name.to_text()

    @property
    def rdtype(self) -> str:
        return dns.rdatatype.to_text(self.message.question[0].rdtype)

    @property
    def over_udp(self) -> bool:
        return self.connection is None

    def reply(self, *records: str, rcode: str = "NOERROR", soa: str = "") -> dns.message.Message:
        """`records`: "TTL TYPE RDATA" for the name asked, or "OWNER TTL TYPE RDATA"; `soa`: "ZONE TTL MINIMUM"."""
        made = dns.message.make_response(self.message, recursion_available=True)
        made.set_rcode(dns.rcode.from_text(rcode))
        for record in records:
            owner, rest = record.split(" ", 1)
            if owner.isdigit():
                owner, rest = self.written_name, record
            ttl, rdtype, rdata = rest.split(" ", 2)
            found = dns.rrset.from_text(owner, int(ttl), "IN", rdtype, rdata)
            made.find_rrset(made.answer, found.name, found.rdclass, found.rdtype, create=True).update(found)
        if soa:
            zone, ttl, minimum = soa.split()
            text = f"ns.{zone} mail.{zone} 1 7200 3600 86400 {minimum}"
            made.authority.append(dns.rrset.from_text(zone, int(ttl), "IN", "SOA", text))
        return made

    def answer(self, reply: dns.message.Message | bytes) -> None:
        """Send it; over UDP what is larger than the query allows goes out empty with TC."""
        if isinstance(reply, dns.message.Message):
            reply = self._packed(reply)
        if self.connection is None:
            self.peer.udp.sendto(reply, self.source)
        else:
            self.connection.answer(self, reply)

    def _packed(self, reply: dns.message.Message) -> bytes:
        limit = max(512, self.message.payload) if self.over_udp else 65535
        wire = reply.to_wire(max_size=65535)
        if len(wire) <= limit:
            return wire
        cut = dns.message.make_response(self.message, recursion_available=True)
        cut.flags |= dns.flags.TC
        return cut.to_wire()


Script = Callable[[Ask], Awaitable[None]]


class Connection(asyncio.Protocol):
    """One TCP or TLS connection that carries length-prefixed messages."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.transport: Any = None
        self.frozen = False  # reads on, answers nothing
        self.resets_next = False  # RST in place of the next answer
        self.open = True
        self.messages_per_read: list[int] = []
        self._unread = b""
        self._idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.peer.connections.append(self)

    def data_received(self, data: bytes) -> None:
        self._stir()
        if self.resets_next:
            self.reset()
            return
        self._unread += data
        count = 0
        while len(self._unread) >= 2 and len(self._unread) >= 2 + (size := struct.unpack("!H", self._unread[:2])[0]):
            wire, self._unread = self._unread[2 : 2 + size], self._unread[2 + size :]
            count += 1
            self.peer.take(wire, self.transport.get_extra_info("peername"), self)
        self.messages_per_read.append(count)

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        if self._idle is not None:
            self._idle.cancel()

    def answer(self, ask: Ask, wire: bytes) -> None:
        self.write(struct.pack("!H", len(wire)) + wire)
        self._rest()

    def write(self, octets: bytes) -> None:
        if not self.frozen and self.open:
            self.transport.write(octets)

    def close(self) -> None:
        self.transport.close()

    def reset(self) -> None:
        self.open = False
        sock = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _stir(self) -> None:
        if self._idle is not None:
            self._rest()

    def _rest(self) -> None:
        """Hang up when nothing comes for `idle_s`, once something was answered: by turns a clean close and a reset."""
        if self._idle is not None:
            self._idle.cancel()
        if self.peer.idle_s:
            end = self.reset if len(self.peer.connections) % 2 == 0 else self.close
            self._idle = asyncio.get_running_loop().call_later(self.peer.idle_s, end)


class H2Connection(Connection):
    """One HTTP/2 connection of a DoH peer."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(peer)
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
        self.requests: dict[int, dict[str, str]] = {}
        self._bodies: dict[int, bytes] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.peer.max_streams:
            code = h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS
            self.h2.local_settings = h2.settings.Settings(False, {code: self.peer.max_streams})
        self.h2.initiate_connection()
        self.flush()

    def data_received(self, data: bytes) -> None:
        self._stir()
        if self.resets_next:
            self.reset()
            return
        for event in self.h2.receive_data(data):
            self._on(event)
        self.flush()

    def _on(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.RequestReceived):
            self.requests[event.stream_id] = dict(event.headers)
            self._bodies[event.stream_id] = b""
        elif isinstance(event, h2.events.DataReceived):
            self._bodies[event.stream_id] += event.data
            self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.StreamEnded):
            source = self.transport.get_extra_info("peername")
            self.peer.take(self._bodies.pop(event.stream_id), source, self, event.stream_id)

    def answer(self, ask: Ask, wire: bytes) -> None:
        self.respond(ask, 200, [("content-type", "application/dns-message")], wire)

    def respond(self, ask: Ask, status: int, fields: Sequence[tuple[str, str]] = (), body: bytes = b"") -> None:
        self.h2.send_headers(ask.stream_id, [(":status", str(status)), *fields])
        self.h2.send_data(ask.stream_id, body, end_stream=True)
        self.flush()
        self._rest()

    def reset_stream(self, ask: Ask, code: int) -> None:
        self.h2.reset_stream(ask.stream_id, code)
        self.flush()

    def goaway(self, last_stream_id: int, code: int = 0) -> None:
        """A frame of our own: the package would take its own GOAWAY for the end of the connection."""
        self.flush()
        body = struct.pack("!II", last_stream_id, code)
        self.write(len(body).to_bytes(3, "big") + b"\x07\0\0\0\0\0" + body)

    def flush(self) -> None:
        self.write(self.h2.data_to_send())


class Peer(asyncio.DatagramProtocol):
    """One upstream on one port: `udp` (with TCP beside it), `tcp`, `tls`, `https`, `quic` or `h3`."""

    def __init__(
        self,
        script: Script,
        kind: str = "udp",
        authority: Authority | None = None,
        *,
        idle_s: float = 0.0,
        max_streams: int = 0,
        port: int = 0,
        host: str = HOST,
    ) -> None:
        self.script, self.kind, self.authority = script, kind, authority
        self.idle_s, self.max_streams, self.host, self.port = idle_s, max_streams, host, port
        self.asks: list[Ask] = []
        self.connections: list[Connection] = []
        self.dark = False  # hears everything, answers nothing
        self.udp: Any = None
        self._server: asyncio.Server | None = None
        self._quic: dns_quic.QuicServer | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.problems: list[BaseException] = []

    async def __aenter__(self) -> Peer:
        if self.kind in ("quic", "h3"):
            self._quic, self.port = await dns_quic.listen(self)
            return self
        loop = asyncio.get_running_loop()
        make = H2Connection if self.kind == "https" else Connection
        if self.kind == "udp" and not self.port:
            self.port = free_port()  # the kernel's choice for TCP may be taken for UDP
        self._server = await loop.create_server(lambda: make(self), self.host, self.port, ssl=self._tls())
        self.port = self._server.sockets[0].getsockname()[1]
        if self.kind == "udp":
            self.udp, _ = await loop.create_datagram_endpoint(lambda: self, (self.host, self.port))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        assert not self.problems, self.problems

    async def stop(self) -> None:
        """Close the ports and every connection."""
        for task in list(self._tasks):
            task.cancel()
        if self._server is not None:
            self._server.close()
            self._server = None
        if self.udp is not None:
            self.udp.close()
            self.udp = None
        for connection in self.connections:
            if connection.open and self._quic is None:
                connection.transport.abort()
        if self._quic is not None:
            self._quic.close()
            self._quic = None
        await asyncio.sleep(0.01)  # lets the transports say goodbye before the loop ends

    def _tls(self) -> ssl.SSLContext | None:
        if self.kind in ("udp", "tcp"):
            return None
        assert self.authority is not None, "a TLS peer needs an authority"
        return self.authority.server_context(["h2"] if self.kind == "https" else ["dot"])

    @property
    def upstream(self) -> DnsUpstream:
        """The configuration that leads to this peer."""
        ca_file = self.authority.ca_file if self.authority else ""
        path = "/dns-query" if self.kind in ("https", "h3") else ""
        return DnsUpstream(self.kind, "localhost", self.port, path, (self.host,), ca_file=ca_file)

    def seen(self, name: str, rdtype: str = "") -> list[Ask]:
        return [a for a in self.asks if a.name == name.lower() + "." and rdtype in ("", a.rdtype)]

    def datagram_received(self, data: bytes, addr: Address) -> None:
        self.take(data, addr, None)

    def take(self, wire: bytes, source: Address, connection: Connection | None, stream_id: int = 0) -> None:
        ask = Ask(self, wire, dns.message.from_wire(wire), source, connection, stream_id)
        self.asks.append(ask)
        if self.dark:
            return
        task = asyncio.ensure_future(self._play(ask))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _play(self, ask: Ask) -> None:
        try:
            await self.script(ask)
        except Exception as exc:  # a broken script fails the test, not the loop
            self.problems.append(exc)
