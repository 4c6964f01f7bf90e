"""Hear the two legs of an exchange: what each word of a client and of an edge means to the other one.

Theory: one small object for each leg, so that a word of an abandoned leg (its receiver is NOBODY by then) is never taken for
one of the current leg. The words for bytes are the hot path: they count, observe and pass on, and nothing else.

Rules for editing: 1. nothing here may raise into a rim; 2. what ends or moves an exchange goes through `Exchange.step`;
3. after a call that may end the exchange, look at `phase` before going on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy import errors, headers
from proxy.exchange import Event, Phase
from proxy.failover import SAFE_METHODS
from proxy.io.passage import passage_of
from proxy.io.rims import DialMarks
from proxy.io.splice import LEAST, join
from proxy.io.switched import Switched
from proxy.messages import Abort, Cause, Fields, Leg, Party, ResponseHead, Stage
from proxy.priority import Priority, renewed
from proxy.redirects import follow
from proxy.sse import observer_for
from proxy.upload_pace import UploadPace

if TYPE_CHECKING:
    from proxy.io.exchange import Exchange

REPLAY_BYTES = 1024 * 1024
"""Request bytes kept for a second try; a larger body is sent once (it cannot be replayed, and the client is told so)."""
HOLD_BYTES = 64 * 1024
"""Request bytes taken before an edge is open; then the client is paused."""
PRIORITIES = 16
"""Times that a client may change its mind upstream: the edge's connection is shared, and its bounds on such frames too."""
IDEMPOTENT = SAFE_METHODS | {b"PUT", b"DELETE"}
SECOND_LOOK = frozenset({307, 308, 421, 425, 429, 502, 503, 504})
"""Statuses that may lead to another try before anything of them went to the client."""
ASKED, ANSWERING = Phase.ASKED, Phase.ANSWERING
"""By names of their own: Python 3.11 finds a member of an Enum by an exception inside, 0.1 us each time."""


class Opening:
    """One wait for a leg. A cancelled one hears nothing more, so that it cannot answer for the next."""

    __slots__ = ("_exchange",)

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def on_open(self, leg: Leg, marks: DialMarks) -> None:
        self._exchange.opened(leg, marks)

    def on_open_failed(self, abort: Abort) -> None:
        self._exchange.open_failed(abort)


class ClientSide:
    """What the client's leg says."""

    __slots__ = ("_pace", "_priorities", "_x")

    def __init__(self, exchange: Exchange) -> None:
        self._x = exchange
        self._pace: UploadPace | None = None
        self._priorities = PRIORITIES

    def on_data(self, chunk: bytes) -> None:
        x = self._x
        size = len(chunk)
        x.bytes_in += size
        if x.bytes_in > x.relay.max_body_bytes:
            self._too_large()
            return
        leg, kept = x.leg, x.kept
        if kept is not None:
            x.kept_bytes += size
            if leg is not None and x.kept_bytes > REPLAY_BYTES:
                x.kept = None
                join(x.client, leg, self.on_passed)
            else:
                kept.append(chunk)
        if leg is not None:
            if x.phase is ANSWERING:
                x.deadline = x.relay.now + x.idle_s
            else:
                x.deadline = self._next_due(size)
            leg.data(chunk)
            if x.edge_full and self._pace is not None:
                self._pace.held()
        elif x.kept_bytes > HOLD_BYTES and not x.held_back:
            x.held_back = True
            x.client.pause()

    def on_passed(self, size: int) -> None:
        """So many bytes went to the edge unseen."""
        x = self._x
        x.bytes_in += size
        if x.bytes_in > x.relay.max_body_bytes:
            self._too_large()
        elif x.phase is Phase.ANSWERING:
            x.deadline = x.relay.now + x.idle_s
        else:
            x.deadline = self._next_due(size)
            if x.edge_full and self._pace is not None:
                self._pace.held()

    def _next_due(self, size: int) -> float:
        """When more of the request is due after these bytes."""
        x = self._x
        if self._pace is None:
            self._pace = UploadPace(x.pool.config.timeouts.first_byte_s)
        return self._pace.came(size, x.relay.now)

    def _too_large(self) -> None:
        x, limit = self._x, self._x.relay.max_body_bytes
        x.abort = Abort(Party.US, Stage.BODY, Cause.REFUSED, f"request body of more than {limit} bytes")
        if x.phase is ANSWERING:
            x.step(Event.REFUSED)
        else:
            x.say(*errors.body_too_large(limit, x.dialect))

    def on_trailers(self, fields: Fields) -> None:
        self._x.trailers = fields

    def on_end(self) -> None:
        x = self._x
        x.client_ended = True
        leg = x.leg
        if leg is not None:
            x.end_request(leg)
            if x.phase is ASKED:
                x.await_first_byte()

    def on_abort(self, abort: Abort) -> None:
        self._x.abort = abort
        self._x.step(Event.CLIENT_LOST)

    def on_full(self) -> None:
        self._x.client_full = True
        if self._x.leg is not None:
            self._x.leg.pause()

    def on_drained(self) -> None:
        self._x.client_full = False
        if self._x.leg is not None:
            self._x.leg.resume()

    def on_priority(self, priority: Priority) -> None:
        if self._priorities:
            self._priorities -= 1
            self._x.head.fields = renewed(self._x.head.fields, priority)  # for an attempt that is still to come
            if self._x.leg is not None:
                self._x.leg.prioritize(priority)

    def on_head(self, head: ResponseHead) -> None: ...
    def on_interim(self, head: ResponseHead) -> None: ...


