"""A stock HTTP/3 client against our listener: the request as the gateway gets it, and what is refused."""

from __future__ import annotations

import pytest
from aioquic.buffer import encode_uint_var
from aioquic.h3.connection import FrameType, encode_frame

from proxy.io.rims import Limits
from proxy.messages import Abort, Cause, Party, RequestHead, ResponseHead
from tests.peers.h3peers import Client, Gateway, listening, say

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
