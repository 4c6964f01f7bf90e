"""A request to an HTTP/3 edge: what the relay says becomes frames, what the edge says becomes words.

Theory: a WebSocket is an extended CONNECT (RFC 9220, RFC 8441): its request has no end of its own, a 2xx opens the tunnel and
is told as 101, FIN is the half-close of either direction. Refused, it is an ordinary answer and the stream ends.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from proxy.io import quic_leg
from proxy.io.quic_codes import (
    EXCESSIVE_LOAD,
    MESSAGE_ERROR,
    REQUEST_CANCELLED,
    UNPROCESSED,
    StreamFault,
    code_for_edge,
)
from proxy.io.quic_h3 import MAX_LINES
from proxy.io.quic_heads import malformed, request_section, response_head
from proxy.io.quic_leg import StreamLeg
from proxy.io.quic_wire import LONGEST_STRING
from proxy.messages import Abort, Cause, Fields, Head, Party, RequestHead, ResponseHead, Stage
from proxy.priority import Priority, of_fields

MAX_INTERIMS = 64
"""Interim responses to one request: more are sport."""
MAX_SECTION = 64 * 1024
"""Bytes of a response's fields that are read."""


class Connection(quic_leg.Connection, Protocol):
    """What an edge's leg needs of its connection besides."""

    @property
    def allows_websocket(self) -> bool: ...


class EdgeLeg(StreamLeg):
    """A request to an edge, as the relay holds it."""

    _connection: Connection

    def __init__(self, connection: Connection, stream_id: int, *, reused: bool) -> None:
        super().__init__(connection, stream_id)
        self.reused = reused
        self._method = b""
        self._no_body = False
        self._asks_tunnel = False
        self._interims = 0

    # -- Leg ----------------------------------------------------------------------------------------------------------

    def head(self, head: Head) -> None:
        assert isinstance(head, RequestHead)
        if self.dead or self._head_sent:
            return
        self._head_sent = True
        self._asks_tunnel = head.protocol == b"websocket" and self._connection.allows_websocket
        if head.method == b"CONNECT" or (head.protocol and not self._asks_tunnel):
            self._fail_later("the edge takes no such tunnel over h3 (RFC 9220)")
            return
        if len(head.target) > LONGEST_STRING:
            self._fail_later(f"a target of {len(head.target)} bytes does not fit an h3 request")
            return
        self._method = head.method
        said = of_fields(head.fields)
        if said is not None:
            self._connection.quic.prioritize(self.stream_id, said)  # uploads share a connection too (RFC 9218 9)
        self._connection.h3.send_section(self.stream_id, request_section(head))
        self._connection.wake()

    def prioritize(self, priority: Priority) -> None:
        if self._head_sent and not self.dead and not (self.sent_end and self.got_end):
            self._connection.quic.prioritize(self.stream_id, priority)
            self._connection.h3.send_priority(self.stream_id, bytes(priority))
            self._connection.wake()

    def interim(self, head: ResponseHead) -> None:
        """An edge leg is told no interim responses."""

    def abort(self, abort: Abort) -> None:
        self.cut(code_for_edge(abort))

    def _fail_later(self, detail: str) -> None:
        receiver = self.receiver
        self.cut(REQUEST_CANCELLED)
        abort = Abort(Party.US, Stage.CONNECT, Cause.REFUSED, detail, unprocessed=True)
        asyncio.get_running_loop().call_soon(receiver.on_abort, abort)

    @property
    def stage(self) -> Stage:
        """How far the exchange has come: what a retry is decided by."""
        if self._got_head or self._interims:
            return Stage.BODY
        return Stage.HEAD if self._head_sent else Stage.CONNECT

    # -- Sink ---------------------------------------------------------------------------------------------------------

    def on_section(self, section: Fields, *, last: bool) -> None:
        if self._got_head:
            self.take_trailers(section)
            return
        head = response_head(section, method=self._method, websocket=self._asks_tunnel)
        if head.status == 101:
            self._got_head = True
            self.receiver.on_head(head)
            return
        if head.status < 200:
            if last:
                raise malformed("the stream ended after an interim response")
            self._interims += 1
            if self._interims > MAX_INTERIMS:
                raise malformed(f"more than {MAX_INTERIMS} interim responses")
            self.receiver.on_interim(head)
            return
        self._got_head = True
        if self._asks_tunnel:
            self.end()  # refused: an ordinary answer to a request that ends here
        self._no_body = head.no_body
        self._expected = 0 if head.no_body else head.length
        if last and not head.no_body and head.length is None:
            head.length = 0
        self.receiver.on_head(head)

    def on_body(self, chunk: bytes) -> None:
        if self._no_body:
            raise malformed("a body where the answer has none")
        super().on_body(chunk)

    def on_finished(self) -> None:
        if not self._got_head:
            raise malformed("the stream ended before a final response")
        super().on_finished()

    def on_oversized(self, size: str) -> None:
        bounds = f"at most {MAX_SECTION} bytes in {MAX_LINES} lines are read"
        self._break(f"response fields of {size}; {bounds}", EXCESSIVE_LOAD)

    def on_fault(self, fault: StreamFault) -> None:
        self._break(fault.detail, fault.code)

    def _break(self, detail: str, code: int) -> None:
        if not self.dead:
            receiver, stage = self.receiver, self.stage
            self.cut(MESSAGE_ERROR if code == MESSAGE_ERROR else REQUEST_CANCELLED)
            receiver.on_abort(Abort(Party.EDGE, stage, Cause.BROKEN, detail, code))

    # -- what the transport says --------------------------------------------------------------------------------------

    def edge_reset(self, code: int) -> None:
        if not self.dead:
            receiver, stage = self.receiver, self.stage
            self.cut(REQUEST_CANCELLED)
            unprocessed = code in UNPROCESSED and stage is not Stage.BODY
            cause = Cause.REFUSED if unprocessed else Cause.LOST
            detail = f"h3 stream reset {code:#x} after {self._received} bytes"
            receiver.on_abort(Abort(Party.EDGE, stage, cause, detail, code, unprocessed=unprocessed))

    def connection_lost(self, code: int, detail: str) -> None:
        self.fail(Abort(Party.EDGE, self.stage, Cause.LOST, detail, code))
