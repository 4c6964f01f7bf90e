"""Small clients for three HTTP versions, on the protocol libraries themselves.

An SDK hides how an answer ended; these say it. `Answer.clean` is True only when the version's own end of message was
seen: the last chunk or the announced length (h1), END_STREAM (h2), FIN of the stream (h3).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h11
from aioquic.asyncio.client import connect as connect_quic
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.h3.connection import H3_ALPN, ErrorCode, H3Connection
from aioquic.h3.events import DataReceived, H3Event, HeadersReceived
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import ConnectionTerminated, QuicEvent, StreamReset

READ_SIZE = 65536
VERSIONS = ("h1", "h2", "h3")


@dataclass(frozen=True, slots=True)
class Target:
    """A server on loopback: where it is, what name its certificate must carry, and who vouches for it (None: no TLS)."""

    port: int
    ca_file: Path | None
    server_name: str = "localhost"
    address: str = "127.0.0.1"

    @property
    def authority(self) -> str:
        return f"{self.server_name}:{self.port}"


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    body: bytes = b""
    fields: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Answer:
    """What came back. Times are seconds since the request was sent; 0.0 for what never came."""

    version: str
    status: int = 0
    fields: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    first_byte_s: float = 0.0
    total_s: float = 0.0
    clean: bool = False
    ending: str = ""  # how it ended when not cleanly


class Recorder:
    """Builds an `Answer` from what a connection reports; `on_body` hears each piece."""

    def __init__(self, version: str, on_body: Callable[[bytes], None] | None = None) -> None:
        self.answer = Answer(version)
        self.done = asyncio.Event()
        self._parts: list[bytes] = []
        self._on_body = on_body
        self._started = time.perf_counter()

    def sent(self) -> None:
        self._started = time.perf_counter()

    def head(self, status: int, fields: list[tuple[bytes, bytes]]) -> None:
        self.answer.status = status
        self.answer.fields = {name.decode().lower(): value.decode("latin-1") for name, value in fields}

    def body(self, piece: bytes) -> None:
        if not self._parts:
            self.answer.first_byte_s = self._elapsed()
        self._parts.append(piece)
        if self._on_body is not None:
            self._on_body(piece)

    def end(self, *, clean: bool, ending: str = "") -> None:
        """The first end counts: what follows a reset is its echo."""
        if self.done.is_set():
            return
        self.answer.clean, self.answer.ending = clean, ending
        self.answer.total_s = self._elapsed()
        self.answer.body = b"".join(self._parts)
        self.done.set()

    def _elapsed(self) -> float:
        return time.perf_counter() - self._started


async def ask(
    version: str, target: Target, request: Request, *, on_body: Callable[[bytes], None] | None = None
) -> Answer:
    """Send one request on a connection of its own. A connection that fails is an `Answer` with `ending`, no exception."""
    recorder = Recorder(version, on_body)
    try:
        await {"h1": _ask_h1, "h2": _ask_h2, "h3": _ask_h3}[version](target, request, recorder)
    except h11.RemoteProtocolError:
        recorder.end(clean=False, ending="closed before the last chunk")
    except (OSError, h2.exceptions.ProtocolError) as exc:
        recorder.end(clean=False, ending=f"{type(exc).__name__}: {exc}")
    recorder.end(clean=False, ending="connection closed before the end of the answer")
    return recorder.answer


async def _ask_h1(target: Target, request: Request, recorder: Recorder) -> None:
    reader, writer = await open_stream(target, "http/1.1")
    wire = h11.Connection(h11.CLIENT)
    fields = [("host", target.authority), ("content-length", str(len(request.body))), *request.fields.items()]
    head = h11.Request(method=request.method, target=request.path, headers=fields)
    try:
        writer.write(
            _wire(wire.send(head)) + _wire(wire.send(h11.Data(request.body))) + _wire(wire.send(h11.EndOfMessage()))
        )
        recorder.sent()
        while not recorder.done.is_set():
            event = wire.next_event()
            if event is h11.NEED_DATA:
                wire.receive_data(await reader.read(READ_SIZE))
            elif isinstance(event, h11.Response):
                recorder.head(event.status_code, list(event.headers.raw_items()))
            elif isinstance(event, h11.Data):
                recorder.body(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                recorder.end(clean=True)
            elif isinstance(event, h11.ConnectionClosed):
                recorder.end(clean=False, ending="closed before an answer")
    finally:
        await _close(writer)


async def _ask_h2(target: Target, request: Request, recorder: Recorder) -> None:
    reader, writer = await open_stream(target, "h2")
    wire = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding=None))
    try:
        wire.initiate_connection()
        wire.send_headers(1, pseudo_fields(target, request), end_stream=not request.body)
        if request.body:
            wire.send_data(1, request.body, end_stream=True)
        writer.write(wire.data_to_send())
        recorder.sent()
        while not recorder.done.is_set():
            received = await reader.read(READ_SIZE)
            if not received:
                return
            for event in wire.receive_data(received):
                _on_h2(wire, event, recorder)
            writer.write(wire.data_to_send())
    finally:
        await _close(writer)


def _on_h2(wire: h2.connection.H2Connection, event: h2.events.Event, recorder: Recorder) -> None:
    if isinstance(event, h2.events.ResponseReceived):
        recorder.head(*_status_and_fields(list(event.headers)))
    elif isinstance(event, h2.events.DataReceived):
        wire.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id or 1)
        if event.data:
            recorder.body(event.data)
    elif isinstance(event, h2.events.StreamEnded):
        recorder.end(clean=True)
    elif isinstance(event, h2.events.StreamReset):
        recorder.end(clean=False, ending=f"RST_STREAM {int(event.error_code or 0):#x}")
    elif isinstance(event, h2.events.ConnectionTerminated):
        recorder.end(clean=False, ending=f"GOAWAY {int(event.error_code or 0):#x}")


async def _ask_h3(target: Target, request: Request, recorder: Recorder) -> None:
    async with connect_h3(target, recorder) as client:
        client.send(pseudo_fields(target, request), request.body)
        recorder.sent()
        try:
            await recorder.done.wait()
        except asyncio.CancelledError:
            client.leave()
            raise


@contextlib.asynccontextmanager
async def connect_h3(target: Target, recorder: Recorder) -> AsyncIterator[H3Client]:
    """A QUIC connection that tells `recorder` what comes on it."""
    assert target.ca_file is not None, "h3 has no form without TLS"
    configuration = QuicConfiguration(is_client=True, alpn_protocols=H3_ALPN, server_name=target.server_name)
    configuration.load_verify_locations(cafile=str(target.ca_file))
    new = partial(H3Client, recorder=recorder)
    async with connect_quic(target.address, target.port, configuration=configuration, create_protocol=new) as client:
        assert isinstance(client, H3Client)
        yield client


class H3Client(QuicConnectionProtocol):
    """One request on one QUIC connection."""

    def __init__(self, *args: Any, recorder: Recorder, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._h3 = H3Connection(self._quic)
        self._recorder = recorder
        self._stream_id = 0

    def leave(self) -> None:
        """Ask for no more of the answer (STOP_SENDING); the connection stays."""
        self._quic.stop_stream(self._stream_id, ErrorCode.H3_REQUEST_CANCELLED)
        self.transmit()

    def send(self, head: list[tuple[bytes, bytes]], body: bytes) -> None:
        stream_id = self._stream_id = self._quic.get_next_available_stream_id()
        self._h3.send_headers(stream_id, head, end_stream=not body)
        if body:
            self._h3.send_data(stream_id, body, end_stream=True)
        self.transmit()

    def quic_event_received(self, event: QuicEvent) -> None:
        if isinstance(event, StreamReset):
            self._recorder.end(clean=False, ending=f"RESET_STREAM {event.error_code:#x}")
        elif isinstance(event, ConnectionTerminated):
            self._recorder.end(clean=False, ending=f"CONNECTION_CLOSE {event.error_code:#x} {event.reason_phrase}")
        for seen in self._h3.handle_event(event):
            self._on_h3(seen)

    def _on_h3(self, event: H3Event) -> None:
        if isinstance(event, HeadersReceived):
            self._recorder.head(*_status_and_fields(event.headers))
        elif isinstance(event, DataReceived) and event.data:
            self._recorder.body(event.data)
        if isinstance(event, HeadersReceived | DataReceived) and event.stream_ended:
            self._recorder.end(clean=True)


@dataclass(frozen=True, slots=True)
class Handshake:
    """One TLS connection: whether it was resumed, how long the handshake took, and what the next one can offer."""

    resumed: bool
    took_s: float
    session: ssl.SSLSession | None


async def handshake(target: Target, session: ssl.SSLSession | None = None) -> Handshake:
    """Connect over TLS, offer `session`, and make one small request: in TLS 1.3 tickets come after the handshake."""
    return await asyncio.to_thread(_handshake, target, session)


def _handshake(target: Target, session: ssl.SSLSession | None) -> Handshake:
    # The context lives as long as the sessions it made: OpenSSL refuses those of another one.
    assert target.ca_file is not None, "no TLS, no handshake"
    context = _context_for(target.ca_file)
    with socket.create_connection((target.address, target.port), timeout=5) as raw:
        started = time.perf_counter()
        with context.wrap_socket(raw, server_hostname=target.server_name, session=session) as tls:
            took_s = time.perf_counter() - started
            tls.sendall(f"GET /healthz HTTP/1.1\r\nhost: {target.authority}\r\nconnection: close\r\n\r\n".encode())
            while tls.recv(READ_SIZE):
                pass
            return Handshake(bool(tls.session_reused), took_s, tls.session)


_CONTEXTS: dict[Path, ssl.SSLContext] = {}


def _context_for(ca_file: Path) -> ssl.SSLContext:
    if ca_file not in _CONTEXTS:
        _CONTEXTS[ca_file] = client_context(ca_file, "http/1.1")
    return _CONTEXTS[ca_file]


def client_context(ca_file: Path, alpn: str) -> ssl.SSLContext:
    """A context that trusts `ca_file` alone and offers one protocol."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(ca_file)
    context.set_alpn_protocols([alpn])
    return context


