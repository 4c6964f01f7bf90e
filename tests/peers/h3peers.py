"""HTTP/3 peers on aioquic's own `H3Connection`, and a gateway that does what the test says."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.asyncio.server import QuicServer
from aioquic.h3.connection import H3Connection
from aioquic.h3.events import DataReceived, HeadersReceived
from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.tls import SessionTicket

from config.model import Listen, Tickets
from proxy.io.inbound_quic import QuicListener, listen_quic
from proxy.io.rims import InboundConnection, Limits, Origin
from proxy.messages import Leg, RequestHead, ResponseHead
from tests.patience import HANG_S
from tests.peers.authority import Authority
from tests.peers.fakeleg import Recorder

Section = list[tuple[bytes, bytes]]


class _Noted(list[tuple[str, Any]]):
    """A list that says when something was added."""

    def __init__(self, happened: asyncio.Event) -> None:
        super().__init__()
        self._happened = happened

    def append(self, said: tuple[str, Any]) -> None:
        super().append(said)
        self._happened.set()


@dataclass
class Exchanged(Recorder):
    """A request as the gateway got it: the leg, its head, and what its receiver heard."""

    leg: Leg | None = None
    head: RequestHead | None = None
    origin: Origin | None = None
    happened: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.heard = _Noted(self.happened)

    async def until(self, ready: Callable[[Exchanged], bool], timeout_s: float = HANG_S) -> Exchanged:
        """Wait until what was heard satisfies `ready`."""
        async with asyncio.timeout(timeout_s):
            while not ready(self):
                self.happened.clear()
                await self.happened.wait()
        return self

    async def heard_word(self, word: str) -> Any:
        await self.until(lambda x: word in x.words)
        return next(value for said, value in self.heard if said == word)


class Gateway:
    """A Service that hands each request to the test's own function."""

    def __init__(self, answer: Callable[[Exchanged], None] | None = None, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.answer = answer
        self.exchanges: list[Exchanged] = []
        self.connections: list[InboundConnection] = []
        self.lost: list[InboundConnection] = []
        self.room = 100
        self._arrived = asyncio.Event()

    def known(self, head: RequestHead, origin: Origin) -> None: ...

    def shortcut(self, head: RequestHead, origin: Origin) -> None:
        return None

    def on_request(self, leg: Leg, head: RequestHead, origin: Origin) -> None:
        exchange = Exchanged(leg=leg, head=head, origin=origin)
        leg.receiver = exchange
        self.exchanges.append(exchange)
        self._arrived.set()
        if self.answer is not None:
            self.answer(exchange)

    def on_connected(self, connection: InboundConnection) -> bool:
        if len(self.connections) - len(self.lost) >= self.room:
            return False
        self.connections.append(connection)
        self._arrived.set()
        return True

    def on_disconnected(self, connection: InboundConnection) -> None:
        self.lost.append(connection)
        self._arrived.set()

    async def until(self, ready: Callable[[Gateway], bool], timeout_s: float = HANG_S) -> None:
        async with asyncio.timeout(timeout_s):
            while not ready(self):
                self._arrived.clear()
                await self._arrived.wait()

    async def request(self, number: int = 0) -> Exchanged:
        await self.until(lambda g: len(g.exchanges) > number)
        return self.exchanges[number]


def say(leg: Leg | None, status: int = 200, body: bytes = b"", fields: Section | None = None) -> None:
    """A whole answer."""
    assert leg is not None
    leg.head(ResponseHead(status, list(fields or []), len(body)))
    leg.data(body)
    leg.end()


@dataclass
class Answer:
    """What a client saw on one stream."""

    stream_id: int
    sections: list[Section] = field(default_factory=list)
    body: bytes = b""
    ended: bool = False
    reset: int | None = None
    stopped: int | None = None
    happened: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def statuses(self) -> list[bytes]:
        return [value for section in self.sections for name, value in section if name == b":status"]

    @property
    def status(self) -> int:
        return int(self.statuses[-1])

    async def until(self, ready: Callable[[Answer], object], timeout_s: float = HANG_S) -> Answer:
        async with asyncio.timeout(timeout_s):
            while not ready(self):
                self.happened.clear()
                await self.happened.wait()
        return self

    async def whole(self) -> Answer:
        return await self.until(lambda a: a.ended)


class Protocol(QuicConnectionProtocol):
    """Either side's connection; `heard` gets every QUIC event."""

    owner: Any = None

    def quic_event_received(self, event: events.QuicEvent) -> None:
        self.owner.on_event(self, event)


class Client:
    """A stock aioquic HTTP/3 client. Use as an async context manager."""

    def __init__(self, port: int, ca_file: str, host: str = "localhost", **config: Any) -> None:
        self.authority = f"{host}:{port}".encode()
        self.config = QuicConfiguration(is_client=True, alpn_protocols=["h3"], server_name=host, **config)
        self.config.verify_mode = ssl.CERT_REQUIRED
        self.config.load_verify_locations(ca_file)
        self.tickets: list[SessionTicket] = []
        self.answers: dict[int, Answer] = {}
        self.handshake: events.HandshakeCompleted | None = None
        self.closed: events.ConnectionTerminated | None = None
        self.happened = asyncio.Event()
        self.gone = False
        self.raw_control = b""  # what the server's control stream brought
        self.local = "127.0.0.1"
        self._address = ("127.0.0.1", port)
        self._transports: list[asyncio.DatagramTransport] = []

    async def __aenter__(self) -> Client:
        await self.connect()
        await self.until(lambda c: c.handshake or c.closed)
        return self

    async def connect(self, *, transmit: bool = True) -> None:
        self.quic = QuicConnection(configuration=self.config, session_ticket_handler=self.tickets.append)
        self.http = H3Connection(self.quic)
        loop = asyncio.get_running_loop()
        transport, self.protocol = await loop.create_datagram_endpoint(self._protocol, local_addr=(self.local, 0))
        self._transports.append(transport)
        self.protocol.connect(self._address, transmit=transmit)

    def _protocol(self) -> Protocol:
        protocol = Protocol(self.quic)
        protocol.owner = self
        return protocol

    async def __aexit__(self, *_: object) -> None:
        if not self.gone:
            self.protocol.close(0x100)
            self.vanish()

    def vanish(self) -> None:
        """Be gone without a word."""
        self.gone = True
        for transport in self._transports:
            transport.close()
        if self.protocol._timer is not None:
            self.protocol._timer.cancel()

    async def until(self, ready: Callable[[Client], object], timeout_s: float = HANG_S) -> None:
        async with asyncio.timeout(timeout_s):
            while not ready(self):
                self.happened.clear()
                await self.happened.wait()

    def on_event(self, _protocol: Protocol, event: events.QuicEvent) -> None:
        if isinstance(event, events.HandshakeCompleted):
            self.handshake = event
        elif isinstance(event, events.ConnectionTerminated):
            self.closed = event
        elif isinstance(event, events.StreamReset):
            self._answer(event.stream_id).reset = event.error_code
        elif isinstance(event, events.StopSendingReceived):
            self._answer(event.stream_id).stopped = event.error_code
        elif isinstance(event, events.StreamDataReceived) and event.stream_id == 3:
            self.raw_control += event.data
        for each in self.http.handle_event(event):
            answer = self._answer(each.stream_id)
            if isinstance(each, HeadersReceived):
                answer.sections.append(each.headers)
            elif isinstance(each, DataReceived):
                answer.body += each.data
            answer.ended |= each.stream_ended
        for answer in self.answers.values():
            answer.happened.set()
        self.happened.set()

    def _answer(self, stream_id: int) -> Answer:
        return self.answers.setdefault(stream_id, Answer(stream_id))

    def fields(self, method: str = "GET", path: str = "/", *more: tuple[bytes, bytes]) -> Section:
        pseudo = [(b":method", method.encode()), (b":scheme", b"https"), (b":authority", self.authority)]
        return [*pseudo, (b":path", path.encode()), *more]

    def ask(
        self, method: str = "GET", path: str = "/", *more: tuple[bytes, bytes], body: bytes = b"", end: bool = True
    ) -> Answer:
        """Send a request; `end=False` leaves its body open."""
        return self.ask_raw(self.fields(method, path, *more), body=body, end=end)

    def ask_raw(self, section: Section, *, body: bytes = b"", end: bool = True) -> Answer:
        stream_id = self.quic.get_next_available_stream_id()
        self.http.send_headers(stream_id, section, end_stream=end and not body)
        if body:
            self.http.send_data(stream_id, body, end_stream=end)
        self.protocol.transmit()
        return self._answer(stream_id)

    def send_bytes(self, payload: bytes, *, end: bool = False) -> Answer:
        """Open a request stream with these bytes, whatever they say."""
        stream_id = self.quic.get_next_available_stream_id()
        self.quic.send_stream_data(stream_id, payload, end)
        self.protocol.transmit()
        return self._answer(stream_id)

    def send(self, answer: Answer, chunk: bytes, *, end: bool = False) -> None:
        self.http.send_data(answer.stream_id, chunk, end)
        self.protocol.transmit()

    async def rebind(self) -> None:
        """Go on from another port, without telling anyone."""
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: _Forward(self.protocol), local_addr=("127.0.0.1", 0))
        old = self.protocol._transport
        self.protocol._transport = transport
        self._transports.append(transport)
        old.close()


