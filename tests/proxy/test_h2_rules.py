"""What an HTTP/2 server answers to frames that break a rule, or only look so: a table after RFC 9113 (and h2spec).

A row is a sentence, the frames after the handshake, and what must come: `gone(code)`: GOAWAY with it; `cut(id, code)`:
RST_STREAM with it and a connection that goes on; `fine(n)`: no complaint, n requests, and the connection goes on.
"""

from __future__ import annotations

import pytest

from proxy import h2_frames as wire
from proxy.h2_errors import Code
from proxy.h2_limits import H2Limits
from proxy.messages import ResponseHead
from tests.proxy.h2_wire import GET, POST, Seen, Served, body, coded, credit, frame, headers, reset, settings, word

HALF = headers(1, POST)  # a request that stays open
WHOLE = headers(1, GET, end=True)  # half-closed (remote): our answer is outstanding
DEPENDS_ON_ITSELF = word(1) + b"\x0f"
MAX = wire.MAX_WINDOW


def gone(code: Code) -> tuple[str, int, Code]:
    return "gone", 0, code


def cut(stream_id: int, code: Code) -> tuple[str, int, Code]:
    return "cut", stream_id, code


def fine(requests: int = 0) -> tuple[str, int, Code]:
    return "fine", requests, Code.NO_ERROR


def without(name: bytes) -> list[tuple[bytes, bytes]]:
    return [field for field in GET if field[0] != name]


def padded(kind: int, flags: int, pad: int, payload: bytes) -> bytes:
    return frame(kind, flags | wire.PADDED, 1, bytes([pad]) + payload)


def split(*parts: bytes, end: bool = True) -> bytes:
    """A header block in HEADERS and CONTINUATION frames."""
    out = frame(wire.HEADERS, wire.END_STREAM if end else 0, 1, parts[0])
    for part in parts[1:-1]:
        out += frame(wire.CONTINUATION, 0, 1, part)
    return out + frame(wire.CONTINUATION, wire.END_HEADERS, 1, parts[-1])


BLOCK = coded(GET)
PROTOCOL, SIZE, FLOW, CLOSED = Code.PROTOCOL_ERROR, Code.FRAME_SIZE_ERROR, Code.FLOW_CONTROL_ERROR, Code.STREAM_CLOSED

