"""HTTP/1.1 to clients over real sockets: requests, answers, ends, and clients that go away in every way they can."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from config.model import Listen
from proxy.io.inbound_tcp import listen_tcp
from proxy.io.rims import Limits
from proxy.messages import Abort, Cause, Party, ResponseHead, Stage
from tests.patience import no_hang
from tests.peers.services import ByHand

KEY = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"


class Client:
    """A raw TCP client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, raw: bytes) -> None:
        self.writer.write(raw)

    async def head(self) -> bytes:
        async with no_hang():
            return await self.reader.readuntil(b"\r\n\r\n")

    async def exactly(self, size: int) -> bytes:
        async with no_hang():
            return await self.reader.readexactly(size)

    async def rest(self) -> bytes:
        async with no_hang():
            return await self.reader.read()

    def reset(self) -> None:
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@asynccontextmanager
async def served(service: ByHand) -> AsyncIterator[Client]:
    listener = await listen_tcp(Listen("http", "127.0.0.1", 0), service, tls=None)
    reader, writer = await asyncio.open_connection(*listener.address)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()
        listener.close()
        for connection in list(service.connections):
            connection.close_now()
        await asyncio.sleep(0)


GET = b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n"
POST = b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\n"


async def test_a_request_is_answered_and_the_next_one_too() -> None:
    service = ByHand()
    async with served(service) as client:
        for body in (b"one", b"two"):
            client.send(GET)
            exchange = await service.arrived()
            assert exchange.words == ["end"]
            exchange.answer(body)
            head = await client.head()
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            assert b"keep-alive: timeout=120" in head
            assert await client.exactly(3) == body


async def test_head_and_chunks_leave_when_they_are_said_and_the_last_chunk_only_at_the_end() -> None:
    service = ByHand()
    async with served(service) as client:
        client.send(GET)
        exchange = await service.arrived()
        exchange.leg.head(ResponseHead(200, []))
        assert b"transfer-encoding: chunked" in await client.head()
        exchange.leg.data(b"data: x\n\n")
        assert await client.exactly(14) == b"9\r\ndata: x\n\n\r\n"
        exchange.leg.trailers([(b"x-t", b"1")])
        exchange.leg.end()
        assert await client.exactly(13) == b"0\r\nx-t: 1\r\n\r\n"


async def test_an_aborted_answer_closes_without_the_last_chunk_and_loses_nothing() -> None:
    service = ByHand()
    async with served(service) as client:
        client.send(GET)
        exchange = await service.arrived()
        exchange.leg.head(ResponseHead(200, []))
        for _ in range(20):
            exchange.leg.data(b"event\n\n")
        exchange.leg.abort(Abort(Party.EDGE, Stage.BODY, Cause.LOST))
        await client.head()
        assert await client.rest() == b"7\r\nevent\n\n\r\n" * 20


async def test_an_aborted_http_1_0_answer_is_a_reset() -> None:
    service = ByHand()
    async with served(service) as client:
        client.send(b"GET / HTTP/1.0\r\nHost: h\r\n\r\n")
        exchange = await service.arrived()
        exchange.leg.head(ResponseHead(200, []))
        exchange.leg.data(b"half")
        assert b"chunked" not in await client.head()
        assert await client.exactly(4) == b"half"
        exchange.leg.abort(Abort(Party.EDGE, Stage.BODY, Cause.LOST))
        with pytest.raises(ConnectionResetError):
            await client.rest()


async def test_a_reset_before_the_first_byte_is_told_at_once() -> None:
    service = ByHand()
    async with served(service) as client:
        client.send(POST + b"body")
        exchange = await service.arrived()
        client.reset()
        await exchange.until("abort")
        abort = exchange.heard[-1][1]
        assert (abort.by, abort.cause) == (Party.CLIENT, Cause.CANCELLED)


async def test_a_reset_is_seen_after_an_upload_that_was_stopped_with_its_last_byte() -> None:
    service = ByHand()
    service.on_exchange = lambda exchange: exchange.leg.pause()
    async with served(service) as client:
        client.send(POST + b"body")
        exchange = await service.arrived()
        await exchange.until("end")
        client.reset()
        await exchange.until("abort")


async def test_a_fin_after_a_whole_request_is_answered() -> None:
    service = ByHand()
    async with served(service) as client:
        client.send(POST + b"body")
        client.writer.write_eof()
        exchange = await service.arrived()
        await asyncio.sleep(0.05)  # the FIN has surely been read: nothing may come of it
        assert "abort" not in exchange.words
        exchange.answer(b"late")
        assert (await client.rest()).endswith(b"late")


async def test_a_fin_inside_a_request_is_a_cancel() -> None:
    service = ByHand()
    async with served(service) as client:
        client.send(POST + b"bo")
        exchange = await service.arrived()
        client.writer.write_eof()
        await exchange.until("abort")
        assert exchange.body == b"bo"
        assert "end" not in exchange.words


