"""HTTP/3 for a lab application on aioquic.

hypercorn speaks h3 too, but tells an application nothing when the client resets a stream or sends STOP_SENDING, and
drops datagrams above a queue of ten; a lab must see each cancel, so this is its own. Requests and answers only: a
WebSocket goes over TCP. Tickets are kept (bounded), so that clients resume and send 0-RTT.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.asyncio.server import QuicServer
from aioquic.h3.connection import H3_ALPN, ErrorCode, H3Connection, Setting
from aioquic.h3.events import DataReceived, H3Event, HeadersReceived
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import ConnectionTerminated, QuicEvent, StopSendingReceived, StreamReset
from aioquic.tls import SessionTicket

from headrace.lab.asgi import Application, Message, Scope

KEPT_TICKETS = 256
WAITING_MESSAGES = 1024  # of one stream; a peer that floods past it loses the stream


class StreamConnection:
    """What an application finds under `scope["state"]["connection"]`: `cut` resets this one stream."""

    def __init__(self, reset: Callable[[], None]) -> None:
        self.cut = reset


class Stream:
    """One request stream: a bounded inbox towards the application, and its task."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[Message] = asyncio.Queue(WAITING_MESSAGES)
        self.task: asyncio.Task[None] | None = None
        self.gone = False

    def deliver(self, body: bytes, *, more: bool) -> None:
        self.inbox.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def disconnect(self) -> None:
        self.gone = True
        with contextlib.suppress(asyncio.QueueFull):
            self.inbox.put_nowait({"type": "http.disconnect"})


class WithoutWebSockets(H3Connection):
    """Offers no extended CONNECT (RFC 9220 3), which aioquic does for every server: nobody here would answer one."""

    def _get_local_settings(self) -> dict[int, int]:
        settings: dict[int, int] = super()._get_local_settings()
        del settings[Setting.ENABLE_CONNECT_PROTOCOL]
        return settings