RULES = [
    # 4.1, 4.2, 5.5: frames
    ("a frame of unknown type is ignored", frame(0x16, 0xFF, 0, b"x" * 8) + WHOLE, fine(1)),
    ("undefined flags are ignored", frame(wire.PING, 0x16, 0, b"8 bytes!"), fine()),
    ("the reserved bit is ignored", frame(wire.PING, 0, 1 << 31, b"8 bytes!"), fine()),
    ("a DATA frame of 2^14 bytes is taken", HALF + body(1, b"x" * 16384), fine(1)),
    ("a larger DATA frame", HALF + body(1, b"x" * 16385), gone(SIZE)),
    ("a larger HEADERS frame", frame(wire.HEADERS, 5, 1, b"x" * 16385), gone(SIZE)),
    ("a larger frame of unknown type", frame(0x16, 0, 0, b"x" * 16385), gone(SIZE)),
    # 3.4: the first frame
    ("a second SETTINGS may come any time", settings(max_frame_size=20000) + WHOLE + settings(), fine(1)),
    # 4.3: header blocks
    ("an invalid header block", frame(wire.HEADERS, 5, 1, b"\x00\x7f"), gone(Code.COMPRESSION_ERROR)),
    ("an index outside the table", frame(wire.HEADERS, 5, 1, b"\xbe"), gone(Code.COMPRESSION_ERROR)),
    ("a table size above ours", frame(wire.HEADERS, 5, 1, b"\x3f\xe2\x1f" + BLOCK), gone(Code.COMPRESSION_ERROR)),
    ("PRIORITY inside a header block", headers(1, GET, whole=False) + frame(wire.PRIORITY, 0, 1, b"\0" * 5), gone(PROTOCOL)),
    ("another stream's HEADERS inside a block", headers(1, GET, whole=False) + headers(3, GET), gone(PROTOCOL)),
    ("an unknown frame inside a header block", headers(1, GET, whole=False) + frame(0x16, 0, 1), gone(PROTOCOL)),
    ("DATA inside a header block", headers(1, GET, whole=False) + body(1, b"x"), gone(PROTOCOL)),
    ("PING inside a header block", headers(1, GET, whole=False) + frame(wire.PING, 0, 0, b"8 bytes!"), gone(PROTOCOL)),
    # 5.1: states
    ("DATA on an idle stream", body(1, b"x"), gone(PROTOCOL)),
    ("RST_STREAM on an idle stream", reset(1, 8), gone(PROTOCOL)),
    ("WINDOW_UPDATE on an idle stream", credit(1, 1), gone(PROTOCOL)),
    ("CONTINUATION on an idle stream", frame(wire.CONTINUATION, 4, 1, BLOCK), gone(PROTOCOL)),
    ("PRIORITY on an idle stream is ignored", frame(wire.PRIORITY, 0, 9, b"\0" * 5) + WHOLE, fine(1)),
    ("DATA after END_STREAM", WHOLE + body(1, b"x"), cut(1, CLOSED)),
    ("HEADERS after END_STREAM", WHOLE + headers(1, GET, end=True), cut(1, CLOSED)),
    ("CONTINUATION after END_STREAM", WHOLE + frame(wire.CONTINUATION, 4, 1, BLOCK), gone(PROTOCOL)),
    ("WINDOW_UPDATE after END_STREAM is fine", WHOLE + credit(1, 5), fine(1)),
    ("PRIORITY after END_STREAM is fine", WHOLE + frame(wire.PRIORITY, 0, 1, b"\0" * 5), fine(1)),
    ("RST_STREAM after END_STREAM is fine", WHOLE + reset(1, 8), fine(1)),
    ("DATA after RST_STREAM", HALF + reset(1, 8) + body(1, b"x"), cut(1, CLOSED)),
    ("HEADERS after RST_STREAM", HALF + reset(1, 8) + headers(1, GET, end=True), cut(1, CLOSED)),
    ("WINDOW_UPDATE after RST_STREAM is ignored", HALF + reset(1, 8) + credit(1, 5), fine(1)),
    ("RST_STREAM twice is ignored", HALF + reset(1, 8) + reset(1, 8), fine(1)),
    ("RST_STREAM with an unknown code is fine", HALF + reset(1, 0xFF), fine(1)),
    # 5.1.1: identifiers
    ("an even stream id", headers(2, GET, end=True), gone(PROTOCOL)),
    ("a stream id lower than the last", headers(5, GET, end=True) + headers(3, GET, end=True), gone(PROTOCOL)),
    ("stream ids may have gaps", headers(1, GET, end=True) + headers(101, GET, end=True), fine(2)),
    # 5.3 (RFC 7540)
    ("HEADERS that depend on themselves", frame(wire.HEADERS, 0x25, 1, DEPENDS_ON_ITSELF + BLOCK), cut(1, PROTOCOL)),
    ("PRIORITY that depends on itself", HALF + frame(wire.PRIORITY, 0, 1, DEPENDS_ON_ITSELF), cut(1, PROTOCOL)),
    ("a priority in HEADERS is ignored", frame(wire.HEADERS, 0x25, 1, word(3 | 1 << 31) + b"\xff" + BLOCK), fine(1)),
    # 6.1: DATA
    ("DATA on stream 0", body(0, b"x"), gone(PROTOCOL)),
    ("DATA padding as long as the payload", HALF + padded(wire.DATA, 0, 4, b"123"), gone(PROTOCOL)),
    ("DATA padded without a pad length", HALF + frame(wire.DATA, wire.PADDED, 1), gone(SIZE)),
    ("DATA that is all padding is taken", HALF + padded(wire.DATA, 0, 3, b"\0\0\0"), fine(1)),
    # 6.2: HEADERS
    ("HEADERS on stream 0", headers(0, GET, end=True), gone(PROTOCOL)),
    ("HEADERS padding beyond the payload", padded(wire.HEADERS, 5, 200, BLOCK), gone(PROTOCOL)),
    ("HEADERS too short for its priority", frame(wire.HEADERS, 0x25, 1, b"\0\0"), gone(SIZE)),
    ("padded HEADERS are taken", padded(wire.HEADERS, 5, 4, BLOCK + b"\0\0\0\0"), fine(1)),
    # 6.3, 6.4: PRIORITY, RST_STREAM
    ("PRIORITY on stream 0", frame(wire.PRIORITY, 0, 0, b"\0" * 5), gone(PROTOCOL)),
    ("PRIORITY of 4 bytes", HALF + frame(wire.PRIORITY, 0, 1, b"\0" * 4), cut(1, SIZE)),
    ("RST_STREAM on stream 0", reset(0, 8), gone(PROTOCOL)),
    ("RST_STREAM of 3 bytes", HALF + frame(wire.RST_STREAM, 0, 1, b"\0" * 3), gone(SIZE)),
    # 6.5: SETTINGS
    ("a SETTINGS ACK with a payload", frame(wire.SETTINGS, wire.ACK, 0, b"\0" * 6), gone(SIZE)),
    ("SETTINGS on stream 1", frame(wire.SETTINGS, 0, 1), gone(PROTOCOL)),
    ("SETTINGS of 5 bytes", frame(wire.SETTINGS, 0, 0, b"\0" * 5), gone(SIZE)),
    ("SETTINGS_ENABLE_PUSH 2", settings(enable_push=2), gone(PROTOCOL)),
    ("SETTINGS_INITIAL_WINDOW_SIZE 2^31", settings(initial_window_size=MAX + 1), gone(FLOW)),
    ("SETTINGS_MAX_FRAME_SIZE 2^14 - 1", settings(max_frame_size=16383), gone(PROTOCOL)),
    ("SETTINGS_MAX_FRAME_SIZE 2^24", settings(max_frame_size=2**24), gone(PROTOCOL)),
    ("SETTINGS_ENABLE_CONNECT_PROTOCOL 2", settings(enable_connect_protocol=2), gone(PROTOCOL)),
    ("an unknown setting is ignored", wire.settings({0xFF: 5}) + WHOLE, fine(1)),
    # 6.6: PUSH_PROMISE
    ("PUSH_PROMISE from a client", HALF + frame(wire.PUSH_PROMISE, 4, 1, word(2) + BLOCK), gone(PROTOCOL)),
    # 6.7, 6.8: PING, GOAWAY
    ("PING on stream 1", frame(wire.PING, 0, 1, b"8 bytes!"), gone(PROTOCOL)),
    ("PING of 6 bytes", frame(wire.PING, 0, 0, b"6bytes"), gone(SIZE)),
    ("GOAWAY on stream 1", frame(wire.GOAWAY, 0, 1, b"\0" * 8), gone(PROTOCOL)),
    ("GOAWAY of 7 bytes", frame(wire.GOAWAY, 0, 0, b"\0" * 7), gone(SIZE)),
    ("GOAWAY with an unknown code is fine", WHOLE + frame(wire.GOAWAY, 0, 0, word(0) + word(0xFF)), fine(1)),
    # 6.9: WINDOW_UPDATE
    ("WINDOW_UPDATE of 0 on the connection", credit(0, 0), gone(PROTOCOL)),
    ("WINDOW_UPDATE of 0 on a stream", HALF + credit(1, 0), cut(1, PROTOCOL)),
    ("WINDOW_UPDATE of 3 bytes", frame(wire.WINDOW_UPDATE, 0, 0, b"\0" * 3), gone(SIZE)),
    ("a connection window above 2^31 - 1", credit(0, MAX), gone(FLOW)),
    ("a stream window above 2^31 - 1", HALF + credit(1, MAX), cut(1, FLOW)),
    ("SETTINGS that push a window above 2^31 - 1", HALF + credit(1, 65536) + settings(initial_window_size=MAX), gone(FLOW)),
    # 6.10: CONTINUATION
    ("several CONTINUATION frames", split(BLOCK[:5], BLOCK[5:9], BLOCK[9:]), fine(1)),
    ("CONTINUATION on stream 0", headers(1, GET, whole=False) + frame(wire.CONTINUATION, 4, 0, b""), gone(PROTOCOL)),
    ("CONTINUATION on another stream", headers(1, GET, whole=False) + frame(wire.CONTINUATION, 4, 3, b""), gone(PROTOCOL)),
    ("CONTINUATION after END_HEADERS", HALF + frame(wire.CONTINUATION, 4, 1, b""), gone(PROTOCOL)),
    ("CONTINUATION after DATA", HALF + body(1, b"x") + frame(wire.CONTINUATION, 4, 1, b""), gone(PROTOCOL)),
    # 8.1: the exchange
    ("a second HEADERS without END_STREAM", HALF + headers(1, [(b"x", b"y")]), cut(1, PROTOCOL)),
    ("trailers are taken", HALF + body(1, b"x") + headers(1, [(b"x", b"y")], end=True), fine(1)),
    ("a pseudo-field in the trailers", HALF + headers(1, [(b":method", b"GET")], end=True), cut(1, PROTOCOL)),
    # 8.1.1: content-length
    ("less body than content-length", headers(1, [*POST, (b"content-length", b"9")]) + body(1, b"x", end=True),
     cut(1, PROTOCOL)),
    ("more body than content-length", headers(1, [*POST, (b"content-length", b"1")]) + body(1, b"xy"), cut(1, PROTOCOL)),
    ("a sum unlike content-length", headers(1, [*POST, (b"content-length", b"3")]) + body(1, b"x") + body(1, b"y", end=True),
     cut(1, PROTOCOL)),
    ("content-length and no body", headers(1, [*POST, (b"content-length", b"3")], end=True), cut(1, PROTOCOL)),
    ("missing bytes before trailers", headers(1, [*POST, (b"content-length", b"3")]) + headers(1, [], end=True),
     cut(1, PROTOCOL)),
    ("the body that was announced", headers(1, [*POST, (b"content-length", b"3")]) + body(1, b"abc", end=True), fine(1)),
    # RFC 9218
    ("PRIORITY_UPDATE is taken", frame(wire.PRIORITY_UPDATE, 0, 0, word(1) + b"u=2, i") + WHOLE, fine(1)),
    ("PRIORITY_UPDATE on stream 1", frame(wire.PRIORITY_UPDATE, 0, 1, word(1)), gone(PROTOCOL)),
    ("PRIORITY_UPDATE of 3 bytes", frame(wire.PRIORITY_UPDATE, 0, 0, b"\0\0\1"), gone(SIZE)),
    ("PRIORITY_UPDATE for stream 0", frame(wire.PRIORITY_UPDATE, 0, 0, word(0)), gone(PROTOCOL)),
]  # fmt: skip

