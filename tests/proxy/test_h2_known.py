"""Header blocks that came before and answers whose head was sent before: the short ways say what the long ones say."""

from __future__ import annotations

from typing import Any

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy import h2_frames as wire
from proxy.h2_errors import Code
from proxy.h2_known import KnownHeads
from proxy.h2_limits import H2Limits
from proxy.h2_server import ServerStream
from proxy.hpack import Decoder
from proxy.hpack_encoder import Encoder, plain_literal
from proxy.messages import RequestHead, ResponseHead
from tests.proxy.h2_wire import GET, POST, Seen, Served, body, coded, credit, frame, headers, settings, word

Fields = list[tuple[bytes, bytes]]
AGENT = (b"user-agent", b"sdk/1")
REQUESTS: list[Fields] = [
    [*GET, AGENT],
    [*GET[:3], (b":path", b"/other"), AGENT],
    [*GET, (b"x-trace", b"1"), (b"x-trace", b"2")],
    [*GET, (b"priority", b"u=1")],
    [*POST, AGENT, (b"content-length", b"0")],
]
TIMING = (b"server-timing", b'headrace;desc="1"')


# ---------------------------------------------------------------------------------------------- heads


def asked(client: Served) -> tuple[Fields, RequestHead]:
    """The newest request, as the pseudo-fields and fields that it says."""
    _, head, _ = client.requests[-1]
    pseudo = [(b":method", head.method), (b":scheme", head.scheme), (b":authority", head.authority)]
    return [*pseudo, (b":path", head.target), *head.fields], head


@given(st.lists(st.sampled_from(REQUESTS), min_size=2, max_size=24), st.sampled_from([0, 60, 4096]), st.booleans())
def test_whatever_was_learned_each_request_says_its_own_fields(asks: list[Fields], table: int, huffman: bool) -> None:
    client, coder = Served(), hpack.Encoder()
    coder.header_table_size = table  # small ones move all the time
    for number, fields in enumerate(asks):
        block = coder.encode(fields, huffman=huffman)
        client.say(frame(wire.HEADERS, wire.END_HEADERS | wire.END_STREAM, 2 * number + 1, block))
        assert asked(client)[0] == fields
    assert len(client.requests) == len(asks)
    assert len({id(head) for _, head, _ in client.requests}) == len(asks), "a head may be changed by who got it"


def test_block_is_found_only_while_the_table_stands_and_ends_as_it_did() -> None:
    decoder = Decoder(1 << 16)
    heads, head = KnownHeads(decoder), RequestHead(b"GET", b"/", b"https", b"a.test", [])
    block = coded(GET)
    decoder.decode(block)
    heads.learn(block, head, True)
    found = heads.find(block, True)
    assert found is not None
    assert found.again() == head
    assert heads.find(block, False) is None
    decoder.decode(b"\x40\x01a\x01b")
    assert heads.find(block, True) is None


@pytest.mark.parametrize("more", [{"method": b"CONNECT"}, {"protocol": b"websocket"}])
def test_tunnel_is_not_learned(more: dict[str, bytes]) -> None:
    decoder = Decoder(1 << 16)
    heads, block = KnownHeads(decoder), coded(GET)
    decoder.decode(block)
    head: dict[str, Any] = {
        "method": b"GET",
        "target": b"/",
        "scheme": b"https",
        "authority": b"a",
        "fields": [],
    } | more
    heads.learn(block, RequestHead(**head), True)
    assert heads.find(block, True) is None


def test_block_that_moves_the_table_is_not_learned() -> None:
    decoder, coder = Decoder(1 << 16), Encoder()
    heads, block = KnownHeads(decoder), coder.encode([*GET, AGENT])
    decoder.decode(block)
    heads.learn(block, RequestHead(b"GET", b"/", b"https", b"a.test", []), True)
    assert heads.find(block, True) is None


def known(limits: H2Limits | None = None) -> Served:
    """A client that asked the same thing twice; the second answer is out, the first is not."""
    client = Served(limits or H2Limits())
    for stream_id in (1, 3):
        client.say(headers(stream_id, GET, end=True))
    client.requests[-1][0].head(ResponseHead(200, [], 0))
    client.requests[-1][0].end()
    client.heard()
    return client


