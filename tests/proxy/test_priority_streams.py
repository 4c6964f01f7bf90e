"""An urgent answer among many on one connection: transcripts of h2, real sockets for h2 and h3, and the way upstream."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from aioquic.buffer import encode_uint_var
from aioquic.h3.connection import encode_frame

from config.model import Config, Listen, PathPriority, Tickets
from headrace.lab.ca import ThrowAwayCa
from proxy import h2_frames as wire
from proxy.io.inbound_quic import listen_quic
from proxy.io.inbound_tcp import listen_tcp
from proxy.messages import Fields, RequestHead, ResponseHead
from proxy.priority import Priority
from tests.patience import no_hang
from tests.peers.h3peers import Client, Exchanged, Gateway, say
from tests.peers.services import ByHand, Exchange
from tests.proxy.h2_wire import GET, Eyes, Served, credit, frame, headers, word
from tests.proxy.matrix import PAIRS, VERSIONS, matrix

BULK, BULK_BYTES, URGENT_BYTES = 20, 2 * 1024 * 1024, 64 * 1024
WIDE = wire.PREFACE + wire.settings({wire.INITIAL_WINDOW_SIZE: 1 << 24}) + credit(0, 1 << 28)
FRAME = 16_384


def update(stream_id: int, value: bytes) -> bytes:
    return frame(wire.PRIORITY_UPDATE, 0, 0, word(stream_id) + value)


# -- transcripts


def answer(
    served: Served, stream_id: int, said: bytes | None, size: int = 3 * FRAME, fields: Fields | None = None
) -> None:
    """A request that says `said`, answered at once with more than the closed window lets out."""
    stream, _, _ = served.ask(stream_id, [*GET, (b"priority", said)] if said is not None else GET)
    stream.head(ResponseHead(200, fields or []))
    stream.data(b"x" * size)
    stream.end()


def order(served: Served) -> list[int]:
    """Streams in the order of their DATA frames, once the connection's window opens."""
    served.heard()
    served.say(credit(0, 1 << 24))
    seen = [*served.heard(), *served.heard(), *served.heard()]
    return [frame.stream_id for frame in seen if frame.kind == "Data" and frame.value]


def closed_window() -> Served:
    served = Served(hello=wire.PREFACE + wire.settings({wire.INITIAL_WINDOW_SIZE: 1 << 24}))
    served.h2.sender.window = 0
    return served


def test_streams_nobody_spoke_for_share() -> None:
    served = closed_window()
    answer(served, 1, None)
    answer(served, 3, None)
    assert order(served) == [1, 3, 1, 3, 1, 3]


def test_the_more_urgent_goes_first_and_equals_in_order_or_in_turns() -> None:
    served = closed_window()
    answer(served, 1, b"u=5", FRAME)
    answer(served, 3, b"u=1")
    answer(served, 5, b"u=1")
    answer(served, 7, b"u=0, i", 2 * FRAME)
    answer(served, 9, b"u=0, i", 2 * FRAME)
    assert order(served) == [7, 9, 7, 9, 3, 3, 3, 5, 5, 5, 1]


def test_priority_update_moves_what_waits() -> None:
    served = closed_window()
    answer(served, 1, b"u=1")
    answer(served, 3, b"u=1")
    served.say(update(3, b"u=0"))
    assert order(served) == [3, 3, 3, 1, 1, 1]


def test_priority_update_before_its_request_is_the_later_word() -> None:
    served = closed_window()
    served.say(update(3, b"u=0"))
    answer(served, 1, b"u=2")
    answer(served, 3, b"u=7")
    assert order(served) == [3, 3, 3, 1, 1, 1]


def test_priority_updates_kept_for_later_are_bounded() -> None:
    served = closed_window()
    for stream_id in range(1, 2001, 2):
        served.say(update(stream_id, b"u=0"))
    assert len(served.h2._early) == 64


def test_a_value_that_does_not_parse_and_a_stream_that_is_over_change_nothing() -> None:
    served = closed_window()
    answer(served, 1, b"u=1")
    answer(served, 3, b"u=2")
    served.say(update(3, b"u=0,"), update(99, b"\xff"))
    assert order(served) == [1, 1, 1, 3, 3, 3]
    served.say(update(1, b"u=0"))
    assert served.h2.failed is None


