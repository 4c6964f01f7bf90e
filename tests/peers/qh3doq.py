"""DNS over QUIC by another implementation than ours, as a client and as a server: what aioquic cannot check of itself."""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from qh3.asyncio.protocol import QuicConnectionProtocol
from qh3.asyncio.server import serve
from qh3.quic import events
from qh3.quic.configuration import QuicConfiguration
from qh3.quic.connection import QuicConnection

from tests.patience import no_hang
from tests.peers.authority import Authority

HOST = "127.0.0.1"
NAMES = ("localhost", *(f"name{number}.of-a-large-certificate.test" for number in range(8)))
"""qh3 2.1 as a server sometimes fails with "packet builder capacity exhausted" where its first flight just fills a datagram,
as one with a small certificate does: one handshake in forty. This one needs more room by far."""


class QhDoqClient:
    """One connection. An async context manager; `ticket` resumes an earlier one, with `wait=False` questions go in 0-RTT."""

    def __init__(self, port: int, ca_file: str, *, ticket: Any = None, wait: bool = True) -> None:
        self.config = QuicConfiguration(is_client=True, alpn_protocols=["doq"], server_name="localhost")
        self.config.verify_mode = ssl.CERT_REQUIRED
        self.config.load_verify_locations(ca_file)
        self.config.session_ticket = ticket
        self.tickets: list[Any] = []
        self.answers: dict[int, bytes] = {}
        self.ended: set[int] = set()
        self.handshake: events.HandshakeCompleted | None = None
        self.closed: events.ConnectionTerminated | None = None
        self._happened = asyncio.Event()
        self._address = (HOST, port)
        self._wait = wait
        self._transports: list[asyncio.DatagramTransport] = []

    async def __aenter__(self) -> QhDoqClient:
        self.quic = QuicConnection(configuration=self.config, session_ticket_handler=self._keep)
        self._protocol = _Protocol(self.quic)
        self._protocol.tell = self._on
        await self.rebind()
        self._protocol.connect(self._address)
        if self._wait:
            await self.until(lambda: self.handshake or self.closed)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._protocol.close()
        if self._protocol._timer is not None:
            self._protocol._timer.cancel()
        for transport in self._transports:
            transport.abort()
        await asyncio.sleep(0)  # they close on the next turn

    async def rebind(self) -> None:
        """Go on from another port, without telling anyone: what a NAT does that forgot."""
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: self._protocol, local_addr=(HOST, 0))
        for old in self._transports:
            old.abort()
        self._transports.append(transport)
        self._protocol._transport = transport

    async def until(self, ready: Callable[[], object]) -> None:
        async with no_hang():
            while not ready():
                self._happened.clear()
                await self._happened.wait()

    def open(self, octets: bytes, *, end: bool = True) -> int:
        """Raw bytes on a new stream; its id."""
        stream_id: int = self.quic.get_next_available_stream_id()
        self.quic.send_stream_data(stream_id, octets, end)
        self._protocol.transmit()
        return stream_id

    def stop(self, stream_id: int, code: int) -> None:
        self.quic.stop_stream(stream_id, code)
        self._protocol.transmit()

    async def answer(self, stream_id: int) -> bytes:
        """The message once its FIN came."""
        await self.until(lambda: stream_id in self.ended)
        whole = self.answers.pop(stream_id)
        assert struct.unpack("!H", whole[:2])[0] == len(whole) - 2
        return whole[2:]

    async def ask(self, wire: bytes) -> bytes:
        return await self.answer(self.open(struct.pack("!H", len(wire)) + wire))

    def _keep(self, ticket: Any) -> None:
        self.tickets.append(ticket)
        self._happened.set()

    def _on(self, event: events.QuicEvent) -> None:
        match event:
            case events.HandshakeCompleted():
                self.handshake = event
            case events.ConnectionTerminated():
                self.closed = event
            case events.StreamDataReceived():
                self.answers[event.stream_id] = self.answers.get(event.stream_id, b"") + bytes(event.data)
                if event.end_stream:
                    self.ended.add(event.stream_id)
        self._happened.set()


class _Protocol(QuicConnectionProtocol):
    tell: Callable[[events.QuicEvent], None]

    def quic_event_received(self, event: events.QuicEvent) -> None:
        self.tell(event)


class QhDoqServer:
    """Answers each query by `reply`. `handshakes` says of each connection whether it was resumed."""

    def __init__(self, reply: Callable[[bytes], bytes]) -> None:
        self.reply = reply
        self.handshakes: list[bool] = []
        self.connections: list[_Side] = []
        self.port = 0

    def hang_up(self) -> None:
        """Close every connection, as a server does with idle ones."""
        for connection in self.connections:
            connection.close()
        self.connections.clear()


class _Side(QuicConnectionProtocol):
    def __init__(self, server: QhDoqServer, *args: Any, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self._server = server
        self._unread: dict[int, bytes] = {}

    def quic_event_received(self, event: events.QuicEvent) -> None:
        if isinstance(event, events.HandshakeCompleted):
            self._server.handshakes.append(event.session_resumed)
            self._server.connections.append(self)
        elif isinstance(event, events.StreamDataReceived):
            self._unread[event.stream_id] = self._unread.get(event.stream_id, b"") + bytes(event.data)
            if event.end_stream:
                reply = self._server.reply(self._unread.pop(event.stream_id)[2:])
                self._quic.send_stream_data(event.stream_id, struct.pack("!H", len(reply)) + reply, True)
                self.transmit()


@asynccontextmanager
async def qh3_doq_server(
    authority: Authority, reply: Callable[[bytes], bytes], *, retry: bool = False
) -> AsyncIterator[QhDoqServer]:
    configuration = QuicConfiguration(is_client=False, alpn_protocols=["doq"])
    # Its loader takes a key behind the certificate for a part of it.
    leaf, begin, key = Path(authority.issue(NAMES)).read_bytes().partition(b"-----BEGIN PRIVATE KEY-----")
    configuration.load_cert_chain(leaf, begin + key)
    found, tickets = QhDoqServer(reply), {}

    def keep(ticket: Any) -> None:
        tickets[ticket.ticket] = ticket

    server = await serve(
        HOST,
        0,
        configuration=configuration,
        create_protocol=lambda *args, **kw: _Side(found, *args, **kw),
        session_ticket_fetcher=lambda label: tickets.pop(label, None),
        session_ticket_handler=keep,
        retry=retry,
    )
    found.port = server._transport.get_extra_info("sockname")[1]
    try:
        yield found
    finally:
        server.close()
        await asyncio.sleep(0)
