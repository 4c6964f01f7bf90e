"""A client's request over HTTP/3: what the client says becomes words, what the relay says becomes frames.

Theory: what is refused before the gateway hears of it is refused here (431, 501), and here is decided what the ending of a
stream means to the other side. A client that resets its stream or stops ours cancels the whole exchange: both directions end.
"""

from __future__ import annotations

from typing import Protocol

from proxy import errors
from proxy.io import quic_leg
from proxy.io.quic_codes import (
    EXCESSIVE_LOAD,
    NO_ERROR,
    REQUEST_CANCELLED,
    REQUEST_INCOMPLETE,
    StreamFault,
    code_for_client,
)
from proxy.io.quic_h3 import MAX_LINES
from proxy.io.quic_heads import request_head, response_section
from proxy.io.quic_leg import StreamLeg
from proxy.io.rims import Service
from proxy.messages import Abort, Cause, Fields, Head, Party, RequestHead, ResponseHead, Stage
from proxy.priority import Priority, adjusted, of_fields

PARTING_S = 10.0
"""How long the last bytes of an answer that was cut may take to arrive before it is reset: as long as over HTTP/1.1."""


class Connection(quic_leg.Connection, Protocol):
    """What a client's leg needs of its connection besides."""

    service: Service

    def deliver(self, leg: ServerLeg, head: RequestHead) -> None:
        """A head is whole."""


class ServerLeg(StreamLeg):
    """A request of a client, as the relay holds it."""

    _connection: Connection

    def __init__(self, connection: Connection, stream_id: int) -> None:
        super().__init__(connection, stream_id)
        self._websocket = False
        self._connect = False
        self._tunnel = False
        self._spoken_for = False  # the client said how urgent it is
        self.updated: Priority | None = None  # and last by a PRIORITY_UPDATE

    # -- Leg ----------------------------------------------------------------------------------------------------------

    def head(self, head: Head) -> None:
        assert isinstance(head, ResponseHead)
        if self.dead or self._head_sent:
            return
        self._head_sent = True
        # 101 is how the relay says that a WebSocket's edge accepted; a CONNECT is accepted by any 2xx.
        self._tunnel = (self._websocket and head.status == 101) or (self._connect and 200 <= head.status < 300)
        self._connection.h3.send_section(self.stream_id, response_section(head, websocket=self._websocket))
        value = head.get(b"priority")
        if value is not None:
            quic = self._connection.quic
            quic.prioritize(self.stream_id, adjusted(quic.priority_of(self.stream_id), value))
        self._connection.wake()

    def prioritize(self, priority: Priority) -> None:
        if not self._spoken_for:
            self._connection.quic.prioritize(self.stream_id, priority)

    def client_prioritizes(self, priority: Priority) -> None:
        """The client's own word, before which ours does not count."""
        self._spoken_for = True
        self._connection.quic.prioritize(self.stream_id, priority)

    def client_updates(self, priority: Priority) -> None:
        """A PRIORITY_UPDATE of the client's, which may come before its request's head."""
        self.updated = priority
        self.client_prioritizes(priority)
        self.receiver.on_priority(priority)

    def interim(self, head: ResponseHead) -> None:
        if not (self.dead or self._head_sent):
            self._connection.h3.send_section(self.stream_id, response_section(head, websocket=False))
            self._connection.wake()

    def end(self) -> None:
        super().end()
        if not (self.dead or self.got_end or self._tunnel):
            # RFC 9114 4.1: the answer is whole, the rest of the upload is not wanted, and that is no error.
            self._connection.h3.detach(self.stream_id)
            self._connection.quic.stop(self.stream_id, NO_ERROR)
            self.got_end = True
            self._ended()

    def abort(self, abort: Abort) -> None:
        self.cut(code_for_client(abort, tunnel=self._tunnel), within_s=PARTING_S)

    # -- Sink ---------------------------------------------------------------------------------------------------------

    def on_section(self, section: Fields, *, last: bool) -> None:
        if self._got_head:
            self.take_trailers(section)
            return
        head = request_head(section, ended=last)
        self._got_head = True
        self._expected = head.length
        self._websocket = head.protocol == b"websocket"
        self._connect = head.method == b"CONNECT"
        if self._websocket or self._connect:
            self._expected = None
        said = of_fields(head.fields)
        if said is not None and not self._spoken_for:
            self.client_prioritizes(said)
        if head.protocol and not self._websocket:
            self.refuse(501, "this :protocol is not known here; websocket is")
        else:
            self._connection.deliver(self, head)

    def on_finished(self) -> None:
        if self._got_head:
            super().on_finished()
        else:
            self.cut(REQUEST_INCOMPLETE)

    def on_oversized(self, size: str) -> None:
        limit = self._connection.service.limits.max_header_bytes
        if self._got_head:
            self._tell_client_fault(f"trailers of {size}; at most {limit} bytes are read", EXCESSIVE_LOAD)
        else:
            bounds = f"at most {limit} bytes (proxy.max_header_size) in {MAX_LINES} lines are read"
            self.refuse(431, f"request fields of {size}; {bounds}")

    def refuse(self, status: int, message: str) -> None:
        """Answer without the gateway; the rest of the request is not read."""
        self._got_head = True
        head, body = errors.own_answer(status, message, code="bad_request")
        self.head(head)
        self.data(body)
        self.end()

    def on_fault(self, fault: StreamFault) -> None:
        self._tell_client_fault(fault.detail, fault.code)

    def _tell_client_fault(self, detail: str, code: int) -> None:
        if not self.dead:
            receiver = self.receiver
            self.cut(code)
            receiver.on_abort(Abort(Party.CLIENT, Stage.BODY, Cause.BROKEN, detail, code))

    # -- what the transport says --------------------------------------------------------------------------------------

    def client_left(self, code: int, detail: str) -> None:
        """The client reset its request or wants no answer: both are a cancel, and both directions end."""
        if not self.dead:
            receiver = self.receiver
            self.cut(REQUEST_CANCELLED)
            receiver.on_abort(Abort(Party.CLIENT, Stage.BODY, Cause.CANCELLED, detail, code))
