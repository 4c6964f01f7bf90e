"""Long bodies pass from socket to socket: whole, no faster than they are taken, and never beyond an end of either side."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from config.model import Timeouts
from headrace.lab.ca import ThrowAwayCa
from proxy.io.outbound_h1 import H1EdgeConnection
from proxy.io.splice import MOST, PIECE, RUNNING, Splice
from proxy.io.wire import Wire
from proxy.messages import Abort, Cause, Fields, Leg, Party, RequestHead, ResponseHead, Stage
from tests.patience import eventually, soon
from tests.peers.services import Exchange
from tests.proxy.matrix import Heard, Matrix, matrix

BODY = random.Random(3).randbytes(1 << 20) * 24
"""More than the sockets on its way hold, so that whoever does not read stops it."""
CANCEL = Abort(Party.US, Stage.BODY, Cause.CANCELLED, "test")
LOST = Abort(Party.EDGE, Stage.BODY, Cause.LOST, "test")


def descriptors() -> list[str]:
    """What every descriptor of ours is, but for its number."""
    kinds = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            kinds.append(os.readlink(entry).partition(":")[0])
        except OSError:
            continue
    return sorted(kind for kind in kinds if kind in ("socket", "pipe"))


async def stalled() -> Splice:
    """The one that runs, once it waits for room."""
    await eventually(lambda: any(not one._source.is_reading for one in RUNNING))
    (one,) = RUNNING
    return one


async def upload(made: Matrix, length: int = len(BODY)) -> tuple[H1EdgeConnection, Leg, Heard, Exchange]:
    """An upload whose origin does not read on."""
    client = await made.client("h1")
    assert isinstance(client, H1EdgeConnection)
    leg, heard = made.ask(client, "h1", RequestHead(b"POST", b"/up", b"http", b"", [], length=length))
    exchange = await made.origin.arrived()
    exchange.leg.pause()
    leg.data(BODY)
    return client, leg, heard, exchange


async def download(made: Matrix, fields: Fields, length: int = len(BODY)) -> tuple[Leg, Heard, Exchange]:
    """An answer whose client does not read on, and the bytes that there are of it."""
    leg, heard = made.ask(await made.client("h1"), "h1", RequestHead(b"GET", b"/down", b"http", b"", [], length=0))
    leg.end()
    exchange = await made.origin.arrived()
    exchange.leg.head(ResponseHead(200, fields, length=length))
    await heard.until("head")
    leg.pause()
    exchange.leg.data(BODY)
    return leg, heard, exchange


async def raw_upload(made: Matrix, sent: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Exchange]:
    """A client that sends so many bytes of a longer body; they have all arrived, and the rest is waited for."""
    reader, writer = await asyncio.open_connection("127.0.0.1", made.port("h1"))
    writer.write(b"POST /up HTTP/1.1\r\nhost: h1.localhost\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY[:sent])
    exchange = await made.origin.arrived()
    await eventually(lambda: exchange_size(exchange) == sent)
    assert len(RUNNING) == 1
    return reader, writer, exchange


def exchange_size(exchange: Exchange) -> int:
    return sum(len(value) for word, value in exchange.heard if word == "data")


def status(heard: Heard) -> int:
    (head,) = [value for word, value in heard.heard if word == "head"]
    return int(head.status)


class End(asyncio.Protocol):
    """Our end of a connection, by itself."""

    def __init__(self) -> None:
        self.wire = Wire(asyncio.get_running_loop())
        self.words: list[str] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.wire.attach(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.wire.let_go()

    def pause_writing(self) -> None:
        self.words.append("full")
        self.peer.wire.pause()

    def resume_writing(self) -> None:
        self.words.append("drained")
        self.peer.wire.resume()

    peer: End


@asynccontextmanager
async def ends() -> AsyncIterator[tuple[Splice, End, End, socket.socket, socket.socket, list[int]]]:
    """(a splice, its source, its sink, the peers of both, what was heard)."""
    loop = asyncio.get_running_loop()
    made: list[tuple[End, socket.socket]] = []
    for _ in range(2):
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        _, end = await loop.create_connection(End, sock=ours)
        made.append((end, theirs))
    (source, client), (sink, server) = made
    source.peer, sink.peer = sink, source
    heard: list[int] = []
    with client, server:
        yield Splice(source.wire, sink, heard.append, heard.append), source, sink, client, server, heard
        source.wire.reset()
        sink.wire.reset()
        await eventually(lambda: source.wire.transport is sink.wire.transport is None)


async def read_all(sock: socket.socket, size: int) -> bytes:
    """So many bytes, or as many as come before the end."""
    got = b""
    while len(got) < size and (more := await soon(asyncio.get_running_loop().sock_recv(sock, 1 << 20))):
        got += more
    return got


async def test_what_was_taken_from_a_source_that_ends_still_reaches_the_sink() -> None:
    async with ends() as (splice, source, sink, client, server, heard):
        assert splice.begin(len(BODY))
        sending = asyncio.create_task(asyncio.get_running_loop().sock_sendall(client, BODY))
        await eventually(lambda: sink.words == ["full"])
        assert splice._in_pipe
        sending.cancel()
        source.wire.reset()
        assert not splice.is_running
        assert sink.words == ["full", "drained"]
        taken = sum(heard)
        assert await read_all(server, taken) == BODY[:taken]


async def test_it_does_not_overtake_what_was_written_before() -> None:
    async with ends() as (splice, source, sink, _, server, _):
        turn = sink.wire.turn
        turn.is_open = True
        sink.wire.write(BODY)
        assert not splice.begin(len(BODY))
        turn.end()
        assert sink.words == ["full"]
        assert not splice.begin(len(BODY))
        assert await read_all(server, len(BODY)) == BODY
        await eventually(lambda: sink.words == ["full", "drained"] and source.wire.is_reading)
        assert splice.begin(len(BODY))


async def test_an_upload_arrives_whole_and_both_connections_go_on(ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        client, leg, heard, exchange = await upload(made)
        one = await stalled()
        assert one.is_running
        exchange.leg.resume()
        leg.end()
        await exchange.until("end")
        assert exchange.body == BODY
        assert not RUNNING
        exchange.answer(b"thanks")
        await heard.until("end")
        assert heard.body == b"thanks"

        again, heard = made.ask(client, "h1", RequestHead(b"POST", b"/2", b"http", b"", [], length=2))
        again.data(b"hi")
        again.end()
        exchange = await made.origin.arrived()
        await exchange.until("end")
        assert exchange.body == b"hi"
        exchange.answer()
        await heard.until("end")
        await eventually(lambda: len(made.records) == 2)
        assert [(record.bytes_in, record.reused, record.outcome) for record in made.records] == [
            (len(BODY), False, "ok"),
            (2, True, "ok"),
        ]


async def test_nothing_is_left_open_behind_an_upload(ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        client = await made.client("h1")
        leg, _ = made.ask(client, "h1", RequestHead(b"POST", b"/up", b"http", b"", [], length=len(BODY)))
        exchange = await made.origin.arrived()
        before = descriptors()
        exchange.leg.pause()
        leg.data(BODY)
        await stalled()
        assert len(descriptors()) == len(before) + 4
        exchange.leg.resume()
        leg.end()
        await exchange.until("end")
        assert descriptors() == before


async def test_an_edge_that_does_not_read_stops_the_client(ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        client, _, _, _ = await upload(made)
        one = await stalled()
        assert 0 < one._in_pipe <= PIECE
        assert client.wire.is_behind
        assert one._left > PIECE


async def test_a_cancelled_upload_never_ends_at_the_edge(ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        _, leg, _, exchange = await upload(made)
        await stalled()
        leg.abort(CANCEL)
        exchange.leg.resume()
        await exchange.until("abort")
        assert "end" not in exchange.words
        assert BODY.startswith(exchange.body)
        await eventually(lambda: not RUNNING)


async def test_a_client_that_closes_inside_its_upload_is_cut_at_the_edge(ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        _, writer, exchange = await raw_upload(made, 4 << 20)
        writer.close()
        await exchange.until("abort")
        assert "end" not in exchange.words
        assert exchange.body == BODY[: 4 << 20]
        assert not RUNNING
        await soon(writer.wait_closed())


async def test_bytes_behind_the_body_are_the_next_request(ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        reader, writer, exchange = await raw_upload(made, 4 << 20)
        writer.write(BODY[4 << 20 :] + b"GET /next HTTP/1.1\r\nhost: h1.localhost\r\nconnection: close\r\n\r\n")
        await exchange.until("end")
        assert exchange.body == BODY
        exchange.answer(b"first")
        following = await made.origin.arrived()
        assert following.head.target == b"/next"
        following.answer(b"second")
        said = await soon(reader.read())
        assert said.index(b"first") < said.index(b"second")
        writer.close()


async def test_an_answer_before_the_upload_ended_reaches_the_client(ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        _, _, heard, exchange = await upload(made)
        await stalled()
        exchange.answer(b"too much", status=413)
        await heard.until("end")
        assert heard.body == b"too much"
        assert not RUNNING


async def test_an_edge_that_dies_inside_an_upload_is_answered_for(ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        _, _, heard, exchange = await upload(made)
        await stalled()
        exchange.leg.abort(LOST)
        await heard.until("head")
        assert status(heard) == 502
        assert not RUNNING


async def test_an_upload_that_stands_still_is_timed_out(ca: ThrowAwayCa) -> None:
    async with matrix(ca, timeouts=Timeouts(first_byte_s=0.5)) as made:
        reader, writer, exchange = await raw_upload(made, 4 << 20)
        assert (await soon(reader.readline())).startswith(b"HTTP/1.1 408 ")
        await exchange.until("abort")
        assert not RUNNING
        writer.close()


async def test_the_hard_stop_ends_it(ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        _, _, heard, _ = await upload(made)
        await stalled()
        made.gateway.abort_all()
        assert not RUNNING
        await heard.until("head")
        assert status(heard) >= 500


async def test_a_download_arrives_whole(ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        leg, heard, exchange = await download(made, [])
        one = await stalled()
        assert one._in_pipe <= PIECE
        exchange.leg.end()
        leg.resume()
        await heard.until("end")
        assert heard.body == BODY
        assert not RUNNING
        await eventually(lambda: made.records)
        assert (made.records[0].bytes_out, made.records[0].outcome) == (len(BODY), "ok")


async def test_a_download_whose_edge_dies_is_cut_after_what_it_sent(ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        leg, heard, exchange = await download(made, [], len(BODY) + 1)
        await stalled()
        exchange.leg.abort(LOST)
        leg.resume()
        await heard.until("abort")
        assert "end" not in heard.words
        assert heard.body == BODY
        assert not RUNNING


async def test_a_client_that_leaves_its_download_cancels_it_at_the_edge(ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        leg, _, exchange = await download(made, [])
        await stalled()
        leg.abort(CANCEL)
        await exchange.until("abort")
        assert not RUNNING


async def test_a_client_that_takes_nothing_is_cut(ca: ThrowAwayCa) -> None:
    async with matrix(ca, timeouts=Timeouts(idle_s=0.5)) as made:
        leg, heard, exchange = await download(made, [])
        await exchange.until("abort")
        leg.resume()
        await heard.until("abort")
        assert BODY.startswith(heard.body)
        assert made.records[0].detail == "client took nothing for timeouts.idle = 0.5 s"
        assert not RUNNING


async def test_what_is_watched_or_encrypted_is_not_passed_unseen(ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        leg, _, exchange = await download(made, [(b"content-type", b"text/event-stream")])
        await eventually(lambda: any(one.client_full for one in made.gateway.relay.exchanges))
        assert not RUNNING
        leg.abort(CANCEL)
        await exchange.until("abort")

        context = ca.client_context(["http/1.1"])
        _, writer = await asyncio.open_connection(
            "127.0.0.1", made.port("h2"), ssl=context, server_hostname="localhost"
        )
        writer.write(b"POST /up HTTP/1.1\r\nhost: h1.localhost\r\ncontent-length: %d\r\n\r\n" % len(BODY))
        writer.write(BODY[: 4 << 20])
        exchange = await made.origin.arrived()
        await eventually(lambda: exchange_size(exchange) == 4 << 20)
        assert not RUNNING
        writer.transport.abort()
        await exchange.until("abort")


async def test_beyond_the_bound_bodies_go_the_ordinary_way(ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        made_up = {object() for _ in range(MOST)}
        RUNNING.update(made_up)  # type: ignore[arg-type]
        try:
            _, leg, _, exchange = await upload(made)
            await eventually(lambda: any(one.edge_full for one in made.gateway.relay.exchanges))
            assert made_up == RUNNING
            exchange.leg.resume()
            leg.end()
            await exchange.until("end")
            assert exchange.body == BODY
        finally:
            RUNNING.difference_update(made_up)  # type: ignore[arg-type]
