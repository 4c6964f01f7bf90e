"""WebSocket endings over real sockets and both loops: what a FIN, an RST and a half-close look like to the other end."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
import uvloop

from config.model import WebSocket
from headrace.lab.ca import ThrowAwayCa
from proxy.io import websocket_tunnel
from proxy.io.inbound_h1 import H1ServerConnection
from proxy.io.outbound_h1 import H1EdgeConnection
from proxy.io.rims import InboundConnection, Limits, Origin
from proxy.io.websocket_tunnel import TunnelEnd, WebSocketTunnel
from proxy.messages import Leg, NullReceiver, RequestHead, ResponseHead
from proxy.websocket import Op, frame
from tests.patience import no_hang, timed
from tests.proxy.test_websocket_tunnel import closes_in, frames, text

UPGRADE = (
    b"GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
SWITCHED = (
    b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n"
)


@dataclass
class End:
    """One endpoint: raw bytes over a socket."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    heard: bytearray = field(default_factory=bytearray)

    def says(self, *chunks: bytes) -> None:
        self.writer.writelines(chunks)

    async def hears(self, enough: Callable[[bytes], object]) -> bytes:
        """What came after the heads until `enough`; ConnectionError as the socket says it."""
        async with no_hang():
            while not enough(bytes(self.heard)):
                chunk = await self.reader.read(65536)
                if not chunk:
                    break
                self.heard += chunk
        return bytes(self.heard)

    def half_close(self) -> None:
        self.writer.write_eof()

    def reset(self) -> None:
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def close(self) -> None:
        self.writer.close()


class Joining(NullReceiver):
    """As much of a gateway as a tunnel needs: one edge, no decisions."""

    limits = Limits()

    def __init__(self, edge_port: int) -> None:
        self.edge_port = edge_port
        self.ends: list[TunnelEnd] = []
        self.connections: set[InboundConnection] = set()
        self.tunnel: WebSocketTunnel | None = None

    def on_connected(self, connection: InboundConnection) -> bool:
        self.connections.add(connection)
        return True

    def on_disconnected(self, connection: InboundConnection) -> None:
        self.connections.discard(connection)

    def known(self, head: RequestHead, origin: Origin) -> None: ...

    def shortcut(self, head: RequestHead, origin: Origin) -> None:
        return None

    def on_request(self, leg: Leg, head: RequestHead, origin: Origin) -> None:
        self.client, self.asked = leg, head
        leg.receiver = NullReceiver()
        self.dialling = asyncio.ensure_future(self.dial())

    async def dial(self) -> None:
        _, connection = await asyncio.get_running_loop().create_connection(
            H1EdgeConnection, "127.0.0.1", self.edge_port
        )
        self.edge = connection.open()
        self.edge.receiver = self
        self.edge.head(self.asked)

    def on_head(self, head: ResponseHead) -> None:
        self.client.head(head)
        self.tunnel = WebSocketTunnel(self.client, self.edge, WebSocket(), on_finished=self.ends.append)


