"""The conversations that `bench.fuzz_rims` starts from: what clients and edges say on a good day, version by version."""

from __future__ import annotations

import gzip
import zlib
from functools import partial

import pylsqpack

from proxy import h2_frames as h2
from proxy.hpack_encoder import Encoder
from proxy.io.quic_wire import frame as h3_frame
from proxy.messages import Fields
from proxy.websocket import Op, close_frame
from proxy.websocket import frame as ws_frame

MASK = b"\x01\x02\x03\x04"
HOST = b"Host: pool.localhost\r\n"
POST = (
    b"POST /v1/chat HTTP/1.1\r\n", HOST, b"Content-Type: application/json\r\n", b"Content-Length: 12\r\n", b"\r\n",
    b'{"n": 12345}',
)  # fmt: skip
GET = (b"GET /v1/models?x=1 HTTP/1.1\r\n", HOST, b"Accept: */*\r\n", b"Cookie: a=b\r\n", b"\r\n")
CHUNKED = (
    b"PUT /up HTTP/1.1\r\n", HOST, b"Transfer-Encoding: chunked\r\n", b"Trailer: X-Sum\r\n", b"\r\n",
    b"5\r\n", b"hello", b"\r\n", b"1A;ext=1\r\n", b"abcdefghijklmnopqrstuvwxyz", b"\r\n", b"0\r\n", b"X-Sum: 1\r\n", b"\r\n",
)  # fmt: skip
UPGRADE = (
    b"GET /v1/realtime HTTP/1.1\r\n", HOST, b"Connection: Upgrade\r\n", b"Upgrade: websocket\r\n",
    b"Sec-WebSocket-Version: 13\r\n", b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n", b"\r\n",
)  # fmt: skip
WS = (
    ws_frame(Op.TEXT, b"hello", MASK), ws_frame(Op.PING, b"ours", MASK), ws_frame(Op.PONG, b"ours12", MASK),
    b"\x82\xfe\x01\x2c" + MASK + bytes(300), close_frame(1000, "bye", MASK), b"\x88\x82" + MASK + b"\x02\xef\x03\x04"[:2],
    b"\x81\x7f" + (70_000).to_bytes(8) + b"x" * 70_000, bytes([0x01, 3]) + b"abc", bytes([0x80, 3]) + b"def",
)  # fmt: skip

H1_REQUESTS = [
    GET, POST, CHUNKED, POST + GET + POST, GET + GET + GET,
    (b"HEAD / HTTP/1.0\r\n", HOST, b"Connection: keep-alive\r\n", b"\r\n"),
    (b"CONNECT a.test:443 HTTP/1.1\r\n", b"Host: a.test:443\r\n", b"\r\n", b"\x16\x03\x01"),
    (b"OPTIONS * HTTP/1.1\r\n", HOST, b"\r\n"),
    (b"GET http://pool.localhost/x HTTP/1.1\r\n", HOST, b"\r\n"),
    (*POST[:4], b"Expect: 100-continue\r\n", *POST[4:]),
    UPGRADE + WS,
    CHUNKED + POST,
]  # fmt: skip

