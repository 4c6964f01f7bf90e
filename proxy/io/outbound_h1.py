"""Speak HTTP/1.1 to an edge on one connection: one exchange at a time, then idle again for the next.

Theory: `room` is 1 while nothing is in progress and the connection may be reused. A connection that hears anything while
idle (an EOF, a late 408, stray bytes) is finished: it is never handed out again, so a stale one is mostly found before a
request is written on it. What could not be found is told by `reused` and by the stage of the abort: whoever holds the body
decides about a replay (RFC 9112 9.3.1), not this file.

Cancelling is a reset: a FIN would look like the half-close of a client that still waits for its answer.

Owner: the pool that dialled it. It has no timers; those who wait for an answer have the deadlines.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Protocol

from proxy.h1 import HeadError, head_end, parse_response, write_request
from proxy.h1_bodies import (
    BodyReader,
    ChunkedReader,
    CloseReader,
    LengthReader,
    response_reader,
    write_chunk,
    write_last_chunk,
)
from proxy.io.splice import Sink, Splice
from proxy.io.wire import Wire
from proxy.messages import NOBODY, Abort, Cause, Fields, Head, Party, Receiver, RequestHead, ResponseHead, Stage
from proxy.priority import Priority
from proxy.websocket_handshake import accept_of, with_key

MAX_RESPONSE_HEAD = 256 * 1024  # bytes; providers send large policy headers, an endless head is refused
MAX_INTERIMS = 64


def _nothing() -> None: ...


class EdgeEnd(Protocol):
    """Who hears what a connection says about the exchange in progress."""

    def take(self, chunk: bytes) -> object: ...

    def take_eof(self) -> bool: ...

    def lost(self, detail: str, *, clean: bool) -> None: ...

    def wire_full(self) -> None: ...

    def wire_drained(self) -> None: ...


class H1EdgeConnection(asyncio.Protocol):
    """The client's side of one HTTP/1.1 connection; an EdgeConnection."""

    version = "h1"

    def __init__(self) -> None:
        self.on_change: Callable[[], None] = _nothing
        self.closed = False
        self.idle_hint_s = 0.0
        self.wire = Wire(asyncio.get_running_loop())
        self.room = 0
        self._leg: EdgeEnd | None = None
        self._exchanges = 0
        self._first: Callable[[bytes], bool] | None = None  # asked before the leg whether it has seen to a read
        self._retired = False

    @property
    def active(self) -> int:
        return 0 if self._leg is None else 1

    def lend(self, leg: EdgeEnd, take: Callable[[bytes], bool], request: bytes) -> None:
        """Send a whole request for somebody whose `take` reads its answer, or unfolds and leaves what it was given to the
        ordinary leg; see `restore` and `unfold`."""
        assert self.room, "no room for another exchange"
        self._leg = leg
        self._first = take
        self._exchanges += 1
        self.room = 0
        self.wire.write_whole(request)

    def restore(self, idle_hint_s: float) -> bool:
        """The answer of the lent connection was whole; whether another request may follow, of which nobody is told."""
        if idle_hint_s:
            self.idle_hint_s = idle_hint_s
        self._leg = self._first = None
        if self._retired or self.closed:
            self._shut()
            return False
        self.room = 1
        return True

    def unfold(self, method: bytes) -> H1EdgeLeg:
        """An ordinary leg in the place of whoever borrowed the connection: the request was sent, nothing came yet."""
        leg = self._leg = H1EdgeLeg(self, reused=True)
        self._first = None
        leg.was_sent(method)
        return leg

    def let_pass(self, leg: H1EdgeLeg, passage: Callable[[bytes], bool]) -> None:
        """Until the exchange of `leg` is over, ask `passage` first with what comes: whether it has seen to it."""
        if self._leg is leg:
            self._first = passage

    def open(self) -> H1EdgeLeg:
        assert self.room, "no room for another exchange"
        leg = self._leg = H1EdgeLeg(self, reused=self._exchanges > 0)
        self._exchanges += 1
        self.room = 0
        return leg

    def close(self) -> None:
        self._retired = True
        self.room = 0
        if self._leg is None:
            self._shut()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "busy" if self._leg is not None else "idle"
        return f"<H1EdgeConnection {state}, {self._exchanges} exchanges>"

    # ---------------------------------------------------------------- the transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.wire.attach(transport)
        self.room = 0 if self._retired else 1

    def data_received(self, data: bytes) -> None:
        first = self._first
        if first is not None and first(data):
            return
        leg = self._leg
        if leg is None:
            self._shut()  # nothing was asked: whatever this is, the connection is out of step
            return
        turn = self.wire.turn
        turn.is_open = True
        try:
            leg.take(data)
        finally:
            turn.end()

    def eof_received(self) -> bool:
        leg = self._leg
        if leg is None:
            self._shut()
            return False
        return leg.take_eof()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self.room = 0
        leg, self._leg, self._first = self._leg, None, None
        if leg is not None:
            leg.lost("connection closed" if exc is None else "connection reset", clean=exc is None)
        self.wire.let_go()
        self.on_change()

    def pause_writing(self) -> None:
        if self._leg is not None:
            self._leg.wire_full()

    def resume_writing(self) -> None:
        if self._leg is not None:
            self._leg.wire_drained()

    # ---------------------------------------------------------------- called by the leg

    def release(self, leg: H1EdgeLeg, *, reusable: bool) -> None:
        """The exchange of `leg` is over."""
        if self._leg is not leg:
            return
        self._leg = self._first = None
        if reusable and not self._retired and not self.closed:
            self.room = 1
            self.wire.resume()
            self.on_change()
        else:
            self._shut()

    def kill(self, leg: H1EdgeLeg) -> None:
        """Cancel the exchange of `leg`, and with it the connection."""
        if self._leg is leg:
            self._leg = self._first = None
            self.closed = True
            self.room = 0
            self.wire.reset()
            self.on_change()

    def _shut(self) -> None:
        if not self.closed:
            self.closed = True
            self.room = 0
            self.wire.close()
            self.on_change()


