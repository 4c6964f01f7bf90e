"""The server's half of HTTP/2 as transcripts: what a client says, what the relay hears, what leaves."""

from __future__ import annotations

import json

import pytest

from proxy.h2_errors import Code
from proxy.h2_limits import H2Limits
from proxy.messages import Abort, Cause, Party, ResponseHead, Stage
from tests.proxy.h2_wire import GET, OK, POST, Seen, Served, body, frame, headers, reset, settings, wire

HELLO = ResponseHead(200, [(b"Content-Type", b"text/plain")])
CONNECT = [(b":method", b"CONNECT"), (b":protocol", b"websocket"), (b":scheme", b"https"), (b":authority", b"a.test"),
           (b":path", b"/chat"), (b"sec-websocket-version", b"13")]  # fmt: skip


def test_we_say_what_we_allow_at_once() -> None:
    served = Served(hello=b"")
    (said, window) = served.heard()
    assert said.value == {3: 256, 4: 1 << 20, 6: 65536, 8: 1, 9: 1}
    assert window == Seen("WindowUpdate", 0, (32 << 20) - 65535)


def test_a_get_arrives_whole_and_its_answer_is_two_frames() -> None:
    served = Served()
    stream, head, told = served.ask(1, [*GET, (b"accept", b"*/*")])
    assert (head.method, head.target, head.scheme, head.authority, head.length) == (
        b"GET",
        b"/",
        b"https",
        b"a.test",
        0,
    )
    assert head.fields == [(b"accept", b"*/*")]
    assert told.words == ["end"]
    stream.head(HELLO)
    stream.data(b"hi")
    stream.end()
    assert served.heard() == [
        Seen("Headers", 1, [*OK, (b"content-type", b"text/plain")]),
        Seen("Data", 1, b"hi", end=True),
    ]
    assert not served.h2.streams


def test_everything_of_a_turn_is_one_wake() -> None:
    served = Served()
    for stream_id in (1, 3, 5):
        served.ask(stream_id)
    served.wakes = 0
    for stream, _, _ in served.requests:
        stream.head(HELLO)
        stream.data(b"hi")
        stream.end()
    assert served.wakes == 1


def test_an_answer_without_body_ends_with_its_head() -> None:
    served = Served()
    stream, _, _ = served.ask()
    stream.head(ResponseHead(204, [], 0, no_body=True))
    stream.end()
    assert served.heard() == [Seen("Headers", 1, [(b":status", b"204")], end=True)]


def test_an_end_in_a_later_turn_is_a_frame_of_its_own() -> None:
    served = Served()
    stream, _, _ = served.ask()
    stream.head(HELLO)
    served.heard()
    stream.end()
    assert served.heard() == [Seen("Data", 1, b"", end=True)]


def test_a_head_too_long_for_a_frame_goes_on_in_continuations() -> None:
    served = Served()
    stream, _, _ = served.ask()
    long = [(b"x-%d" % n, bytes([n]) * 6000) for n in range(128, 136)]
    stream.head(ResponseHead(200, long))
    stream.end()
    seen = served.eyes
    output = served.h2.sender.take()
    kinds = []
    block = b""
    at = 0
    while at < len(output):
        size = int.from_bytes(output[at : at + 3], "big")
        kinds.append((output[at + 3], output[at + 4]))
        block += output[at + 9 : at + 9 + size] if output[at + 3] in (1, 9) else b""
        at += 9 + size
    assert kinds == [(wire.HEADERS, 0), (wire.CONTINUATION, 0), (wire.CONTINUATION, 4), (wire.DATA, 1)]
    assert [tuple(f) for f in seen._decoder.decode(block, raw=True)] == [*OK, *long]


def test_fields_of_the_connection_never_leave_and_names_are_lower_case() -> None:
    served = Served()
    stream, _, _ = served.ask()
    fields = [(b"Connection", b"x"), (b"Keep-Alive", b"timeout=5"), (b"Transfer-Encoding", b"chunked"), (b"Upgrade", b"h2c"),
              (b"Proxy-Connection", b"x"), (b"X-Request-ID", b"r"), (b"bad name", b"x")]  # fmt: skip
    stream.head(ResponseHead(200, fields))
    assert served.heard()[0].value == [*OK, (b"x-request-id", b"r")]


def test_interim_heads_pass_before_the_final_one() -> None:
    served = Served()
    stream, head, _ = served.ask(1, [*POST, (b"expect", b"100-continue")], end=False)
    assert head.expect_continue
    stream.interim(ResponseHead(100, []))
    stream.interim(ResponseHead(103, [(b"link", b"</a>")]))
    stream.head(HELLO)
    stream.interim(ResponseHead(103, []))
    assert [s.value[0][1] for s in served.heard()] == [b"100", b"103", b"200"]