H1_ANSWERS = [
    (b"HTTP/1.1 200 OK\r\n", b"Content-Type: application/json\r\n", b"Content-Length: 12\r\n", b"\r\n", b'{"ok": true}'),
    (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\n", b"Link: </a>\r\n", b"\r\n",
     b"HTTP/1.1 204 None\r\n\r\n"),
    (b"HTTP/1.1 200 OK\r\n", b"Transfer-Encoding: chunked\r\n", b"Content-Type: text/event-stream\r\n", b"\r\n", b"6\r\n",
     b"data:1", b"\r\n", b"10\r\n", b"0123456789abcdef", b"\r\n", b"0\r\n", b"Server-Timing: a;dur=1\r\n", b"\r\n"),
    (b"HTTP/1.1 200 OK\r\n", b"Connection: close\r\n", b"\r\n", b"until the end"),
    (b"HTTP/1.0 200 OK\r\n", b"\r\n", b"until the end"),
    (b"HTTP/1.1 101 Switching Protocols\r\n", b"Upgrade: websocket\r\n", b"Connection: Upgrade\r\n",
     b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n", b"\r\n", *WS),
    (b"HTTP/1.1 307 Go\r\n", b"Location: http://b.test:80/x\r\n", b"Content-Length: 0\r\n", b"\r\n"),
    (b"HTTP/1.1 429 Slow\r\n", b"Retry-After: Wed, 21 Oct 2026 07:28:00 GMT\r\n", b"Content-Length: 2\r\n", b"\r\n", b"no"),
    (b"HTTP/1.1 304 Same\r\n", b"Content-Length: 99\r\n", b"Keep-Alive: timeout=5, max=7\r\n", b"\r\n"),
    (b"HTTP/1.1 200 OK\r\n", b"Alt-Svc: h3=\":443\"; ma=60\r\n", b"Content-Length: 1\r\n", b"\r\n", b"x"),
]  # fmt: skip

ASK: Fields = [
    (b":method", b"POST"),
    (b":scheme", b"https"),
    (b":authority", b"pool.localhost"),
    (b":path", b"/v1/chat"),
]
FIELDS: Fields = [(b"content-type", b"application/json"), (b"authorization", b"Bearer k"), (b"cookie", b"a=b")]
OK: Fields = [(b":status", b"200"), (b"content-type", b"text/event-stream")]
CONNECT: Fields = [(b":method", b"CONNECT"), (b":protocol", b"websocket"), *ASK[1:], (b"sec-websocket-version", b"13")]


def h2_requests() -> list[tuple[bytes, ...]]:
    encode = Encoder().encode
    whole, ends = h2.END_HEADERS, h2.END_HEADERS | h2.END_STREAM
    hello = (h2.PREFACE, h2.settings({}))
    part = Encoder().encode(ASK + FIELDS)
    headers, body = partial(h2.frame, h2.HEADERS), partial(h2.frame, h2.DATA)
    return [
        (*hello, headers(ends, 1, encode(ASK)), headers(whole, 3, encode(ASK + FIELDS)), body(0, 3, b"ab"), body(1, 3, b"c")),
        (*hello, headers(h2.END_STREAM, 1, part[:9]), h2.frame(h2.CONTINUATION, 4, 1, part[9:]),
         h2.frame(h2.PING, 0, 0, bytes(8))),
        (*hello, headers(whole, 1, Encoder().encode(ASK)), body(8, 1, b"\x02abc\0\0"),
         headers(ends, 1, Encoder().encode([(b"x-sum", b"1")])), h2.frame(h2.RST_STREAM, 0, 1, bytes(4))),
        (*hello, headers(whole, 1, Encoder().encode(CONNECT)), *(body(0, 1, one) for one in WS), body(1, 1, b"")),
        (*hello, h2.settings({3: 1, 4: 10, 5: 20_000}), h2.frame(h2.WINDOW_UPDATE, 0, 0, b"\0\0\1\0"),
         headers(0x25, 1, b"\0\0\0\0\x10" + Encoder().encode(ASK)), h2.frame(0x10, 0, 0, b"\0\0\0\1u=1, i"),
         h2.frame(h2.GOAWAY, 0, 0, bytes(8))),
    ]  # fmt: skip


def h2_answers() -> list[tuple[bytes, ...]]:
    encode = Encoder().encode
    headers, body = partial(h2.frame, h2.HEADERS), partial(h2.frame, h2.DATA)
    hello, whole = h2.settings({8: 1}), h2.END_HEADERS
    return [
        (hello, headers(whole, 1, encode(OK)), body(0, 1, b"data: 1\n\n"), body(1, 1, b"x"),
         headers(5, 3, encode([(b":status", b"204")]))),
        (hello, headers(whole, 1, Encoder().encode([(b":status", b"103"), (b"link", b"a")])),
         headers(whole, 1, Encoder().encode(OK)), headers(5, 1, Encoder().encode([(b"x-sum", b"1")]))),
        (hello, h2.frame(h2.WINDOW_UPDATE, 0, 1, b"\0\0\1\0"), h2.frame(h2.RST_STREAM, 0, 1, b"\0\0\0\7"),
         h2.frame(h2.GOAWAY, 0, 0, bytes(8)), headers(whole, 3, Encoder().encode(OK)), body(1, 3, b"")),
    ]  # fmt: skip


def h3_requests() -> list[tuple[bytes, ...]]:
    """Of each stream; a control and an encoder stream come from `bench.fuzz_h3`."""
    section = partial(_section, pylsqpack.Encoder())
    return [
        (section(ASK + FIELDS), h3_frame(0, b"hello"), h3_frame(0x21, b"?"), section([(b"x-sum", b"1")])),
        (section(ASK), ),
        (section([*ASK, (b"content-length", b"3")]), h3_frame(0, b"abc")),
        (section(CONNECT), *(h3_frame(0, one) for one in WS)),
    ]  # fmt: skip


def h3_answers() -> list[tuple[bytes, ...]]:
    section = partial(_section, pylsqpack.Encoder())
    return [
        (section(OK), h3_frame(0, b"data: 1\n\n"), section([(b"x-sum", b"1")])),
        (
            section([(b":status", b"103")]),
            section([(b":status", b"200"), (b"content-length", b"2")]),
            h3_frame(0, b"ab"),
        ),
    ]


def h3_control() -> list[tuple[bytes, ...]]:
    settings = h3_frame(4, b"\x01\x50\x00\x06\x50\x00\x07\x10\x08\x01")
    return [
        (b"\x00", settings, h3_frame(7, b"\x04"), h3_frame(0xD, b"\x08"), h3_frame(0xF0700, b"\x00u=1")),
        (b"\x00", settings),
        (b"\x02", b"\x3f\xe1\x1f", b"\x4a" + b"x-customkey"[:10] + b"\x05value", b"\xc0\x01a", b"\x00"),
        (b"\x03", b"\x80", b"\x01", b"\x44"),
        (b"\x01", b"\x00"),
        (b"\x40\x54", b"grease"),
    ]


def _section(encoder: pylsqpack.Encoder, fields: Fields) -> bytes:
    return h3_frame(1, encoder.encode(0, fields)[1])


EVENTS = [
    (b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n', b'data: {"choices":[{"delta":{"content":"b"}}]}\n\n',
     b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}\n\n', b"data: [DONE]\n\n"),
    (b"event: message_start\r\n", b'data: {"type":"message_start","message":{"usage":{"input_tokens":3}}}\r\n', b"\r\n",
     b": ping\r\n", b"event: message_stop\r\n", b'data: {"type":"message_stop"}\r\n', b"\r\n"),
    (b'data: {"type":"error","error":{"type":"overloaded_error"}}\r', b"\r", b"\xef\xbb\xbfid: 1\n", b"data\n", b"\n"),
    (b'data: {"type":"response.output_text.delta","delta":"a"}\n\n',
     b'data: {"type":"response.completed","response":{"usage":null}}\n\n'),
]  # fmt: skip


def coded_events() -> list[tuple[bytes, ...]]:
    found: list[tuple[bytes, ...]] = []
    for events in EVENTS:
        pack = zlib.compressobj(wbits=31)
        found.append((*(pack.compress(one) + pack.flush(zlib.Z_SYNC_FLUSH) for one in events), pack.flush()))
        found.append((gzip.compress(b"".join(events) * 50, mtime=0), gzip.compress(events[0], mtime=0)))
        found.append((zlib.compress(b"".join(events)),))
    return found


def header_blocks() -> list[tuple[bytes, ...]]:
    one = Encoder()
    return [
        tuple(one.encode(fields) for fields in (ASK, ASK + FIELDS, OK, CONNECT, ASK + FIELDS)),
        (b"\x3f\xe1\x1f", b"\x82\x87", b"\xbe"),
    ]


LOCATIONS = [
    (b"http://", b"b.test", b":", b"80", b"/x?y"),
    (b"/path", b"#f"),
    (b"https://u@[::1]", b":443", b"/"),
    (b"//evil/",),
]
ALT_SVC = [(b'h3=":443"', b"; ma=60", b", ", b'h2="o:443"; persist=1'), (b"clear",)]
PRIORITIES = [(b"u=", b"1", b", ", b"i"), (b"u=3;a=b", b",", b'i=?0, x=(1 2), y="z"', b", d=:aGk=:, e=1.5"), (b"u=7",)]
RETRIES = [
    (b"Wed, 21 Oct 2026 07:28:00 GMT",),
    (b"1", b".5"),
    (b"Wed, ", b"21 ", b"Oct ", b"2026 ", b"07:28:00 ", b"+0100"),
]
