"""Our edge connection against a stock HTTP/3 server: the request on the wire, every way an answer goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from aioquic.buffer import encode_uint_var
from aioquic.h3.connection import FrameType, encode_frame
from aioquic.quic.connection import QuicConnection

from proxy.io.quic_edge_leg import MAX_INTERIMS
from proxy.messages import Abort, Cause, Party, Stage
from tests.patience import eventually
from tests.peers.h3peers import Asked, Server
from tests.proxy.h3.exchanges import OK, dialled, head, start

# -- an exchange


async def test_request_and_answer_pass_whole(ca: str, pem: str) -> None:
    def answer(asked: Asked) -> None:
        asked.http.send_headers(asked.stream_id, [(b":status", b"103"), (b"link", b"</a>")])
        asked.respond([*OK, (b"x-a", b"1")], b"body", end=False)
        asked.respond([(b"x-sum", b"4")])

    async with Server(pem, answer) as server, dialled(server.port, ca) as connection:
        request = head(
            b"POST", b"/v1//x%2F?q", (b"X-Key", b"v"), (b"Connection", b"x"), (b"Authorization", b"Bearer s")
        )
        exchange = start(connection, request, b"prompt" * 100)
        await exchange.heard_word("end")
        assert exchange.words == ["interim", "head", "data", "trailers", "end"]
        got = exchange.heard[1][1]
        assert (got.status, got.fields, exchange.body) == (200, [(b"x-a", b"1")], b"body")
        await server.until(lambda s: s.asked[0].ended)
        asked = server.asked[0]
        assert asked.body == b"prompt" * 100
        assert asked.fields == [
            (b":method", b"POST"), (b":scheme", b"https"), (b":authority", b"localhost"), (b":path", b"/v1//x%2F?q"),
            (b"x-key", b"v"), (b"authorization", b"Bearer s"),
        ]  # fmt: skip


async def test_request_without_body_is_one_frame_with_fin(ca: str, pem: str) -> None:
    async with Server(pem) as server, dialled(server.port, ca) as connection:
        leg = connection.open()
        leg.head(head())
        leg.end()
        await server.until(lambda s: s.asked)
        assert server.asked[0].ended


async def test_giant_and_secret_fields_arrive_unchanged_and_are_never_in_the_table(ca: str, pem: str) -> None:
    secret = (b"x-api-key", b"sk-canary-0123456789abcdef")
    async with Server(pem) as server, dialled(server.port, ca) as connection:
        for _ in range(4):
            start(connection, head(b"GET", b"/", secret, (b"x-giant", b"g" * 60_000), (b"x-usual", b"u" * 40)))
            await asyncio.sleep(0.02)  # let the encoder hear that its entries arrived
        await server.until(lambda s: len(s.asked) == 4)
        for asked in server.asked:
            assert secret in asked.fields
            assert (b"x-giant", b"g" * 60_000) in asked.fields
        # The peer's decoder was told less than one secret's worth besides the usual field.
        assert server.asked[0].http._encoder_bytes_received < 120


async def test_many_exchanges_share_one_connection_and_say_that_it_is_reused(ca: str, pem: str) -> None:
    async with Server(pem, lambda a: a.respond(OK, dict(a.fields)[b":path"])) as server:
        async with dialled(server.port, ca) as connection:
            exchanges = [start(connection, head(b"GET", b"/%d" % n)) for n in range(50)]
            assert connection.active == 50
            for number, exchange in enumerate(exchanges):
                await exchange.heard_word("end")
                assert exchange.body == b"/%d" % number
            assert [x.leg.reused for x in exchanges if x.leg] == [False] + [True] * 49
            assert connection.active == 0
        assert len(server.protocols) == 1


async def test_head_304_and_204_have_no_body_and_may_announce_one(ca: str, pem: str) -> None:
    def answer(asked: Asked) -> None:
        status = dict(asked.fields)[b":path"][1:]
        asked.respond([(b":status", status), (b"content-length", b"42")])

    async with Server(pem, answer) as server, dialled(server.port, ca) as connection:
        for method, status in ((b"HEAD", b"200"), (b"GET", b"304"), (b"GET", b"204")):
            exchange = start(connection, head(method, b"/" + status))
            await exchange.heard_word("end")
            assert exchange.heard[0][1].no_body
            assert exchange.words == ["head", "end"]


# -- room


async def test_room_is_what_the_edge_grants_and_its_growth_is_told(ca: str, pem: str) -> None:
    server = Server(pem)
    async with server:
        server.server._create_protocol = _few_streams(server, 3)
        async with dialled(server.port, ca) as connection:
            changes: list[int] = []
            connection.on_change = lambda: changes.append(connection.room)
            assert connection.room == 3
            exchanges = [start(connection) for _ in range(3)]
            assert connection.room == 0
            await server.until(lambda s: len(s.asked) == 3)
            for asked in server.asked:
                asked.respond(OK, b"x")
            for exchange in exchanges:
                await exchange.heard_word("end")
            await eventually(lambda: connection.room > 0)
            assert changes[-1] > 0


def _few_streams(server: Server, count: int) -> Callable[..., object]:
    def create(quic: QuicConnection, **rest: object) -> object:
        quic._local_max_streams_bidi.value = quic._local_max_streams_bidi.sent = count
        return server._protocol(quic, **rest)

    return create


# -- what goes wrong with an answer


def framed(section: bytes, *more: bytes) -> bytes:
    return encode_frame(FrameType.HEADERS, section) + b"".join(more)


@pytest.mark.parametrize(
    ("fields", "body", "words"),
    [
        ([*OK, (b"content-length", b"5")], b"1234", ["head", "data", "abort"]),
        ([*OK, (b"content-length", b"5")], b"123456", ["head", "abort"]),
        ([*OK, (b"content-length", b"five")], b"", ["abort"]),
        ([*OK, (b"transfer-encoding", b"chunked")], b"", ["abort"]),
        ([*OK, (b"X-Upper", b"1")], b"", ["abort"]),
        ([*OK, (b"x-a", b"a\r\nset-cookie: b")], b"", ["abort"]),
        ([(b":status", b"99")], b"", ["abort"]),
        ([(b":status", b"101")], b"", ["abort"]),
        ([(b":status", b"204")], b"surprise", ["head", "abort"]),
        ([(b"x-no", b"status")], b"", ["abort"]),
        ([(b":status", b"103")], None, ["abort"]),
    ],
)
async def test_answer_that_breaks_a_rule_fails_alone(
    ca: str, pem: str, fields: list[tuple[bytes, bytes]], body: bytes | None, words: list[str]
) -> None:
    def answer(asked: Asked) -> None:
        if dict(asked.fields)[b":path"] == b"/good":
            asked.respond(OK, b"fine")
            return
        _, section = asked.http._encoder.encode(asked.stream_id, fields)
        wire = framed(section, encode_frame(FrameType.DATA, body) if body else b"")
        asked.quic.send_stream_data(asked.stream_id, wire, end_stream=True)

    async with Server(pem, answer) as server, dialled(server.port, ca) as connection:
        exchange = start(connection)
        abort: Abort = await exchange.heard_word("abort")
        assert exchange.words == words
        assert (abort.by, abort.cause, abort.unprocessed) == (Party.EDGE, Cause.BROKEN, False)
        assert abort.stage is (Stage.BODY if "head" in words else Stage.HEAD)
        good = start(connection, head(b"GET", b"/good"))
        await good.heard_word("end")
        assert good.body == b"fine"


async def test_interim_answers_are_bounded_and_count_as_answers(ca: str, pem: str) -> None:
    async with Server(pem) as server, dialled(server.port, ca) as connection:
        flooded, begun = start(connection), start(connection)
        await server.until(lambda s: len(s.asked) == 2)
        for _ in range(MAX_INTERIMS + 1):
            server.asked[0].http.send_headers(server.asked[0].stream_id, [(b":status", b"103")])
        server.asked[1].respond([(b":status", b"103")], end=False)
        abort: Abort = await flooded.heard_word("abort")
        assert abort.cause is Cause.BROKEN and flooded.words.count("interim") == MAX_INTERIMS
        await begun.heard_word("interim")
        server.asked[1].quic.reset_stream(server.asked[1].stream_id, 0x102)
        server.asked[1].protocol.transmit()
        # It has begun: whoever decides on another try must not take it for a request that nobody answered
        assert (await begun.heard_word("abort")).stage is Stage.BODY


async def test_an_answer_of_too_many_lines_breaks_nothing_but_its_own_exchange(ca: str, pem: str) -> None:
    async with Server(pem) as server, dialled(server.port, ca) as connection:
        running, flooded = start(connection), start(connection, head(b"GET", b"/flood"))
        await server.until(lambda s: len(s.asked) == 2)
        server.asked[0].respond(OK, b"one", end=False)
        server.asked[1].respond([*OK, *[(b"x-%d" % number, b"1") for number in range(2000)]])
        abort: Abort = await flooded.heard_word("abort")
        assert (abort.by, abort.cause) == (Party.EDGE, Cause.BROKEN)
        assert "2001 lines" in abort.detail
        server.asked[0].send(b"two", end=True)
        await running.heard_word("end")
        assert running.body == b"onetwo"


async def test_oversized_answer_head_is_broken_and_names_the_limit(ca: str, pem: str) -> None:
    def answer(asked: Asked) -> None:
        asked.respond([*OK, (b"x-a", b"\xff" * 40_000), (b"x-b", b"\xff" * 40_000)], b"x")

    async with Server(pem, answer) as server, dialled(server.port, ca) as connection:
        exchange = start(connection)
        abort: Abort = await exchange.heard_word("abort")
        assert abort.cause is Cause.BROKEN
        assert "at most 65536" in abort.detail
        assert not connection.closed


async def test_edge_that_breaks_framing_loses_the_connection(ca: str, pem: str) -> None:
    def answer(asked: Asked) -> None:
        asked.quic.send_stream_data(asked.stream_id, encode_frame(FrameType.DATA, b"x"))

    async with Server(pem, answer) as server, dialled(server.port, ca) as connection:
        exchange, other = start(connection), start(connection, body=None)
        assert (await exchange.heard_word("abort")).cause is Cause.LOST
        assert other.words == ["abort"]
        assert connection.closed and connection.room == 0
        await server.until(lambda s: s.closed)
        assert server.closed[0].error_code == 0x105


@pytest.mark.parametrize(
    ("code", "begun", "unprocessed"),
    [(0x102, False, False), (0x102, True, False), (0x10B, False, True), (0x10B, True, False), (0x110, False, True)],
)
async def test_reset_by_the_edge_says_where_and_whether_it_was_processed(
    ca: str, pem: str, code: int, begun: bool, unprocessed: bool
) -> None:
    def answer(asked: Asked) -> None:
        if begun:
            asked.respond(OK, b"12345", end=False)
        else:
            asked.quic.reset_stream(asked.stream_id, code)

    async with Server(pem, answer) as server, dialled(server.port, ca) as connection:
        exchange = start(connection)
        if begun:
            await exchange.heard_word("data")
            server.asked[0].quic.reset_stream(server.asked[0].stream_id, code)
            server.protocols[0].transmit()
        abort: Abort = await exchange.heard_word("abort")
        assert (abort.by, abort.code, abort.unprocessed) == (Party.EDGE, code, unprocessed)
        assert abort.stage is (Stage.BODY if begun else Stage.HEAD)
        assert abort.cause is (Cause.REFUSED if unprocessed else Cause.LOST)


async def test_goaway_spares_the_lower_streams_and_frees_the_others(ca: str, pem: str) -> None:
    async with Server(pem) as server, dialled(server.port, ca) as connection:
        first, second = start(connection), start(connection, head(b"POST"), None)
        await server.until(lambda s: len(s.asked) == 2)
        asked = server.asked[0]
        control = asked.http._local_control_stream_id
        assert control is not None
        asked.quic.send_stream_data(control, encode_frame(FrameType.GOAWAY, encode_uint_var(4)))
        server.protocols[0].transmit()
        abort: Abort = await second.heard_word("abort")
        assert abort.unprocessed and abort.by is Party.EDGE
        assert connection.room == 0 and not connection.closed
        asked.respond(OK, b"still answered")
        await first.heard_word("end")
        assert first.body == b"still answered"
        await eventually(lambda: connection.closed)


async def test_stop_of_the_upload_is_no_failure_when_an_answer_comes(ca: str, pem: str) -> None:
    async with Server(pem) as server, dialled(server.port, ca) as connection:
        exchange = start(connection, head(b"POST"), None)
        assert exchange.leg is not None
        await server.until(lambda s: s.asked)
        asked = server.asked[0]
        asked.quic.stop_stream(asked.stream_id, 0x100)
        asked.respond([(b":status", b"413")], b"enough")
        await exchange.heard_word("end")
        exchange.leg.data(b"more")
        exchange.leg.end()
        assert exchange.body == b"enough"
        assert connection.active == 0
        again = start(connection, head(b"GET", b"/again"))
        await server.until(lambda s: len(s.asked) == 2)
        server.asked[1].respond(OK, b"x")
        await again.heard_word("end")