def test_a_body_is_passed_chunk_by_chunk_and_trailers_come_right_before_the_end() -> None:
    served = Served()
    _, head, told = served.ask(1, POST, end=False)
    assert head.length is None
    served.say(body(1, b"one"), frame(wire.DATA, wire.PADDED, 1, b"\x02two\0\0"), headers(1, [(b"x", b"y")], end=True))
    assert told.heard == [("data", b"one"), ("data", b"two"), ("trailers", [(b"x", b"y")]), ("end", None)]


def test_trailers_end_an_answer() -> None:
    served = Served()
    stream, _, _ = served.ask()
    stream.head(HELLO)
    stream.data(b"hi")
    stream.trailers([(b"Grpc-Status", b"0"), (b"Connection", b"x")])
    stream.end()
    assert served.heard()[1:] == [Seen("Data", 1, b"hi"), Seen("Headers", 1, [(b"grpc-status", b"0")], end=True)]


def test_cookie_crumbs_become_one_field() -> None:
    served = Served()
    _, head, _ = served.ask(1, [*GET, (b"cookie", b"a=1"), (b"x", b"y"), (b"cookie", b"b=2")])
    assert head.fields == [(b"cookie", b"a=1; b=2"), (b"x", b"y")]


@pytest.mark.parametrize(
    ("fields", "authority"),
    [
        ([f for f in GET if f[0] != b":authority"] + [(b"host", b"b.test")], b"b.test"),
        ([*GET, (b"host", b"A.test")], b"a.test"),
        ([f for f in GET if f[0] != b":authority"], b""),
    ],
    ids=["host alone", "both the same", "neither"],
)
def test_host_is_the_authority_and_no_field(fields: list[tuple[bytes, bytes]], authority: bytes) -> None:
    _, head, _ = Served().ask(1, fields)
    assert (head.authority, head.get(b"host")) == (authority, None)


# ------------------------------------------------------------------------------------------------ ends that are not clean


def test_a_client_that_resets_is_heard_as_a_cancel() -> None:
    served = Served()
    stream, _, told = served.ask()
    served.say(reset(1, Code.CANCEL))
    assert told.heard[-1] == ("abort", Abort(Party.CLIENT, Stage.HEAD, Cause.CANCELLED, "h2 stream reset CANCEL", 8))
    stream.head(HELLO)
    stream.data(b"x")
    stream.end()
    assert served.heard() == []


LOST = Abort(Party.EDGE, Stage.BODY, Cause.LOST)


@pytest.mark.parametrize(
    ("abort", "answered", "code"),
    [
        (LOST, True, Code.INTERNAL_ERROR),
        (Abort(Party.EDGE, Stage.BODY, Cause.TIMED_OUT), True, Code.INTERNAL_ERROR),
        (Abort(Party.EDGE, Stage.BODY, Cause.BROKEN), True, Code.INTERNAL_ERROR),
        (Abort(Party.US, Stage.BODY, Cause.CANCELLED), True, Code.CANCEL),
        (Abort(Party.EDGE, Stage.CONNECT, Cause.LOST, unprocessed=True), False, Code.REFUSED_STREAM),
        (Abort(Party.EDGE, Stage.CONNECT, Cause.LOST, unprocessed=True), True, Code.INTERNAL_ERROR),
    ],
)
def test_an_abort_becomes_the_reset_that_tells_it(abort: Abort, answered: bool, code: Code) -> None:
    served = Served()
    stream, _, told = served.ask()
    if answered:
        stream.head(HELLO)
        stream.data(b"half")
    stream.abort(abort)
    stream.abort(abort)
    stream.data(b"more")
    seen = served.heard()
    assert seen[-1] == Seen("RstStream", 1, code)
    assert not [s for s in seen if s.end]
    assert told.words == ["end"]


def test_data_that_waited_is_dropped_by_an_abort() -> None:
    served = Served(hello=wire.PREFACE + settings(initial_window_size=2))
    stream, _, _ = served.ask()
    stream.head(HELLO)
    stream.data(b"12345")
    stream.abort(LOST)
    assert [s.kind for s in served.heard()] == ["Headers", "RstStream"]
    assert served.h2.sender.queued == 0


def refused_upload() -> Served:
    served = Served(H2Limits(stream_window=1000, connection_window=100_000))
    stream, _, told = served.ask(1, POST, end=False)
    served.say(body(1, b"some"))
    stream.head(ResponseHead(401, [], 0))
    stream.end()
    assert served.heard() == [Seen("Headers", 1, [(b":status", b"401")], end=True)]
    served.say(body(1, b"more"))
    assert told.heard == [("data", b"some")]
    return served


