"""Answer one request of an HTTP/1.x client: the client's leg, on `proxy.io.inbound_h1`'s connection.

Rules for editing: the connection decides what comes next and when it ends; nothing here reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from proxy.h1 import Framing, write_response
from proxy.h1_bodies import write_chunk, write_last_chunk
from proxy.io.splice import Sink
from proxy.messages import NOBODY, Abort, Fields, Head, Receiver, ResponseHead
from proxy.priority import Priority
from proxy.websocket_handshake import accepted

if TYPE_CHECKING:
    from proxy.io.inbound_h1 import H1ServerConnection
    from proxy.io.wire import Wire


class H1ClientLeg:
    """One request of an HTTP/1.x client and its answer; see `proxy.messages.Leg`."""

    __slots__ = (
        "_chunked",
        "_close",
        "_connection",
        "_dead",
        "_framing",
        "_method",
        "_trailers",
        "answered",
        "receiver",
        "websocket_key",
    )

    reused = False
    version = "h1"

    def __init__(self, connection: H1ServerConnection, framing: Framing, method: bytes) -> None:
        self.receiver: Receiver = NOBODY
        self.answered = False
        self.websocket_key = b""
        self._connection = connection
        self._framing = framing
        self._method = method
        self._chunked = False
        self._close = False
        self._trailers: Fields = []
        self._dead = False

    def head(self, head: Head) -> None:
        assert isinstance(head, ResponseHead)
        if self._dead:
            return
        self.answered = True
        connection, framing = self._connection, self._framing
        tunnel = head.status == 101 or (self._method == b"CONNECT" and 200 <= head.status < 300)
        until_close = head.length is None and not head.no_body and framing.http10
        # A body that was not read to its end makes the next request's start unknowable, so the client is told now.
        self._close = not framing.keep_alive or connection.closing or until_close or not connection.request_whole
        if tunnel:
            if self.websocket_key:
                head = accepted(head, self.websocket_key)
            if self._method == b"CONNECT":
                head = ResponseHead(
                    head.status, head.fields, length=0, no_body=True, reason=head.reason or b"Connection established"
                )
            raw, _ = write_response(head, http10=False, close=False)
            connection.wire.write(raw)
            connection.start_tunnel()
            return
        raw, self._chunked = write_response(
            head, http10=framing.http10, close=self._close, keep_alive=connection.keep_alive
        )
        connection.wire.write(raw)

    def interim(self, head: ResponseHead) -> None:
        if not self._dead and not self._framing.http10:
            raw, _ = write_response(head, http10=False, close=False)
            self._connection.wire.write(raw)

    def data(self, chunk: bytes) -> None:
        if not self._dead:
            self._connection.wire.write(write_chunk(chunk) if self._chunked else chunk)

    @property
    def chunks_to(self) -> Wire | None:
        """Where whole chunks may be sent, framing and all, outside of a turn; None while this answer is not in chunks."""
        return self._connection.wire if self._chunked and not self._dead else None

    def trailers(self, fields: Fields) -> None:
        self._trailers = fields

    def end(self) -> None:
        if self._dead:
            return
        connection = self._connection
        if connection.in_tunnel:
            connection.half_close()
            return
        self._dead = True
        if self._chunked:
            connection.wire.write(write_last_chunk(self._trailers))
        connection.finish(self, keep_alive=not self._close)

    def finish(self) -> None:
        if not self._dead and self._connection.in_tunnel:
            self._connection.close_tunnel()
        else:
            self.end()

    def abort(self, abort: Abort) -> None:
        if not self._dead:
            self._dead = True
            # HTTP/1.0 bodies end with the connection: only a reset shows that this one was cut.
            self._connection.abandon(self, flush=not (self.answered and self._framing.http10))

    def splice_into(self, sink: Sink, heard: Callable[[int], None]) -> None:
        if not self._dead:
            self._connection.splice_into(self, sink, heard)

    @property
    def splice_sink(self) -> Sink | None:
        return None if self._dead or self._chunked or not self.answered else self._connection

    def pause(self) -> None:
        self._connection.stop_reading(self)

    def prioritize(self, priority: Priority) -> None:
        """One answer at a time: there is nothing to overtake."""

    def resume(self) -> None:
        self._connection.start_reading(self)
