"""The bytes of HTTP/2 frames: header, types, flags, settings (RFC 9113 sections 4, 6 and 11)."""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct

from proxy.h2_errors import Code, H2ConnectionError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEADER_BYTES = 9
MAX_WINDOW = 2**31 - 1
DEFAULT_WINDOW = 65_535
DEFAULT_MAX_FRAME = 16_384
LARGEST_MAX_FRAME = 2**24 - 1

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
PRIORITY_UPDATE = 0x10  # RFC 9218 7.1

END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

HEADER_TABLE_SIZE = 0x1
ENABLE_PUSH = 0x2
MAX_CONCURRENT_STREAMS = 0x3
INITIAL_WINDOW_SIZE = 0x4
MAX_FRAME_SIZE = 0x5
MAX_HEADER_LIST_SIZE = 0x6
ENABLE_CONNECT_PROTOCOL = 0x8  # RFC 8441
NO_RFC7540_PRIORITIES = 0x9  # RFC 9218

# 24 bits of length as 16 + 8, then type, flags, stream id: one pack and one unpack a frame.
FRAME_HEADER = Struct(">HBBBL")
SETTING = Struct(">HL")
WORD = Struct(">L")


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """A whole frame; for all but DATA and HEADERS, which the sender lays out piece by piece."""
    size = len(payload)
    return FRAME_HEADER.pack(size >> 8, size & 0xFF, kind, flags, stream_id) + payload


def window_update(stream_id: int, credit: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream_id, WORD.pack(credit))


def rst_stream(stream_id: int, code: int) -> bytes:
    return frame(RST_STREAM, 0, stream_id, WORD.pack(code))


def goaway(last_id: int, code: int, detail: str = "") -> bytes:
    return frame(GOAWAY, 0, 0, WORD.pack(last_id) + WORD.pack(code) + detail.encode()[:128])


def settings(values: dict[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(SETTING.pack(key, value) for key, value in values.items()))


SETTINGS_ACK = frame(SETTINGS, ACK, 0)


def priority_update(stream_id: int, value: bytes) -> bytes:
    """A client's new priority for a request (RFC 9218 7.1)."""
    return frame(PRIORITY_UPDATE, 0, 0, stream_id.to_bytes(4, "big") + value)


def word(payload: bytes, at: int = 0) -> int:
    """31 bits: the reserved bit is ignored on receipt (RFC 9113 4.1)."""
    return int(WORD.unpack_from(payload, at)[0]) & MAX_WINDOW


def unpadded(payload: bytes, flags: int, kind: str) -> bytes:
    """The payload without its pad length and padding (RFC 9113 6.1)."""
    if not flags & PADDED:
        return payload
    if not payload:
        raise H2ConnectionError(Code.FRAME_SIZE_ERROR, f"{kind} frame too short for its pad length")
    if payload[0] >= len(payload):
        raise H2ConnectionError(Code.PROTOCOL_ERROR, f"{kind} padding of {payload[0]} in {len(payload)} bytes")
    return payload[1 : len(payload) - payload[0]]


@dataclass(slots=True)
class PeerSettings:
    """What the peer said of itself, with the defaults of RFC 9113 6.5.2."""

    header_table_size: int = 4096
    max_concurrent_streams: int | None = None
    initial_window_size: int = DEFAULT_WINDOW
    max_frame_size: int = DEFAULT_MAX_FRAME
    max_header_list_size: int | None = None
    enable_connect_protocol: bool = False
    no_rfc7540_priorities: bool = False

    def apply(self, payload: bytes, *, by_server: bool) -> None:
        """Take one SETTINGS payload, in order; unknown identifiers are ignored. Raises H2ConnectionError."""
        if len(payload) % 6:
            raise H2ConnectionError(Code.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes")
        for key, value in SETTING.iter_unpack(payload):
            self._check(key, value, by_server)
            if key == HEADER_TABLE_SIZE:
                self.header_table_size = value
            elif key == MAX_CONCURRENT_STREAMS:
                self.max_concurrent_streams = value
            elif key == INITIAL_WINDOW_SIZE:
                self.initial_window_size = value
            elif key == MAX_FRAME_SIZE:
                self.max_frame_size = value
            elif key == MAX_HEADER_LIST_SIZE:
                self.max_header_list_size = value
            elif key == ENABLE_CONNECT_PROTOCOL:
                self.enable_connect_protocol = value == 1
            elif key == NO_RFC7540_PRIORITIES:
                self.no_rfc7540_priorities = value == 1

    def _check(self, key: int, value: int, by_server: bool) -> None:
        if key == INITIAL_WINDOW_SIZE and value > MAX_WINDOW:
            raise H2ConnectionError(Code.FLOW_CONTROL_ERROR, f"SETTINGS_INITIAL_WINDOW_SIZE of {value}")
        wrong = (
            (key == ENABLE_PUSH and value > (0 if by_server else 1))
            or (key == MAX_FRAME_SIZE and not DEFAULT_MAX_FRAME <= value <= LARGEST_MAX_FRAME)
            or (key in (ENABLE_CONNECT_PROTOCOL, NO_RFC7540_PRIORITIES) and value > 1)
            # RFC 8441 section 3: once offered, never taken back.
            or (key == ENABLE_CONNECT_PROTOCOL and self.enable_connect_protocol and value == 0)
        )
        if wrong:
            raise H2ConnectionError(Code.PROTOCOL_ERROR, f"SETTINGS identifier {key} with value {value}")