class H1EdgeLeg:
    """One request to an HTTP/1.1 edge and its answer; see `proxy.messages.Leg`."""

    __slots__ = (
        "_accept", "_answered", "_buffer", "_chunked", "_chunks", "_connection", "_dead", "_ended", "_interims", "_keep_alive",
        "_method", "_reader", "_searched", "_sent_whole", "_splice", "_trailers", "_tunnel", "_upgrade", "receiver", "reused",
    )  # fmt: skip

    version = "h1"

    def __init__(self, connection: H1EdgeConnection, *, reused: bool) -> None:
        self.receiver: Receiver = NOBODY
        self.reused = reused
        self._connection = connection
        self._buffer = b""
        self._searched = 0
        self._reader: BodyReader | None = None
        self._chunks: ChunkedReader | None = None  # the same, where it is one
        self._method = b""
        self._upgrade = False
        self._accept = b""
        self._chunked = self._sent_whole = self._answered = self._tunnel = self._ended = self._dead = False
        self._keep_alive = True
        self._interims = 0
        self._trailers: Fields = []
        self._splice: Splice | None = None  # may take the rest of the answer

    @property
    def chunks(self) -> ChunkedReader | None:
        """What takes the answer's chunks apart, if its body is in chunks."""
        return self._chunks

    def let_pass(self, passage: Callable[[bytes], bool]) -> None:
        """Until this answer is over, ask `passage` first with what comes: whether it has seen to it."""
        self._connection.let_pass(self, passage)

    def was_sent(self, method: bytes) -> None:
        """Its request, without an upgrade, has been written by somebody else, whole."""
        self._method = method
        self._sent_whole = True

    # ---------------------------------------------------------------- from the relay

    def head(self, head: Head) -> None:
        assert isinstance(head, RequestHead)
        if self._dead:
            return
        self._method = head.method
        self._upgrade = self._sent_whole = bool(head.protocol)
        if head.protocol == b"websocket" and head.get(b"sec-websocket-key") is None:
            head = with_key(head, os.urandom(16))
            self._accept = accept_of(head.get(b"sec-websocket-key") or b"")
        raw, self._chunked = write_request(head)
        self._connection.wire.write(raw)

    def interim(self, head: ResponseHead) -> None:
        raise AssertionError("a request has no interim head")

    def data(self, chunk: bytes) -> None:
        if not self._dead:
            self._connection.wire.write(write_chunk(chunk) if self._chunked else chunk)

    def splice_into(self, sink: Sink, heard: Callable[[int], None]) -> None:
        """What is left of the answer may pass into `sink` unseen, where only its end has to be known."""
        if isinstance(self._reader, LengthReader) and not self._dead:
            self._splice = Splice(self._connection.wire, sink, heard, self._on_spliced)

    def _on_spliced(self, left: int) -> None:
        """The body, of which `left` bytes are to come, goes on the ordinary way."""
        assert isinstance(self._reader, LengthReader)
        self._reader.left, self._splice = left, None
        if not left and not self._dead:
            self._take_body(b"", 0)

    @property
    def splice_sink(self) -> Sink | None:
        return None if self._dead or self._chunked or self._upgrade else self._connection

    def trailers(self, fields: Fields) -> None:
        self._trailers = fields

    def end(self) -> None:
        if self._dead or self._sent_whole:
            return
        self._sent_whole = True
        if self._tunnel:
            self._connection.wire.half_close()
            if self._ended:
                self._finish(reusable=False)
            return
        if self._chunked:
            self._connection.wire.write(write_last_chunk(self._trailers))
        if self._ended:
            self._finish(reusable=self._keep_alive)

    def finish(self) -> None:
        self.end()  # who serves closes first (RFC 6455 7.1.1)

    def abort(self, abort: Abort) -> None:
        if not self._dead:
            self._dead = True
            self._connection.kill(self)

    def pause(self) -> None:
        if not self._dead:
            self._connection.wire.pause()

    def prioritize(self, priority: Priority) -> None:
        """Its request's field says it."""

    def resume(self) -> None:
        if not self._dead:
            self._connection.wire.resume()

    # ---------------------------------------------------------------- from the connection

    def wire_full(self) -> None:
        self.receiver.on_full()

    def wire_drained(self) -> None:
        self.receiver.on_drained()

    def take(self, chunk: bytes) -> None:
        """Bytes of the answer."""
        if self._chunks is not None and (payload := self._chunks.alone(chunk)):
            self.receiver.on_data(payload)
            return
        if self._tunnel:
            self.receiver.on_data(chunk)
            return
        if self._ended:  # bytes after the answer, while the request still goes on: out of step
            self._keep_alive = False
            return
        try:
            if self._reader is None:
                self._take_head(chunk)
            else:
                self._take_body(chunk, 0)
        except HeadError as problem:
            self._fail(Cause.BROKEN, problem.detail)

    def _take_head(self, chunk: bytes) -> None:
        self._buffer = self._buffer + chunk if self._buffer else chunk
        while not self._dead and self._reader is None:
            end = head_end(self._buffer, self._searched, MAX_RESPONSE_HEAD)
            if end < 0:
                self._searched = len(self._buffer)
                return
            raw, rest = self._buffer[:end], self._buffer[end:]
            self._buffer, self._searched = rest, 0
            self._on_head(raw)
        if self._tunnel or self._dead:
            return
        rest, self._buffer = self._buffer, b""
        self._take_body(rest, 0)

    def _on_head(self, raw: bytes) -> None:
        head, framing = parse_response(raw, self._method)
        if head.status == 101:
            self._on_switch(head)
            return
        if head.status < 200:
            self._interims += 1
            if self._interims > MAX_INTERIMS:
                raise HeadError(f"more than {MAX_INTERIMS} interim answers")
            self.receiver.on_interim(head)
            return
        self._keep_alive = framing.keep_alive
        self._connection.idle_hint_s = framing.idle_hint_s or self._connection.idle_hint_s
        reader = self._reader = response_reader(head, framing)
        if isinstance(reader, ChunkedReader):
            self._chunks = reader
        self._answered = True
        self.receiver.on_head(head)

    def _on_switch(self, head: ResponseHead) -> None:
        if not self._upgrade:
            raise HeadError("101 that nobody asked for")
        if self._accept and head.get(b"sec-websocket-accept") != self._accept:
            raise HeadError("101 without the right sec-websocket-accept (RFC 6455 4.2.2)")
        self._tunnel = self._answered = True
        self._keep_alive = self._sent_whole = False
        early, self._buffer = self._buffer, b""
        self._reader = CloseReader()
        self.receiver.on_head(head)
        if early and not self._dead:
            self.receiver.on_data(early)

    def _take_body(self, chunk: bytes, start: int) -> None:
        reader = self._reader
        assert reader is not None
        at = reader.feed(chunk, start, self.receiver.on_data)
        if self._dead or not reader.done:
            if self._splice is not None and isinstance(reader, LengthReader) and not self._dead:
                self._splice.begin(reader.left)
            return
        if at < len(chunk):
            self._keep_alive = False  # bytes after the answer: out of step, but this answer is whole
        self._ended = True
        trailers = reader.trailers
        if self._sent_whole:
            self._finish(reusable=self._keep_alive)
        if trailers:
            self.receiver.on_trailers(trailers)
        self.receiver.on_end()

    def take_eof(self) -> bool:
        """The edge's FIN; True keeps our direction open, which only a tunnel needs."""
        if not self._tunnel:
            return False
        self._ended = True
        self.receiver.on_end()
        return not self._sent_whole

    def lost(self, detail: str, *, clean: bool) -> None:
        """The connection is gone; `clean`: by a FIN, which is the end of a body that has no other."""
        over = self._dead or (self._ended and (self._sent_whole or not self._tunnel))
        self._dead = True
        if over:
            return
        if clean and isinstance(self._reader, CloseReader) and not self._tunnel:
            self.receiver.on_end()
            return
        self.receiver.on_abort(Abort(Party.EDGE, self._stage, Cause.LOST, detail))

    def _finish(self, *, reusable: bool) -> None:
        self._dead = True
        self._connection.release(self, reusable=reusable)

    def _fail(self, cause: Cause, detail: str) -> None:
        if self._dead:
            return
        self._dead = True
        self._connection.kill(self)
        self.receiver.on_abort(Abort(Party.EDGE, self._stage, cause, detail))

    @property
    def _stage(self) -> Stage:
        # An interim answer is an answer's byte: the request has been begun, and is not to be sent again.
        return Stage.BODY if self._answered or self._interims else Stage.HEAD