class _Forward(asyncio.DatagramProtocol):
    def __init__(self, protocol: Protocol) -> None:
        self.protocol = protocol

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.protocol.datagram_received(data, addr)


@dataclass
class Asked:
    """A request that a stock server got."""

    server: Server
    protocol: Protocol
    http: H3Connection
    stream_id: int
    fields: Section
    body: bytes = b""
    ended: bool = False
    reset: int | None = None
    stopped: int | None = None

    def respond(self, fields: Section, body: bytes | None = None, *, end: bool = True) -> None:
        self.http.send_headers(self.stream_id, fields, end_stream=end and body is None)
        if body is not None:
            self.http.send_data(self.stream_id, body, end_stream=end)
        self.protocol.transmit()

    def send(self, chunk: bytes, *, end: bool = False) -> None:
        self.http.send_data(self.stream_id, chunk, end)
        self.protocol.transmit()

    @property
    def quic(self) -> QuicConnection:
        return self.http._quic


class Server:
    """A stock aioquic HTTP/3 server. `answer` is called when a request's head came. An async context manager."""

    def __init__(self, pem_file: str, answer: Callable[[Asked], None] | None = None, **options: Any) -> None:
        self.config = QuicConfiguration(is_client=False, alpn_protocols=["h3"], **options)
        self.config.load_cert_chain(pem_file)
        self.answer = answer
        self.asked: list[Asked] = []
        self.protocols: list[Protocol] = []
        self.handshakes: list[events.HandshakeCompleted] = []
        self.closed: list[events.ConnectionTerminated] = []
        self.happened = asyncio.Event()
        self._https: dict[Protocol, H3Connection] = {}
        self._tickets: dict[bytes, SessionTicket] = {}
        self.retry = False
        self.gone = False
        self.wanted_port = 0  # the kernel's choice

    async def __aenter__(self) -> Server:
        loop = asyncio.get_running_loop()
        self.transport, self.server = await loop.create_datagram_endpoint(
            lambda: QuicServer(
                configuration=self.config,
                create_protocol=self._protocol,
                session_ticket_fetcher=self._tickets.get,
                session_ticket_handler=lambda ticket: self._tickets.__setitem__(ticket.ticket, ticket),
                retry=self.retry,
            ),
            local_addr=("127.0.0.1", self.wanted_port),
        )
        self.port: int = self.transport.get_extra_info("sockname")[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self.gone:
            self.server.close()
            self.vanish()

    def vanish(self) -> None:
        """Be gone without a word; the port is closed."""
        self.gone = True
        self.transport.abort()
        for protocol in self.protocols:
            if protocol._timer is not None:
                protocol._timer.cancel()

    def _protocol(self, quic: QuicConnection, **_: Any) -> Protocol:
        protocol = Protocol(quic)
        protocol.owner = self
        self.protocols.append(protocol)
        return protocol

    def on_event(self, protocol: Protocol, event: events.QuicEvent) -> None:
        if isinstance(event, events.ProtocolNegotiated):
            self._https[protocol] = H3Connection(protocol._quic)
        elif isinstance(event, events.HandshakeCompleted):
            self.handshakes.append(event)
        elif isinstance(event, events.ConnectionTerminated):
            self.closed.append(event)
        http = self._https.get(protocol)
        if http is not None:
            self._hear(protocol, http, event)
        self.happened.set()

    def _hear(self, protocol: Protocol, http: H3Connection, event: events.QuicEvent) -> None:
        for asked in self.asked:
            if asked.protocol is protocol and asked.stream_id == getattr(event, "stream_id", None):
                if isinstance(event, events.StreamReset):
                    asked.reset = event.error_code
                elif isinstance(event, events.StopSendingReceived):
                    asked.stopped = event.error_code
        for each in http.handle_event(event):
            if isinstance(each, HeadersReceived):
                known = self._find(protocol, each.stream_id)
                if known is not None:
                    known.fields += each.headers
                    known.ended |= each.stream_ended
                    continue
                asked = Asked(self, protocol, http, each.stream_id, list(each.headers), ended=each.stream_ended)
                self.asked.append(asked)
                if self.answer is not None:
                    self.answer(asked)
            elif isinstance(each, DataReceived):
                known = self._find(protocol, each.stream_id)
                assert known is not None
                known.body += each.data
                known.ended |= each.stream_ended

    def _find(self, protocol: Protocol, stream_id: int) -> Asked | None:
        return next((a for a in self.asked if a.protocol is protocol and a.stream_id == stream_id), None)

    async def until(self, ready: Callable[[Server], object], timeout_s: float = HANG_S) -> None:
        async with asyncio.timeout(timeout_s):
            while not ready(self):
                self.happened.clear()
                await self.happened.wait()


@asynccontextmanager
async def listening(gateway: Gateway, pem_file: str, tickets: Tickets | None = None) -> AsyncIterator[QuicListener]:
    """Our listener on a port of the kernel's choice."""
    listener = await listen_quic(
        Listen("h3", "127.0.0.1", 0), gateway, cert_file=pem_file, key_file=pem_file, tickets=tickets or Tickets()
    )
    try:
        yield listener
    finally:
        listener.close()


def make_authority(directory: Path) -> tuple[str, str]:
    """(CA file, PEM file of a server for localhost)."""
    authority = Authority(directory)
    return authority.ca_file, authority.issue()
