"""The lab's DNS upstream over UDP, TCP, TLS (DoT, RFC 7858) and HTTPS (DoH, RFC 8484), one zone behind all four.

It counts each question by transport, name and type, so that "answered from the cache" can be asserted, and can be told
to be slow, to fail or to fall silent.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast
from urllib.parse import parse_qs

import dns.exception
import dns.message
import dns.rcode
import dns.rdatatype
import dns.zone

from headrace.lab import zone as zones
from headrace.lab.asgi import Exchange, Receive, Scope, Send, serve_http
from headrace.lab.ca import ThrowAwayCa
from headrace.lab.listener import TcpListener
from headrace.lab.ports import bind_pair, bind_tcp

HOST = "dns.lab.example"
DOH_PATH = "/dns-query"
MAX_MESSAGE = 65535
MAX_WAITING = 4096  # delayed answers; more is dropped, as a drowning server does


@dataclass(slots=True)
class DnsControls:
    """How the upstream behaves; the defaults are quick and right."""

    delay_s: float = 0.0
    silent: bool = False
    rcode: int = 0  # answer this instead, e.g. 2 for SERVFAIL


class Nameserver:
    """Four listeners on loopback. Ports are kept over `kill` and `start`."""

    def __init__(self, ca: ThrowAwayCa) -> None:
        self.zone: dns.zone.Zone = zones.lab_zone([])
        self.controls = DnsControls()
        self.queries: Counter[tuple[str, str, str]] = Counter()  # (transport, name, type)
        self.port = self.tls_port = self.https_port = 0
        self._ca = ca
        self._udp: asyncio.DatagramTransport | None = None
        self._servers: list[asyncio.Server] = []
        self._streams: set[DnsStream] = set()
        self._doh: TcpListener | None = None
        self._timers: set[asyncio.TimerHandle] = set()

    @property
    def asked(self) -> int:
        """Questions so far, over all transports."""
        return self.queries.total()

    @property
    def doh_url(self) -> str:
        return f"https://{HOST}:{self.https_port}{DOH_PATH}"

    @property
    def dot_url(self) -> str:
        return f"tls://{HOST}:{self.tls_port}"

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        tcp, udp = bind_pair(self.port)
        tls, https = bind_tcp(self.tls_port), bind_tcp(self.https_port)
        self.port, self.tls_port, self.https_port = (each.getsockname()[1] for each in (tcp, tls, https))
        self._udp, _ = await loop.create_datagram_endpoint(lambda: DnsDatagrams(self.answer), sock=udp)
        context = self._ca.server_context(["dot"])
        self._servers = [
            await loop.create_server(lambda: DnsStream("tcp", self.answer, self._streams), sock=tcp),
            await loop.create_server(lambda: DnsStream("tls", self.answer, self._streams), sock=tls, ssl=context),
        ]
        self._doh = TcpListener(self._https, tls=self._doh_context())
        await self._doh.start(https)

    async def kill(self) -> None:
        """All four listeners gone and their connections reset."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        if self._udp is not None:
            self._udp.abort()
        for server in self._servers:
            server.close()
        for stream in tuple(self._streams):
            stream.reset()
        if self._doh is not None:
            await self._doh.stop()

    def answer(self, transport: str, wire: bytes, limit: int, reply: Callable[[bytes], None]) -> None:
        """Answer one query, now or after the delay; silent for garbage, and when told to be."""
        made = self._made(transport, wire, limit)
        if made is None or self.controls.silent:
            return
        if not self.controls.delay_s:
            reply(made)
        elif len(self._timers) < MAX_WAITING:
            self._later(lambda: reply(made))

    def _made(self, transport: str, wire: bytes, limit: int) -> bytes | None:
        try:
            query = dns.message.from_wire(wire)
        except dns.exception.DNSException:
            return None
        for question in query.question:
            name = question.name.to_text(omit_final_dot=True).lower()
            self.queries[transport, name, dns.rdatatype.to_text(question.rdtype)] += 1
        if self.controls.rcode:
            failed = dns.message.make_response(query, recursion_available=True)
            failed.set_rcode(dns.rcode.Rcode(self.controls.rcode))
            return failed.to_wire()
        return zones.respond(self.zone, wire, limit=limit)

    def _later(self, call: Callable[[], None]) -> None:
        def due() -> None:
            self._timers.discard(timer)
            call()

        timer = asyncio.get_running_loop().call_later(self.controls.delay_s, due)
        self._timers.add(timer)

    def _doh_context(self) -> ssl.SSLContext:
        return self._ca.server_context(["h2", "http/1.1"])

    async def _https(self, scope: Scope, receive: Receive, send: Send) -> None:
        await serve_http(scope, receive, send, self._over_https, lambda _: None)

    async def _over_https(self, exchange: Exchange) -> None:
        if exchange.path != DOH_PATH:
            await exchange.respond(404, b"", "text/plain")
            return
        wire = _doh_query(exchange)
        if wire is None:
            await exchange.respond(400, b"", "text/plain")
            return
        answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.answer("https", wire, MAX_MESSAGE, lambda made: None if answered.done() else answered.set_result(made))
        made = await answered
        await exchange.respond(200, made, "application/dns-message", [("cache-control", f"max-age={_max_age(made)}")])


class DnsDatagrams(asyncio.DatagramProtocol):
    """UDP: one datagram, one message."""

    def __init__(self, answer: Callable[[str, bytes, int, Callable[[bytes], None]], None]) -> None:
        self._answer = answer
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # asyncio's own transport is no DatagramTransport by inheritance (3.11), nor are uvloop's.
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        transport = self._transport
        assert transport is not None

        def reply(made: bytes) -> None:
            if not transport.is_closing():
                transport.sendto(made, addr)

        self._answer("udp", data, zones.udp_limit(data), reply)


class DnsStream(asyncio.Protocol):
    """TCP and TLS: two bytes of length before each message, answers as they are ready (RFC 7766 6.2.1.1)."""

    def __init__(
        self,
        transport_name: str,
        answer: Callable[[str, bytes, int, Callable[[bytes], None]], None],
        family: set[DnsStream],
    ) -> None:
        self._name = transport_name
        self._answer = answer
        self._family = family
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._family.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._family.discard(self)

    def reset(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= 2:
            size = int.from_bytes(self._buffer[:2], "big")
            if len(self._buffer) < 2 + size:
                return
            wire = bytes(self._buffer[2 : 2 + size])
            del self._buffer[: 2 + size]
            self._answer(self._name, wire, MAX_MESSAGE, self._reply)

    def _reply(self, made: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(len(made).to_bytes(2, "big") + made)


def _doh_query(exchange: Exchange) -> bytes | None:
    """The DNS message of a DoH request, GET or POST; None when there is none."""
    if exchange.method == "POST":
        return exchange.body if exchange.headers.get("content-type") == "application/dns-message" else None
    encoded = parse_qs(exchange.query).get("dns", [""])[0]
    try:
        return base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)) or None
    except binascii.Error:
        return None


def _max_age(wire: bytes) -> int:
    # RFC 8484 5.1: no longer than the smallest TTL of the answer.
    message = dns.message.from_wire(wire)
    return min((rrset.ttl for rrset in (*message.answer, *message.authority)), default=0)