FIELDS = [
    ("an upper-case name", [*GET, (b"X-A", b"b")]),
    ("an empty name", [*GET, (b"", b"b")]),
    ("a name with a space", [*GET, (b"x a", b"b")]),
    ("a name with a colon", [*GET, (b"x:a", b"b")]),
    ("an unknown pseudo-field", [*GET, (b":test", b"b")]),
    ("the response's pseudo-field", [*GET, (b":status", b"200")]),
    ("a pseudo-field after a field", [(b"x", b"y"), *GET]),
    ("a late pseudo-field", [*GET, (b"x", b"y"), (b":authority", b"a.test")]),
    ("connection", [*GET, (b"connection", b"keep-alive")]),
    ("keep-alive", [*GET, (b"keep-alive", b"timeout=5")]),
    ("proxy-connection", [*GET, (b"proxy-connection", b"keep-alive")]),
    ("transfer-encoding", [*POST, (b"transfer-encoding", b"chunked")]),
    ("upgrade", [*GET, (b"upgrade", b"websocket")]),
    ("te other than trailers", [*GET, (b"te", b"trailers, deflate")]),
    ("an empty :path", [*without(b":path"), (b":path", b"")]),
    ("no :path", without(b":path")),
    ("no :method", without(b":method")),
    ("no :scheme", without(b":scheme")),
    ("two :method", [*GET, (b":method", b"GET")]),
    ("two :scheme", [*GET, (b":scheme", b"https")]),
    ("two :path", [*GET, (b":path", b"/")]),
    ("two :authority", [*GET, (b":authority", b"a.test")]),
    ("a :path without a slash", [*without(b":path"), (b":path", b"x")]),
    ("* for another method than OPTIONS", [*without(b":path"), (b":path", b"*")]),
    ("a space in :path", [*without(b":path"), (b":path", b"/a HTTP/1.1")]),
    ("CR LF in :path", [*without(b":path"), (b":path", b"/a\r\nx: y")]),
    ("a fragment in :path", [*without(b":path"), (b":path", b"/a#b")]),
    ("CR LF in :method", [(b":method", b"GET / HTTP/1.1\r\nx: y"), *GET[1:]]),
    ("CR LF in :authority", [*without(b":authority"), (b":authority", b"a.test\r\nx: y")]),
    ("userinfo in :authority", [*without(b":authority"), (b":authority", b"me@a.test")]),
    ("CR in a value", [*GET, (b"x", b"a\rb")]),
    ("LF in a value", [*GET, (b"x", b"a\nb")]),
    ("NUL in a value", [*GET, (b"x", b"a\0b")]),
    ("space before a value", [*GET, (b"x", b" a")]),
    ("tab after a value", [*GET, (b"x", b"a\t")]),
    ("two content-lengths", [*POST, (b"content-length", b"1"), (b"content-length", b"2")]),
    ("a content-length with a sign", [*POST, (b"content-length", b"+1")]),
    ("a content-length list", [*POST, (b"content-length", b"1, 1")]),
    ("host unlike :authority", [*GET, (b"host", b"b.test")]),
    ("two hosts", [*without(b":authority"), (b"host", b"a.test"), (b"host", b"a.test")]),
    (":protocol without CONNECT", [*GET, (b":protocol", b"websocket")]),
    ("CONNECT with :path", [(b":method", b"CONNECT"), *GET[1:]]),
    ("CONNECT without :authority", [(b":method", b"CONNECT")]),
]
RULES += [(f"a request with {name}", headers(1, fields, end=True), cut(1, PROTOCOL)) for name, fields in FIELDS]