async def test_pipelined_requests_are_answered_in_order() -> None:
    service = ByHand()
    service.on_exchange = lambda exchange: exchange.answer(exchange.head.target)
    async with served(service) as client:
        client.send(b"".join(b"GET /%d HTTP/1.1\r\nHost: h\r\n\r\n" % i for i in range(50)))
        for i in range(50):
            await client.head()
            body = b"/%d" % i
            assert await client.exactly(len(body)) == body


@pytest.mark.parametrize("when", ["at once", "while the first is answered"])
async def test_requests_pipelined_before_a_fin_are_answered(when: str) -> None:
    service = ByHand()
    async with served(service) as client:
        client.send(POST + b"body" + GET + POST + b"last" + b"GET /cut HTTP/1.1\r\nHo")
        if when == "at once":
            client.writer.write_eof()
        first = await service.arrived()
        if when != "at once":
            client.writer.write_eof()
        first.answer(b"first")
        for body in (b"second", b"third"):
            (await service.arrived()).answer(body)
        rest = await client.rest()
        assert [rest.count(body) for body in (b"first", b"second", b"third")] == [1, 1, 1]
        assert rest.count(b"HTTP/1.1 200") == 3
        assert not service.connections


async def test_a_pipelined_request_that_a_fin_cut_is_a_cancel() -> None:
    service = ByHand()
    async with served(service) as client:
        client.send(GET + POST + b"bo")
        client.writer.write_eof()
        (await service.arrived()).answer(b"whole")
        cut = await service.arrived()
        await cut.until("abort")
        assert "end" not in cut.words


async def test_a_broken_body_is_400_and_the_end_of_the_connection() -> None:
    service = ByHand()
    async with served(service) as client:
        client.send(b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabXX")
        exchange = await service.arrived()
        await exchange.until("abort")
        assert exchange.heard[-1][1].cause is Cause.BROKEN
        assert (await client.rest()).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"garbage\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", b"400"),
        (b"GET / HTTP/3.0\r\nHost: h\r\n\r\n", b"505"),
        (b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"v" * 70_000, b"431"),
    ],
)
async def test_what_is_no_request_is_answered_and_closed(raw: bytes, status: bytes) -> None:
    service = ByHand()
    async with served(service) as client:
        client.send(raw)
        assert (await client.rest()).startswith(b"HTTP/1.1 " + status)
        assert service.exchanges.empty()


