"""The client's half of HTTP/2: requests out, answers in, and what a lost or leaving edge means for each request.

Theory: a leg is opened without an id; head() gives it the next one, since ids must reach the peer in order (RFC 9113
5.1.1). Requests may go before the peer's SETTINGS came, but for an extended CONNECT, which waits for the peer's word that
it knows them (RFC 8441 section 3).

`unprocessed` is said of a request only on the peer's word (REFUSED_STREAM, above the last id of GOAWAY) or when none of
its bytes were taken for the wire.
"""

from __future__ import annotations

from collections.abc import Callable

from proxy.h2 import Connection
from proxy.h2_control import RESET_BY_US
from proxy.h2_errors import Code, H2ConnectionError, H2StreamError, abort_by_edge, code_for_edge, code_name
from proxy.h2_frames import (
    ENABLE_PUSH,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_HEADER_LIST_SIZE,
    MAX_WINDOW,
    PREFACE,
    priority_update,
)
from proxy.h2_heads import read_response, read_trailers, write_fields, write_request
from proxy.h2_limits import MAX_INTERIM, H2Limits
from proxy.h2_streams import Stream
from proxy.messages import Abort, Cause, Fields, Head, Party, RequestHead, ResponseHead, Stage
from proxy.priority import UNSAID, Priority, of_fields

MAX_OPEN_STREAMS = 256
"""Ours, where the peer allows more."""
ASSUMED_STREAMS = 100
"""Before its SETTINGS came: what RFC 9113 6.5.2 asks a peer not to go below."""
LAST_USABLE_ID = MAX_WINDOW - 2


class ClientStream(Stream):
    """An edge's leg."""

    __slots__ = ("answered", "interims", "method", "opened_turn", "pending_head", "renewed", "settled")

    connection: ClientConnection

    def __init__(self, connection: ClientConnection, *, reused: bool) -> None:
        super().__init__(connection, 0)
        self.reused = reused
        self.method = b""
        self.answered = False  # a head came, interim ones too
        self.interims = 0
        self.opened_turn = -1
        self.pending_head: RequestHead | None = None
        self.renewed = False  # its priority is no longer what its head said, and the edge was not told
        self.settled = False  # its place among the open ones was given back

    def head(self, head: Head) -> None:
        assert isinstance(head, RequestHead)
        if self.send_open and self.pending_head is None and not self.id:
            self.pending_head = head
            self.connection.request(self, head)

    def interim(self, head: ResponseHead) -> None:
        """Requests have none."""

    def trailers(self, fields: Fields) -> None:
        super().trailers(write_fields(fields, []))

    def end(self) -> None:
        if self.id:
            super().end()
        else:
            self.ending = True  # its head still waits for the peer's SETTINGS

    def abort(self, abort: Abort) -> None:
        if self.id:
            self.connection.reset_stream(self, code_for_edge(abort))
        else:
            self.connection.withdraw(self)

    def prioritize(self, priority: Priority) -> None:
        if self.id and (self.send_open or self.recv_open):
            self.connection.sender.prioritize(self, priority)
            self.renewed = True
            self.connection.tell_priority(self)

    @property
    def stage(self) -> Stage:
        if self.answered:
            return Stage.BODY
        return Stage.CONNECT if self.unsent else Stage.HEAD

    @property
    def unsent(self) -> bool:
        """No byte of it was taken for the wire."""
        return not self.id or self.opened_turn == self.connection.sender.turn

    def on_fault(self, error: H2StreamError) -> None:
        self._gone(Abort(Party.EDGE, self.stage, Cause.BROKEN, error.detail, error.code))

    def on_reset(self, code: int) -> None:
        self._gone(abort_by_edge(code, self.stage))

    def on_lost(self, detail: str, code: int | None, *, broken: bool) -> None:
        cause = Cause.BROKEN if broken else Cause.LOST
        self._gone(Abort(Party.EDGE, self.stage, cause, detail, code, unprocessed=self.unsent))

    def on_refused(self, detail: str, code: int | None = None) -> None:
        """It was not and will not be processed."""
        self._gone(Abort(Party.EDGE, self.stage, Cause.REFUSED, detail, code, unprocessed=True))

    def _gone(self, abort: Abort) -> None:
        # RFC 9113 8.1: after a whole answer an edge may reset, or go; it only does not want the rest of the upload.
        # Of a tunnel that was one half only: whoever holds the other must hear that it is gone.
        if self.tunnel or not self.peer_ended:
            self.receiver.on_abort(abort)