def test_an_upload_after_a_whole_answer_is_let_run_for_a_while_and_then_cut_without_an_error() -> None:
    # RFC 9113 8.1 would have the reset at once; curl 7.88 then loses the answer.
    served = refused_upload()
    assert served.h2.cut_lingering()
    assert served.heard() == []
    assert not served.h2.cut_lingering()
    assert served.heard() == [Seen("RstStream", 1, Code.NO_ERROR)]
    served.say(body(1, b"late", end=True))
    assert served.heard() == []


def test_an_upload_that_is_let_run_gets_no_credit_and_takes_none_from_others() -> None:
    served = refused_upload()
    served.say(body(1, b"x" * 900))
    assert served.heard() == []
    assert served.h2._owed == 908
    served.say(body(1, b"x" * 100))
    assert served.heard() == [Seen("RstStream", 1, Code.FLOW_CONTROL_ERROR)]


@pytest.mark.parametrize("last", [body(1, b"", end=True), reset(1, Code.CANCEL)], ids=["end", "reset"])
def test_a_client_that_stops_its_unwanted_upload_is_not_reset(last: bytes) -> None:
    served = refused_upload()
    served.say(last)
    assert not served.h2.streams
    assert not served.h2.cut_lingering()
    assert served.heard() == []


def test_an_abort_after_the_answers_end_does_not_spoil_it() -> None:
    served = refused_upload()
    served.requests[0][0].abort(LOST)
    assert served.heard() == []


def test_an_answer_may_begin_while_the_upload_goes_on() -> None:
    served = Served()
    stream, _, told = served.ask(1, POST, end=False)
    stream.head(HELLO)
    stream.data(b"early")
    served.say(body(1, b"more"), body(1, b"last", end=True))
    stream.end()
    assert told.words == ["data", "data", "end"]
    assert served.heard()[-1].end
    assert not served.h2.streams


def test_a_malformed_request_that_had_begun_is_an_abort_for_the_relay() -> None:
    served = Served()
    _, _, told = served.ask(1, [*POST, (b"content-length", b"2")], end=False)
    served.say(body(1, b"abc"))
    word, abort = told.heard[-1]
    assert word == "abort"
    assert (abort.by, abort.cause, abort.code) == (Party.CLIENT, Cause.BROKEN, Code.PROTOCOL_ERROR)


def test_a_lost_connection_is_heard_by_every_stream_once() -> None:
    served = Served()
    for stream_id in (1, 3):
        served.ask(stream_id, POST, end=False)
    served.h2.lose("client connection lost")
    served.h2.lose("client connection lost")
    for _, _, told in served.requests:
        assert told.heard == [("abort", Abort(Party.CLIENT, Stage.HEAD, Cause.LOST, "client connection lost"))]


def test_a_broken_connection_is_heard_by_every_stream_as_broken() -> None:
    served = Served()
    _, _, told = served.ask(1, POST, end=False)
    served.say(body(0, b"x"))
    (word, abort) = told.heard[-1]
    assert (word, abort.cause, abort.code) == ("abort", Cause.BROKEN, Code.PROTOCOL_ERROR)
    assert served.heard()[-1] == Seen("GoAway", 0, Code.PROTOCOL_ERROR)


# ------------------------------------------------------------------------------------------------ bounds


def test_a_head_over_the_limit_is_431_with_a_text_that_names_the_limit() -> None:
    served = Served(H2Limits(max_header_bytes=1000))
    served.say(headers(1, [*GET, (b"x", b"y" * 1000)], end=True))
    head, text = served.heard()
    assert head.value[0] == (b":status", b"431")
    assert (b"content-type", b"application/json") in head.value and text.end
    assert "1000 bytes" in json.loads(text.value)["error"]["message"]
    served.ask(3)
    assert len(served.requests) == 1


def test_a_head_over_the_limit_ends_its_upload_too() -> None:
    served = Served(H2Limits(max_header_bytes=1000))
    served.say(headers(1, [*POST, (b"x", b"y" * 1000)]), body(1, b"x"))
    assert [s.kind for s in served.heard()] == ["Headers", "Data"]
    served.h2.cut_lingering()
    served.h2.cut_lingering()
    assert served.heard() == [Seen("RstStream", 1, Code.NO_ERROR)]


def test_the_time_of_a_head_counts_from_its_first_byte() -> None:
    served = Served()
    block = headers(1, GET, whole=False)
    for now, said in [(200.0, block[:3]), (201.0, block[3:]), (202.0, frame(wire.CONTINUATION, 0, 1, b""))]:
        served.now = now
        served.say(said)
        assert served.h2.block_since == 200.0
    served.say(frame(wire.CONTINUATION, wire.END_HEADERS, 1, b""))
    assert served.h2.block_since is None