class EdgeSide:
    """What the current edge's leg says."""

    __slots__ = ("_x",)

    def __init__(self, exchange: Exchange) -> None:
        self._x = exchange

    def on_interim(self, head: ResponseHead) -> None:
        x = self._x
        if x.phase is not ASKED:
            return
        x.await_first_byte()
        if head.status == 100:
            # One 100 at most, and only to a client that waits for it (RFC 9110 10.1.1): the edge owns the handshake.
            if not x.head.expect_continue or x.continued:
                return
            x.continued = True
        x.client.interim(ResponseHead(head.status, headers.response_fields(head, server_timing=b"", loopback=False)))

    def on_head(self, head: ResponseHead) -> None:
        x = self._x
        if x.phase is not ASKED:
            return
        now = x.waterfall.head = x.relay.clock()
        if head.status in SECOND_LOOK and self._second_look(head, now):
            return
        if head.status == 101:
            x.kept = None
            x.status = 101
            x.step(Event.SWITCHED)
            x.switched = Switched(x, head)
        elif x.head.protocol == b"websocket" and 200 <= head.status < 300:
            x.say(*errors.no_websocket(x.dialect, x.origin.version))
        else:
            self._answer(head, now)

    def _answer(self, head: ResponseHead, now: float) -> None:
        """The commit point."""
        x = self._x
        assert x.edge is not None
        x.status = head.status
        x.kept = None
        x.edge.note_status(head, now, ttfb_s=now - x.waterfall.opened)
        x.deadline = x.relay.now + x.idle_s
        kind = head.get(b"content-type")
        if kind is not None and kind[:5].lower() == b"text/":
            x.observer = observer_for(kind, head.get(b"content-encoding"), x.relay.clock)
        x.step(Event.ANSWERED)
        x.client.head(x.client_head(head))
        if x.observer is None and x.leg is not None and (head.length or 0) > LEAST:
            join(x.leg, x.client, self.on_passed)

    def _second_look(self, head: ResponseHead, now: float) -> bool:
        """Whether a redirect is followed or a status gets a second try; True: this answer is not for the client."""
        x = self._x
        assert x.edge is not None
        if head.status in (307, 308):
            return self._redirected(head, now)
        command = x.second_try(head.status, now, redirect_to=None, idempotent=x.head.method in IDEMPOTENT)
        if command is None:
            return False
        x.edge.note_status(head, now)
        x.leave_for(command)
        return True

    def _redirected(self, head: ResponseHead, now: float) -> bool:
        x = self._x
        assert x.edge is not None
        redirection = follow(head, x.pool.config, x.edge.config)
        if redirection is None:
            return False  # it leads out of the pool: the client decides (RFC 9110 15.4)
        command = x.second_try(head.status, now, redirect_to=redirection.edge_id, idempotent=False)
        if command is not None:
            x.edge.note_status(head, now)
            x.target = redirection.target
            x.leave_for(command)
        else:
            x.say(*errors.redirect_not_followed(x.dialect, replayable=x.kept is not None and x.client_ended))
        return True

    def on_data(self, chunk: bytes) -> None:
        x = self._x
        if x.phase is not ANSWERING:
            return
        if not x.bytes_out:
            x.waterfall.first = x.relay.clock()
            x.passage = passage_of(x)
        x.bytes_out += len(chunk)
        x.deadline = x.relay.now + x.idle_s
        x.client.data(chunk)
        if x.observer is not None:  # after the bytes are on their way: undoing a coding may take a while
            x.observer.feed(chunk)

    def on_passed(self, size: int) -> None:
        """So many bytes went to the client unseen."""
        x = self._x
        if x.phase is Phase.ANSWERING:
            if not x.bytes_out:
                x.waterfall.first = x.relay.clock()
            x.bytes_out += size
            x.deadline = x.relay.now + x.idle_s

    def on_trailers(self, fields: Fields) -> None:
        if self._x.phase is ANSWERING:
            self._x.client.trailers(fields)

    def on_end(self) -> None:
        if self._x.phase is ANSWERING:
            self._x.step(Event.EDGE_ENDED)

    def on_abort(self, abort: Abort) -> None:
        x = self._x
        x.leg = None
        if x.phase is ASKED:
            x.attempt_failed(abort)
        else:
            x.abort = abort
            x.step(Event.EDGE_LOST)

    def on_full(self) -> None:
        self._x.edge_full = True
        self._x.client.pause()

    def on_drained(self) -> None:
        self._x.edge_full = False
        self._x.client.resume()

    def on_priority(self, priority: Priority) -> None: ...
