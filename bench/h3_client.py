"""An HTTP/3 client for load, on qh3: the same for every contestant, and of nobody's making here."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time

from qh3.asyncio.protocol import QuicConnectionProtocol
from qh3.h3.connection import H3Connection
from qh3.h3.events import DataReceived, HeadersReceived
from qh3.quic import events
from qh3.quic.configuration import QuicConfiguration
from qh3.quic.connection import QuicConnection

STAMP = b'"created":'
HANDSHAKE_S = 10.0
WINDOW = 64 << 20
RECEIVE_BUFFER = 4 << 20


class Asked:
    """One request: how much came, when each stamped event came, and a future for the end."""

    def __init__(self, *, stamped: bool) -> None:
        self.status = b""
        self.got = 0
        self._stamped, self._begun = stamped, b""
        self.delays_ns: list[int] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self, chunk: bytes) -> None:
        self.got += len(chunk)
        if self._stamped:
            now = time.monotonic_ns()
            *events, self._begun = (self._begun + chunk).split(b"\n\n")
            for event in events:
                self.delays_ns.append(now - int(event.partition(STAMP)[2].partition(b",")[0]))


class _Protocol(QuicConnectionProtocol):
    client: Client

    def quic_event_received(self, event: events.QuicEvent) -> None:
        self.client.on_event(event)


def _socket() -> socket.socket:
    """With the room that browsers ask for: what overflows here would be the contestant's loss to make good."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
    sock.bind(("127.0.0.1", 0))
    return sock


class Client:
    """One connection; an async context manager."""

    def __init__(self, port: int, ca_file: str, name: str) -> None:
        self._config = QuicConfiguration(is_client=True, alpn_protocols=["h3"], server_name=name)
        self._config.verify_mode = ssl.CERT_REQUIRED
        self._config.max_data = self._config.max_stream_data = WINDOW
        self._config.load_verify_locations(ca_file)
        self._name = name.encode()
        self._port = port
        self._asked: dict[int, Asked] = {}
        self._shaken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Client:
        self._quic = QuicConnection(configuration=self._config)
        self._protocol = _Protocol(self._quic)
        self._protocol.client = self
        self._transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: self._protocol, sock=_socket()
        )
        self._protocol.connect(("127.0.0.1", self._port))
        self._http = H3Connection(self._quic)
        async with asyncio.timeout(HANDSHAKE_S):
            await self._shaken
        return self

    async def __aexit__(self, *_: object) -> None:
        self._asked.clear()
        self._protocol.close()
        self._transport.abort()
        await asyncio.sleep(0)

    def ask(self, target: bytes, body: bytes = b"", *, stamped: bool = False) -> Asked:
        stream_id = self._quic.get_next_available_stream_id()
        self._asked[stream_id] = asked = Asked(stamped=stamped)
        fields = [
            (b":method", b"POST" if body else b"GET"),
            (b":scheme", b"https"),
            (b":authority", self._name),
            (b":path", target),
            (b"user-agent", b"OpenAI/Python 3.0.0"),
            (b"accept", b"*/*"),
        ]
        if body:
            fields.append((b"content-length", b"%d" % len(body)))
        self._http.send_headers(stream_id, fields, end_stream=not body)
        if body:
            self._http.send_data(stream_id, body, end_stream=True)
        self._protocol.transmit()
        return asked

    def on_event(self, event: events.QuicEvent) -> None:
        if isinstance(event, events.HandshakeCompleted):
            self._shaken.set_result(None)
        elif isinstance(event, events.ConnectionTerminated):
            self._fail(f"the connection ended: {event.error_code:#x} {event.reason_phrase}")
        elif isinstance(event, events.StreamReset) and event.stream_id in self._asked:
            self._end(event.stream_id, f"reset {event.error_code:#x}")
        for each in self._http.handle_event(event):
            if isinstance(each, HeadersReceived) and each.stream_id in self._asked:
                self._asked[each.stream_id].status = dict(each.headers)[b":status"]
            elif isinstance(each, DataReceived) and each.stream_id in self._asked:
                self._asked[each.stream_id].take(each.data)
            if getattr(each, "stream_ended", False):
                self._end(each.stream_id, "")

    def _fail(self, reason: str) -> None:
        if not self._shaken.done():
            self._shaken.set_exception(ConnectionError(reason))
        for stream_id in list(self._asked):
            self._end(stream_id, reason)

    def _end(self, stream_id: int, reason: str) -> None:
        asked = self._asked.pop(stream_id, None)
        if asked is None or asked.done.done():
            return
        if reason or asked.status != b"200":
            asked.done.set_exception(ConnectionError(reason or f"status {asked.status!r}"))
        else:
            asked.done.set_result(None)