@pytest.mark.parametrize(("frames", "expected"), [pytest.param(*row[1:], id=row[0]) for row in RULES])
@pytest.mark.parametrize("at_once", [True, False], ids=["one read", "byte by byte"])
def test_rule(frames: bytes, expected: tuple[str, int, Code], at_once: bool) -> None:
    served = Served()
    for piece in [frames] if at_once else [frames[at : at + 1] for at in range(len(frames))]:
        served.say(piece)
    seen = served.heard()
    kind, number, code = expected
    if kind == "gone":
        assert Seen("GoAway", 0, code) in seen
        assert served.h2.failed is not None
        return
    resets = [s for s in seen if s.kind == "RstStream"]
    assert not [s for s in seen if s.kind == "GoAway"]
    if kind == "cut":
        assert resets == [Seen("RstStream", number, code)]
    else:
        assert not resets
        assert len(served.requests) == number
    assert_goes_on(served)


def assert_goes_on(served: Served) -> None:
    served.say(frame(wire.PING, 0, 0, b"and now?"))
    assert Seen("Ping", 0, b"and now?") in served.heard()
    before = len(served.requests)
    served.ask(1001)
    assert len(served.requests) == before + 1


@pytest.mark.parametrize("hello", [b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSN", wire.PREFACE + WHOLE,
                                   wire.PREFACE + frame(wire.SETTINGS, wire.ACK, 0)])  # fmt: skip
