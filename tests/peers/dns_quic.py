"""The QUIC side of a scripted DNS peer: DoQ and DNS over HTTP/3, on aioquic's own server."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from aioquic.asyncio import QuicConnectionProtocol, serve
from aioquic.asyncio.server import QuicServer
from aioquic.h3.connection import H3Connection
from aioquic.h3.events import DataReceived, HeadersReceived
from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration
from aioquic.tls import SessionTicket

if TYPE_CHECKING:
    from tests.peers.dns import Ask, Peer


class QuicSide(QuicConnectionProtocol):
    """One connection, with the face of `tests.peers.dns.Connection`."""

    def __init__(self, peer: Peer, *args: Any, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.peer = peer
        self.frozen = self.resets_next = False
        self.open = True
        self.resumed = False
        self.close_code = -1
        self.requests: dict[int, dict[str, str]] = {}
        self._bodies: dict[int, bytes] = {}
        self._h3: H3Connection | None = None
        peer.connections.append(self)  # type: ignore[arg-type]

    def quic_event_received(self, event: events.QuicEvent) -> None:
        if isinstance(event, events.HandshakeCompleted):
            self.resumed = event.session_resumed
        elif isinstance(event, events.ConnectionTerminated):
            self.open = False
            self.close_code = event.error_code
        elif self.peer.kind == "h3":
            self._h3 = self._h3 or H3Connection(self._quic)
            for heard in self._h3.handle_event(event):
                self._hear_h3(heard)
        elif isinstance(event, events.StreamDataReceived):
            self._take(event.stream_id, event.data, event.end_stream, prefixed=True)

    def _hear_h3(self, event: Any) -> None:
        if isinstance(event, HeadersReceived):
            self.requests[event.stream_id] = {k.decode(): v.decode() for k, v in event.headers}
        elif isinstance(event, DataReceived):
            self._take(event.stream_id, event.data, event.stream_ended, prefixed=False)

    def _take(self, stream_id: int, piece: bytes, ended: bool, *, prefixed: bool) -> None:
        body = self._bodies.get(stream_id, b"") + piece
        self._bodies[stream_id] = body
        if not ended:
            return
        if self.resets_next:
            self.reset()
            return
        if prefixed:
            assert struct.unpack("!H", body[:2])[0] == len(body) - 2
            body = body[2:]
        source = self._quic._network_paths[0].addr[:2]
        self.peer.take(body, source, self, stream_id)  # type: ignore[arg-type]

    def answer(self, ask: Ask, wire: bytes) -> None:
        if self.frozen or not self.open:
            return
        if self._h3 is not None:
            self.respond(ask, 200, [("content-type", "application/dns-message")], wire)
        else:
            self.write(ask.stream_id, struct.pack("!H", len(wire)) + wire, end=True)

    def write(self, stream_id: int, octets: bytes, *, end: bool = False) -> None:
        self._quic.send_stream_data(stream_id, octets, end_stream=end)
        self.transmit()

    def respond(self, ask: Ask, status: int, fields: Any = (), body: bytes = b"") -> None:
        assert self._h3 is not None
        head = [(b":status", str(status).encode()), *((k.encode(), v.encode()) for k, v in fields)]
        self._h3.send_headers(ask.stream_id, head)
        self._h3.send_data(ask.stream_id, body, end_stream=True)
        self.transmit()

    def reset_stream(self, ask: Ask, code: int) -> None:
        self._quic.reset_stream(ask.stream_id, code)
        self.transmit()

    def reset(self) -> None:
        self.close()

    def close(self, error_code: int = 0, reason_phrase: str = "") -> None:
        self.open = False
        super().close(error_code=error_code, reason_phrase=reason_phrase)
        self.transmit()


async def listen(peer: Peer) -> tuple[QuicServer, int]:
    assert peer.authority is not None
    configuration = QuicConfiguration(is_client=False, alpn_protocols=["doq" if peer.kind == "quic" else "h3"])
    configuration.load_cert_chain(peer.authority.issue())
    if peer.idle_s:
        configuration.idle_timeout = peer.idle_s
    tickets: dict[bytes, SessionTicket] = {}
    server = await serve(
        peer.host,
        peer.port,
        configuration=configuration,
        create_protocol=lambda *args, **kw: QuicSide(peer, *args, **kw),
        session_ticket_fetcher=lambda label: tickets.pop(label, None),
        session_ticket_handler=lambda ticket: tickets.__setitem__(ticket.ticket, ticket),
    )
    return server, server._transport.get_extra_info("sockname")[1]
