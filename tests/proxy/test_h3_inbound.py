"""A stock HTTP/3 client against our listener: what reaches the gateway, and what the gateway's words become."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from aioquic.buffer import encode_uint_var
from aioquic.h3.connection import FrameType, encode_frame

from config.model import Tickets
from proxy.io.quic_flow import STREAM_WINDOW
from proxy.io.quic_server import H3ServerConnection
from proxy.io.rims import HIGH_WATER, Limits
from proxy.messages import Abort, Cause, Party, RequestHead, ResponseHead, Stage
from tests.patience import soon, timed
from tests.peers.h3peers import Answer, Client, Exchanged, Gateway, listening, make_authority, say


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


def stop(client: Client, answer: Answer, code: int = 0x10C) -> None:
    client.quic.stop_stream(answer.stream_id, code)
    client.protocol.transmit()


def reset(client: Client, answer: Answer, code: int = 0x10C) -> None:
    client.quic.reset_stream(answer.stream_id, code)
    client.protocol.transmit()


# -- the request as the gateway gets it


async def test_request_arrives_with_its_target_authority_fields_and_origin(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: say(x.leg, 200, b"ok"))
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = await client.ask("GET", "/a%2Fb//c?q=%20", (b"x-a", b"1"), (b"x-a", b"2")).whole()
        exchange = await gateway.request()
    authority = f"localhost:{listener.address[1]}".encode()
    assert exchange.head == RequestHead(
        b"GET", b"/a%2Fb//c?q=%20", b"https", authority, [(b"x-a", b"1"), (b"x-a", b"2")], 0
    )
    assert (answer.status, answer.body) == (200, b"ok")
    origin = exchange.origin
    assert origin is not None
    assert (origin.peer, origin.version, origin.server_name) == ("127.0.0.1", "h3", "localhost")
    assert not origin.resumed and not origin.early_data


async def test_body_is_delivered_in_order_and_ends_once(ca: str, pem: str) -> None:
    gateway = Gateway()
    body = bytes(range(256)) * 800
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client.ask("POST", "/", (b"content-length", b"%d" % len(body)), body=body)
        exchange = await gateway.request()
        await exchange.heard_word("end")
        assert exchange.head is not None and exchange.head.length == len(body)
        assert exchange.body == body
        assert exchange.words.count("end") == 1 and exchange.words[-1] == "end"
        say(exchange.leg, 201)
        assert (await answer.whole()).status == 201


async def test_fin_in_a_frame_of_its_own_still_means_no_body(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: say(x.leg))
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client._answer(client.quic.get_next_available_stream_id())
        client.http.send_headers(answer.stream_id, client.fields())
        client.quic.send_stream_data(answer.stream_id, b"", end_stream=False)
        client.http._quic.send_stream_data(answer.stream_id, b"", end_stream=True)
        client.protocol.transmit()
        await answer.whole()
        assert gateway.exchanges[0].head is not None
        assert gateway.exchanges[0].head.length == 0


async def test_fin_that_comes_later_ends_a_request_without_length(ca: str, pem: str) -> None:
    gateway = Gateway()
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client.ask("POST", end=False)
        exchange = await gateway.request()
        assert exchange.head is not None and exchange.head.length is None
        client.quic.send_stream_data(answer.stream_id, b"", end_stream=True)
        client.protocol.transmit()
        await exchange.heard_word("end")
        assert exchange.words == ["end"]


async def test_empty_data_frames_say_nothing(ca: str, pem: str) -> None:
    gateway = Gateway()
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client.ask("POST", end=False)
        for chunk in (b"", b"x", b""):
            client.send(answer, chunk)
        client.send(answer, b"", end=True)
        exchange = await gateway.request()
        await exchange.heard_word("end")
        assert exchange.heard == [("data", b"x"), ("end", None)]


async def test_many_requests_in_one_packet_are_all_answered(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: say(x.leg, 200, x.head.target if x.head else b""))
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answers = []
        for number in range(20):
            stream_id = client.quic.get_next_available_stream_id()
            client.http.send_headers(stream_id, client.fields("GET", f"/{number}"), end_stream=True)
            answers.append(client._answer(stream_id))
        client.protocol.transmit()
        bodies = [(await answer.whole()).body for answer in answers]
    assert bodies == [f"/{number}".encode() for number in range(20)]


@pytest.mark.parametrize("step", [1, 7, 100])
async def test_a_request_split_anywhere_is_the_same_request(ca: str, pem: str, step: int) -> None:
    gateway = Gateway(lambda x: None)
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        stream_id = client.quic.get_next_available_stream_id()
        _, section = client.http._encoder.encode(stream_id, client.fields("POST", "/split"))
        wire = encode_frame(FrameType.HEADERS, section) + encode_frame(FrameType.DATA, b"abc" * 50)
        wire += encode_frame(0x21, b"grease") + encode_frame(FrameType.DATA, b"tail")
        for at in range(0, len(wire), step):
            client.quic.send_stream_data(stream_id, wire[at : at + step], at + step >= len(wire))
            client.protocol.transmit()
        exchange = await gateway.request()
        await exchange.heard_word("end")
        assert exchange.body == b"abc" * 50 + b"tail"


async def test_trailers_come_right_before_the_end(ca: str, pem: str) -> None:
    gateway = Gateway()
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client.ask("POST", end=False)
        client.send(answer, b"x")
        client.http.send_headers(answer.stream_id, [(b"x-sum", b"1")], end_stream=True)
        client.protocol.transmit()
        exchange = await gateway.request()
        await exchange.heard_word("end")
        assert exchange.heard == [("data", b"x"), ("trailers", [(b"x-sum", b"1")]), ("end", None)]


async def test_connect_and_websocket_arrive_in_the_form_all_versions_share(ca: str, pem: str) -> None:
    gateway = Gateway()
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        client.ask_raw([(b":method", b"CONNECT"), (b":authority", b"api.openai.com:443")], end=False)
        plain = await gateway.request(0)
        client.ask_raw([*client.fields("CONNECT", "/chat"), (b":protocol", b"websocket")], end=False)
        socket = await gateway.request(1)
    assert plain.head == RequestHead(b"CONNECT", b"api.openai.com:443", b"https", b"api.openai.com:443", [], None)
    assert socket.head is not None
    assert (socket.head.method, socket.head.target, socket.head.protocol) == (b"GET", b"/chat", b"websocket")


async def test_websocket_is_accepted_by_200_and_carries_bytes_both_ways(ca: str, pem: str) -> None:
    gateway = Gateway()
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client.ask_raw([*client.fields("CONNECT", "/chat"), (b":protocol", b"websocket")], end=False)
        exchange = await gateway.request()
        assert exchange.leg is not None
        accepted = [(b"Upgrade", b"websocket"), (b"Sec-WebSocket-Accept", b"x"), (b"Sec-WebSocket-Protocol", b"chat")]
        exchange.leg.head(ResponseHead(101, accepted))
        exchange.leg.data(b"to client")
        client.send(answer, b"to server")
        assert await exchange.heard_word("data") == b"to server"
        await answer.until(lambda a: a.body)
        # Then: our half-close leaves the other direction open.
        exchange.leg.end()
        await answer.whole()
        client.send(answer, b"still here", end=True)
        await exchange.heard_word("end")
    assert answer.sections == [[(b":status", b"200"), (b"sec-websocket-protocol", b"chat")]]
    assert exchange.body == b"to serverstill here"
    assert answer.stopped is None


async def test_unknown_protocol_is_refused_with_501(ca: str, pem: str) -> None:
    gateway = Gateway()
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client.ask_raw([*client.fields("CONNECT", "/x"), (b":protocol", b"connect-udp")], end=False)
        assert (await answer.whole()).status == 501
    assert gateway.exchanges == []


# -- what is refused


@pytest.mark.parametrize(
    "more",
    [
        [(b"X-Upper", b"1")],
        [(b"connection", b"close")],
        [(b"transfer-encoding", b"chunked")],
        [(b"te", b"gzip")],
        [(b"content-length", b"5"), (b"content-length", b"5")],
        [(b"content-length", b"+5")],
        [(b"x-a", b"a\r\nb")],
        [(b"x-a", b"a\0b")],
        [(b"x-a", b" padded")],
        [(b":path", b"/again")],
        [(b"host", b"other.test")],
    ],
    ids=lambda fields: str(fields[-1][0], "ascii"),
)
async def test_malformed_request_is_reset_and_its_neighbours_live(
    ca: str, pem: str, more: list[tuple[bytes, bytes]]
) -> None:
    gateway = Gateway(lambda x: say(x.leg))
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client.ask("POST", "/bad", *more, end=False)
        await answer.until(lambda a: a.reset is not None)
        assert answer.reset == 0x10E
        assert (await client.ask("GET", "/good").whole()).status == 200
    assert [x.head.target for x in gateway.exchanges if x.head] == [b"/good"]


@pytest.mark.parametrize("sent", [b"", b"1234", b"123456"])
async def test_body_that_contradicts_its_length_is_a_stream_error(ca: str, pem: str, sent: bytes) -> None:
    gateway = Gateway()
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client.ask("POST", "/", (b"content-length", b"5"), end=False)
        exchange = await gateway.request()
        client.quic.send_stream_data(answer.stream_id, encode_frame(FrameType.DATA, sent), end_stream=True)
        client.protocol.transmit()
        abort: Abort = await exchange.heard_word("abort")
        await answer.until(lambda a: a.reset is not None)
    assert (abort.by, abort.cause, abort.code) == (Party.CLIENT, Cause.BROKEN, 0x10E)
    assert answer.reset == 0x10E
    assert "end" not in exchange.words


@pytest.mark.parametrize(("size", "status"), [(25_000, 200), (35_000, 431)])
async def test_fields_beyond_the_limit_are_answered_431_and_within_it_pass(
    ca: str, pem: str, size: int, status: int
) -> None:
    gateway = Gateway(lambda x: say(x.leg))
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = await client.ask("GET", "/", (b"x-big", b"\xff" * size), (b"x-more", b"a" * size)).whole()
        assert answer.status == status
        assert (await client.ask("GET", "/after").whole()).status == 200


async def test_one_field_that_only_grows_too_long_when_decoded_is_answered_431_too(ca: str, pem: str) -> None:
    # Given 75000 bytes that Huffman coding brings below the limit, beyond what the decoder holds in one string
    gateway = Gateway(lambda x: say(x.leg))
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        coded = bytes.fromhex("18c6318c63") * (75_000 // 8)  # eight times "a", five bits each
        _, section = client.http._encoder.encode(0, client.fields())
        section += b"\x25" + b"x-big" + b"\xff" + encode_hpack_tail(len(coded)) + coded
        answer = client.send_bytes(encode_frame(FrameType.HEADERS, section), end=True)
        assert (await answer.whole()).status == 431
        assert (await client.ask("GET", "/after").whole()).status == 200


def encode_hpack_tail(value: int) -> bytes:
    """What follows a full 7-bit prefix (RFC 7541 5.1)."""
    value -= 127
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out) + bytes((value,))


async def test_limit_counts_decoded_fields_not_compressed_ones(ca: str, pem: str) -> None:
    # Given a client whose fields compress to a byte each, twice sent so that they are in the table
    gateway = Gateway(lambda x: say(x.leg), Limits(max_header_bytes=4096))
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        await client.until(lambda c: c.http.received_settings)
        for _ in range(3):
            await client.ask("GET", "/", (b"x-often", b"v" * 900)).whole()
        # When it names one of them many times
        answer = await client.ask("GET", "/", *[(b"x-often", b"v" * 900)] * 40).whole()
        assert answer.status == 431


@pytest.mark.parametrize(
    ("wire", "code"),
    [
        (encode_frame(FrameType.DATA, b"x"), 0x105),
        (encode_frame(FrameType.SETTINGS, b""), 0x105),
        (encode_frame(FrameType.HEADERS, b""), 0x200),
        (encode_frame(FrameType.HEADERS, b"\xff\xff\xff\xff\xff\xff"), 0x200),
        (encode_frame(0x2, b""), 0x105),
    ],
)
async def test_broken_framing_closes_the_connection_with_its_code(ca: str, pem: str, wire: bytes, code: int) -> None:
    gateway = Gateway()
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        client.send_bytes(wire, end=False)
        await client.until(lambda c: c.closed)
        assert client.closed is not None and client.closed.error_code == code
        await gateway.until(lambda g: g.lost)


async def test_frame_cut_short_by_the_streams_end_closes_the_connection(ca: str, pem: str) -> None:
    gateway = Gateway()
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client.ask("POST", end=False)
        exchange = await gateway.request()
        client.quic.send_stream_data(answer.stream_id, b"\x00\x0aabc", end_stream=True)
        client.protocol.transmit()
        await client.until(lambda c: c.closed)
        assert client.closed is not None and client.closed.error_code == 0x106
        assert exchange.words[-1] == "abort"


async def test_request_that_ends_without_a_head_is_reset(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: say(x.leg))
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client.send_bytes(b"", end=True)
        await answer.until(lambda a: a.reset is not None)
        assert answer.reset == 0x10D
        assert (await client.ask().whole()).status == 200


async def test_head_that_does_not_become_whole_in_time_is_reset(ca: str, pem: str) -> None:
    gateway = Gateway(limits=Limits(header_timeout_s=0.3))
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client.send_bytes(b"\x01\x40")
        await answer.until(lambda a: a.reset is not None)
        assert answer.reset == 0x10D


async def test_priority_update_and_unknown_frames_on_the_control_stream_are_passed_over(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: say(x.leg))
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        control = client.http._local_control_stream_id
        assert control is not None
        update = encode_frame(0xF0700, encode_uint_var(0) + b"u=1, i")
        for at in range(0, len(update), 3):
            client.quic.send_stream_data(control, update[at : at + 3])
            client.protocol.transmit()
        client.quic.send_stream_data(control, encode_frame(0x21, b"?" * 5000))
        assert (await client.ask().whole()).status == 200


# -- the answer as the client gets it


async def test_interim_heads_final_head_body_and_trailers_arrive_in_order(ca: str, pem: str) -> None:
    def answer_all(x: Exchanged) -> None:
        assert x.leg is not None
        x.leg.interim(ResponseHead(100, []))
        x.leg.interim(ResponseHead(103, [(b"Link", b"</a>")]))
        x.leg.head(ResponseHead(200, [(b"Content-Type", b"text/plain"), (b"Connection", b"keep-alive")]))
        x.leg.data(b"one")
        x.leg.data(b"two")
        x.leg.trailers([(b"X-Sum", b"6")])
        x.leg.end()

    async with listening(Gateway(answer_all), pem) as listener, Client(listener.address[1], ca) as client:
        answer = await client.ask().whole()
    assert answer.statuses == [b"100", b"103", b"200"]
    assert answer.sections[1][1:] == [(b"link", b"</a>")]
    assert answer.sections[2][1:] == [(b"content-type", b"text/plain")]
    assert answer.sections[3] == [(b"x-sum", b"6")]
    assert answer.body == b"onetwo"


async def test_head_leaves_before_there_is_a_body(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: x.leg.head(ResponseHead(200, [])) if x.leg else None)
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = await client.ask().until(lambda a: a.sections)
        assert not answer.ended


async def test_each_event_of_a_stream_leaves_on_its_own(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: x.leg.head(ResponseHead(200, [])) if x.leg else None)
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client.ask()
        exchange = await gateway.request()
        assert exchange.leg is not None
        for number in range(5):
            exchange.leg.data(b"data: %d\n\n" % number)
            await answer.until(lambda a, n=number: a.body.endswith(b"data: %d\n\n" % n), 0.5)


async def test_answer_to_head_announces_a_length_and_has_no_body(ca: str, pem: str) -> None:
    def announce(x: Exchanged) -> None:
        assert x.leg is not None
        x.leg.head(ResponseHead(200, [(b"content-length", b"42")], 42, no_body=True))
        x.leg.end()

    async with listening(Gateway(announce), pem) as listener, Client(listener.address[1], ca) as client:
        client.http._check_content_length = lambda _: None  # type: ignore[method-assign]  # it knows no HEAD
        answer = client.ask("HEAD")
        await answer.until(lambda a: a.sections)
        assert answer.sections[0][1] == (b"content-length", b"42")


async def test_whole_answer_during_an_upload_stops_the_upload_without_error(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: say(x.leg, 413, b"too much"))
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client.ask("POST", end=False, body=b"x" * 100)
        await answer.whole()
        await answer.until(lambda a: a.stopped is not None)
        assert (answer.status, answer.body, answer.reset, answer.stopped) == (413, b"too much", None, 0x100)


@pytest.mark.parametrize(
    ("abort", "code"),
    [
        (Abort(Party.EDGE, Stage.BODY, Cause.LOST), 0x102),
        (Abort(Party.EDGE, Stage.BODY, Cause.BROKEN), 0x102),
        (Abort(Party.EDGE, Stage.HEAD, Cause.TIMED_OUT), 0x102),
        (Abort(Party.US, Stage.BODY, Cause.CANCELLED), 0x10C),
        (Abort(Party.US, Stage.CONNECT, Cause.REFUSED, unprocessed=True), 0x10B),
        (Abort(Party.US, Stage.HEAD, Cause.REFUSED), 0x107),
        (Abort(Party.CLIENT, Stage.HEAD, Cause.BROKEN), 0x10E),
    ],
)
async def test_failed_stream_is_reset_never_ended(ca: str, pem: str, abort: Abort, code: int) -> None:
    gateway = Gateway()
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client.ask("POST", end=False)
        exchange = await gateway.request()
        assert exchange.leg is not None
        exchange.leg.head(ResponseHead(200, []))
        exchange.leg.data(b"partial")
        exchange.leg.abort(abort)
        exchange.leg.end()
        await answer.until(lambda a: a.reset is not None and a.stopped is not None)
        assert (answer.reset, answer.stopped, answer.ended) == (code, code, False)
        assert "abort" not in exchange.words


# -- cancels


async def within(exchange: Exchanged, act: Callable[[], None], limit_s: float = 0.1) -> Abort:
    """The abort that follows an act, and that it came in time."""
    began = time.monotonic()
    act()
    abort: Abort = await exchange.heard_word("abort")
    assert time.monotonic() - began < limit_s
    return abort


@pytest.mark.parametrize("act", [stop, reset])
@pytest.mark.parametrize("begun", [False, True])
@timed
async def test_clients_cancel_is_heard_within_100_ms(
    ca: str, pem: str, act: Callable[[Client, Answer], None], begun: bool
) -> None:
    gateway = Gateway()
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client.ask("POST", end=act is stop, body=b"x")
        exchange = await gateway.request()
        assert exchange.leg is not None
        if begun:
            exchange.leg.head(ResponseHead(200, []))
            exchange.leg.data(b"token")
            await answer.until(lambda a: a.body)
        abort = await within(exchange, lambda: act(client, answer))
        assert (abort.by, abort.cause, abort.code) == (Party.CLIENT, Cause.CANCELLED, 0x10C)
        assert exchange.words.count("abort") == 1
        exchange.leg.data(b"into the void")
        exchange.leg.end()
        assert (await gateway_answers(client, gateway)).status == 200


async def gateway_answers(client: Client, gateway: Gateway) -> Answer:
    gateway.answer = lambda x: say(x.leg)
    return await client.ask("GET", "/next").whole()


@timed
async def test_closed_connection_cancels_its_requests_within_100_ms(ca: str, pem: str) -> None:
    gateway = Gateway()
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        client.ask("POST", end=False)
        client.ask("GET")
        first, second = await gateway.request(0), await gateway.request(1)
        # Given a long path: the library's own word comes three probe timeouts later
        connection = gateway.connections[0]
        assert isinstance(connection, H3ServerConnection)
        connection.quic._loss._rtt_smoothed = 1.0
        abort = await within(first, lambda: client.protocol.close(0x100))
        assert (abort.by, abort.cause) == (Party.CLIENT, Cause.CANCELLED)
        assert second.words[-1] == "abort"
        await gateway.until(lambda g: len(g.lost) == 1)


async def test_finished_request_is_no_cancel(ca: str, pem: str) -> None:
    gateway = Gateway()
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client.ask("POST", body=b"all")
        exchange = await gateway.request()
        await exchange.heard_word("end")
        say(exchange.leg, 200, b"fine")
        assert (await answer.whole()).body == b"fine"
        assert exchange.words == ["data", "end"]


async def test_client_that_resets_for_sport_is_closed(ca: str, pem: str) -> None:
    gateway = Gateway()
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        for _ in range(600):
            answer = client.ask()
            stop(client, answer)
            if client.closed:
                break
            await asyncio.sleep(0)
        await client.until(lambda c: c.closed)
        assert client.closed is not None and client.closed.error_code == 0x107
        assert len(gateway.exchanges) < 450


# -- back-pressure


async def test_paused_upload_stays_within_one_window(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: x.leg.pause() if x.leg else None)
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client.ask("POST", end=False)
        client.send(answer, bytes(4 * STREAM_WINDOW))
        exchange = await gateway.request()
        await exchange.until(lambda x: len(x.body) > STREAM_WINDOW // 2)
        # A second stream's round trips prove that the connection is alive and nothing more came for the first.
        gateway.answer = lambda x: say(x.leg)
        for _ in range(5):
            await client.ask().whole()
        assert len(exchange.body) <= STREAM_WINDOW + 64
        assert exchange.leg is not None
        exchange.leg.resume()
        await exchange.until(lambda x: len(x.body) == 4 * STREAM_WINDOW)


async def test_many_paused_uploads_leave_the_connection_usable(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: x.leg.pause() if x.leg else None)
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        for _ in range(8):
            answer = client.ask("POST", end=False)
            client.send(answer, bytes(STREAM_WINDOW // 4))
        await gateway.request(7)
        gateway.answer = lambda x: say(x.leg)
        assert (await client.ask().whole()).status == 200


async def test_unread_answer_says_full_once_and_drained_when_it_is_read(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: x.leg.head(ResponseHead(200, [])) if x.leg else None)
    window = 64 * 1024
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca, max_stream_data=window) as client:
        # Given a client that gives no more credit than its first window
        client.quic._write_stream_limits = lambda **_: None  # type: ignore[method-assign]
        answer = client.ask()
        exchange = await gateway.request()
        leg = exchange.leg
        assert leg is not None
        while "full" not in exchange.words:
            leg.data(bytes(16 * 1024))
        await answer.until(lambda a: len(a.body) > window // 2)
        connection = gateway.connections[0]
        assert isinstance(connection, H3ServerConnection)
        held = connection.quic.unsent(answer.stream_id)
        assert HIGH_WATER - window - 16 * 1024 <= held <= HIGH_WATER + 32 * 1024
        assert exchange.words == ["end", "full"]
        # When it gives credit again
        del client.quic._write_stream_limits  # type: ignore[misc]
        client.quic._streams[answer.stream_id].max_stream_data_local = 1 << 24
        client.protocol.transmit()
        await exchange.heard_word("drained")
        assert exchange.words == ["end", "full", "drained"]


# -- the connection


async def test_stream_goes_on_when_the_clients_port_changes(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: x.leg.head(ResponseHead(200, [])) if x.leg else None)
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client.ask("POST", end=False)
        exchange = await gateway.request()
        assert exchange.leg is not None
        exchange.leg.data(b"before ")
        await answer.until(lambda a: a.body)
        await client.rebind()
        client.send(answer, b"from another port")
        assert await exchange.heard_word("data") == b"from another port"
        exchange.leg.data(b"after")
        exchange.leg.end()
        assert (await answer.whole()).body == b"before after"
        assert listener.connections == 1


async def test_stream_goes_on_under_another_connection_id_and_port(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: x.leg.head(ResponseHead(200, [])) if x.leg else None)
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client.ask("POST", end=False)
        exchange = await gateway.request()
        assert exchange.leg is not None
        for number in range(12):  # more ids than are granted at once: used ones are retired, new ones issued
            await client.until(lambda c: c.quic._peer_cid_available)
            await client.rebind()
            client.protocol.change_connection_id()
            client.send(answer, b"%x" % number)
            await exchange.until(lambda x, n=number: len(x.body) == n + 1)
        exchange.leg.end()
        await answer.whole()
        assert exchange.body == b"0123456789ab"
        assert len(listener._by_id) < 20


async def test_drain_says_goaway_lets_streams_end_and_closes(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: x.leg.head(ResponseHead(200, [])) if x.leg else None)
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client.ask()
        exchange = await gateway.request()
        listener.drain()
        await client.until(lambda c: c.raw_control.endswith(b"\x07\x01\x04"))
        late = client.ask()
        await late.until(lambda a: a.reset is not None)
        assert late.reset == 0x10B
        assert exchange.leg is not None
        exchange.leg.data(b"the tail")
        exchange.leg.end()
        assert (await answer.whole()).body == b"the tail"
        await client.until(lambda c: c.closed)
        assert client.closed is not None and client.closed.error_code == 0x100
        assert len(gateway.exchanges) == 1


async def test_close_aborts_every_exchange_and_none_ends_cleanly(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: x.leg.head(ResponseHead(200, [])) if x.leg else None)
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client.ask()
        exchange = await gateway.request()
        await answer.until(lambda a: a.sections)
        listener.close()
        assert exchange.words[-1] == "abort"
        await client.until(lambda c: c.closed)
        assert not answer.ended
        assert client.closed is not None and client.closed.error_code != 0x100


async def test_connection_beyond_the_limit_is_refused(ca: str, pem: str) -> None:
    gateway = Gateway()
    gateway.room = 1
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca):
        second = Client(listener.address[1], ca)
        await second.connect()
        await second.until(lambda c: c.closed)
        assert second.closed is not None and second.closed.error_code == 0x2
        second.vanish()
    assert len(gateway.connections) == 1


async def test_idle_connection_ends_after_its_timeout(ca: str, pem: str) -> None:
    gateway = Gateway(limits=Limits(idle_timeout_s=0.4))
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        client.vanish()
        await gateway.until(lambda g: g.lost)
        await soon(_empty(lambda: listener.connections == 0))


async def _empty(ready: Callable[[], bool]) -> None:
    while not ready():
        await asyncio.sleep(0.02)


async def test_vanished_client_with_work_in_progress_is_noticed(
    ca: str, pem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.io.quic_server.PING_AFTER_S", 0.2)
    monkeypatch.setattr("proxy.io.quic_server.LOST_AFTER_S", 0.5)
    gateway = Gateway()
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        client.ask()
        exchange = await gateway.request()
        client.vanish()
        abort: Abort = await exchange.heard_word("abort")
        assert "nothing heard" in abort.detail


@timed
async def test_quiet_client_that_answers_pings_is_not_lost(ca: str, pem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.io.quic_server.PING_AFTER_S", 0.1)
    monkeypatch.setattr("proxy.io.quic_server.LOST_AFTER_S", 0.3)
    gateway = Gateway()
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client.ask()
        exchange = await gateway.request()
        await asyncio.sleep(1.0)  # the time in which silence would have been taken for death, three times over
        say(exchange.leg, 200, b"slow model")
        assert (await answer.whole()).body == b"slow model"


# -- resumption


async def resumed(port: int, ca: str, first: Client, *, early: bool = False) -> Client:
    """A client that offers the newest ticket of another; `early`: nothing is sent yet."""
    client = Client(port, ca)
    client.config.session_ticket = first.tickets[-1]
    await client.connect(transmit=not early)
    return client


async def test_second_connection_resumes_and_says_so(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: say(x.leg))
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as first:
        await first.until(lambda c: c.tickets)
        second = await resumed(listener.address[1], ca, first)
        await second.until(lambda c: c.handshake)
        await second.ask().whole()
        assert second.handshake is not None and second.handshake.session_resumed
        assert gateway.exchanges[0].origin is not None and gateway.exchanges[0].origin.resumed
        assert (listener.full_handshakes, listener.resumed_handshakes) == (1, 1)
        second.vanish()


async def test_early_request_is_marked_and_the_same_flight_is_not_executed_twice(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: say(x.leg))
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as first:
        await first.until(lambda c: c.tickets)
        second = await resumed(listener.address[1], ca, first, early=True)
        flight: list[bytes] = []
        transport = second._transports[-1]
        second.protocol._transport = _Tap(transport, flight)  # type: ignore[assignment]
        answer = second.ask("GET", "/early")
        await answer.whole()
        assert second.handshake is not None and second.handshake.early_data_accepted
        assert gateway.exchanges[0].origin is not None and gateway.exchanges[0].origin.early_data
        late = await second.ask("GET", "/late").whole()
        assert late.status == 200
        assert gateway.exchanges[1].origin is not None and not gateway.exchanges[1].origin.early_data
        # When the captured flight comes once more, from elsewhere
        loop = asyncio.get_running_loop()
        thief, _ = await loop.create_datagram_endpoint(
            asyncio.DatagramProtocol, remote_addr=("127.0.0.1", listener.address[1])
        )
        for datagram in flight[:4]:
            thief.sendto(datagram)
        await first.ask("GET", "/fence").whole()
        assert [x.head.target for x in gateway.exchanges if x.head] == [b"/early", b"/late", b"/fence"]
        thief.close()
        second.vanish()


async def test_where_early_data_is_off_a_ticket_resumes_and_no_request_comes_before_the_handshake(
    ca: str, pem: str
) -> None:
    gateway = Gateway(lambda x: say(x.leg))
    off = Tickets(early_data="off")
    async with listening(gateway, pem, off) as listener, Client(listener.address[1], ca) as first:
        await first.until(lambda c: c.tickets)
        assert first.tickets[-1].max_early_data_size is None
        second = await resumed(listener.address[1], ca, first)
        await second.until(lambda c: c.handshake)
        assert (await second.ask().whole()).status == 200
        assert second.handshake is not None and second.handshake.session_resumed
        assert not second.handshake.early_data_accepted
        second.vanish()


async def test_a_request_in_early_data_that_an_older_ticket_allowed_is_served_after_the_handshake(
    ca: str, pem: str
) -> None:
    gateway = Gateway(lambda x: say(x.leg))
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as first:
        await first.until(lambda c: c.tickets)
        listener.retune(Tickets(early_data="off"))
        second = await resumed(listener.address[1], ca, first, early=True)
        assert (await second.ask("GET", "/early").whole()).status == 200
        assert second.handshake is not None and second.handshake.session_resumed
        assert not second.handshake.early_data_accepted
        assert gateway.exchanges[0].origin is not None and not gateway.exchanges[0].origin.early_data
        second.vanish()


class _Tap:
    """A transport that notes what is sent."""

    def __init__(self, transport: asyncio.DatagramTransport, seen: list[bytes]) -> None:
        self._transport, self._seen = transport, seen

    def sendto(self, data: bytes, addr: object = None) -> None:
        self._seen.append(data)
        self._transport.sendto(data, addr)  # type: ignore[arg-type]

    def close(self) -> None:
        self._transport.close()


async def test_expired_ticket_means_a_full_handshake(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: say(x.leg))
    tickets = Tickets(lifetime_s=1)
    async with listening(gateway, pem, tickets) as listener, Client(listener.address[1], ca) as first:
        await first.until(lambda c: c.tickets)
        ticket = first.tickets[-1]
        assert (ticket.not_valid_after - ticket.not_valid_before).total_seconds() == 1
        ticket.not_valid_after = ticket.not_valid_after.replace(year=ticket.not_valid_after.year + 1)
        await asyncio.sleep(1.1)  # the lifetime: there is no event for a time that passes
        second = await resumed(listener.address[1], ca, first)
        await second.ask().whole()
        assert second.handshake is not None and not second.handshake.session_resumed
        second.vanish()


async def test_new_certificate_is_used_for_new_connections_and_old_ones_live(ca: str, pem: str, tmp_path: Path) -> None:
    other_ca, other_pem = make_authority(tmp_path)
    gateway = Gateway(lambda x: say(x.leg))
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as first:
        listener.reload_certificate(other_pem, other_pem)
        assert (await first.ask().whole()).status == 200
        async with Client(listener.address[1], other_ca) as second:
            assert (await second.ask().whole()).status == 200
        with pytest.raises(OSError, match="absent"):
            listener.reload_certificate(str(tmp_path / "absent.pem"))
        async with Client(listener.address[1], other_ca) as third:
            assert (await third.ask().whole()).status == 200