async def open_stream(target: Target, alpn: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connected stream, over TLS when the target has a CA."""
    if target.ca_file is None:
        return await asyncio.open_connection(target.address, target.port, limit=READ_SIZE)
    context = client_context(target.ca_file, alpn)
    return await asyncio.open_connection(
        target.address, target.port, ssl=context, server_hostname=target.server_name, limit=READ_SIZE
    )


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with contextlib.suppress(OSError, ssl.SSLError):
        await writer.wait_closed()


def _wire(made: bytes | None) -> bytes:
    return made or b""


def pseudo_fields(target: Target, request: Request) -> list[tuple[bytes, bytes]]:
    """A request's head in the form of h2 and h3."""
    pseudo = [
        (b":method", request.method.encode()),
        (b":scheme", b"https"),
        (b":authority", target.authority.encode()),
        (b":path", request.path.encode()),
    ]
    own = [(b"content-length", str(len(request.body)).encode())] if request.body else []
    return [*pseudo, *own, *((name.lower().encode(), value.encode()) for name, value in request.fields.items())]


def _status_and_fields(headers: list[Any]) -> tuple[int, list[tuple[bytes, bytes]]]:
    pairs = [(bytes(name), bytes(value)) for name, value in headers]
    status = next(int(value) for name, value in pairs if name == b":status")
    return status, [(name, value) for name, value in pairs if not name.startswith(b":")]
