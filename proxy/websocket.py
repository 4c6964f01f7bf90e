"""Find the boundaries of WebSocket frames in a stream of bytes, and decide when a silent peer is asked or given up.

Theory: a tunnel passes bytes; it needs to know three things about them. Where a frame ends, for only there may a ping or
a close of ours stand (RFC 6455 5.4: control frames may come between the fragments of a message, never inside a frame).
Which pongs answer *our* pings, for the peers must not see them. And with which code a peer closes.

      bytes -> [header | payload ....][header | payload]    a data frame's payload passes as it comes, uncounted bytes
                ^ boundary             ^ boundary            aside; headers and control frames (<= 125 bytes) are held
                                                            until they are whole, so what was passed ends at a boundary

Nothing is decoded: RSV bits, deflate, masks and opcodes that an extension may have given a meaning pass unchanged (RFC
7692 5). A frame whose *length* cannot be trusted makes the scanner blind: from there on bytes pass unseen and the endpoints
judge them. One thing is changed: close codes 1005, 1006 and 1015 never belong on the wire (RFC 6455 7.4.1).

Rules for editing: 1. payload of data frames is never copied or kept; 2. what feed() returns is what it was given, but for
our pongs and forbidden codes: test_bytes_pass_unchanged_however_they_are_cut holds you to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum

MAX_CONTROL = 125
MAX_KEPT = 256 * 1024
"""Bytes of a client's opening that are kept for another edge; an opening beyond it is not repeated."""


class Op(IntEnum):
    """Opcodes that are ours to know; 8 and above are control frames."""

    CONTINUATION = 0
    TEXT = 1
    BINARY = 2
    CLOSE = 8
    PING = 9
    PONG = 10


class Code(IntEnum):
    """Close codes that we send, and NO_STATUS, which stands for an empty close (RFC 6455 7.4.1)."""

    NORMAL = 1000
    GOING_AWAY = 1001
    PROTOCOL_ERROR = 1002
    NO_STATUS = 1005
    INTERNAL = 1011  # openai-python reconnects on it; on 1014, "bad gateway", it does not
    RESTART = 1012


NEVER_ON_THE_WIRE = frozenset({1005, 1006, 1015})


def frame(op: Op, payload: bytes, mask: bytes = b"") -> bytes:
    """A whole control frame; `mask` (four random bytes) towards a server, b"" towards a client."""
    assert len(payload) <= MAX_CONTROL, f"a control frame carries at most {MAX_CONTROL} bytes, not {len(payload)}"
    if not mask:
        return bytes((0x80 | op, len(payload))) + payload
    return bytes((0x80 | op, 0x80 | len(payload))) + mask + masked(payload, mask)


def close_frame(code: int, reason: str, mask: bytes = b"") -> bytes:
    """A close; the reason is cut to what fits, at a whole character. ValueError for a code that must not be sent."""
    if code in NEVER_ON_THE_WIRE or not 1000 <= code <= 4999:
        raise ValueError(f"close code {code} does not belong on the wire")
    text = reason.encode()[: MAX_CONTROL - 2].decode(errors="ignore").encode()
    return frame(Op.CLOSE, code.to_bytes(2, "big") + text, mask)


