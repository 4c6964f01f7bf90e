"""What we send on an HTTP/2 connection: frames in order, DATA within both windows, one buffer for a loop turn.

Theory: frames gather in `out` until the rim takes them all for one write. DATA goes straight in when both windows, the
turn's room and the transport allow and nobody waits; the rest waits on its stream, and `pump` serves the waiting streams as
`proxy.turns` says, by RFC 9218. What is in `out` cannot be overtaken any more, so a turn takes PUMP_BYTES and no more.
END_STREAM is set on the head that still lies in `out`, or on the DATA that lies there last, which saves a frame an answer.

A token's way is the most trodden one of all: while nothing waits, `room` is what streams may take of the connection's window
and of the turn without asking (`Stream.data`); what they took is counted when somebody else needs to know (`settle`).

Rules for editing: 1. a header block is encoded at the moment it enters `out`, since the peer decodes in that order;
2. receivers are called after the loop over the streams, for they may send; 3. settle before `out`, `window` or `pending` is
looked at or changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from proxy.h2_errors import Code, H2ConnectionError, H2StreamError
from proxy.h2_frames import (
    CONTINUATION,
    DATA,
    DEFAULT_MAX_FRAME,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER,
    FRAME_HEADER_BYTES,
    HEADERS,
    MAX_WINDOW,
    rst_stream,
)
from proxy.h2_limits import MAX_UNSENT_CONTROL_BYTES
from proxy.h2_streams import EMPTY, Stream
from proxy.hpack_encoder import Encoder
from proxy.messages import Fields
from proxy.priority import Priority
from proxy.turns import Turns

STREAM_HIGH = 256 * 1024
STREAM_LOW = 64 * 1024
CONNECTION_HIGH = 8 * 1024 * 1024
"""Bytes waiting on all streams together: above it each stream is full at STREAM_LOW already."""
LARGEST_FRAME = 64 * 1024
"""We never send larger ones, whatever the peer allows: a frame is what other streams wait for."""
PUMP_BYTES = 128 * 1024
"""What a loop turn gives to the transport: the most that a more urgent answer finds ahead of it there."""
MOST_LENT = 2**16 - 1
"""Of `room`: what a length of two bytes says, see `h2_streams`."""
_header = FRAME_HEADER.pack
_ENDED = [bytes((flags | END_STREAM,)) for flags in range(256)]


class Sender:
    """One connection's output. `wake` is called when there is something to take; `ended(stream)` when END_STREAM is out."""

    __slots__ = (
        "_lent", "_lent_at", "_wake", "awake", "blocked", "encoder", "ended", "last", "max_frame", "out", "overrun", "pending",
        "queued", "room", "stream_window", "turn", "turns", "window",
    )  # fmt: skip

    def __init__(
        self, wake: Callable[[], None], ended: Callable[[Stream], None], encoder: Encoder | None = None
    ) -> None:
        self._wake = wake
        self.ended = ended
        self.awake = False
        self.encoder = encoder or Encoder()
        self.out: list[bytes | memoryview] = []
        self.pending = 0  # bytes in out
        self.room = 0  # of what was lent
        self._lent = self._lent_at = 0  # since `out` had so many pieces
        self.last: Stream | None = None  # whose frame, header and payload, the last two pieces of `out` are
        self.turn = 0
        self.turns: Turns[Stream] = Turns()
        self.blocked = False  # the transport's buffer is full
        self.overrun = False  # the peer makes us reply and does not read: the connection ends at its next frame
        self.queued = 0  # bytes on all streams' queues
        self.window = DEFAULT_WINDOW
        self.stream_window = DEFAULT_WINDOW  # of a new stream
        self.max_frame = DEFAULT_MAX_FRAME

    # ------------------------------------------------------------------------------------------ into the output

    def control(self, frame: bytes) -> None:
        """A whole frame that no window holds back."""
        if self._lent:
            self.settle()
        self.last = None
        self.out.append(frame)
        self.pending += len(frame)
        if self.blocked and self.pending > MAX_UNSENT_CONTROL_BYTES:
            self.overrun = True
        if not self.awake:
            self.wake()

    def wake(self) -> None:
        self.awake = True
        self._wake()

    def headers(self, stream: Stream, fields: Fields, *, end: bool = False) -> None:
        """A header block, cut into CONTINUATION frames where it must be."""
        self.block(stream.id, fields, end=end)
        stream.mark, stream.mark_turn, stream.flows = len(self.out) - 2, self.turn, False
        if end:
            stream.send_open = False
            self.ended(stream)

    def block(self, stream_id: int, fields: Fields, *, end: bool) -> None:
        """As headers(), for an id alone."""
        self._lay_out(stream_id, self.encoder.encode(fields), END_STREAM if end else 0)

    def _lay_out(self, stream_id: int, block: bytes, flags: int) -> None:
        limit = self.max_frame
        if len(block) <= limit:
            self._frame(HEADERS, flags | END_HEADERS, stream_id, block)
            return
        # END_STREAM belongs to the HEADERS frame, which end() could not find any more: so it comes as an empty DATA frame.
        self._frame(HEADERS, flags, stream_id, block[:limit])
        for at in range(limit, len(block), limit):
            last = END_HEADERS if at + limit >= len(block) else 0
            self._frame(CONTINUATION, last, stream_id, block[at : at + limit])

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes | memoryview) -> None:
        size = len(payload)
        if self._lent:
            self.settle()
        self.last = None
        self.out.append(_header(size >> 8, size & 0xFF, kind, flags, stream_id))
        self.out.append(payload)
        self.pending += size + 9
        if not self.awake:
            self.wake()

    def data(self, stream: Stream, chunk: bytes) -> None:
        """Body bytes: out at once when everything allows it, else after those that wait already. What fits into `room`
        does not come here."""
        size = len(chunk)
        if stream.queue or not self._is_clear(stream, size):
            self._enqueue(stream, chunk, size)
            return
        stream.send_window -= size
        self.window -= size
        view = chunk if size <= self.max_frame else memoryview(chunk)
        for at in range(0, size, self.max_frame):
            self._frame(DATA, 0, stream.id, view[at : at + self.max_frame])
        self.last, stream.flows = stream, True
        if not self.queued:
            self._lend()

    def _is_clear(self, stream: Stream, size: int) -> bool:
        """Whether so many bytes may go out at once."""
        if self._lent:
            self.settle()
        return not (
            size > stream.send_window
            or size > self.window
            or self.blocked
            or self.pending > PUMP_BYTES
            or (self.queued and self.turns)
        )

    def _lend(self) -> None:
        self.room = self._lent = max(0, min(self.window, PUMP_BYTES - self.pending, self.max_frame, MOST_LENT))
        self._lent_at = len(self.out)

    @property
    def unsent(self) -> int:
        """Bytes that the next take() gives, but for the headers of the frames that were not settled yet."""
        return self.pending + self._lent - self.room

    def settle(self) -> None:
        """Count what streams took of what was lent to them, and lend no more."""
        if not self._lent:
            return
        taken = self._lent - self.room
        self.room = self._lent = 0
        self.window -= taken
        self.pending += taken + (len(self.out) - self._lent_at) // 2 * FRAME_HEADER_BYTES

    def fits(self, stream: Stream, size: int) -> bool:
        """Whether a body of `size` bytes could go out at once, in one frame."""
        return size <= self.max_frame and self._is_clear(stream, size)

    def whole(self, stream: Stream, block: bytes, body: bytes) -> None:
        """A header block, encoded just now, and a whole body that fits(), of a stream that sent nothing yet."""
        size, coded = len(body), len(block)
        if coded > self.max_frame:
            self._lay_out(stream.id, block, 0)
            if body:
                self.data(stream, body)
            self.end(stream)
            return
        flags = END_HEADERS if size else END_HEADERS | END_STREAM
        frames = _header(coded >> 8, coded & 0xFF, HEADERS, flags, stream.id) + block
        if size:
            stream.send_window -= size
            self.window -= size
            frames += _header(size >> 8, size & 0xFF, DATA, END_STREAM, stream.id) + body
        self.last = None
        self.out.append(frames)
        self.pending += len(frames)
        if not self.awake:
            self.wake()
        stream.ending, stream.send_open = True, False
        self.ended(stream)

    def _enqueue(self, stream: Stream, chunk: bytes, size: int) -> None:
        if stream.queue is EMPTY:
            stream.queue = deque()
        stream.queue.append(chunk)
        stream.queued += size
        self.queued += size
        self.ready(stream)
        crowded = self.queued >= CONNECTION_HIGH and stream.queued > STREAM_LOW
        if not stream.full and (stream.queued >= STREAM_HIGH or crowded):
            stream.full = True
            stream.receiver.on_full()

    def ready(self, stream: Stream) -> None:
        """A stream may have become able to send."""
        if stream.queue and stream.send_window > 0:
            self.turns.add(stream.id, stream, stream.priority)
            if self.window > 0 and not self.blocked and not self.awake:
                self.wake()

    def prioritize(self, stream: Stream, priority: Priority) -> None:
        """Serve a stream by another priority from now on, what waits of it included."""
        stream.priority = priority
        if stream.queue and self.turns.remove(stream.id):
            self.turns.add(stream.id, stream, priority)

    def end(self, stream: Stream) -> None:
        """END_STREAM after what waits, in the trailers if there are some."""
        if stream.queue:
            stream.ending = True
            return
        self._end_now(stream)

    def _end_now(self, stream: Stream, at: int = -1) -> None:
        """`at`: where in `out` the header of its last frame lies, if that is known."""
        if self._lent:
            self.settle()
        stream.ending = True
        if stream.trailing is not None:
            self.headers(stream, stream.trailing, end=True)
            return
        if at < 0 and stream.flows and self.last is stream:
            at = len(self.out) - 2
        elif at < 0 and not stream.flows and stream.mark_turn == self.turn:
            at = stream.mark
        header = self.out[at] if at >= 0 else b""
        if header and (header[3] == DATA or (header[4] & END_HEADERS and header[3] == HEADERS)):
            self.out[at] = bytes(header[:4]) + _ENDED[header[4]] + bytes(header[5:])
            self.last = None
        else:
            self._frame(DATA, END_STREAM, stream.id, b"")
        stream.send_open = stream.flows = False
        self.ended(stream)

    def reset(self, stream: Stream, code: int) -> None:
        """RST_STREAM; what waits is dropped."""
        self.drop(stream)
        self.control(rst_stream(stream.id, code))

    def drop(self, stream: Stream) -> None:
        """Forget what waits of a stream that ended early."""
        stream.send_open = stream.flows = False
        if stream.queue:
            self.turns.remove(stream.id)
            self.queued -= stream.queued
            stream.queued = 0
            stream.queue.clear()

    # ------------------------------------------------------------------------------------------ windows

    def credit(self, stream: Stream | None, amount: int) -> None:
        """A WINDOW_UPDATE; an overflow is the stream's or the connection's error (RFC 9113 6.9.1)."""
        if stream is None:
            self.settle()
            if self.window + amount > MAX_WINDOW:
                raise H2ConnectionError(Code.FLOW_CONTROL_ERROR, f"connection window of {self.window} + {amount}")
            self.window += amount
            if self.queued and not self.awake:
                self.wake()
            return
        if stream.send_window + amount > MAX_WINDOW:
            raise H2StreamError(Code.FLOW_CONTROL_ERROR, f"stream window of {stream.send_window} + {amount}")
        stream.send_window += amount
        self.ready(stream)

    def resize_windows(self, size: int, streams: list[Stream]) -> None:
        """SETTINGS_INITIAL_WINDOW_SIZE moves every stream's window, below zero too (RFC 9113 6.9.2)."""
        delta, self.stream_window = size - self.stream_window, size
        for stream in streams:
            stream.send_window += delta
            if stream.send_window > MAX_WINDOW:
                raise H2ConnectionError(
                    Code.FLOW_CONTROL_ERROR, f"stream window of {stream.send_window} after SETTINGS"
                )
            self.ready(stream)

    # ------------------------------------------------------------------------------------------ out of it

    def take(self) -> bytes:
        """Everything of this turn, for one write. Calls `wake` again when more can go in the next one."""
        self.awake = True  # what is said meanwhile is taken below
        self.settle()
        if self.queued and not self.blocked:
            self._pump(PUMP_BYTES - self.pending)
            self.settle()  # whoever was told to go on has gone on
        taken = b"".join(self.out)
        self.out.clear()
        self.last = None
        self.pending = 0
        self.turn += 1
        self.awake = False
        if self.queued and not self.blocked and self.window > 0 and self.turns:
            self.wake()
        return taken

    def _pump(self, room: int) -> None:
        emptied: list[tuple[Stream, int]] = []
        drained: list[Stream] = []
        while room > 0 and self.window > 0 and (stream := self.turns.next()) is not None:
            if not (stream.send_open and stream.queue and stream.send_window > 0):
                continue  # SETTINGS took its window meanwhile
            at = len(self.out)
            room -= self._send_waiting(stream)
            if not stream.queue:
                emptied.append((stream, at))
            elif stream.send_window > 0:
                self.turns.add(stream.id, stream, stream.priority)
            if stream.full and stream.queued <= STREAM_LOW:
                stream.full = False
                drained.append(stream)
        for stream, at in emptied:
            if stream.ending and stream.send_open:
                self._end_now(stream, at)
        for stream in drained:
            stream.receiver.on_drained()

    def _send_waiting(self, stream: Stream) -> int:
        """One DATA frame of as many waiting slices as fit; its size."""
        room = left = min(self.max_frame, stream.send_window, self.window)
        pieces: list[bytes | memoryview] = []
        queue = stream.queue
        while left and queue:
            piece = queue.popleft()
            if len(piece) > left:
                view = memoryview(piece)
                queue.appendleft(view[left:])
                piece = view[:left]
            pieces.append(piece)
            left -= len(piece)
        size = room - left
        stream.queued -= size
        stream.send_window -= size
        self.queued -= size
        self.window -= size
        self.last, stream.flows = None, True
        self.out.append(_header(size >> 8, size & 0xFF, DATA, 0, stream.id))
        self.out += pieces
        self.pending += size + 9
        return size