def test_a_field_of_60_kib_passes() -> None:
    _, head, _ = Served().ask(1, [*GET, (b"x", b"y" * 16000)])
    assert head.get(b"x") == b"y" * 16000
    served = Served()
    block = headers(1, [*GET, (b"x", b"y" * 60000)])[9:]
    served.say(frame(wire.HEADERS, wire.END_STREAM, 1, block[:16384]))
    for at in range(16384, len(block), 16384):
        served.say(frame(wire.CONTINUATION, 4 if at + 16384 >= len(block) else 0, 1, block[at : at + 16384]))
    assert served.requests[0][1].get(b"x") == b"y" * 60000


# ------------------------------------------------------------------------------------------------ tunnels


def test_a_websocket_looks_like_an_upgrade_and_is_accepted_with_200() -> None:
    served = Served()
    stream, head, told = served.ask(1, CONNECT, end=False)
    assert (head.method, head.target, head.protocol, head.length) == (b"GET", b"/chat", b"websocket", 0)
    accept = [(b"Upgrade", b"websocket"), (b"Connection", b"Upgrade"), (b"Sec-WebSocket-Accept", b"x"),
              (b"Sec-WebSocket-Protocol", b"realtime")]  # fmt: skip
    stream.head(ResponseHead(101, accept))
    served.say(body(1, b"\x81\x80"))
    stream.data(b"\x81\x00")
    assert served.heard() == [
        Seen("Headers", 1, [*OK, (b"sec-websocket-protocol", b"realtime")]),
        Seen("Data", 1, b"\x81\x00"),
    ]
    assert told.heard == [("data", b"\x81\x80")]


def test_a_tunnel_half_closes_in_either_direction() -> None:
    served = Served()
    stream, _, told = served.ask(1, CONNECT, end=False)
    stream.head(ResponseHead(101, []))
    stream.end()
    assert served.heard()[-1] == Seen("Headers", 1, OK, end=True)
    served.say(body(1, b"still"), body(1, b"", end=True))
    assert told.heard == [("data", b"still"), ("end", None)]
    assert not served.h2.streams


def test_two_websockets_live_on_one_connection() -> None:
    served = Served()
    for stream_id in (1, 3):
        stream, _, _ = served.ask(stream_id, CONNECT, end=False)
        stream.head(ResponseHead(101, []))
    served.say(body(3, b"b"), body(1, b"a"))
    assert [told.body for _, _, told in served.requests] == [b"a", b"b"]


def test_a_refused_websocket_ends_like_any_answer() -> None:
    served = Served()
    stream, _, _ = served.ask(1, CONNECT, end=False)
    stream.head(ResponseHead(426, [], 0))
    stream.end()
    assert served.heard() == [Seen("Headers", 1, [(b":status", b"426")], end=True)]
    served.say(body(1, b"", end=True))
    assert not served.h2.streams


def test_a_protocol_that_nobody_speaks_is_501() -> None:
    served = Served()
    served.say(headers(1, [(n, b"webtransport" if n == b":protocol" else v) for n, v in CONNECT]))
    head, text = served.heard()[:2]
    assert head.value[0] == (b":status", b"501")
    assert json.loads(text.value)["error"]["code"] == "bad_request"
    assert not served.requests


def test_a_plain_connect_names_its_authority_as_target() -> None:
    _, head, told = Served().ask(1, [(b":method", b"CONNECT"), (b":authority", b"a.test:443")], end=False)
    assert (head.method, head.target, head.protocol) == (b"CONNECT", b"a.test:443", b"")
    assert told.words == []


# ------------------------------------------------------------------------------------------------ going away


def test_a_drain_says_goaway_twice_and_serves_what_was_on_its_way() -> None:
    served = Served()
    served.ask(1, POST, end=False)
    served.h2.announce_drain()
    served.say(headers(3, GET, end=True))  # crossed the first GOAWAY
    served.h2.drain()
    served.say(headers(5, GET, end=True))
    first, second = served.heard()
    assert (first.kind, second.kind) == ("GoAway", "GoAway")
    assert [stream.id for stream, _, _ in served.requests] == [1, 3]
    served.say(body(1, b"x", end=True), body(5, b"late"))
    assert served.heard() == []
    assert served.requests[0][2].words == ["data", "end"]


def test_a_hard_stop_resets_each_stream_and_tells_its_relay() -> None:
    served = Served()
    stream, _, told = served.ask()
    stream.head(HELLO)
    served.h2.abandon("the proxy stops")
    assert [s.kind for s in served.heard()] == ["Headers", "RstStream", "GoAway"]
    assert told.words == ["end", "abort"]