@pytest.mark.parametrize(
    ("stream_id", "seen"),
    [
        (0, [("GoAway", Code.PROTOCOL_ERROR)]),
        (4, [("GoAway", Code.PROTOCOL_ERROR)]),
        (3, [("GoAway", Code.STREAM_CLOSED)]),  # ended on both sides
        (1, [("RstStream", Code.STREAM_CLOSED)]),  # ended by the client
    ],
)
def test_known_block_on_a_stream_that_cannot_be_is_still_an_error(stream_id: int, seen: list[Any]) -> None:
    client = known()
    client.say(headers(stream_id, GET, end=True))
    assert [(each.kind, each.value) for each in client.heard()] == seen
    assert len(client.requests) == 2


def test_known_block_over_the_limit_of_streams_is_refused() -> None:
    client = known(H2Limits(max_streams=2))
    client.say(headers(5, GET, end=True), headers(7, GET, end=True))
    assert client.heard() == [Seen("RstStream", 7, Code.REFUSED_STREAM)]


def test_known_block_after_our_goaway_is_ignored() -> None:
    client = known()
    client.h2.drain()
    client.heard()
    client.say(headers(5, GET, end=True))
    assert client.heard() == []
    assert len(client.requests) == 2


def test_known_block_with_a_priority_is_known_and_one_that_names_itself_is_an_error() -> None:
    client = known()
    flags = wire.END_HEADERS | wire.END_STREAM | wire.HAS_PRIORITY
    client.say(frame(wire.HEADERS, flags, 5, word(1) + b"\x0f" + coded(GET)))
    assert len(client.requests) == 3
    client.say(frame(wire.HEADERS, flags, 7, word(7) + b"\x0f" + coded(GET)))
    assert client.heard() == [Seen("RstStream", 7, Code.PROTOCOL_ERROR)]
    client.say(frame(wire.HEADERS, flags, 9, b"\x00\x00"))
    assert [seen.kind for seen in client.heard()] == ["GoAway"]


def test_known_block_without_the_body_that_it_announces_is_an_error() -> None:
    client, fields = Served(), [*POST, (b"content-length", b"2")]
    for stream_id in (1, 3):
        client.say(headers(stream_id, fields), body(stream_id, b"ok", end=True))
    client.say(headers(5, fields, end=True))
    assert client.heard() == [Seen("RstStream", 5, Code.PROTOCOL_ERROR)]
    client.say(headers(7, fields), body(7, b"odd", end=True))
    assert client.heard() == [Seen("RstStream", 7, Code.PROTOCOL_ERROR)]


# ---------------------------------------------------------------------------------------------- answers


def stream_of(client: Served, stream_id: int) -> ServerStream:
    return client.ask(stream_id)[0]


def in_three(stream: ServerStream, fields: Fields, chunk: bytes) -> None:
    stream.head(ResponseHead(200, [*fields, TIMING], len(chunk)))
    if chunk:
        stream.data(chunk)
    stream.end()


@given(
    st.lists(
        st.tuples(st.sampled_from(["ask", "ask", "ask", "table", "other"]), st.integers(0, 2), st.booleans()),
        max_size=24,
    )
)
def test_answer_in_one_step_says_what_three_say(steps: list[tuple[str, int, bool]]) -> None:
    lists: list[Fields] = [
        [(b"content-type", b"text/plain"), (b"content-length", b"2"), (b"x-odd", b"1")],
        [(b"content-type", b"application/json"), (b"set-cookie", b"a=b")],
        [(b"etag", b'"1"'), (b"server", b"x"), (b"x-odd", b"2")],
    ]
    client = Served()
    for number, (what, which, empty) in enumerate(steps):
        if what == "table":
            client.eyes._decoder.max_allowed_table_size = 4096
            client.say(settings(header_table_size=[0, 100, 4096][which]))
            client.heard()
            continue
        chunk, fields = b"" if empty else b"ok", lists[which]
        stream = stream_of(client, 2 * number + 1)
        if what == "other":
            in_three(stream, fields, chunk)
        else:
            assert stream.answer(which, 200, fields, TIMING, chunk)
        head = Seen("Headers", stream.id, [(b":status", b"200"), *fields, TIMING], what == "ask" and empty)
        seen = client.heard()
        assert seen[0].value == head.value
        assert [each.end for each in seen][-1]
        assert b"".join(each.value for each in seen if each.kind == "Data") == chunk
        assert stream.id not in client.h2.streams