def test_a_bad_preface_ends_the_connection(hello: bytes) -> None:
    served = Served(hello=b"")
    served.say(hello)
    assert Seen("GoAway", 0, PROTOCOL) in served.heard()


def test_a_preface_may_come_byte_by_byte() -> None:
    served = Served(hello=b"")
    for byte in wire.PREFACE + settings() + WHOLE:
        served.say(bytes([byte]))
    assert len(served.requests) == 1


def test_every_settings_is_acknowledged_in_order() -> None:
    served = Served()
    served.say(settings(initial_window_size=1), settings(initial_window_size=2))
    assert served.heard() == [Seen("Settings", 0, "ack")] * 2


def test_a_ping_is_answered_and_an_answer_is_not() -> None:
    served = Served()
    served.say(frame(wire.PING, 0, 0, b"12345678"), frame(wire.PING, wire.ACK, 0, b"12345678"))
    assert served.heard() == [Seen("Ping", 0, b"12345678")]


def test_our_own_reset_is_not_held_against_frames_that_crossed_it() -> None:
    served = Served()
    stream, _, _ = served.ask(1, POST, end=False)
    served.h2.reset_stream(stream, Code.CANCEL)
    served.say(body(1, b"late"), headers(1, [(b"x", b"y")], end=True), credit(1, 5))
    assert served.heard() == [Seen("RstStream", 1, Code.CANCEL)]


def test_a_frame_on_a_stream_that_ended_on_both_sides_ends_the_connection() -> None:
    for late in (body(1, b"x"), headers(1, GET, end=True)):
        served = Served()
        stream, _, _ = served.ask()
        stream.head(ResponseHead(204, [], 0, no_body=True))
        stream.end()
        served.say(late)
        assert served.heard()[-1] == Seen("GoAway", 0, CLOSED)


def test_a_late_header_block_still_moves_the_table() -> None:
    # RFC 9113 4.3: a block that is skipped would leave the two tables different.
    served = Served()
    stream, _, _ = served.ask(1, POST, end=False)
    served.h2.reset_stream(stream, Code.CANCEL)
    served.say(frame(wire.HEADERS, 5, 1, b"\x40\x01x\x01y"))
    served.say(frame(wire.HEADERS, 5, 3, coded(GET) + b"\xbe"))
    assert served.requests[-1][1].fields == [(b"x", b"y")]


def test_streams_beyond_the_limit_are_refused() -> None:
    served = Served(H2Limits(max_streams=2))
    for stream_id in (1, 3, 5):
        served.say(headers(stream_id, GET, end=True))
    assert served.heard() == [Seen("RstStream", 5, Code.REFUSED_STREAM)]
    assert len(served.requests) == 2
