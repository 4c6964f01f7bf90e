"""Our edge connection against a stock HTTP/3 server: dialling, the request on the wire, every way an answer goes wrong."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aioquic.buffer import encode_uint_var
from aioquic.h3.connection import FrameType, H3Connection, Setting, encode_frame
from aioquic.quic.connection import QuicConnection
from aioquic.tls import Epoch

from proxy.io import outbound_quic
from proxy.io.outbound_quic import H3EdgeConnection, QuicSessions, dial_quic
from proxy.io.quic_edge_leg import MAX_INTERIMS
from proxy.io.quic_flow import STREAM_WINDOW
from proxy.io.rims import HIGH_WATER
from proxy.messages import Abort, Cause, Leg, Party, RequestHead, Stage
from tests.patience import no_hang, soon, timed
from tests.peers import h3peers
from tests.peers.authority import Authority
from tests.peers.h3peers import Asked, Exchanged, Gateway, Server, listening, make_authority, say
from tests.peers.nat import Nat
from tests.peers.ports import free_port

OK = [(b":status", b"200")]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    directory: Path = tmp_path_factory.mktemp("tls")
    return make_authority(directory)


@pytest.fixture
def ca(files: tuple[str, str]) -> str:
    return files[0]


@pytest.fixture
def pem(files: tuple[str, str]) -> str:
    return files[1]


@asynccontextmanager
async def dialled(port: int, ca: str, sessions: QuicSessions | None = None) -> AsyncIterator[H3EdgeConnection]:
    connection = await dial_quic(
        "127.0.0.1", port, server_name="localhost", ca_file=ca, timeout_s=30, sessions=sessions or QuicSessions()
    )
    try:
        yield connection
    finally:
        connection.abandon()


def head(method: bytes = b"GET", target: bytes = b"/", *fields: tuple[bytes, bytes]) -> RequestHead:
    return RequestHead(method, target, b"https", b"localhost", list(fields), None)


def start(connection: H3EdgeConnection, request: RequestHead | None = None, body: bytes | None = b"") -> Exchanged:
    """Open a leg and send; `body=None` leaves the request open."""
    leg: Leg = connection.open()
    exchange = Exchanged(leg=leg)
    leg.receiver = exchange
    leg.head(request or head())
    if body is not None:
        leg.data(body)
        leg.end()
    return exchange


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
            await soon(_until(lambda: connection.room > 0))
            assert changes[-1] > 0


def _few_streams(server: Server, count: int) -> Callable[..., object]:
    def create(quic: QuicConnection, **rest: object) -> object:
        quic._local_max_streams_bidi.value = quic._local_max_streams_bidi.sent = count
        return server._protocol(quic, **rest)

    return create


async def _until(ready: Callable[[], object]) -> None:
    while not ready():
        await asyncio.sleep(0.01)


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
        await soon(_until(lambda: connection.closed))


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


def websocket() -> RequestHead:
    request = head(b"GET", b"/ws", (b"sec-websocket-version", b"13"), (b"sec-websocket-key", b"a2V5"))
    request.protocol, request.length = b"websocket", 0
    return request


async def settled(connection: H3EdgeConnection) -> None:
    async with asyncio.timeout(5):
        while not connection.is_settled:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("kind", ["connect", "another protocol"])
async def test_any_other_tunnel_is_refused_before_a_byte_leaves(ca: str, pem: str, kind: str) -> None:
    async with Server(pem) as server, dialled(server.port, ca) as connection:
        await settled(connection)
        request = head(b"CONNECT" if kind == "connect" else b"GET")
        request.protocol = b"" if kind == "connect" else b"made-up"
        exchange = start(connection, request, None)
        abort: Abort = await exchange.heard_word("abort")
        assert (abort.unprocessed, abort.cause) == (True, Cause.REFUSED)
        assert connection.active == 0 and server.asked == []


async def test_a_websocket_is_an_extended_connect_with_two_directions(ca: str, pem: str) -> None:
    async with Server(pem) as server, dialled(server.port, ca) as connection:
        await settled(connection)
        exchange = start(connection, websocket(), None)
        await server.until(lambda s: s.asked)
        asked = server.asked[0]
        assert asked.fields == [
            (b":method", b"CONNECT"), (b":protocol", b"websocket"), (b":scheme", b"https"),
            (b":authority", b"localhost"), (b":path", b"/ws"), (b"sec-websocket-version", b"13"),
        ]  # fmt: skip
        assert not asked.ended
        asked.respond([(b":status", b"200"), (b"sec-websocket-protocol", b"realtime")], end=False)
        accepted = await exchange.heard_word("head")
        assert (accepted.status, accepted.fields) == (101, [(b"sec-websocket-protocol", b"realtime")])
        exchange.leg.data(b"up")
        await server.until(lambda s: s.asked[0].body == b"up")
        asked.send(b"down", end=True)
        await exchange.heard_word("end")
        assert exchange.body == b"down"
        exchange.leg.data(b" and more")  # the other direction goes on after their half-close
        exchange.leg.end()
        await server.until(lambda s: s.asked[0].ended)
        assert asked.body == b"up and more"
        assert connection.active == 0


async def test_a_refused_websocket_is_an_ordinary_answer_and_leaves_nothing(ca: str, pem: str) -> None:
    async with Server(pem) as server, dialled(server.port, ca) as connection:
        await settled(connection)
        exchange = start(connection, websocket(), None)
        await server.until(lambda s: s.asked)
        server.asked[0].respond([(b":status", b"403")], b"no")
        await exchange.heard_word("end")
        refused = next(value for word, value in exchange.heard if word == "head")
        assert (refused.status, exchange.body, connection.active) == (403, b"no", 0)
        await server.until(lambda s: s.asked[0].ended)


class Older(H3Connection):
    """Knows nothing of RFC 9220."""

    def _get_local_settings(self) -> dict[int, int]:
        settings = super()._get_local_settings()
        del settings[Setting.ENABLE_CONNECT_PROTOCOL]
        return settings


async def test_an_edge_that_does_not_offer_it_is_asked_for_no_websocket(
    ca: str, pem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(h3peers, "H3Connection", Older)
    async with Server(pem) as server, dialled(server.port, ca) as connection:
        await settled(connection)
        assert not connection.allows_websocket
        exchange = start(connection, websocket(), None)
        assert (await exchange.heard_word("abort")).unprocessed
        assert connection.active == 0 and server.asked == []


# -- cancels and back-pressure


@pytest.mark.parametrize("begun", [False, True])
@timed
async def test_abort_cancels_at_the_edge_within_100_ms(ca: str, pem: str, begun: bool) -> None:
    def answer(asked: Asked) -> None:
        if begun:
            asked.respond(OK, b"token", end=False)

    async with Server(pem, answer) as server, dialled(server.port, ca) as connection:
        exchange = start(connection, head(b"POST"), None)
        assert exchange.leg is not None
        await server.until(lambda s: s.asked)
        if begun:
            await exchange.heard_word("data")
        began = time.monotonic()
        exchange.leg.abort(Abort(Party.CLIENT, Stage.HEAD, Cause.CANCELLED))
        exchange.leg.abort(Abort(Party.CLIENT, Stage.HEAD, Cause.CANCELLED))
        asked = server.asked[0]
        await server.until(lambda s: asked.reset is not None and asked.stopped is not None)
        assert time.monotonic() - began < 0.1
        assert (asked.reset, asked.stopped) == (0x10C, 0x10C)
        assert connection.active == 0 and "abort" not in exchange.words


async def test_paused_answer_stays_within_one_window(ca: str, pem: str) -> None:
    total = 4 * STREAM_WINDOW
    async with Server(pem, lambda a: a.respond(OK, bytes(total))) as server, dialled(server.port, ca) as connection:
        leg = connection.open()
        exchange = Exchanged(leg=leg)
        leg.receiver = exchange
        leg.pause()
        leg.head(head())
        leg.end()
        await exchange.until(lambda x: len(x.body) > STREAM_WINDOW // 2)
        await asyncio.sleep(0.2)
        assert len(exchange.body) <= STREAM_WINDOW + 64
        leg.resume()
        await exchange.until(lambda x: len(x.body) == total)


async def test_upload_that_the_edge_does_not_read_says_full_then_drained(ca: str, pem: str) -> None:
    async with Server(pem, max_stream_data=32 * 1024) as server, dialled(server.port, ca) as connection:
        exchange = start(connection, head(b"POST"), None)
        leg = exchange.leg
        assert leg is not None
        quic = server.protocols[0]._quic
        quic._write_stream_limits = lambda **_: None  # type: ignore[method-assign]
        while "full" not in exchange.words:
            leg.data(bytes(8 * 1024))
        await server.until(lambda s: s.asked and len(s.asked[0].body) > 16 * 1024)
        assert connection.quic.unsent(0) <= HIGH_WATER + 16 * 1024
        del quic._write_stream_limits  # type: ignore[misc]
        quic._streams[0].max_stream_data_local = 1 << 24
        server.protocols[0].transmit()
        await exchange.heard_word("drained")
        assert exchange.words == ["full", "drained"]


# -- dialling


async def test_closed_port_is_refused_at_once(ca: str) -> None:
    with pytest.raises(ConnectionRefusedError):  # and not TimeoutError
        await dial_quic(
            "127.0.0.1", free_port(), server_name="localhost", ca_file=ca, timeout_s=30, sessions=QuicSessions()
        )


async def test_silent_port_times_out(ca: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            await dial_quic(
                "127.0.0.1",
                silent.getsockname()[1],
                server_name="localhost",
                ca_file=ca,
                timeout_s=0.3,
                sessions=QuicSessions(),
            )
        assert time.monotonic() - began > 0.25


async def test_cancelled_dial_leaves_nothing_behind(ca: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        dial = asyncio.create_task(
            dial_quic(
                "127.0.0.1",
                silent.getsockname()[1],
                server_name="localhost",
                ca_file=ca,
                timeout_s=9,
                sessions=QuicSessions(),
            )
        )
        await asyncio.sleep(0.05)
        dial.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dial  # an unclosed socket would fail the test as a ResourceWarning


@pytest.mark.parametrize("wrong", ["authority", "name"])
async def test_certificate_is_always_verified(ca: str, pem: str, wrong: str, tmp_path: Path) -> None:
    other = Authority(tmp_path).ca_file
    async with Server(pem) as server:
        with pytest.raises(ssl.SSLCertVerificationError, match="verify failed"):
            await dial_quic(
                "127.0.0.1",
                server.port,
                server_name="localhost" if wrong == "authority" else "api.openai.com",
                ca_file=other if wrong == "authority" else ca,
                timeout_s=30,
                sessions=QuicSessions(),
            )


async def test_own_authority_is_trusted_besides_the_systems_roots(ca: str, pem: str) -> None:
    async with Server(pem) as server:
        with pytest.raises(ssl.SSLCertVerificationError):
            await dial_quic(
                "127.0.0.1", server.port, server_name="localhost", ca_file="", timeout_s=30, sessions=QuicSessions()
            )
        async with dialled(server.port, ca) as connection:
            assert connection.room > 0


async def test_tickets_resume_once_each_and_only_under_the_same_trust(ca: str, pem: str, tmp_path: Path) -> None:
    sessions = QuicSessions()
    async with Server(pem, lambda a: a.respond(OK, b"x")) as server:
        async with dialled(server.port, ca, sessions) as first:
            await start(first).heard_word("end")
            assert not first.resumed
            await soon(_until(lambda: len(sessions._tickets)))
        async with dialled(server.port, ca, sessions) as second:
            await start(second).heard_word("end")
            assert second.resumed
        other = tmp_path / "more-trust.pem"
        other.write_bytes(Path(ca).read_bytes())
        async with dialled(server.port, str(other), sessions) as third:
            assert not third.resumed


def test_kept_tickets_are_bounded_per_edge_and_in_all() -> None:
    class Ticket:
        is_valid = True

    sessions = QuicSessions(edges=2, per_edge=2)
    tickets = [Ticket() for _ in range(5)]
    for ticket in tickets[:3]:
        sessions.keep("a", ticket)  # type: ignore[arg-type]
    assert [sessions.take("a") for _ in range(3)] == [tickets[2], tickets[1], None]
    for edge in ("b", "c", "d"):
        sessions.keep(edge, tickets[3])  # type: ignore[arg-type]
    assert [sessions.take(edge) for edge in ("b", "c", "d")] == [None, tickets[3], tickets[3]]


async def test_retry_of_a_busy_edge_is_followed(ca: str, pem: str) -> None:
    server = Server(pem, lambda a: a.respond(OK, b"x"))
    server.retry = True
    async with server, dialled(server.port, ca) as connection:
        await start(connection).heard_word("end")


# -- the connection's end


async def test_close_lets_exchanges_end_first(ca: str, pem: str) -> None:
    async with Server(pem) as server, dialled(server.port, ca) as connection:
        exchange = start(connection)
        connection.close()
        assert connection.room == 0 and not connection.closed
        await server.until(lambda s: s.asked)
        server.asked[0].respond(OK, b"late")
        await exchange.heard_word("end")
        await soon(_until(lambda: connection.closed))
        assert exchange.body == b"late"
        await server.until(lambda s: s.closed)
        assert server.closed[0].error_code == 0x100


@timed
async def test_closed_by_the_edge_fails_exchanges_at_once_with_their_stage(ca: str, pem: str) -> None:
    async with Server(pem) as server, dialled(server.port, ca) as connection:
        changes: list[bool] = []
        connection.on_change = lambda: changes.append(connection.closed)
        exchange = start(connection, body=None)
        await server.until(lambda s: s.asked)
        began = time.monotonic()
        server.protocols[0].close(0x102, reason_phrase="going down")
        abort: Abort = await exchange.heard_word("abort")
        assert time.monotonic() - began < 0.1
        assert (abort.by, abort.stage, abort.cause, abort.code) == (Party.EDGE, Stage.HEAD, Cause.LOST, 0x102)
        assert "going down" in abort.detail
        assert changes[-1] is True


async def test_dead_path_is_found_while_there_is_work(ca: str, pem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbound_quic, "PING_AFTER_S", 0.2)
    monkeypatch.setattr(outbound_quic, "LOST_AFTER_S", 0.5)
    async with Server(pem) as server, dialled(server.port, ca) as connection:
        exchange = start(connection)
        await server.until(lambda s: s.asked)
        # Given an edge that hears nothing any more (a black hole, not a closed port)
        server.server.datagram_received = lambda *_: None
        abort: Abort = await exchange.heard_word("abort")
        assert abort.cause is Cause.LOST and "nothing heard" in abort.detail
        assert connection.closed


async def test_an_edge_that_lost_our_port_in_mid_answer_is_told_the_new_one(
    ca: str, pem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbound_quic, "PING_AFTER_S", 1000.0)
    monkeypatch.setattr(outbound_quic, "LOST_AFTER_S", 2000.0)
    async with Server(pem) as server, Nat(server.port) as nat, dialled(nat.port, ca) as connection:
        exchange = start(connection)
        await server.until(lambda s: s.asked)
        server.asked[0].respond(OK, b"one", end=False)
        await exchange.until(lambda x: x.body == b"one")
        sent = server.asked[0].quic._spaces[Epoch.ONE_RTT]
        async with no_hang():
            while sent.ack_eliciting_in_flight:  # we owe no ACK that would say it
                await asyncio.sleep(0.01)
        await nat.rebind()
        server.asked[0].send(b"two", end=True)
        await exchange.heard_word("end")
        assert exchange.body == b"onetwo"


@timed
async def test_slow_model_that_answers_pings_is_waited_for(ca: str, pem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbound_quic, "PING_AFTER_S", 0.1)
    monkeypatch.setattr(outbound_quic, "LOST_AFTER_S", 0.3)
    async with Server(pem) as server, dialled(server.port, ca) as connection:
        exchange = start(connection)
        await asyncio.sleep(1.0)  # three times what would be death
        server.asked[0].respond(OK, b"at last")
        await exchange.heard_word("end")


async def test_edge_that_went_away_is_noticed_by_its_closed_port(ca: str, pem: str) -> None:
    async with Server(pem) as server, dialled(server.port, ca) as connection:
        exchange = start(connection, body=None)
        await server.until(lambda s: s.asked)
        server.vanish()
        assert exchange.leg is not None
        exchange.leg.data(b"anyone?")
        exchange.leg.data(b"anyone?")
        abort: Abort = await exchange.heard_word("abort")
        assert "closed" in abort.detail


async def test_restarted_edge_says_by_a_stateless_reset_that_it_knows_nothing(ca: str, pem: str) -> None:
    gateway = Gateway()
    async with listening(gateway, pem) as listener, dialled(listener.address[1], ca) as connection:
        exchange = start(connection, body=None)
        await gateway.request()
        # When the listener forgets, as after a restart with the same certificate
        for known in list(listener._ids):
            known.link.dispose()
            listener.forget(known)
        assert exchange.leg is not None
        exchange.leg.data(b"x" * 100)
        abort: Abort = await exchange.heard_word("abort")
        assert "stateless reset" in abort.detail


async def test_both_rims_together_move_bodies_both_ways(ca: str, pem: str) -> None:
    def echo(x: Exchanged) -> None:
        assert x.leg is not None and x.head is not None
        say(x.leg, 200, bytes(300_000), [(b"content-length", b"300000")])

    async with listening(Gateway(echo), pem) as listener, dialled(listener.address[1], ca) as connection:
        exchanges = [start(connection, head(b"POST"), bytes(10_000)) for _ in range(5)]
        for exchange in exchanges:
            await exchange.heard_word("end")
            assert len(exchange.body) == 300_000