def test_answer_that_was_sent_before_is_looked_up() -> None:
    client, fields = Served(), [(b"content-type", b"text/plain"), (b"x-unknown", b"1")]
    for stream_id in range(1, 9, 2):
        assert stream_of(client, stream_id).answer("key", 200, fields, TIMING, b"")
    client.heard()
    (block,) = client.h2.sender.encoder.standing.values()
    assert len(block) == 3, "what comes again is in the peer's table by now, one byte each"


@pytest.mark.parametrize("move", ["entry", "size"])
def test_answer_that_was_sent_before_is_coded_anew_when_the_table_moves(move: str) -> None:
    client, fields = Served(), [(b"content-type", b"text/plain"), (b"server", b"x")]
    for stream_id in (1, 3, 5):
        stream_of(client, stream_id).answer("key", 200, fields, TIMING, b"")
    if move == "size":
        client.say(settings(header_table_size=0))
    else:
        in_three(stream_of(client, 7), [(b"content-type", b"text/html")], b"")
    stream_of(client, 9).answer("key", 200, fields, TIMING, b"")
    assert client.heard()[-1] == Seen("Headers", 9, [(b":status", b"200"), *fields, TIMING], True)


def test_secret_of_an_answer_is_not_kept() -> None:
    client = Served()
    for stream_id in (1, 3, 5):
        assert stream_of(client, stream_id).answer("key", 200, [(b"set-cookie", b"sid=1")], TIMING, b"")
    assert client.h2.sender.encoder.standing == {}


def test_answer_that_windows_hold_back_takes_three_steps() -> None:
    client = Served(hello=wire.PREFACE + wire.settings({wire.INITIAL_WINDOW_SIZE: 1}))
    stream = stream_of(client, 1)
    assert not stream.answer("key", 200, [], TIMING, b"ok")
    assert client.heard() == []
    in_three(stream, [], b"ok")
    client.say(credit(1, 1))
    assert [(seen.kind, seen.end) for seen in client.heard()] == [("Headers", False), ("Data", True)]
    assert 1 not in client.h2.streams


def test_answer_of_a_full_transport_or_a_tunnel_takes_three_steps() -> None:
    client = Served()
    stream = stream_of(client, 1)
    client.h2.sender.blocked = True
    assert not stream.answer("key", 200, [], TIMING, b"")
    client.h2.sender.blocked = False
    assert not stream.answer("key", 200, [(b"priority", b"u=1")], TIMING, b""), "it changes how the stream is served"
    tunnel, _, _ = client.ask(3, [(b":method", b"CONNECT"), (b":authority", b"a.test:1")], end=False)
    assert not tunnel.answer("key", 200, [], TIMING, b"")
    assert client.heard() == []


def test_head_of_an_answer_that_is_too_long_for_a_frame_is_cut() -> None:
    client, long = Served(), (b"x-long", b"x" * 20_000)
    assert stream_of(client, 1).answer("key", 200, [long], TIMING, b"ok")
    sent = client.h2.sender.take()
    kinds = []
    while sent:
        size = int.from_bytes(sent[:3], "big")
        kinds.append((sent[3], sent[4]))
        sent = sent[9 + size :]
    assert kinds == [(wire.HEADERS, 0), (wire.CONTINUATION, wire.END_HEADERS), (wire.DATA, wire.END_STREAM)]


def test_literal_that_never_repeats_is_read_by_others() -> None:
    for size in (0, 1, 126, 127, 128, 300):
        field = (b"server-timing", b"x" * size)
        assert [tuple(each) for each in hpack.Decoder().decode(plain_literal(*field), raw=True)] == [field]