def test_a_path_rule_counts_only_where_the_client_said_nothing() -> None:
    served = closed_window()
    for stream_id, said in ((1, None), (3, b"u=4"), (5, None)):
        answer(served, stream_id, said)
    for stream, _, _ in served.requests:
        stream.prioritize(Priority(1 if stream.id == 5 else 0 if stream.id == 3 else 5))
    assert order(served) == [5, 5, 5, 3, 3, 3, 1, 1, 1]


def test_a_response_may_say_that_it_is_urgent() -> None:
    served = closed_window()
    answer(served, 1, b"u=1")
    answer(served, 3, b"u=5", fields=[(b"priority", b"u=0")])
    assert order(served) == [3, 3, 3, 1, 1, 1]


def test_one_loud_turn_does_not_fill_the_transport_before_an_urgent_answer() -> None:
    # Given windows that are open wide, and twenty answers that come in one turn before an urgent one
    served = Served(hello=WIDE)
    for stream_id in range(1, 41, 2):
        answer(served, stream_id, None, 256 * 1024)
    answer(served, 41, b"u=0")
    # Then what the turn's write holds ahead of it is bounded
    first = [seen.stream_id for seen in served.heard() if seen.kind == "Data"]
    second = [seen.stream_id for seen in served.heard() if seen.kind == "Data"]
    assert len(first) <= 256 * 1024 // FRAME + 1
    assert second[:3] == [41, 41, 41]


# -- sockets


@asynccontextmanager
async def wide_client(service: ByHand) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """An h2 client that takes little at a time, as a slow path would."""
    listener = await listen_tcp(Listen("http", "127.0.0.1", 0), service, tls=None)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", listener.address[1]))
    reader, writer = await asyncio.open_connection(sock=sock, limit=FRAME)
    writer.write(WIDE)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        listener.close()
        for connection in list(service.connections):
            connection.close_now()
        for _ in range(3):
            await asyncio.sleep(0)


async def h2_bytes_ahead(said: bytes | None) -> tuple[int, int]:
    """Bulk bytes that came between asking and the first, and the last byte of one more answer."""
    service, eyes, number = ByHand(), Eyes(), 2 * BULK + 1
    got = first = last = 0
    asked_at = -1
    async with no_hang(), wide_client(service) as (reader, writer):
        for i in range(BULK):
            writer.write(headers(2 * i + 1, GET, end=True))
        for _ in range(BULK):
            (await service.arrived()).answer(b"x" * BULK_BYTES)
        while not last:
            for seen in eyes.read(await reader.read(65536)):
                if seen.stream_id == number and seen.kind == "Data":
                    first = first or got - asked_at
                    last = got - asked_at if seen.end else 0
                elif seen.kind == "Data":
                    got += len(seen.value)
            if asked_at < 0 and got > 1024 * 1024:
                asked_at = got
                more = [(b"priority", said)] if said is not None else []
                writer.write(headers(number, [*GET, *more], end=True))
                (await service.arrived()).answer(b"u" * URGENT_BYTES)
    return first, last