async def connected(story: Callable[[End, End, Joining], Awaitable[None]], ca: ThrowAwayCa | None = None) -> Joining:
    """Run a story between a client and an edge that are joined by two real connections; the client's over TLS with `ca`."""
    accepted: asyncio.Future[End] = asyncio.get_running_loop().create_future()

    async def on_edge(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(SWITCHED)
        accepted.set_result(End(reader, writer))

    edges = await asyncio.start_server(on_edge, "127.0.0.1", 0)
    joining = Joining(edges.sockets[0].getsockname()[1])
    origin = Origin("127.0.0.1", 0, "http://127.0.0.1:0", b"http", "h1")
    inbound = await asyncio.get_running_loop().create_server(
        lambda: H1ServerConnection(joining, origin),
        "127.0.0.1",
        0,
        ssl=ca.server_context(["http/1.1"]) if ca is not None else None,
    )
    reader, writer = await asyncio.open_connection(
        *inbound.sockets[0].getsockname()[:2],
        ssl=ca.client_context(["http/1.1"]) if ca is not None else None,
        server_hostname="localhost" if ca is not None else None,
    )
    writer.write(UPGRADE)
    await reader.readuntil(b"\r\n\r\n")
    client, edge = End(reader, writer), await accepted
    await story(client, edge, joining)
    for end in (client, edge):
        end.close()
    async with no_hang():
        while not joining.ends:
            await asyncio.sleep(0.01)
    for connection in list(joining.connections):
        connection.close_now()
    for server in (edges, inbound):
        server.close()
    while joining.connections:
        await asyncio.sleep(0.01)
    return joining


LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


Story = Callable[["End", "End", "Joining"], Awaitable[None]]


def on_each_loop(story: Story) -> Callable[..., None]:
    @pytest.mark.parametrize("new_loop", LOOPS, ids=["asyncio", "uvloop"])
    def test(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            joining = runner.run(connected(story))
            assert len(joining.ends) == 1

    test.__name__, test.__doc__ = story.__name__, story.__doc__
    return test


def timed_on_each_loop(story: Story) -> Callable[..., None]:
    return timed(on_each_loop(story))


@timed_on_each_loop
async def test_closed_edge_is_told_to_the_client_with_1011_within_half_a_second(
    client: End, edge: End, joining: Joining
) -> None:
    """A full close says FIN like a half-close: the probes tell them apart."""
    edge.says(text(b"hi"))
    await client.hears(lambda raw: raw)
    started = asyncio.get_running_loop().time()
    edge.close()
    assert closes_in(await client.hears(closes_in)) == [1011]
    assert asyncio.get_running_loop().time() - started < 0.5


@on_each_loop
async def test_reset_edge_is_told_to_the_client_with_1011_at_once(client: End, edge: End, joining: Joining) -> None:
    edge.says(text(b"hi"))
    await client.hears(lambda raw: raw)
    edge.reset()
    assert closes_in(await client.hears(closes_in)) == [1011]


@on_each_loop
async def test_half_closed_edge_hears_all_that_the_client_says(client: End, edge: End, joining: Joining) -> None:
    edge.says(text(b"bye"))
    edge.half_close()
    await client.hears(lambda raw: raw)
    for turn in range(5):
        client.says(text(b"c%d" % turn, from_client=True))
        await asyncio.sleep(0.1)
    raw = await edge.hears(lambda raw: b"c4" in b"".join(seen.payload for seen in frames(raw)))
    assert [seen.payload for seen in frames(raw) if seen.op == Op.TEXT] == [b"c%d" % turn for turn in range(5)]


@on_each_loop
async def test_half_closed_client_hears_the_edge_to_its_end(client: End, edge: End, joining: Joining) -> None:
    client.says(text(b"last words", from_client=True))
    client.half_close()
    await edge.hears(lambda raw: raw)
    for turn in range(5):
        await asyncio.sleep(0.05)
        edge.says(text(b"tail%d" % turn))
    edge.says(text(struct.pack("!H", 1000), op=Op.CLOSE))
    edge.half_close()
    raw = await client.hears(lambda raw: False)
    assert [seen.payload for seen in frames(raw) if seen.op == Op.TEXT] == [b"tail%d" % turn for turn in range(5)]
    assert closes_in(raw) == [1000]


@timed_on_each_loop
async def test_client_that_is_gone_frees_the_edge_promptly(client: End, edge: End, joining: Joining) -> None:
    """Closed without a close frame, as by a killed browser, while the edge goes on talking to nobody."""
    started = asyncio.get_running_loop().time()
    client.close()
    await edge.hears(lambda raw: False)  # our FIN
    while not joining.ends:
        await asyncio.sleep(0.01)
    assert asyncio.get_running_loop().time() - started < 0.5


@on_each_loop
async def test_close_handshake_reaches_both_ends_whole(client: End, edge: End, joining: Joining) -> None:
    said = text(struct.pack("!H", 1001) + b"maximum duration of 60 minutes", op=Op.CLOSE)
    edge.says(said)
    assert await client.hears(closes_in) == said
    answer = text(struct.pack("!H", 1001), op=Op.CLOSE, from_client=True)
    client.says(answer)
    assert await edge.hears(lambda raw: False) == answer, "and then our FIN"
    assert await client.hears(lambda raw: False) == said


@pytest.mark.parametrize("first", ["client", "edge"])
async def test_a_close_handshake_over_tls_ends_the_connection(
    first: str, ca: ThrowAwayCa, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS has no half-close here: the client waits for us to close, and nobody may wait for the deadline."""
    monkeypatch.setattr(websocket_tunnel, "CLOSE_WAIT_S", 600.0)

    async def story(client: End, edge: End, joining: Joining) -> None:
        by_client, by_edge = frame(Op.CLOSE, b"\x03\xe8", b"\x01\x02\x03\x04"), frame(Op.CLOSE, b"\x03\xe8")
        order = [(client, by_client, edge), (edge, by_edge, client)]
        async with no_hang():
            for said_by, said, heard_by in order if first == "client" else reversed(order):
                said_by.writer.write(said)
                assert await heard_by.reader.readexactly(len(said)) == said
            assert await client.reader.read() == b""
            edge.writer.write_eof()
            while not joining.ends:
                await asyncio.sleep(0.01)

    joining = await connected(story, ca)
    assert [(end.cause, end.code) for end in joining.ends] == [(None, 1000)]
