"""The server's half of HTTP/2: requests in, answers out, and a polite end (RFC 9113 section 8, RFC 8441)."""

from __future__ import annotations

from collections.abc import Callable

from proxy import errors
from proxy.h2 import Connection
from proxy.h2_control import ENDED, RESET_BY_US
from proxy.h2_errors import Code, H2ConnectionError, H2StreamError, abort_by_client, code_for_client
from proxy.h2_frames import (
    DATA,
    DEFAULT_MAX_FRAME,
    ENABLE_CONNECT_PROTOCOL,
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER,
    HAS_PRIORITY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_HEADER_LIST_SIZE,
    MAX_WINDOW,
    NO_RFC7540_PRIORITIES,
    PADDED,
    PREFACE,
    frame,
    goaway,
    word,
)
from proxy.h2_heads import UnknownProtocolError, read_request, read_trailers, write_fields, write_response
from proxy.h2_known import KnownHead, KnownHeads
from proxy.h2_limits import H2Limits
from proxy.h2_shapes import Find, Shapes
from proxy.h2_streams import Stream
from proxy.hpack_encoder import plain_literal
from proxy.messages import NOBODY, Abort, Cause, Fields, Head, Party, RequestHead, ResponseHead, Stage, get_field
from proxy.priority import Priority, adjusted, of_fields, read

EARLY = 64
"""Priorities kept for requests that are still to come."""


class ServerStream(Stream):
    """A client's leg."""

    __slots__ = ("answered", "lingering", "spoken_for", "upgrade")

    connection: ServerConnection

    def __init__(self, connection: ServerConnection, stream_id: int) -> None:
        super().__init__(connection, stream_id)
        self.takes_data = True
        self.answered = False  # the final head is out
        self.upgrade = False  # an extended CONNECT
        self.spoken_for = False  # the client said how urgent it is
        self.lingering = False  # answered whole; what still comes of the upload is thrown away

    def head(self, head: Head) -> None:
        assert isinstance(head, ResponseHead)
        if not self.send_open or self.answered:
            return
        self.answered = True
        # A refused tunnel is an ordinary answer, which ends like one.
        self.tunnel = self.tunnel and (head.status == 101 or 200 <= head.status < 300)
        self.connection.sender.headers(self, write_response(head, tunnel=self.upgrade))
        value = head.get(b"priority")
        if value is not None:
            self.connection.sender.prioritize(self, adjusted(self.priority, value))

    def answer(self, known: object, status: int, fields: Fields, last: tuple[bytes, bytes], body: bytes) -> bool:
        """A whole answer in one step, as head(), data() and end() say it in three; False, and nothing said, where it takes
        those. `known` stands for the same status and fields each time; `last` comes after them and is new each time."""
        sender = self.connection.sender
        if self.answered or self.tunnel or not self.send_open or not sender.fits(self, len(body)):
            return False
        block = sender.encoder.standing.get(known)
        if block is None:
            if get_field(fields, b"priority") is not None:
                return False
            block = sender.encoder.encode_standing(known, write_response(ResponseHead(status, fields)))
        self.answered = True
        sender.whole(self, block + plain_literal(*last), body)
        return True

    def prioritize(self, priority: Priority) -> None:
        if not self.spoken_for:
            self.connection.sender.prioritize(self, priority)

    def interim(self, head: ResponseHead) -> None:
        if self.send_open and not self.answered:
            self.connection.sender.headers(self, write_response(head))

    def trailers(self, fields: Fields) -> None:
        super().trailers(write_fields(fields, []))

    def abort(self, abort: Abort) -> None:
        if not self.lingering:
            self.connection.reset_stream(self, code_for_client(abort, answered=self.answered))

    def on_fault(self, error: H2StreamError) -> None:
        self.receiver.on_abort(Abort(Party.CLIENT, Stage.HEAD, Cause.BROKEN, error.detail, error.code))

    def on_reset(self, code: int) -> None:
        self.receiver.on_abort(abort_by_client(code))

    def on_lost(self, detail: str, code: int | None, *, broken: bool) -> None:
        cause = Cause.BROKEN if broken else Cause.LOST
        self.receiver.on_abort(Abort(Party.CLIENT, Stage.HEAD, cause, detail, code))


