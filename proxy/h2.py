"""Read HTTP/2: frames to heads, bytes and ends on the streams' receivers (RFC 9113). The half that both roles share.

Theory: bytes in by `receive`, plain calls out, bytes out by `sender.take()`; no clock, no socket. A frame is looked at once,
where it lies in the read; only one cut by the end of a read is copied. A rule broken on a stream resets it, a rule broken
on the connection ends it with GOAWAY, and every stream hears of it once.

      receive -> _on_frame -> DATA            -> stream.receiver.on_data / on_end
                           -> HEADERS (+ CONT) -> _on_fields  (h2_server: a request; h2_client: an answer)
                           -> the rest         -> windows, settings, replies  (h2_control)

A closed stream's late frames (RFC 9113 5.1, "closed") are judged by how it closed, which is remembered for the last 512:
      ended on both sides: STREAM_CLOSED for the connection      reset by us: ignored, they crossed our reset
      reset by the peer: STREAM_CLOSED for the stream            forgotten: ignored, on the control budget

Rules for editing: 1. every header block is decoded, whatever its stream's fate, or the tables part; 2. every DATA byte
is given back to the connection's window by exactly one path: consumed(), a pad, a late frame, or close().
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from proxy.h2_blocks import BlockReader, HeaderBlock
from proxy.h2_control import ENDED, RESET_BY_PEER, RESET_BY_US, ControlFrames
from proxy.h2_errors import Code, H2ConnectionError, H2StreamError
from proxy.h2_frames import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_WINDOW,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PRIORITY,
    PRIORITY_UPDATE,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    PeerSettings,
    goaway,
    rst_stream,
    settings,
    unpadded,
    window_update,
)
from proxy.h2_limits import REMEMBERED_CLOSED, Budgets, H2Limits
from proxy.h2_sender import Sender
from proxy.h2_streams import Stream
from proxy.hpack_encoder import Encoder
from proxy.messages import Fields


class Connection(ControlFrames):
    """One HTTP/2 connection, either role. `wake` is called when `sender.take()` has something to give.

    The rim reads: `failed` (the GOAWAY is in the output; close after it), `streams`, `block_since` and the two `on_` hooks.
    """

    def __init__(self, limits: H2Limits, wake: Callable[[], None], *, on_closed: Callable[[], None]) -> None:
        super().__init__()
        self.limits = limits
        self.sender = Sender(wake, self._sent_end, Encoder(indexes_keys=not self.SERVER))
        self.streams: dict[int, Stream] = {}
        self.peer = PeerSettings()
        self.peer_settled = False  # its first SETTINGS came
        self.failed: H2ConnectionError | None = None
        self.last_id = 0  # the highest stream that was opened
        self.block_since: float | None = None  # when the header block or frame in progress began
        self.on_closed = on_closed  # a stream left the table
        self.on_pong: Callable[[bytes], None] = lambda _: None
        self._blocks = BlockReader(limits.max_header_bytes)
        self._budgets = Budgets()
        self._closed: dict[int, int] = {}
        self._recv_window = limits.connection_window
        self._owed = 0  # connection credit not yet worth a frame
        self._now = 0.0

    def _hello(self, values: dict[int, int]) -> bytes:
        """Our SETTINGS and the connection window beyond the default."""
        return settings(values) + window_update(0, self.limits.connection_window - DEFAULT_WINDOW)

    # ------------------------------------------------------------------------------------------ frames

    def receive(self, chunk: bytes, now: float) -> None:
        """What the transport read; `now` in s. Never raises: a fault of the connection sets `failed`."""
        if self.failed is not None:
            return
        self._now = now
        try:
            self._parse(chunk)
        except H2ConnectionError as error:
            self.fail(error)
        if self.sender.overrun:
            unread = f"{self.sender.pending} bytes of replies that nobody reads"
            self.fail(H2ConnectionError(Code.ENHANCE_YOUR_CALM, unread))
        # The header timeout counts from the first byte of a block, not from the last: a slow drip must not renew it.
        if not self._held and not self._blocks.open_id:
            self.block_since = None
        elif self.block_since is None:
            self.block_since = now

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        open_id = self._blocks.open_id
        if open_id and (kind != CONTINUATION or stream_id != open_id):
            raise H2ConnectionError(Code.PROTOCOL_ERROR, f"frame of type {kind} inside a header block (RFC 9113 6.10)")
        if not self.peer_settled and (kind != SETTINGS or flags & ACK):
            raise H2ConnectionError(Code.PROTOCOL_ERROR, f"first frame of type {kind} is not SETTINGS (RFC 9113 3.4)")
        handler = self._HANDLERS.get(kind)
        if handler is None:
            self._budgets.control.spend(self._now)  # RFC 9113 5.5: unknown types are ignored
            return
        try:
            handler(self, flags, stream_id, payload)
        except H2StreamError as error:
            self._on_stream_error(stream_id, error)

    def _on_stream_error(self, stream_id: int, error: H2StreamError) -> None:
        # A reset that the peer provoked costs us as much as one it sends (CVE-2025-8671).
        self._budgets.reset.spend(self._now)
        stream = self.streams.get(stream_id)
        if stream is None:
            self.sender.control(rst_stream(stream_id, error.code))
            self._remember(stream_id, RESET_BY_US)
            return
        self.sender.reset(stream, error.code)
        self.close_stream(stream, RESET_BY_US)
        stream.on_fault(error)

    # ------------------------------------------------------------------------------------------ DATA

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        size = len(payload)
        if stream_id == 0:
            raise H2ConnectionError(Code.PROTOCOL_ERROR, "DATA on stream 0")
        self._recv_window -= size
        if self._recv_window < 0:
            raise H2ConnectionError(
                Code.FLOW_CONTROL_ERROR, f"DATA {-self._recv_window} bytes beyond the connection window"
            )
        stream = self.streams.get(stream_id)
        if stream is None or not stream.recv_open:
            self._on_late_data(stream, stream_id, size)
            return
        chunk = unpadded(payload, flags, "DATA") if flags & PADDED else payload
        stream.recv_window -= size
        try:
            self._check_data(stream, flags, len(chunk))
        except H2StreamError:
            self._give_back(size)
            raise
        if chunk:
            stream.receiver.on_data(chunk)
        if size:
            self.consumed(stream, size)
        if flags & END_STREAM and stream.recv_open:
            self._received_end(stream, None)

    def _check_data(self, stream: Stream, flags: int, body: int) -> None:
        if stream.recv_window < 0:
            raise H2StreamError(Code.FLOW_CONTROL_ERROR, f"DATA {-stream.recv_window} bytes beyond the stream window")
        if not stream.takes_data:
            raise H2StreamError(Code.PROTOCOL_ERROR, "DATA before a final head (RFC 9113 8.1)")
        stream.count(body)
        if not body and not flags & END_STREAM:
            self._budgets.empty.spend(self._now)

    def _on_late_data(self, stream: Stream | None, stream_id: int, size: int) -> None:
        self._give_back(size)
        if stream is not None:
            raise H2StreamError(Code.STREAM_CLOSED, "DATA after END_STREAM")
        self._judge_late(stream_id, "DATA")

    def _judge_late(self, stream_id: int, what: str) -> None:
        """A frame on a stream that is not in the table: idle, or closed one way or another."""
        self._refuse_idle(stream_id, what)
        how = self._closed.get(stream_id)
        if how == ENDED:
            raise H2ConnectionError(Code.STREAM_CLOSED, f"{what} on stream {stream_id}, which has ended")
        if how == RESET_BY_PEER:
            raise H2StreamError(Code.STREAM_CLOSED, f"{what} after RST_STREAM")
        self._budgets.control.spend(self._now)

    # ------------------------------------------------------------------------------------------ credit

    def consumed(self, stream: Stream, size: int) -> None:
        """The receiver took `size` bytes: the peer may send as many again, once the stream is not paused."""
        if stream.paused and stream.recv_open:
            stream.withheld += size
            return
        self._give_back(size)
        if not stream.recv_open:
            return
        stream.owed += size
        # Half a window at a time: a frame for each DATA frame would cost more than the DATA.
        if stream.owed * 2 >= self.limits.stream_window:
            stream.recv_window += stream.owed
            self.sender.control(window_update(stream.id, stream.owed))
            stream.owed = 0

    def _give_back(self, size: int) -> None:
        self._owed += size
        if self._owed * 2 >= self.limits.connection_window and self.failed is None:
            self._recv_window += self._owed
            self.sender.control(window_update(0, self._owed))
            self._owed = 0

    # ------------------------------------------------------------------------------------------ ends

    def _received_end(self, stream: Stream, trailers: Fields | None) -> None:
        stream.check_whole()
        stream.recv_open = False
        stream.peer_ended = True
        self._give_back(stream.withheld)
        stream.withheld = 0
        if trailers:
            stream.receiver.on_trailers(trailers)
        stream.receiver.on_end()
        if not stream.send_open:
            self.close_stream(stream, ENDED)

    def _sent_end(self, stream: Stream) -> None:
        """END_STREAM is in the output."""
        if not stream.recv_open:
            self.close_stream(stream, ENDED)

    def close_stream(self, stream: Stream, how: int) -> None:
        """Take a stream out of the table, once; what it withheld goes back to the connection."""
        stream.recv_open = False
        self.sender.drop(stream)
        if self.streams.pop(stream.id, None) is None:
            return
        self._give_back(stream.withheld)
        stream.withheld = 0
        self._remember(stream.id, how)
        self.on_closed()

    def reset_stream(self, stream: Stream, code: int) -> None:
        """End a stream from our side, telling the peer; its receiver is not told."""
        if stream.id in self.streams and self.failed is None:
            self.sender.reset(stream, code)
            self.close_stream(stream, RESET_BY_US)

    def _remember(self, stream_id: int, how: int) -> None:
        self._closed[stream_id] = how
        if len(self._closed) > REMEMBERED_CLOSED:
            del self._closed[next(iter(self._closed))]

    def fail(self, error: H2ConnectionError) -> None:
        """End the connection: GOAWAY goes out, every stream hears of it."""
        if self.failed is not None:
            return
        self.failed = error
        self.sender.control(goaway(self._processed_id(), error.code, error.detail))
        self.lose(error.detail, error.code, broken=error.code is not Code.NO_ERROR)

    def lose(self, detail: str, code: int | None = None, *, broken: bool = False) -> None:
        """Tell every stream that the connection is gone; nothing is sent on them any more."""
        if self.failed is None:
            self.failed = H2ConnectionError(Code.NO_ERROR, detail)
        for stream in list(self.streams.values()):
            self.close_stream(stream, RESET_BY_PEER)
            stream.on_lost(detail, code, broken=broken)

    def _processed_id(self) -> int:
        """What our GOAWAY names as the last stream we acted on."""
        return 0

    # ------------------------------------------------------------------------------------------ header blocks

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if self._takes_short_way(flags, stream_id, payload):
            return
        block = self._blocks.on_headers(flags, stream_id, payload)
        if block is not None:
            self._on_block(block)

    def _takes_short_way(self, flags: int, stream_id: int, payload: bytes) -> bool:
        """Whether this whole header block was dealt with unread; it may not be one that moves the table."""
        return False

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        block = self._blocks.on_continuation(flags, payload)
        if block is not None:
            self._on_block(block)

    def _on_block(self, block: HeaderBlock) -> None:
        stream_id = block.stream_id
        if block.self_dependent and self.SERVER and stream_id % 2:
            # RFC 9113 dropped priorities but h2spec, and clients tested with it, still expect RFC 7540 5.3.1 here.
            self.last_id = max(self.last_id, stream_id)
            raise H2StreamError(Code.PROTOCOL_ERROR, "stream that depends on itself")
        stream = self.streams.get(stream_id)
        if stream is not None and not stream.recv_open:
            raise H2StreamError(Code.STREAM_CLOSED, "HEADERS after END_STREAM")
        self._on_fields(stream, stream_id, block.fields, block.ended)

    def _on_fields(self, stream: Stream | None, stream_id: int, fields: Fields | None, ended: bool) -> None:
        """A decoded header list; `fields` None: it was over the limit."""
        raise NotImplementedError

    _HANDLERS: ClassVar[dict[int, Callable[[Any, int, int, bytes], None]]] = {
        DATA: _on_data,
        HEADERS: _on_headers,
        PRIORITY: ControlFrames._on_priority,
        RST_STREAM: ControlFrames._on_rst_stream,
        SETTINGS: ControlFrames._on_settings,
        PUSH_PROMISE: ControlFrames._on_push_promise,
        PING: ControlFrames._on_ping,
        GOAWAY: ControlFrames._on_goaway,
        WINDOW_UPDATE: ControlFrames._on_window_update,
        CONTINUATION: _on_continuation,
        PRIORITY_UPDATE: ControlFrames._on_priority_update,
    }