class ClientConnection(Connection):
    """`on_change` is called when a place becomes free or the last one is taken away."""

    def __init__(self, limits: H2Limits, wake: Callable[[], None], *, on_change: Callable[[], None]) -> None:
        super().__init__(limits, wake, on_closed=self._on_stream_closed)
        self._on_change = on_change
        self._opened = 0  # legs given out, not ended
        self._used = False
        self._next_id = 1
        self._waiting: list[ClientStream] = []  # extended CONNECTs before the peer's SETTINGS
        self._last_processed = MAX_WINDOW
        self.going_away = False

    def start(self) -> None:
        """Preface and SETTINGS, for the same write as the first request."""
        self.sender.control(
            PREFACE
            + self._hello(
                {
                    ENABLE_PUSH: 0,
                    MAX_CONCURRENT_STREAMS: 0,
                    INITIAL_WINDOW_SIZE: self.limits.stream_window,
                    MAX_HEADER_LIST_SIZE: self.limits.max_header_bytes,
                }
            )
        )

    # ------------------------------------------------------------------------------------------ places

    @property
    def active(self) -> int:
        return self._opened

    @property
    def room(self) -> int:
        if self.going_away or self.failed is not None or self._next_id > LAST_USABLE_ID:
            return 0
        allowed = self.peer.max_concurrent_streams if self.peer_settled else ASSUMED_STREAMS
        return max(0, min(MAX_OPEN_STREAMS if allowed is None else allowed, MAX_OPEN_STREAMS) - self._opened)

    def open(self) -> ClientStream:
        """A leg, only while there is room."""
        stream = ClientStream(self, reused=self._used)
        self._opened += 1
        self._on_change()
        return stream

    def _settle(self, stream: ClientStream) -> None:
        if not stream.settled:
            stream.settled = True
            self._opened -= 1

    def _on_stream_closed(self) -> None:
        self._on_change()

    def close_stream(self, stream: Stream, how: int) -> None:
        assert isinstance(stream, ClientStream)
        self._settle(stream)
        super().close_stream(stream, how)

    def withdraw(self, stream: ClientStream) -> None:
        """A leg that never had an id is given back."""
        if stream in self._waiting:
            self._waiting.remove(stream)
        self.sender.drop(stream)
        stream.recv_open = False
        if not stream.settled:
            self._settle(stream)
            self._on_change()

    def leave(self) -> None:
        """Take no new leg; those in progress may end."""
        self.going_away = True
        self._on_change()

    # ------------------------------------------------------------------------------------------ requests

    def request(self, stream: ClientStream, head: RequestHead) -> None:
        """Give the leg its id and send its head; or say that it cannot be sent here."""
        if self.failed is not None or self.going_away or self._next_id > LAST_USABLE_ID:
            self._refuse(stream, "the connection takes no new request")
        elif head.protocol and not self.peer_settled:
            self._waiting.append(stream)
        elif head.protocol and (head.protocol != b"websocket" or not self.peer.enable_connect_protocol):
            self._refuse(stream, "the edge offers no extended connect (RFC 8441)")
        else:
            self._send_request(stream, head)

    def _refuse(self, stream: ClientStream, detail: str) -> None:
        self.withdraw(stream)
        stream.on_refused(detail)

    def _send_request(self, stream: ClientStream, head: RequestHead) -> None:
        stream.id = self.last_id = self._next_id
        self._next_id += 2
        self._used = True
        stream.method = head.method
        stream.tunnel = head.protocol != b"" or head.method == b"CONNECT"
        stream.pending_head = None
        stream.send_window = self.sender.stream_window
        stream.priority = of_fields(head.fields) or UNSAID  # uploads share a connection too (RFC 9218 9)
        stream.opened_turn = self.sender.turn
        self.streams[stream.id] = stream
        self.sender.headers(stream, write_request(head))
        self.sender.ready(stream)
        if stream.ending and not stream.queue:
            self.sender.end(stream)

    def tell_priority(self, stream: ClientStream) -> None:
        """PRIORITY_UPDATE, to an edge that knows RFC 9218 by its SETTINGS (2.1.1): others may count it against us."""
        if stream.renewed and self.peer.no_rfc7540_priorities:
            stream.renewed = False
            self.sender.control(priority_update(stream.id, bytes(stream.priority)))

    def _on_settled(self) -> None:
        for stream in self.streams.values():
            assert isinstance(stream, ClientStream)
            self.tell_priority(stream)
        waiting, self._waiting = self._waiting, []
        for stream in waiting:
            assert stream.pending_head is not None
            self.request(stream, stream.pending_head)
        self._on_change()

    # ------------------------------------------------------------------------------------------ answers

    def _on_fields(self, stream: Stream | None, stream_id: int, fields: Fields | None, ended: bool) -> None:
        if stream is None:
            self._judge_late(stream_id, "HEADERS")
            return
        assert isinstance(stream, ClientStream)
        if fields is None:
            raise H2StreamError(Code.CANCEL, f"response header list of more than {self.limits.max_header_bytes} bytes")
        if not stream.takes_data:
            self._on_response(stream, fields, ended)
        elif not ended:
            raise H2StreamError(Code.PROTOCOL_ERROR, "second final HEADERS without END_STREAM (RFC 9113 8.1)")
        else:
            self._received_end(stream, read_trailers(fields))

    def _on_response(self, stream: ClientStream, fields: Fields, ended: bool) -> None:
        websocket = stream.tunnel and stream.method != b"CONNECT"
        head = read_response(fields, method=stream.method, ended=ended, tunnel=websocket)
        stream.answered = True
        if head.status < 200 and head.status != 101:
            stream.interims += 1
            if stream.interims > MAX_INTERIM:
                raise H2StreamError(Code.ENHANCE_YOUR_CALM, f"more than {MAX_INTERIM} interim heads")
            stream.receiver.on_interim(head)
            return
        stream.takes_data = True
        if websocket and head.status >= 300:
            stream.end()  # refused: an ordinary answer to a request that ends here, else its place would stay taken
        stream.tunnel = stream.tunnel and head.status < 300
        stream.expected = 0 if head.no_body else head.length
        stream.receiver.on_head(head)
        if ended and stream.recv_open:
            self._received_end(stream, None)

    # ------------------------------------------------------------------------------------------ the edge leaves

    def _on_going_away(self, last_id: int, code: int) -> None:
        if last_id > self._last_processed:
            raise H2ConnectionError(Code.PROTOCOL_ERROR, f"GOAWAY raises its last stream to {last_id} (RFC 9113 6.8)")
        self._last_processed = last_id
        self.going_away = True
        for stream in [stream for stream in self.streams.values() if stream.id > last_id]:
            assert isinstance(stream, ClientStream)
            self.close_stream(stream, RESET_BY_US)
            stream.on_refused(f"h2 goaway {code_name(code)}, last stream {last_id}", code)
        for stream in list(self._waiting):
            self._refuse(stream, "the connection goes away")
        self._on_change()

    def lose(self, detail: str, code: int | None = None, *, broken: bool = False) -> None:
        super().lose(detail, code, broken=broken)
        waiting, self._waiting = self._waiting, []
        for stream in waiting:
            self._refuse(stream, detail)