class ServerConnection(Connection):
    """`on_request(stream, head)` sets the stream's receiver before it returns."""

    SERVER = True

    def __init__(
        self,
        limits: H2Limits,
        wake: Callable[[], None],
        *,
        on_request: Callable[[ServerStream, RequestHead], None],
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(limits, wake, on_closed=on_closed)
        self._on_request = on_request
        self.shortcut_for: Callable[[RequestHead], Find | None] = lambda _: None
        """Asked for each request without a body: who has whole answers ready for requests that differ in the target alone."""
        self._shapes = Shapes(self._blocks.decoder)
        self._heads = KnownHeads(self._blocks.decoder)
        self._preface = b""
        self._accepted = False  # the preface is complete
        self._early: dict[int, Priority] = {}  # said of streams that are still to come
        self._lingering: list[ServerStream] = []
        self._lingering_longer: list[ServerStream] = []
        self.on_linger: Callable[[], None] = lambda: None  # cut_lingering() is to be called, soon and again
        self.refuses_above: int | None = None  # the last id that our GOAWAY named

    def start(self) -> None:
        """Our SETTINGS, to be sent at once."""
        self.sender.control(
            self._hello(
                {
                    MAX_CONCURRENT_STREAMS: self.limits.max_streams,
                    INITIAL_WINDOW_SIZE: self.limits.stream_window,
                    MAX_HEADER_LIST_SIZE: self.limits.max_header_bytes,
                    ENABLE_CONNECT_PROTOCOL: 1,
                    NO_RFC7540_PRIORITIES: 1,
                }
            )
        )

    def _parse(self, chunk: bytes) -> None:
        if not self._accepted:
            chunk = self._take_preface(chunk)
            if not chunk:
                return
        super()._parse(chunk)

    def _take_preface(self, chunk: bytes) -> bytes:
        so_far = self._preface + chunk[: len(PREFACE) - len(self._preface)]
        if not PREFACE.startswith(so_far):
            raise H2ConnectionError(Code.PROTOCOL_ERROR, "connection preface is not that of HTTP/2")
        rest = chunk[len(so_far) - len(self._preface) :]
        self._preface = so_far
        self._accepted = len(so_far) == len(PREFACE)
        return rest

    # ------------------------------------------------------------------------------------------ requests

    def _takes_short_way(self, flags: int, stream_id: int, payload: bytes) -> bool:
        if flags & (END_HEADERS | PADDED) != END_HEADERS:
            return False
        block, ended = payload, flags & END_STREAM != 0
        if flags & HAS_PRIORITY:
            # A priority that is cut or names the stream itself is for the usual way to judge.
            if len(payload) < 5 or word(payload) == stream_id:
                return False
            block = payload[5:]
        if ended and self._shapes and self._answer_ready(stream_id, block):
            return True
        known = self._heads.find(block, ended)
        return known is not None and self._open_known(stream_id, known, ended)

    def _open_known(self, stream_id: int, known: KnownHead, ended: bool) -> bool:
        """Open a stream for a head that is known. False: the usual way says what is wrong with the stream's id."""
        if stream_id <= self.last_id or not stream_id & 1 or self.refuses_above is not None:
            return False
        if len(self.streams) >= self.limits.max_streams:
            return False
        self.last_id = stream_id
        self._begin(stream_id, known.again(), ended, known.said)
        return True

    def _answer_ready(self, stream_id: int, block: bytes) -> bool:
        """One answer, prepared whole, for a request of a known shape: no head, no stream, no leg. False: the usual way."""
        sender = self.sender
        if stream_id <= self.last_id or not stream_id & 1 or self.refuses_above is not None or sender.blocked:
            return False
        ready = self._shapes.answer(block)
        if ready is None:
            return False
        head, body = ready
        size = len(body)
        sender.settle()
        if size > sender.window or size > sender.stream_window or size > DEFAULT_MAX_FRAME or sender.encoder.is_resized:
            return False
        self.last_id = stream_id
        sender.window -= size
        sender.control(
            FRAME_HEADER.pack(len(head) >> 8, len(head) & 0xFF, HEADERS, END_HEADERS, stream_id)
            + head
            + FRAME_HEADER.pack(size >> 8, size & 0xFF, DATA, END_STREAM, stream_id)
            + body
        )
        self._remember(stream_id, ENDED)
        self.on_closed()
        return True

    def _on_fields(self, stream: Stream | None, stream_id: int, fields: Fields | None, ended: bool) -> None:
        if stream is not None:
            self._on_request_trailers(stream, fields, ended)
            return
        if stream_id % 2 == 0:
            raise H2ConnectionError(Code.PROTOCOL_ERROR, f"request on stream {stream_id}")
        if stream_id <= self.last_id:
            if stream_id not in self._closed:
                raise H2ConnectionError(Code.PROTOCOL_ERROR, f"stream {stream_id} after stream {self.last_id}")
            self._judge_late(stream_id, "HEADERS")
            return
        self.last_id = stream_id
        if self.refuses_above is not None and stream_id > self.refuses_above:
            self._remember(stream_id, RESET_BY_US)  # RFC 9113 6.8: ignored, the client knows from GOAWAY
        elif len(self.streams) >= self.limits.max_streams:
            raise H2StreamError(Code.REFUSED_STREAM, f"more than {self.limits.max_streams} streams")
        elif fields is None:
            self._answer(
                stream_id, ended, 431, f"request header list of more than {self.limits.max_header_bytes} bytes"
            )
        else:
            self._open(stream_id, fields, ended)

    def _open(self, stream_id: int, fields: Fields, ended: bool) -> None:
        try:
            head = read_request(fields, ended=ended)
        except UnknownProtocolError:
            self._answer(stream_id, ended, 501, "extended CONNECT for a protocol other than websocket")
            return
        block = self._blocks.whole
        if block:
            self._heads.learn(block, head, ended)
            if ended and (find := self.shortcut_for(head)) is not None:
                self._shapes.learn(block, find)
        self._begin(stream_id, head, ended, of_fields(head.fields))

    def _begin(self, stream_id: int, head: RequestHead, ended: bool, said: Priority | None) -> None:
        stream = ServerStream(self, stream_id)
        if head.protocol or head.method == b"CONNECT":
            stream.tunnel, stream.upgrade = True, head.protocol != b""
        else:
            stream.expected = head.length
        stream.send_window = self.sender.stream_window
        updated = self._early.pop(stream_id, None) if self._early else None
        if updated is not None:
            said = updated
        if said is not None:
            stream.priority, stream.spoken_for = said, True
        self.streams[stream_id] = stream
        self._on_request(stream, head)
        if updated is not None:
            stream.receiver.on_priority(updated)
        if ended and stream.recv_open:
            self._received_end(stream, None)

    def _prioritize(self, stream_id: int, value: bytes) -> None:
        said = read(value)
        if said is None or stream_id % 2 == 0:
            return
        stream = self.streams.get(stream_id)
        if isinstance(stream, ServerStream):
            stream.spoken_for = True
            self.sender.prioritize(stream, said)
            stream.receiver.on_priority(said)
        elif stream_id > self.last_id:
            self._early[stream_id] = said  # RFC 9218 7.1: it may come before its request, and is the later word
            if len(self._early) > EARLY:
                del self._early[next(iter(self._early))]

    def _on_request_trailers(self, stream: Stream, fields: Fields | None, ended: bool) -> None:
        if not ended:
            raise H2StreamError(Code.PROTOCOL_ERROR, "second HEADERS without END_STREAM (RFC 9113 8.1)")
        if fields is None:
            raise H2StreamError(Code.ENHANCE_YOUR_CALM, f"trailers of more than {self.limits.max_header_bytes} bytes")
        self._received_end(stream, read_trailers(fields))

    # ------------------------------------------------------------------------------------------ answers of our own

    def _answer(self, stream_id: int, ended: bool, status: int, text: str) -> None:
        """A whole answer to a request that nobody above can be shown."""
        head, body = errors.own_answer(status, text, code="bad_request")
        self.sender.settle()
        fits = len(body) <= min(self.sender.window, self.sender.stream_window)
        fields = write_response(head)
        self.sender.block(stream_id, fields if fits else fields[:1], end=not fits)
        if fits:
            self.sender.window -= len(body)
            self.sender.control(frame(DATA, END_STREAM, stream_id, body))
        if ended:
            self._remember(stream_id, ENDED)
            return
        stream = ServerStream(self, stream_id)
        stream.send_open = False
        self.streams[stream_id] = stream
        self._linger(stream)

    def _sent_end(self, stream: Stream) -> None:
        if stream.recv_open and not stream.tunnel:
            assert isinstance(stream, ServerStream)
            self._linger(stream)
        else:
            super()._sent_end(stream)

    def _linger(self, stream: ServerStream) -> None:
        """The answer is whole and the rest of the upload is not wanted.

        RFC 9113 8.1 lets us reset the stream at once with NO_ERROR, yet curl 7.88 then throws the answer away. So the
        upload first runs into its window, which gives the client the time to read the answer and stop by itself.
        """
        stream.lingering = True
        stream.receiver = NOBODY
        taken, stream.withheld = stream.withheld, 0
        self._give_back(taken)
        if not self._lingering and not self._lingering_longer:
            self.on_linger()
        self._lingering.append(stream)

    def cut_lingering(self) -> bool:
        """Reset what lingered since the last call but one; False when none is left to call again for."""
        for stream in self._lingering_longer:
            self.reset_stream(stream, Code.NO_ERROR)
        self._lingering_longer, self._lingering = [s for s in self._lingering if s.id in self.streams], []
        return bool(self._lingering_longer)

    def consumed(self, stream: Stream, size: int) -> None:
        if isinstance(stream, ServerStream) and stream.lingering:
            self._give_back(size)
        else:
            super().consumed(stream, size)

    # ------------------------------------------------------------------------------------------ going away

    def _processed_id(self) -> int:
        return self.last_id if self.refuses_above is None else min(self.last_id, self.refuses_above)

    def announce_drain(self) -> None:
        """First of two GOAWAYs: no new request, please, but those on their way are still served (RFC 9113 6.8)."""
        self.sender.control(goaway(MAX_WINDOW, Code.NO_ERROR))

    def drain(self) -> None:
        """Second GOAWAY: streams above the last one we saw were not processed."""
        if self.refuses_above is None and self.failed is None:
            self.refuses_above = self.last_id
            self.sender.control(goaway(self.last_id, Code.NO_ERROR))

    def abandon(self, detail: str) -> None:
        """Reset every stream and say GOAWAY: a hard stop, which no client may take for a clean end."""
        for stream in list(self.streams.values()):
            self.reset_stream(stream, Code.INTERNAL_ERROR)
            stream.receiver.on_abort(Abort(Party.US, Stage.BODY, Cause.CANCELLED, detail))
        self.fail(H2ConnectionError(Code.NO_ERROR, detail))
