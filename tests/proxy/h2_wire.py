"""Both ends of an HTTP/2 connection for tests: frames written by hand, our output read back by packages of others.

`hyperframe` and `hpack` parse what we send, so that a mistake made on both of our sides does not cancel out.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

import hpack
from hyperframe.frame import Frame as WireFrame

from proxy import h2_frames as wire
from proxy.h2_client import ClientConnection, ClientStream
from proxy.h2_limits import H2Limits
from proxy.h2_server import ServerConnection, ServerStream
from proxy.messages import RequestHead
from tests.peers.fakeleg import Recorder

GET = [(b":method", b"GET"), (b":scheme", b"https"), (b":authority", b"a.test"), (b":path", b"/")]
POST = [(b":method", b"POST"), *GET[1:]]
OK = [(b":status", b"200")]


def frame(kind: int, flags: int = 0, stream_id: int = 0, payload: bytes = b"") -> bytes:
    return wire.frame(kind, flags, stream_id, payload)


def coded(fields: list[tuple[bytes, bytes]]) -> bytes:
    """A header block that uses no table, so that its order among others does not matter."""
    out = b""
    for name, value in fields:
        out += b"\x00" + _length(name) + name + _length(value) + value
    return out


def _length(text: bytes) -> bytes:
    if len(text) < 127:
        return bytes([len(text)])
    rest, out = len(text) - 127, b"\x7f"
    while rest >= 128:
        out += bytes([rest % 128 + 128])
        rest //= 128
    return out + bytes([rest])


def headers(stream_id: int, fields: list[tuple[bytes, bytes]], *, end: bool = False, whole: bool = True) -> bytes:
    flags = (wire.END_STREAM if end else 0) | (wire.END_HEADERS if whole else 0)
    return frame(wire.HEADERS, flags, stream_id, coded(fields))


def body(stream_id: int, chunk: bytes, *, end: bool = False) -> bytes:
    return frame(wire.DATA, wire.END_STREAM if end else 0, stream_id, chunk)


def settings(**values: int) -> bytes:
    return wire.settings({getattr(wire, name.upper()): value for name, value in values.items()})


def word(value: int) -> bytes:
    return struct.pack(">L", value)


def credit(stream_id: int, amount: int) -> bytes:
    return frame(wire.WINDOW_UPDATE, 0, stream_id, word(amount))


def reset(stream_id: int, code: int) -> bytes:
    return frame(wire.RST_STREAM, 0, stream_id, word(code))


@dataclass(frozen=True)
class Seen:
    """One frame that we sent. `value`: the field list of HEADERS, the error code of RST_STREAM and GOAWAY, else bytes."""

    kind: str
    stream_id: int
    value: Any = b""
    end: bool = False


class Eyes:
    """Reads our output."""

    def __init__(self) -> None:
        self._decoder = hpack.Decoder()
        self._rest = b""

    def read(self, output: bytes) -> list[Seen]:
        output, seen = self._rest + output, []
        while len(output) >= 9:
            parsed, length = WireFrame.parse_frame_header(memoryview(output[:9]))
            if len(output) < 9 + length:
                break
            parsed.parse_body(memoryview(output[9 : 9 + length]))
            seen.append(self._one(parsed, output[9 : 9 + length]))
            output = output[9 + length :]
        self._rest = output
        return seen

    def _one(self, parsed: Any, payload: bytes) -> Seen:
        kind, end = type(parsed).__name__.removesuffix("Frame"), "END_STREAM" in parsed.flags
        if kind == "Headers" and "END_HEADERS" in parsed.flags:
            return Seen(kind, parsed.stream_id, [tuple(f) for f in self._decoder.decode(parsed.data, raw=True)], end)
        if kind in ("RstStream", "GoAway"):
            return Seen(kind, parsed.stream_id, parsed.error_code)
        if kind == "Settings":
            return Seen(kind, 0, "ack" if "ACK" in parsed.flags else dict(parsed.settings))
        if kind == "WindowUpdate":
            return Seen(kind, parsed.stream_id, parsed.window_increment)
        return Seen(kind, parsed.stream_id, payload, end)


@dataclass
class Served:
    """Our server with a client that writes frames."""

    limits: H2Limits = field(default_factory=H2Limits)
    now: float = 100.0
    hello: bytes = wire.PREFACE + wire.settings({})
    wakes: int = 0

    def __post_init__(self) -> None:
        self.requests: list[tuple[ServerStream, RequestHead, Recorder]] = []
        self.h2 = ServerConnection(self.limits, self._wake, on_request=self._on_request)
        self.eyes = Eyes()
        self.h2.start()
        if self.hello:
            self.say(self.hello)
            self.heard()

    def _wake(self) -> None:
        self.wakes += 1

    def _on_request(self, stream: ServerStream, head: RequestHead) -> None:
        recorder = Recorder()
        stream.receiver = recorder
        self.requests.append((stream, head, recorder))

    def say(self, *frames: bytes) -> None:
        self.h2.receive(b"".join(frames), self.now)

    def heard(self) -> list[Seen]:
        """What came since the last call, one loop turn's worth."""
        return self.eyes.read(self.h2.sender.take())

    def ask(
        self, stream_id: int = 1, fields: Any = GET, *, end: bool = True
    ) -> tuple[ServerStream, RequestHead, Recorder]:
        self.say(headers(stream_id, fields, end=end))
        return self.requests[-1]


@dataclass
class Edge:
    """Our client with a server that writes frames."""

    limits: H2Limits = field(default_factory=H2Limits)
    now: float = 100.0
    hello: bytes = wire.settings({})

    def __post_init__(self) -> None:
        self.changes = 0
        self.h2 = ClientConnection(self.limits, lambda: None, on_change=self._on_change)
        self.eyes = Eyes()
        self.h2.start()
        self.first = self.h2.sender.take()
        assert self.first.startswith(wire.PREFACE)
        self.hello_seen = self.eyes.read(self.first[len(wire.PREFACE) :])
        if self.hello:
            self.say(self.hello)
            self.heard()

    def _on_change(self) -> None:
        self.changes += 1

    def say(self, *frames: bytes) -> None:
        self.h2.receive(b"".join(frames), self.now)

    def heard(self) -> list[Seen]:
        return self.eyes.read(self.h2.sender.take())

    def ask(self, method: bytes = b"GET", *, end: bool = True, **more: Any) -> tuple[ClientStream, Recorder]:
        leg, recorder = self.h2.open(), Recorder()
        leg.receiver = recorder
        leg.head(RequestHead(method, b"/", b"https", b"a.test", more.pop("fields", []), **more))
        if end:
            leg.end()
        return leg, recorder