def masked(payload: bytes, mask: bytes) -> bytes:
    """Masked or unmasked: the same operation (RFC 6455 5.3)."""
    if not payload:
        return b""
    key = (mask * (len(payload) // 4 + 1))[: len(payload)]
    return (int.from_bytes(payload, "big") ^ int.from_bytes(key, "big")).to_bytes(len(payload), "big")


class _Broken(Exception):
    """From here on lengths cannot be trusted."""


def _header(chunk: bytes, at: int) -> tuple[int, int] | None:
    """Sizes of the header that begins at `at` and of its payload; None while the header is not whole.

    Two numbers rather than an object: this runs for every frame of every tunnel.
    """
    left = len(chunk) - at
    if left < 2:
        return None
    second = chunk[at + 1]
    length = second & 0x7F
    size = 6 if second & 0x80 else 2
    if chunk[at] & 0x08 and (length > MAX_CONTROL or not chunk[at] & 0x80):
        raise _Broken  # a long or fragmented control frame (RFC 6455 5.5)
    if length >= 126:
        wide = 2 if length == 126 else 8
        size += wide
        if left < size:
            return None
        length = int.from_bytes(chunk[at + 2 : at + 2 + wide], "big")
        if length >> 63:
            raise _Broken
    return (size, length) if left >= size else None


class FrameScanner:
    """One direction of a tunnel, watched. `ours` is how the payload of our pings begins; pongs with it are swallowed."""

    __slots__ = ("_cut", "_held", "_left", "_out", "_shift", "boundary", "broken", "close_code", "in_message", "messages",
                 "ours", "pongs", "spoken")  # fmt: skip

    def __init__(self, ours: bytes = b"") -> None:
        self.ours = ours
        self.broken = False
        self.spoken = False  # a data frame began
        self.in_message = False  # fragments of a message are open, between frames, too
        self.messages = 0  # whole ones
        self.pongs = 0  # swallowed
        self.close_code: int | None = None
        self.boundary = 0
        self._left = 0  # payload bytes of a data frame that have not come yet
        self._held = b""
        self._out: list[bytes] = []
        self._cut = self._shift = 0

    @property
    def at_boundary(self) -> bool:
        """What has been passed on ends with a whole frame: one of ours may follow."""
        return not self._left and not self.broken

    def feed(self, chunk: bytes) -> bytes:
        """The bytes to pass on now, b"" when all are held. `boundary` is the last frame end in them, -1 for none."""
        if self.broken:
            self.boundary = -1
            return chunk
        if self._left >= len(chunk):
            self._left -= len(chunk)
            self.boundary = -1 if self._left else len(chunk)
            return chunk
        if self._held:
            chunk, self._held = self._held + chunk, b""
        self._out.clear()
        self._cut = self._shift = 0
        return self._scan(chunk)

    def rest(self) -> bytes:
        """What is still held when the stream ends: the start of a frame that never came."""
        rest, self._held = self._held, b""
        return rest

    def _scan(self, chunk: bytes) -> bytes:
        # The rest of a frame that was under way is passed; at its end stands the first boundary of this chunk.
        at, self._left = self._left, 0
        end = len(chunk)
        try:
            while at < end:
                sizes = _header(chunk, at)
                first = chunk[at]
                after = at + sum(sizes) if sizes else end + 1
                if sizes is None or (first & 0x08 and after > end):
                    self._held, end = chunk[at:], at
                    break
                if first & 0x08:
                    self._on_control(chunk, at, after, sizes)
                else:
                    # Counted at its start: what asks for whole messages asks at a boundary.
                    self.spoken = True
                    self.in_message = first < 0x80
                    self.messages += first >> 7
                    if after > end:
                        self._left = after - end
                        break
                at = after
        except _Broken:
            self.broken = True
        self.boundary = at + self._shift
        return self._passed(chunk, end)

    def _on_control(self, chunk: bytes, at: int, after: int, sizes: tuple[int, int]) -> None:
        op, (size, length) = chunk[at] & 0x0F, sizes
        mask = chunk[at + size - 4 : at + size] if chunk[at + 1] & 0x80 else b""
        payload = chunk[after - length : after]
        if mask:
            payload = masked(payload, mask)
        if op == Op.CLOSE:
            self._on_close(chunk, at, after, payload, mask)
        elif op == Op.PONG and self.ours and payload.startswith(self.ours):
            self.pongs += 1
            self._replace(chunk, at, after, b"")

    def _on_close(self, chunk: bytes, at: int, after: int, payload: bytes, mask: bytes) -> None:
        code = int.from_bytes(payload[:2], "big") if len(payload) >= 2 else int(Code.NO_STATUS)
        if len(payload) >= 2 and code in NEVER_ON_THE_WIRE:
            # From a client it breaks the protocol, and its edge is told so (Autobahn 7.9.4, 7.9.5). An edge that says it
            # has lost something itself, and its client may try again.
            code = int(Code.PROTOCOL_ERROR if mask else Code.INTERNAL)
            self._replace(chunk, at, after, frame(Op.CLOSE, code.to_bytes(2, "big") + payload[2:], mask))
        if self.close_code is None:
            self.close_code = code

    def _replace(self, chunk: bytes, at: int, end: int, instead: bytes) -> None:
        self._out += (chunk[self._cut : at], instead)
        self._shift += len(instead) - (end - at)
        self._cut = end

    def _passed(self, chunk: bytes, end: int) -> bytes:
        if not self._cut:
            return chunk if end == len(chunk) else chunk[:end]
        passed = b"".join((*self._out, chunk[self._cut : end]))
        self._out.clear()  # a silent tunnel would keep its last large read
        return passed


class Opening:
    """What a client has said so far, to be said again to another edge.

    With `messages` 0 it holds every byte until `close()`, called at the edge's first message. Otherwise it holds the
    first so many whole messages, for good. Beyond MAX_KEPT bytes it gives up.
    """

    __slots__ = ("_bytes", "_messages", "_open", "whole")

    def __init__(self, messages: int = 0) -> None:
        self._messages = messages
        self._bytes = bytearray()
        self._open = True
        self.whole = True  # nothing that must be repeated is missing

    def add(self, passed: bytes, client: FrameScanner) -> None:
        """Bytes of the client that were just passed on by its scanner."""
        if not self._open:
            return
        if len(self._bytes) + len(passed) > MAX_KEPT or client.broken:
            self.whole = False
            self.close()
            self._bytes.clear()
            return
        self._bytes += passed
        if self._messages and client.messages >= self._messages and client.at_boundary:
            self._cut_to_messages()
            self.close()

    def close(self) -> None:
        """Take no more."""
        self._open = False

    def take(self) -> bytes:
        """The bytes to say again: whole messages only, unless every byte so far is kept."""
        if self._messages and self._open:
            self._cut_to_messages()
        return bytes(self._bytes)

    def forget(self) -> None:
        """They will not be needed."""
        self.close()
        self.whole = False
        self._bytes.clear()

    def _cut_to_messages(self) -> None:
        # A chunk may have brought more than was asked for: saying that again would order, and bill, an answer twice.
        kept, at, left, end = bytes(self._bytes), 0, self._messages, 0
        while left and (sizes := _header(kept, at)) is not None:
            ends_message = kept[at] & 0x88 == 0x80  # a data frame with FIN
            at += sum(sizes)
            if at > len(kept):
                break
            if ends_message:
                left -= 1
                end = at
        del self._bytes[end:]


class Beat(Enum):
    """What a silent peer calls for."""

    NOTHING = "nothing"
    PING = "ping"
    GIVE_UP = "give up"


@dataclass(slots=True)
class Pulse:
    """Whether one peer is alive: asked after `interval_s` of silence, given up `timeout_s` after it was last heard.

    The time to give up is counted from the first ping without an answer. So a laptop that slept longer than any limit
    asks first, and a peer that is not asked is never given up. Times are seconds of one clock that counts sleep.
    """

    interval_s: float
    timeout_s: float
    heard_at: float
    pinged_at: float = float("-inf")
    asked_at: float | None = None

    @property
    def patience_s(self) -> float:
        """From the first unanswered ping on: 25 s with the defaults, so 45 s after the last frame."""
        return max(self.timeout_s - self.interval_s, self.timeout_s / 4)

    def heard(self, now: float) -> None:
        """Any frame, or part of one, came."""
        self.heard_at = now
        self.asked_at = None

    def pinged(self, now: float) -> None:
        """A ping of ours went out."""
        self.pinged_at = now
        if self.asked_at is None:
            self.asked_at = now

    def forgive(self, now: float) -> None:
        """It could not answer: we slept, or did not read. Ask again before judging."""
        self.asked_at = None
        self.pinged_at = min(self.pinged_at, now - self.interval_s)

    def beat(self, now: float) -> Beat:
        """What to do at this moment."""
        if self.asked_at is not None and now - self.asked_at >= self.patience_s:
            return Beat.GIVE_UP
        return Beat.PING if now - max(self.heard_at, self.pinged_at) >= self.interval_s else Beat.NOTHING

    def next_at(self) -> float:
        """When beat() may say something else than NOTHING."""
        ask = max(self.heard_at, self.pinged_at) + self.interval_s
        return ask if self.asked_at is None else min(ask, self.asked_at + self.patience_s)
