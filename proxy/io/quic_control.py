"""Read the control stream of an HTTP/3 peer: SETTINGS, GOAWAY, PRIORITY_UPDATE, and which frames may stand where.

Rules for editing: 1. no clock, no socket; 2. what is kept of an unfinished frame is bounded by MAX_CONTROL_FRAME.
"""

from __future__ import annotations

from typing import Protocol

from proxy.io.quic_codes import (
    EXCESSIVE_LOAD,
    FRAME_ERROR,
    FRAME_UNEXPECTED,
    ID_ERROR,
    MISSING_SETTINGS,
    ConnectionFault,
)
from proxy.io.quic_wire import parse_settings, read_varint

DATA, HEADERS, CANCEL_PUSH, SETTINGS, PUSH_PROMISE, GOAWAY, MAX_PUSH_ID = 0x0, 0x1, 0x3, 0x4, 0x5, 0x7, 0xD
PRIORITY_UPDATE, PRIORITY_UPDATE_PUSH = 0xF0700, 0xF0701  # RFC 9218 7.2
HTTP2_ONLY = frozenset({0x2, 0x6, 0x8, 0x9})  # RFC 9114 7.2.8
NOT_ON_REQUEST = HTTP2_ONLY | {
    CANCEL_PUSH, SETTINGS, PUSH_PROMISE, GOAWAY, MAX_PUSH_ID, PRIORITY_UPDATE, PRIORITY_UPDATE_PUSH,
}  # fmt: skip
READ_ON_CONTROL = frozenset({SETTINGS, GOAWAY, PRIORITY_UPDATE})
NOT_ON_CONTROL = frozenset({DATA, HEADERS, PUSH_PROMISE}) | HTTP2_ONLY

MAX_CONTROL_FRAME = 4096  # bytes of a SETTINGS frame; ours has 20
NO_FRAME = -1


class Listener(Protocol):
    """Who hears what the control stream says."""

    def take_settings(self, settings: dict[int, int]) -> None:
        """Once, before anything else."""

    def on_goaway(self, last_id: int) -> None: ...

    def on_priority(self, stream_id: int, value: bytes) -> None: ...


class ControlReader:
    """Where the peer's control stream stands. `feed` raises ConnectionFault."""

    def __init__(self, listener: Listener, *, is_client: bool) -> None:
        self._listener = listener
        self._is_client = is_client
        self._kind = NO_FRAME
        self._left = 0
        self._rest = b""
        self._settled = False
        self._goaway: int | None = None

    def feed(self, block: bytes) -> None:
        if self._rest:
            block = self._rest + block
        at = 0
        while at < len(block):
            if self._kind == NO_FRAME:
                kind = read_varint(block, at)
                length = read_varint(block, kind[1]) if kind is not None else None
                if kind is None or length is None:
                    break
                self._kind, (self._left, at) = kind[0], length
                self._check(self._kind, self._left)
            wanted = self._kind in READ_ON_CONTROL
            stop = min(len(block), at + self._left)
            if wanted and stop - at < self._left:
                break
            if wanted:
                self._frame(self._kind, block[at:stop])
            # Anything else, MAX_PUSH_ID among it, is passed over as it comes.
            self._left -= stop - at
            if not self._left:
                self._kind = NO_FRAME
            at = stop
        self._rest = block[at:]

    def _check(self, kind: int, length: int) -> None:
        if kind != SETTINGS and not self._settled:
            raise ConnectionFault(MISSING_SETTINGS, f"frame {kind:#x} before SETTINGS")
        if kind in NOT_ON_CONTROL or (kind == SETTINGS and self._settled):
            raise ConnectionFault(FRAME_UNEXPECTED, f"frame {kind:#x} on the control stream")
        if kind in (MAX_PUSH_ID, PRIORITY_UPDATE, PRIORITY_UPDATE_PUSH) and self._is_client:
            raise ConnectionFault(FRAME_UNEXPECTED, f"frame {kind:#x} from a server")
        if kind == PRIORITY_UPDATE_PUSH:
            raise ConnectionFault(ID_ERROR, "a priority for a push, of which there are none")
        if kind in READ_ON_CONTROL and length > MAX_CONTROL_FRAME:
            raise ConnectionFault(EXCESSIVE_LOAD, f"a control frame of {length} bytes")

    def _frame(self, kind: int, payload: bytes) -> None:
        if kind == SETTINGS:
            self._settled = True
            self._listener.take_settings(parse_settings(payload))
            return
        number = read_varint(payload, 0)
        if kind == PRIORITY_UPDATE:
            if number is None:
                raise ConnectionFault(FRAME_ERROR, "PRIORITY_UPDATE is cut short")
            if number[0] & 3:
                raise ConnectionFault(ID_ERROR, f"a priority for stream {number[0]}, which carries no request")
            self._listener.on_priority(number[0], payload[number[1] :])
            return
        if number is None or number[1] != len(payload):
            raise ConnectionFault(FRAME_ERROR, "GOAWAY does not hold one number")
        last = number[0]
        # RFC 9114 5.2: an id may only go down, and a server names a request stream.
        if (self._goaway is not None and last > self._goaway) or (self._is_client and last & 3):
            raise ConnectionFault(ID_ERROR, f"GOAWAY {last} after {self._goaway}")
        self._goaway = last
        self._listener.on_goaway(last)
