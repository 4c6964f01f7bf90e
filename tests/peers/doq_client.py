"""A DNS over QUIC client that can break every rule: raw bytes on streams, early data, resets."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aioquic.asyncio import QuicConnectionProtocol
from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.tls import SessionTicket

from tests.patience import HANG_S, no_hang


class DoqClient(QuicConnectionProtocol):
    """`answers[stream_id]` becomes the message once its FIN came; `closed` the code that the connection ended with."""

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.answers: dict[int, asyncio.Future[bytes]] = {}
        self.closed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.reset: dict[int, int] = {}
        self.resumed = self.early_accepted = False
        self.transport: Any = None
        self._got: dict[int, bytes] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self.transport = transport

    def quic_event_received(self, event: events.QuicEvent) -> None:
        if isinstance(event, events.HandshakeCompleted):
            self.resumed, self.early_accepted = event.session_resumed, event.early_data_accepted
        elif isinstance(event, events.StreamDataReceived):
            self._got[event.stream_id] = self._got.get(event.stream_id, b"") + event.data
            if event.end_stream:
                whole = self._got.pop(event.stream_id)
                assert struct.unpack("!H", whole[:2])[0] == len(whole) - 2
                self.answer(event.stream_id).set_result(whole[2:])
        elif isinstance(event, events.StreamReset):
            self.reset[event.stream_id] = event.error_code
        elif isinstance(event, events.ConnectionTerminated) and not self.closed.done():
            self.closed.set_result(event.error_code)

    def answer(self, stream_id: int) -> asyncio.Future[bytes]:
        return self.answers.setdefault(stream_id, asyncio.get_running_loop().create_future())

    def open(self, octets: bytes, *, end: bool = True) -> int:
        """Raw bytes on a new stream."""
        stream_id: int = self._quic.get_next_available_stream_id()
        self.more(stream_id, octets, end=end)
        return stream_id

    def more(self, stream_id: int, octets: bytes, *, end: bool = True) -> None:
        self._quic.send_stream_data(stream_id, octets, end_stream=end)
        self.transmit()

    def cancel(self, stream_id: int) -> None:
        self._quic.stop_stream(stream_id, 3)
        self.transmit()

    async def ask(self, wire: bytes, within_s: float = HANG_S) -> bytes:
        stream_id = self.open(framed(wire))
        async with asyncio.timeout(within_s):
            return await self.answer(stream_id)


def framed(wire: bytes) -> bytes:
    return struct.pack("!H", len(wire)) + wire


@asynccontextmanager
async def doq_client(
    port: int,
    ca_file: str,
    *,
    ticket: SessionTicket | None = None,
    on_ticket: Callable[[SessionTicket], None] | None = None,
    early: Callable[[DoqClient], Awaitable[None] | None] | None = None,
    host: str = "127.0.0.1",
) -> AsyncIterator[DoqClient]:
    """`early` runs before the handshake is done: what it sends goes in 0-RTT when there is a ticket."""
    configuration = QuicConfiguration(is_client=True, alpn_protocols=["doq"], cafile=ca_file, server_name="localhost")
    configuration.session_ticket = ticket
    quic = QuicConnection(configuration=configuration, session_ticket_handler=on_ticket)
    loop = asyncio.get_running_loop()
    transport, client = await loop.create_datagram_endpoint(lambda: DoqClient(quic), local_addr=(host, 0))
    try:
        client.connect((host, port))
        if early is not None:
            early(client)
        async with no_hang():
            await client.wait_connected()
        yield client
    finally:
        client.close()
        client.transmit()
        transport.close()