async def test_an_early_answer_says_close_and_is_not_lost_under_the_upload() -> None:
    service = ByHand()
    async with served(service) as client:
        client.send(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 500000\r\n\r\n")
        (await service.arrived()).answer(b"no", status=401)
        client.send(bytes(300_000))
        head = await client.head()
        assert head.startswith(b"HTTP/1.1 401 ")
        assert b"connection: close" in head
        assert await client.rest() == b"no"


async def test_expect_is_told_and_interim_answers_pass() -> None:
    service = ByHand()
    async with served(service) as client:
        client.send(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n")
        exchange = await service.arrived()
        assert exchange.head.expect_continue
        exchange.leg.interim(ResponseHead(103, [(b"link", b"</a>")]))
        exchange.leg.interim(ResponseHead(100, []))
        assert await client.head() == b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
        assert await client.head() == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b"body")
        await exchange.until("end")
        assert exchange.body == b"body"


async def test_a_slow_reader_is_told_by_full_and_drained() -> None:
    service = ByHand()
    async with served(service) as client:
        client.send(GET)
        exchange = await service.arrived()
        client.writer.transport.pause_reading()
        exchange.leg.head(ResponseHead(200, []))
        sent = 0
        while "full" not in exchange.words:
            exchange.leg.data(bytes(65536))
            sent += 65536
            await asyncio.sleep(0)
            assert sent < 64 << 20
        client.writer.transport.resume_reading()
        reading = asyncio.create_task(client.reader.readexactly(sent))
        await exchange.until("drained")
        await reading


async def test_a_paused_upload_stops_at_the_sockets_buffers() -> None:
    service = ByHand()
    async with served(service) as client:
        client.send(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 100000000\r\n\r\n")
        exchange = await service.arrived()
        exchange.leg.pause()
        client.send(bytes(1 << 20))
        await asyncio.sleep(0.1)  # time in which bytes would arrive if pause did nothing
        seen = len(exchange.body)
        assert seen <= 512 * 1024
        exchange.leg.resume()
        await exchange.until("data")


async def test_a_head_that_never_ends_is_408() -> None:
    service = ByHand(Limits(header_timeout_s=0.2))
    async with served(service) as client:
        client.send(b"GET / HT")
        assert (await client.rest()).startswith(b"HTTP/1.1 408 ")


async def test_an_idle_connection_is_closed_and_an_unused_one_too() -> None:
    service = ByHand(Limits(header_timeout_s=0.2, idle_timeout_s=0.2))
    service.on_exchange = lambda exchange: exchange.answer()
    async with served(service) as client:
        client.send(GET)
        assert (await client.rest()).endswith(b"ok")


async def test_draining_answers_what_runs_with_close_and_ends_what_is_idle() -> None:
    service = ByHand()
    async with served(service) as client:
        client.send(GET)
        exchange = await service.arrived()
        for connection in list(service.connections):
            connection.drain()
        exchange.answer(b"last")
        raw = await client.rest()
        assert b"connection: close" in raw
        assert raw.endswith(b"last")


async def test_stopping_now_is_no_clean_end() -> None:
    service = ByHand()
    async with served(service) as client:
        client.send(GET)
        exchange = await service.arrived()
        exchange.leg.head(ResponseHead(200, []))
        await client.head()
        for connection in list(service.connections):
            connection.close_now()
        assert exchange.heard[-1][1].by is Party.US
        with pytest.raises(ConnectionResetError):
            await client.rest()


async def test_a_switch_of_protocols_opens_a_tunnel_with_half_closes() -> None:
    service = ByHand()
    async with served(service) as client:
        client.send(
            b"GET /ws HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n" + KEY + b"\r\nearly"
        )
        exchange = await service.arrived()
        assert exchange.head.protocol == b"websocket"
        exchange.leg.head(ResponseHead(101, [(b"upgrade", b"websocket")]))
        assert b"connection: upgrade" in await client.head()
        client.send(b" bytes")
        await exchange.until("data")
        client.writer.write_eof()
        exchange.leg.data(b"still open")
        assert await client.exactly(10) == b"still open"
        await exchange.until("end", 3)
        assert exchange.body == b"early bytes"
        exchange.leg.end()
        assert await client.rest() == b""


@pytest.mark.parametrize(
    "said",
    [
        b"GET /ws HTTP/1.1\r\n",
        b"GET /ws HTTP/1.1\r\nSec-WebSocket-Key: dGhlIHNhbXBsZQ==\r\n",
        b"GET /ws HTTP/1.1\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZ!==\r\n",
        b"OPTIONS /ws HTTP/1.1\r\n" + KEY,
    ],
    ids=["no key", "a short key", "no base64", "no GET"],
)
async def test_a_websocket_upgrade_that_is_none_is_refused(said: bytes) -> None:
    async with served(ByHand()) as client:
        client.send(said + b"Host: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        assert (await client.head()).startswith(b"HTTP/1.1 400 ")


async def test_an_answer_of_the_edge_to_the_key_is_passed_on_right_or_wrong() -> None:
    service = ByHand()
    async with served(service) as client:
        client.send(b"GET /ws HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n" + KEY + b"\r\n")
        exchange = await service.arrived()
        exchange.leg.head(ResponseHead(101, [(b"upgrade", b"websocket"), (b"sec-websocket-accept", b"wrong")]))
        head = await client.head()
        assert head.count(b"upgrade: websocket") == head.count(b"sec-websocket-accept: wrong") == 1
        assert head.count(b"sec-websocket-accept") == 1


async def test_a_half_close_that_came_before_the_tunnel_stood_is_said_when_it_stands() -> None:
    service = ByHand()
    async with served(service) as client:
        client.send(b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\nearly bytes")
        client.writer.write_eof()
        exchange = await service.arrived()
        await exchange.until("end")  # of the request
        exchange.heard.clear()
        (connection,) = service.connections
        await until(lambda: connection._eof)  # type: ignore[attr-defined]
        exchange.leg.head(ResponseHead(200, [], length=0, no_body=True))
        await exchange.until("end")
        assert exchange.body == b"early bytes"
        exchange.leg.data(b"answer")
        exchange.leg.end()
        assert (await client.rest()).endswith(b"answer")


async def test_a_refused_connection_is_closed() -> None:
    service = ByHand(accept=False)
    async with served(service) as client:
        client.send(GET)
        assert await client.rest() == b""


async def test_a_tunnel_that_ended_on_both_sides_leaves_no_connection() -> None:
    service = ByHand()
    async with served(service) as client:
        client.send(b"GET /ws HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n" + KEY + b"\r\n")
        exchange = await service.arrived()
        exchange.leg.head(ResponseHead(101, [(b"upgrade", b"websocket")]))
        await client.head()
        exchange.leg.end()
        assert await client.rest() == b""
        client.writer.write_eof()
        await exchange.until("end")
        async with no_hang():
            while service.connections:
                await asyncio.sleep(0.01)


async def test_a_client_that_says_nothing_counts_as_a_connection() -> None:
    service = ByHand()
    async with served(service) as client:
        await until(lambda: len(service.connections) == 1)
        client.send(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        (await service.arrived()).answer()
        assert b"200" in await client.head()
        assert len(service.connections) == 1
        client.writer.close()
        await until(lambda: not service.connections)


async def test_a_client_that_says_nothing_is_closed_when_there_are_too_many_and_when_we_drain() -> None:
    async with served(ByHand(accept=False)) as client:
        assert await client.rest() == b""
    service = ByHand()
    async with served(service) as client:
        await until(lambda: len(service.connections) == 1)
        for connection in list(service.connections):
            connection.drain()
        assert await client.rest() == b""


async def until(holds: Callable[[], bool]) -> None:
    async with no_hang():
        while not holds():
            await asyncio.sleep(0.001)