class H3ServerConnection(QuicConnectionProtocol):
    """One QUIC connection that runs the application for each request stream."""

    def __init__(self, *args: Any, app: Application, family: set[H3ServerConnection], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._app = app
        self._family = family
        self._h3: H3Connection | None = None
        self._streams: dict[int, Stream] = {}
        self._frozen = False
        family.add(self)

    @property
    def resumed(self) -> bool:
        return self._quic.tls.session_resumed

    def tasks(self) -> list[asyncio.Task[None]]:
        return [stream.task for stream in self._streams.values() if stream.task is not None]

    def freeze(self) -> None:
        self._frozen = True

    def thaw(self) -> None:
        self._frozen = False

    def die(self) -> None:
        """Fall silent as a killed process does: no CONNECTION_CLOSE, no timer."""
        self._frozen = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transmit_task is not None:
            self._transmit_task.cancel()
        self._abandon()

    def datagram_received(self, data: bytes | str, addr: Any) -> None:
        if not self._frozen:
            super().datagram_received(data, addr)

    def transmit(self) -> None:
        if not self._frozen:
            super().transmit()

    def quic_event_received(self, event: QuicEvent) -> None:
        if isinstance(event, ConnectionTerminated):
            self._abandon()
            return
        if isinstance(event, StreamReset | StopSendingReceived):
            stream = self._streams.get(event.stream_id)
            if stream is not None:
                stream.disconnect()
            return
        if self._h3 is None:
            self._h3 = WithoutWebSockets(self._quic)
        for seen in self._h3.handle_event(event):
            self._on_h3(seen)

    def _on_h3(self, event: H3Event) -> None:
        if isinstance(event, HeadersReceived) and event.stream_id not in self._streams:
            self._open(event.stream_id, event.headers)
        if isinstance(event, HeadersReceived | DataReceived) and event.stream_id in self._streams:
            body = event.data if isinstance(event, DataReceived) else b""
            if body or event.stream_ended:
                self._streams[event.stream_id].deliver(body, more=not event.stream_ended)

    def _open(self, stream_id: int, headers: list[tuple[bytes, bytes]]) -> None:
        stream = self._streams[stream_id] = Stream()
        scope = _scope(headers, StreamConnection(partial(self._reset, stream_id)))
        stream.task = self._loop.create_task(self._answer(stream_id, stream, scope))

    async def _answer(self, stream_id: int, stream: Stream, scope: Scope) -> None:
        async def send(message: Message) -> None:
            if not stream.gone:
                self._send(stream_id, message)

        try:
            await self._app(scope, stream.inbox.get, send)
        finally:
            self._streams.pop(stream_id, None)

    def _send(self, stream_id: int, message: Message) -> None:
        assert self._h3 is not None
        if message["type"] == "http.response.start":
            status = (b":status", str(message["status"]).encode())
            self._h3.send_headers(stream_id, [status, *message["headers"]])
        else:
            ends = not message.get("more_body", False)
            self._h3.send_data(stream_id, message.get("body", b""), ends)
            if ends:
                # What hypercorn tells after an answer as well: the watch for the client's leaving must end.
                self._streams[stream_id].disconnect()
        self.transmit()

    def _reset(self, stream_id: int) -> None:
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.disconnect()
            self._quic.reset_stream(stream_id, ErrorCode.H3_INTERNAL_ERROR)
            self.transmit()

    def _abandon(self) -> None:
        self._family.discard(self)
        for stream in self._streams.values():
            stream.disconnect()


class QuicListener:
    """Serves one application over h3 on one UDP socket."""

    def __init__(self, app: Application, *, cert_file: Path, key_file: Path) -> None:
        self._app = app
        self._configuration = QuicConfiguration(alpn_protocols=H3_ALPN, is_client=False, max_datagram_frame_size=None)
        self._configuration.load_cert_chain(cert_file, key_file)
        self._tickets: OrderedDict[bytes, SessionTicket] = OrderedDict()
        self._transport: asyncio.DatagramTransport | None = None
        self.connections: set[H3ServerConnection] = set()

    async def start(self, bound: Any) -> None:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(self._new_server, sock=bound)

    async def stop(self) -> None:
        """Stop like a killed process: peers hear nothing, or ICMP port unreachable. Waits for the answers' tasks."""
        running = [task for connection in self.connections for task in connection.tasks()]
        for connection in tuple(self.connections):
            connection.die()
        for task in running:
            task.cancel()
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        await asyncio.gather(*running, return_exceptions=True)

    def _new_server(self) -> QuicServer:
        return QuicServer(
            configuration=self._configuration,
            create_protocol=partial(H3ServerConnection, app=self._app, family=self.connections),
            session_ticket_fetcher=self._take_ticket,
            session_ticket_handler=self._keep_ticket,
        )

    def _keep_ticket(self, ticket: SessionTicket) -> None:
        self._tickets[ticket.ticket] = ticket
        while len(self._tickets) > KEPT_TICKETS:
            self._tickets.popitem(last=False)

    def _take_ticket(self, identity: bytes) -> SessionTicket | None:
        # Once only: a ticket that serves twice lets early data be replayed (RFC 8446 8.1).
        return self._tickets.pop(identity, None)


def _scope(headers: list[tuple[bytes, bytes]], connection: StreamConnection) -> Scope:
    pseudo = {name: value for name, value in headers if name.startswith(b":")}
    path, _, query = pseudo.get(b":path", b"/").partition(b"?")
    fields = [(name, value) for name, value in headers if not name.startswith(b":")]
    return {
        "type": "http",
        "http_version": "3",
        "method": pseudo.get(b":method", b"GET").decode("latin-1"),
        "raw_path": path,
        "query_string": query,
        "headers": [(b"host", pseudo.get(b":authority", b"")), *fields],
        "state": {"connection": connection},
    }
