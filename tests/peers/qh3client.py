"""An HTTP/3 client whose QUIC, TLS and QPACK are another implementation's: what aioquic cannot check of itself."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

from qh3.asyncio.protocol import QuicConnectionProtocol
from qh3.h3.connection import H3Connection
from qh3.h3.events import DataReceived, GoawayReceived, HeadersReceived, InformationalHeadersReceived
from qh3.quic import events
from qh3.quic.configuration import QuicConfiguration
from qh3.quic.connection import QuicConnection

from tests.patience import HANG_S
from tests.peers.h3peers import Answer, Section


class _Protocol(QuicConnectionProtocol):
    owner: QhClient

    def quic_event_received(self, event: events.QuicEvent) -> None:
        self.owner.on_event(event)


class QhClient:
    """One connection. An async context manager; `ticket` resumes an earlier one, with `wait=False` requests go in 0-RTT."""

    def __init__(self, port: int, ca_file: str, *, ticket: Any = None, wait: bool = True) -> None:
        self.config = QuicConfiguration(is_client=True, alpn_protocols=["h3"], server_name="localhost")
        self.config.verify_mode = ssl.CERT_REQUIRED
        self.config.load_verify_locations(ca_file)
        self.config.session_ticket = ticket
        self.tickets: list[Any] = []
        self.answers: dict[int, Answer] = {}
        self.handshake: events.HandshakeCompleted | None = None
        self.closed: events.ConnectionTerminated | None = None
        self.goaways: list[int] = []
        self.happened = asyncio.Event()
        self._address = ("127.0.0.1", port)
        self._wait = wait
        self._transports: list[asyncio.DatagramTransport] = []

    async def __aenter__(self) -> QhClient:
        self.quic = QuicConnection(configuration=self.config, session_ticket_handler=self.tickets.append)
        self.protocol = _Protocol(self.quic)
        self.protocol.owner = self
        await self.rebind()
        self.protocol.connect(self._address)
        self.http = H3Connection(self.quic)
        if self._wait:
            await self.until(lambda c: c.handshake or c.closed)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.protocol.close()
        if self.protocol._timer is not None:
            self.protocol._timer.cancel()
        for transport in self._transports:
            transport.abort()
        await asyncio.sleep(0)  # they close on the next turn

    async def rebind(self) -> None:
        """Go on from another port, without telling anyone: what a NAT does that forgot."""
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: self.protocol, local_addr=("127.0.0.1", 0))
        for old in self._transports:
            old.abort()
        self._transports.append(transport)
        self.protocol._transport = transport

    async def migrate(self) -> None:
        """Go on from another port under another connection id (RFC 9000 9.5): what a client does that knows of it."""
        await self.rebind()
        self.protocol.change_connection_id()

    async def until(self, ready: Callable[[QhClient], object], timeout_s: float = HANG_S) -> None:
        async with asyncio.timeout(timeout_s):
            while not ready(self):
                self.happened.clear()
                await self.happened.wait()

    # -- what is sent

    def ask(
        self, host: str, method: str = "GET", path: str = "/", *more: tuple[bytes, bytes], end: bool | None = None
    ) -> Answer:
        """Send a request's head; `end` False (the default of a POST) leaves its body open."""
        stream_id = self.quic.get_next_available_stream_id()
        pseudo: Section = [
            (b":method", method.encode()),
            (b":scheme", b"https"),
            (b":authority", host.encode()),
            (b":path", path.encode()),
        ]
        self.http.send_headers(stream_id, [*pseudo, *more], end_stream=method != "POST" if end is None else end)
        self.protocol.transmit()
        return self._answer(stream_id)

    def send(self, answer: Answer, chunk: bytes, *, end: bool = False) -> None:
        self.http.send_data(answer.stream_id, chunk, end)
        self.protocol.transmit()

    def send_trailers(self, answer: Answer, section: Section) -> None:
        self.http.send_headers(answer.stream_id, section, end_stream=True)
        self.protocol.transmit()

    def reset(self, answer: Answer, code: int = 0x10C) -> None:
        self.quic.reset_stream(answer.stream_id, code)
        self.protocol.transmit()

    def stop(self, answer: Answer, code: int = 0x10C) -> None:
        self.quic.stop_stream(answer.stream_id, code)
        self.protocol.transmit()

    # -- what is heard

    def on_event(self, event: events.QuicEvent) -> None:
        if isinstance(event, events.HandshakeCompleted):
            self.handshake = event
        elif isinstance(event, events.ConnectionTerminated):
            self.closed = event
        elif isinstance(event, events.StreamReset):
            self._answer(event.stream_id).reset = event.error_code
        elif isinstance(event, events.StopSendingReceived):
            self._answer(event.stream_id).stopped = event.error_code
        for each in self.http.handle_event(event):
            self._hear(each)
        for answer in self.answers.values():
            answer.happened.set()
        self.happened.set()

    def _hear(self, event: object) -> None:
        if isinstance(event, GoawayReceived):
            self.goaways.append(event.stream_id)
        elif isinstance(event, InformationalHeadersReceived):
            self._answer(event.stream_id).sections.append(event.headers)
        elif isinstance(event, HeadersReceived):
            answer = self._answer(event.stream_id)
            answer.sections.append(event.headers)
            answer.ended |= event.stream_ended
        elif isinstance(event, DataReceived):
            answer = self._answer(event.stream_id)
            answer.body += bytes(event.data)
            answer.ended |= event.stream_ended

    def _answer(self, stream_id: int) -> Answer:
        return self.answers.setdefault(stream_id, Answer(stream_id))
