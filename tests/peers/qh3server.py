"""An HTTP/3 edge whose QUIC, TLS and QPACK are another implementation's. It answers what a test tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from qh3.asyncio.protocol import QuicConnectionProtocol
from qh3.asyncio.server import QuicServer, serve
from qh3.h3.connection import H3Connection
from qh3.h3.events import DataReceived, HeadersReceived
from qh3.quic import events
from qh3.quic.configuration import QuicConfiguration

from tests.peers.h3peers import Section


@dataclass
class QhAsked:
    """A request that it got."""

    protocol: _Protocol
    stream_id: int
    fields: Section
    body: bytes = b""
    trailers: Section | None = None
    ended: bool = False
    reset: int | None = None
    stopped: int | None = None

    def head(self, fields: Section, *, end: bool = False) -> None:
        assert self.protocol.http is not None
        self.protocol.http.send_headers(self.stream_id, fields, end)
        self.protocol.transmit()

    def send(self, chunk: bytes, *, end: bool = False) -> None:
        assert self.protocol.http is not None
        self.protocol.http.send_data(self.stream_id, chunk, end)
        self.protocol.transmit()

    def abort(self, code: int) -> None:
        self.protocol._quic.reset_stream(self.stream_id, code)
        self.protocol.transmit()


class _Protocol(QuicConnectionProtocol):
    owner: QhServer
    http: H3Connection | None = None

    def quic_event_received(self, event: events.QuicEvent) -> None:
        if isinstance(event, events.HandshakeCompleted):
            self.owner.handshakes.append(event)
            self.http = H3Connection(self._quic)  # earlier it has no keys to write with
        if self.http is not None:
            self.owner.hear(self, self.http, event)


class QhServer:
    """An async context manager; `port` is the kernel's choice."""

    def __init__(self, cert_file: str, key_file: str) -> None:
        self._config = QuicConfiguration(is_client=False, alpn_protocols=["h3"], max_datagram_frame_size=65536)
        self._config.load_cert_chain(cert_file, key_file)
        self.asked: list[QhAsked] = []
        self.handshakes: list[events.HandshakeCompleted] = []
        self.happened = asyncio.Event()
        self._tickets: dict[bytes, Any] = {}
        self._protocols: list[_Protocol] = []

    async def __aenter__(self) -> Self:
        self._server: QuicServer = await serve(
            "127.0.0.1",
            0,
            configuration=self._config,
            create_protocol=self._make,
            session_ticket_fetcher=self._tickets.get,
            session_ticket_handler=lambda ticket: self._tickets.__setitem__(ticket.ticket, ticket),
        )
        assert self._server._transport is not None
        self.port: int = self._server._transport.get_extra_info("sockname")[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for protocol in self._protocols:
            if protocol._timer is not None:
                protocol._timer.cancel()
        await asyncio.sleep(0)

    def _make(self, *args: Any, **more: Any) -> _Protocol:
        protocol = _Protocol(*args, **more)
        protocol.owner = self
        self._protocols.append(protocol)
        return protocol

    async def until(self, ready: Callable[[QhServer], object], timeout_s: float = 5.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not ready(self):
                self.happened.clear()
                await self.happened.wait()

    def hear(self, protocol: _Protocol, http: H3Connection, event: events.QuicEvent) -> None:
        known = self._find(protocol, getattr(event, "stream_id", -1))
        if known is not None and isinstance(event, events.StreamReset):
            known.reset = event.error_code
        if known is not None and isinstance(event, events.StopSendingReceived):
            known.stopped = event.error_code
        for each in http.handle_event(event):
            asked = self._find(protocol, getattr(each, "stream_id", -1))
            if isinstance(each, HeadersReceived) and asked is None:
                self.asked.append(QhAsked(protocol, each.stream_id, list(each.headers), ended=each.stream_ended))
            elif isinstance(each, HeadersReceived) and asked is not None:
                asked.trailers, asked.ended = list(each.headers), each.stream_ended
            elif isinstance(each, DataReceived) and asked is not None:
                asked.body += bytes(each.data)
                asked.ended |= each.stream_ended
        self.happened.set()

    def _find(self, protocol: _Protocol, stream_id: int) -> QhAsked | None:
        return next((a for a in self.asked if a.protocol is protocol and a.stream_id == stream_id), None)