async def test_h2_small_urgent_answer_is_not_delayed_by_bulk_streams() -> None:
    # When the same small answer is asked for with and without a word about its urgency
    first, last = await h2_bytes_ahead(b"u=0")
    _, shared = await h2_bytes_ahead(None)
    # Then the urgent one waits for what is in flight alone (buffers of both kernels: 1 MB), in one piece
    assert last - first <= FRAME
    assert last < 1_400_000
    assert shared - last > (URGENT_BYTES // FRAME - 1) * BULK * FRAME * 3 // 4


async def h3_bytes_ahead(port: int, ca_file: str, said: bytes | None, *, late: bool = False) -> int:
    """As h2_bytes_ahead, the last byte alone; `late`: said by a PRIORITY_UPDATE frame after the answer began."""
    async with no_hang(), Client(port, ca_file, max_data=1 << 28, max_stream_data=1 << 26) as client:
        bulk = [client.ask() for _ in range(BULK)]

        def got() -> int:
            return sum(len(answer.body) for answer in bulk)

        await client.until(lambda _: got() > 512 * 1024)
        asked_at, more = got(), [(b"priority", said)] if said is not None and not late else []
        small = client.ask("GET", "/small", *more)
        if late and said is not None:
            control = client.http._local_control_stream_id
            assert control is not None
            frame = encode_frame(0xF0700, encode_uint_var(small.stream_id) + said)
            client.quic.send_stream_data(control, frame)
            client.protocol.transmit()
        await small.whole()
        ahead = got() - asked_at
        client.vanish()
        return ahead


async def test_h3_small_urgent_answer_is_not_delayed_by_bulk_streams(ca: ThrowAwayCa) -> None:
    def reply(exchange: Exchanged) -> None:
        assert exchange.head is not None
        say(exchange.leg, 200, b"x" * (URGENT_BYTES if exchange.head.target == b"/small" else BULK_BYTES // 2))

    gateway = Gateway(reply)
    listener = await listen_quic(
        Listen("h3", "127.0.0.1", 0), gateway, cert_file=str(ca.cert_file), key_file=str(ca.key_file), tickets=Tickets()
    )
    try:
        port, ca_file = listener.address[1], str(ca.ca_file)
        urgent = await h3_bytes_ahead(port, ca_file, b"u=0")
        updated = await h3_bytes_ahead(port, ca_file, b"u=0", late=True)
        shared = await h3_bytes_ahead(port, ca_file, None)
    finally:
        listener.close()
    assert shared > 15 * URGENT_BYTES
    assert urgent < shared / 2 and updated < shared / 2


@pytest.mark.parametrize(
    ("update", "code"),
    [
        (encode_frame(0xF0700, encode_uint_var(2) + b"u=1"), 0x108),
        (encode_frame(0xF0700, encode_uint_var(4 * 256) + b"u=1"), 0x108),
        (encode_frame(0xF0701, encode_uint_var(0) + b"u=1"), 0x108),
        (encode_frame(0xF0700, b""), 0x106),
        (encode_frame(0xF0700, encode_uint_var(0) + b"u=" * 3000), 0x107),
    ],
    ids=["no request stream", "beyond the stream limit", "a push", "cut short", "too long"],
)
async def test_h3_priority_update_that_breaks_a_rule_ends_the_connection(
    ca: ThrowAwayCa, update: bytes, code: int
) -> None:
    listener = await listen_quic(
        Listen("h3", "127.0.0.1", 0),
        Gateway(),
        cert_file=str(ca.cert_file),
        key_file=str(ca.key_file),
        tickets=Tickets(),
    )
    try:
        async with Client(listener.address[1], str(ca.ca_file)) as client:
            control = client.http._local_control_stream_id
            assert control is not None
            client.quic.send_stream_data(control, update)
            client.protocol.transmit()
            await client.until(lambda c: c.closed)
            assert client.closed is not None and client.closed.error_code == code
    finally:
        listener.close()


async def test_h3_priority_update_before_its_request_is_kept_and_the_later_word(ca: ThrowAwayCa) -> None:
    gateway = Gateway()
    listener = await listen_quic(
        Listen("h3", "127.0.0.1", 0), gateway, cert_file=str(ca.cert_file), key_file=str(ca.key_file), tickets=Tickets()
    )
    try:
        async with Client(listener.address[1], str(ca.ca_file)) as client:
            control = client.http._local_control_stream_id
            assert control is not None
            client.quic.send_stream_data(control, encode_frame(0xF0700, encode_uint_var(0) + b"u=1, i"))
            client.protocol.transmit()
            client.ask("GET", "/", (b"priority", b"u=6"))
            leg = (await gateway.request()).leg
            assert leg is not None
            leg.prioritize(Priority(7))  # a path rule comes too late
            assert leg._connection.quic.priority_of(0) == Priority(1, True)  # type: ignore[attr-defined]
    finally:
        listener.close()


# -- upstream


@pytest.mark.parametrize(("down", "up"), PAIRS, ids=[f"{down}-{up}" for down, up in PAIRS])
async def test_a_path_rule_reaches_the_edge_where_the_client_said_nothing(down: str, up: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        rule = PathPriority("/v1/chat", 1, True)
        pools = tuple(replace(made.edges.pool(name).config, priorities=(rule,)) for name in VERSIONS)
        made.edges.apply(pools)
        made.gateway.apply(Config(state_dir=Path("/nonexistent"), pools=pools))
        client = await made.client(down)
        said: list[bytes | None] = []
        for target, more in ((b"/v1/chat", []), (b"/v1/chat", [(b"priority", b"u=6")]), (b"/v1/files", [])):
            leg, heard = made.ask(client, up, RequestHead(b"GET", target, b"", b"", list(more), length=0))
            leg.end()
            exchange: Exchange = await made.origin.arrived(5)
            said.append(exchange.head.get(b"priority"))
            exchange.answer()
            await heard.until("end")
        assert said == [b"u=1, i", b"u=6", None]
