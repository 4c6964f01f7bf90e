"""Join a client's leg and an edge's leg for one exchange: the one pump.

Theory: `proxy.exchange` decides, this does. An `Exchange` has one phase, at most one edge at a time, and two sides
(`proxy.io.sides`) that hear the legs. Body bytes take one call in and one call out; this file is about
attempts, steps and ends. What is counted or observed hangs here and in the sides, never in a rim.

  request bytes are held (`kept`) until the answer begins, at most REPLAY_BYTES; while they are all there the request may be
  sent again where `proxy.failover` allows it. While no edge is open yet, the client is paused instead of held without bound.

Owner: the relay; an exchange ends itself in `over`, exactly once, and is then forgotten.
Who may cancel: the client's leg (on_abort), a deadline, `Relay.abort_all` at the hard stop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from proxy import errors, headers
from proxy.exchange import TABLE, Event, Phase, Step
from proxy.failover import Attempts, Dial, GiveUp
from proxy.io.edge_state import EdgeState
from proxy.io.edges import PoolState
from proxy.io.passage import Passage
from proxy.io.rims import DialMarks, Origin
from proxy.io.sides import ClientSide, EdgeSide, Opening
from proxy.io.switched import Switched
from proxy.messages import NOBODY, Abort, Cause, Fields, Leg, Party, RequestHead, ResponseHead, Stage
from proxy.redirects import for_client
from proxy.routing import host_of, is_loopback
from proxy.sse import Observer
from proxy.waterfall import RequestRecord, Waterfall

if TYPE_CHECKING:
    from proxy.io.relay import Relay

NEVER = float("inf")
WITH_LOCATION = frozenset({201, 300, 301, 302, 303, 305, 307, 308})


class Exchange:
    """One request and its answer, from the head to the end."""

    # What most exchanges never touch is a default of the class, not a store for each of them.
    phase = Phase.DIALING
    leg: Leg | None = None
    edge: EdgeState | None = None
    abort: Abort | None = None
    observer: Observer | None = None
    switched: Switched | None = None
    passage: Passage | None = None
    kept_bytes = bytes_in = bytes_out = status = 0
    client_full = edge_full = held_back = continued = False
    trailers: Fields = []  # never appended to
    deadline = total_deadline = NEVER
    _attempts: Attempts | None = None
    _command: Dial | None = None
    _opening: Opening | None = None
    _marks: DialMarks | None = None
    _begun = False

    def __init__(
        self,
        relay: Relay,
        client: Leg,
        head: RequestHead,
        origin: Origin,
        pool: PoolState,
        target: bytes,
        name: str,
        *,
        now: float,
    ) -> None:
        self.relay = relay
        self.client = client
        self.head = head
        self.origin = origin
        self.pool = pool
        self.target = target
        self.id = name
        self.kept: list[bytes] | None = []
        self.client_ended = bool(head.protocol)  # an upgrade has no end of its own
        self.waterfall = Waterfall(now)
        self.idle_s = pool.config.timeouts.idle_s
        self._candidates: list[str] = []
        client.receiver = ClientSide(self)

    def __repr__(self) -> str:
        edge = self.edge.id if self.edge is not None else "-"
        pool = self.pool.config.name
        return (
            f"<Exchange {self.id} {self.phase.value} pool={pool} edge={edge} in={self.bytes_in} out={self.bytes_out}>"
        )

    @property
    def dialect(self) -> str:
        return errors.dialect_of(self.target)

    # ---------------------------------------------------------------- attempts

    def start(self) -> None:
        """Choose edges and dial the first."""
        now, pool, config = self.waterfall.start, self.pool, self.pool.config
        if config.timeouts.total_s:
            self.total_deadline = now + config.timeouts.total_s
        self._candidates = pool.choose(now, self.origin.peer.encode() if config.strategy == "hash" else b"")
        pool.budget.note_request(now)
        if pool.priorities is not None and (said := pool.priorities.of(self.target)) is not None:
            self.client.prioritize(said)
        if self._candidates:
            self._dial(self._candidates[0], fresh=False)
            return
        shed = pool.shed(now)
        self.abort = Abort(Party.US, Stage.CONNECT, Cause.REFUSED, shed.reason, unprocessed=True)
        self.say(*errors.shed(config.name, shed.reason, shed.retry_after_s, self.dialect))

    def was_sent(self, edge: EdgeState, leg: Leg, marks: DialMarks, body: bytes, candidates: list[str]) -> None:
        """Take over a request that somebody sent whole to `edge`, the first of `candidates`, which has counted it."""
        self.edge, self.leg, self._marks, self._begun = edge, leg, marks, True
        self._candidates = candidates
        self.kept = [body] if body else []
        self.kept_bytes = self.bytes_in = len(body)
        self.client_ended = True
        self.waterfall.open(self.waterfall.start, 0.0, 0.0, 0.0)
        self.waterfall.sent = self.waterfall.start
        self.phase = Phase.ASKED
        leg.receiver = EdgeSide(self)

    @property
    def attempts(self) -> Attempts:
        """The book of this request's dials, opened when the first of them was not enough."""
        if self._attempts is None:
            config = self.pool.config
            self._attempts = Attempts(
                retry=config.retry,
                budget=self.pool.budget,
                candidates=self._candidates,
                follow_redirects=config.websocket.follow_redirects,
                last_resort=self.pool.last_resort,
            )
            self._attempts.started(self._candidates[0])
        return self._attempts

    def _dial(self, edge_id: str, *, fresh: bool) -> None:
        edge = self.pool.edges[edge_id]
        if edge.config.standby and self.offers_redirect:
            self._send_to_standby(edge)
            return
        self._opening = opening = Opening(self)
        self.deadline = NEVER  # the dial has its own: timeouts.connect
        self.ask_for_leg(edge, opening, fresh=fresh)

    def ask_for_leg(self, edge: EdgeState, opening: object, *, fresh: bool) -> None:
        """Begin with an edge: it counts this request from now on."""
        self.edge = edge
        edge.begin(self.relay.clock())
        self._begun = True
        edge.connections.open(opening, fresh=fresh, upgrade=self.head.protocol)  # type: ignore[arg-type]

    @property
    def offers_redirect(self) -> bool:
        return self.head.protocol == b"websocket" and self.pool.config.websocket.on_edge_failure == "redirect"

    def _send_to_standby(self, edge: EdgeState) -> None:
        config = edge.config
        scheme = "https" if config.is_tls else "http"
        location = f"{scheme}://{config.authority}{config.base_path}".encode() + self.target
        self.say(*errors.go_to_standby(location, self.dialect))

    def opened(self, leg: Leg, marks: DialMarks) -> None:
        """The current opening was answered by a leg."""
        self._opening = None
        if self.phase is not Phase.DIALING:
            leg.abort(Abort(Party.US, Stage.CONNECT, Cause.CANCELLED, "no longer wanted"))
            return
        self.took_leg(marks)
        self.leg = leg
        leg.receiver = EdgeSide(self)
        self.step(Event.OPENED)

    def took_leg(self, marks: DialMarks) -> None:
        self._marks = marks
        self.waterfall.open(self.relay.clock(), marks.resolve_s, marks.connect_s, marks.tls_s)

    def open_failed(self, abort: Abort) -> None:
        """The current opening failed."""
        self._opening = None
        if self.phase is Phase.DIALING:
            self.attempt_failed(abort)

    def attempt_failed(self, abort: Abort) -> None:
        """The attempt ended before the first byte of an answer: another one, or the end."""
        self.leg = None
        command = self.next_after(abort, reused=self._marks is not None and self._marks.reused)
        if isinstance(command, Dial):
            self._command = command
            self.step(Event.RETRY)
        else:
            self.abort = command.abort
            self.step(Event.GAVE_UP)

    def next_after(self, abort: Abort, *, reused: bool) -> Dial | GiveUp:
        """What `proxy.failover` says to the failure of the current edge."""
        assert self.edge is not None
        now = self.relay.clock()
        self._finish_edge(abort, now)
        replayable = self.kept is not None or self.switched is not None
        return self.attempts.on_failed(
            self.edge.id, abort, reused=reused, replayable=replayable, method=self.head.method, now=now
        )

    def second_try(self, status: int, now: float, *, redirect_to: str | None, idempotent: bool) -> Dial | None:
        """What `proxy.failover` says to an answer that may be left unread."""
        assert self.edge is not None
        replayable = self.kept is not None and self.client_ended
        if redirect_to is not None:
            return self.attempts.on_redirect(redirect_to, replayable=replayable, now=now)
        return self.attempts.on_status(self.edge.id, status, replayable=replayable, idempotent=idempotent, now=now)

    def leave_for(self, command: Dial) -> None:
        """Leave the current edge's answer unread and dial another."""
        self._finish_edge(None, self.relay.clock())
        self._drop_leg(Abort(Party.US, Stage.HEAD, Cause.CANCELLED, "answered by another edge"))
        self._command = command
        self.step(Event.RETRY)

    # ---------------------------------------------------------------- the table's steps

    def step(self, event: Event) -> None:
        """Go on as the table says."""
        self.phase, step = TABLE[self.phase, event]
        do = _STEPS[step]
        if do is not None:
            do(self)

    def _do_dial(self) -> None:
        assert self._command is not None
        self._dial(self._command.edge_id, fresh=self._command.fresh)

    def _do_send(self) -> None:
        leg = self.leg
        assert leg is not None
        # An edge that was left may have stopped the client as well, and will never say that it may go on.
        stopped = self.held_back or self.edge_full
        self.held_back = self.edge_full = False
        self.await_first_byte()
        leg.head(self.edge_head())
        if self.client_full:  # it said so to an edge that was left, or to nobody
            leg.pause()
        if self.kept:
            for chunk in self.kept:
                leg.data(chunk)
        if self.client_ended:
            self.end_request(leg)
        elif stopped and not self.edge_full:
            self.client.resume()

    def edge_head(self) -> RequestHead:
        """The request's head as the current edge shall see it."""
        assert self.edge is not None
        return request_for_edge(self.relay, self.head, self.origin, self.pool, self.edge, self.target)

    def end_request(self, leg: Leg) -> None:
        self.waterfall.sent = self.relay.clock()
        if self.head.protocol:
            return
        if self.trailers:
            leg.trailers(self.trailers)
        leg.end()

    def client_head(self, head: ResponseHead) -> ResponseHead:
        """An edge's final head as the client shall see it."""
        timing = self.waterfall.server_timing(self._describe())
        fields = headers.response_fields(head, server_timing=timing, loopback=is_loopback(host_of(self.head.authority)))
        if head.status in WITH_LOCATION and self.edge is not None:
            fields = for_client(fields, self.pool.config, self.edge.config, self._prefix)
        return ResponseHead(head.status, fields, head.length, head.no_body, head.reason)

    @property
    def _prefix(self) -> bytes:
        """What was taken off the client's target: the pool's path, unless it came by one of the pool's hosts."""
        config, host = self.pool.config, host_of(self.head.authority)
        return b"" if host in map(str.lower, config.hosts) else config.path.encode().rstrip(b"/")

    def _describe(self) -> str:
        edge, marks = self.edge, self._marks
        assert edge is not None and marks is not None
        how = " reused" if marks.reused else " resumed" if marks.resumed else ""
        retries = f" retries={self._attempts.moves}" if self._attempts is not None and self._attempts.moves else ""
        return f"{self.id} {edge.id} {marks.version}{how}{retries}"

    def _do_fail(self) -> None:
        assert self.abort is not None
        edge = self.edge.id if self.edge is not None else ""
        self.say(*errors.for_abort(self.abort, self.dialect, edge=edge, sent=self.waterfall.opened >= 0))

    def _do_cancel(self) -> None:
        """The client is gone: nothing may go on working for it."""
        self.cancel_edge(self.abort or Abort(Party.CLIENT, Stage.BODY, Cause.CANCELLED))
        self.over()

    def _do_cut(self) -> None:
        assert self.abort is not None
        self.cancel_edge(self.abort)
        self.client.receiver = NOBODY
        self.client.abort(self.abort)
        self.over()

    def cancel_edge(self, abort: Abort) -> None:
        """End whatever there is towards an edge: a wait for a leg, or the leg."""
        if self._opening is not None and self.edge is not None:
            self.edge.connections.cancel(self._opening)
            self._opening = None
        self._drop_leg(abort)

    def _drop_leg(self, abort: Abort) -> None:
        leg, self.leg = self.leg, None
        if leg is not None:
            leg.receiver = NOBODY
            leg.abort(abort)

    def _do_finish(self) -> None:
        self.client.receiver = NOBODY
        if self.leg is not None:
            self.leg.receiver = NOBODY
            if not self.client_ended:
                # The answer is whole and the rest of the upload is of no use (RFC 9110 9.3, RFC 9113 8.1).
                self.leg.abort(Abort(Party.US, Stage.BODY, Cause.CANCELLED, "answered before the request ended"))
        self.client.end()
        self.over()

    def say(self, head: ResponseHead, body: bytes) -> None:
        """Answer in our own name, before the commit point; whatever there is towards an edge ends."""
        self.phase = Phase.OVER
        self.cancel_edge(self.abort or Abort(Party.US, Stage.HEAD, Cause.CANCELLED, "the answer is not passed on"))
        self.status = head.status
        client = self.client
        client.receiver = NOBODY
        if self.held_back or self.edge_full:
            client.resume()
        head.no_body = self.head.method == b"HEAD"
        client.head(head)
        if not head.no_body:
            client.data(body)
        client.end()
        self.over()

    # ---------------------------------------------------------------- deadlines and ends

    def await_first_byte(self) -> None:
        self.deadline = self.relay.clock() + self.pool.config.timeouts.first_byte_s

    def overdue(self, now: float) -> None:
        """A deadline passed: say whose, and end."""
        if self.passage is not None:
            self.passage.settle()
            if now < min(self.deadline, self.total_deadline):
                return
        timeouts, by = self.pool.config.timeouts, Party.CLIENT if self.client_full else Party.EDGE
        if now >= self.total_deadline:
            detail = f"not done within timeouts.total = {timeouts.total_s:g} s"
        elif self.phase is Phase.ANSWERING:
            who = "client took" if self.client_full else "edge sent"
            detail = f"{who} nothing for timeouts.idle = {timeouts.idle_s:g} s"
        elif self._waits_for_client:
            # Blamed on the edge, a few stalled uploads would take it out of the pool for everybody.
            by, detail = (
                Party.CLIENT,
                f"the rest of the request came too slowly for timeouts.first_byte = {timeouts.first_byte_s:g} s",
            )
        else:
            detail = f"no answer within timeouts.first_byte = {timeouts.first_byte_s:g} s"
        stage = Stage.BODY if self.phase is Phase.ANSWERING else Stage.HEAD
        self.abort = Abort(by, stage, Cause.TIMED_OUT, detail)
        self.step(Event.TIMED_OUT)

    @property
    def _waits_for_client(self) -> bool:
        """The rest of the request is due, and nobody but the client holds it up."""
        asked_to_wait = self.head.expect_continue and not (self.continued or self.bytes_in)
        held_up = self.edge_full or self.held_back or asked_to_wait
        return self.phase is Phase.ASKED and not (self.client_ended or held_up)

    def stop(self, abort: Abort) -> None:
        """The hard stop."""
        if self.switched is not None:
            self.switched.close_now()
            return
        self.abort = abort
        self.step(Event.REFUSED)

    def _finish_edge(self, abort: Abort | None, now: float) -> None:
        edge = self.edge
        if edge is None or not self._begun:
            return
        self._begun = False
        fall = self.waterfall
        ttfb_s = fall.head - fall.opened if fall.head >= 0 <= fall.opened else None
        # What the client or we ended says nothing about the edge.
        fault = abort if abort is not None and abort.by is Party.EDGE else None
        edge.finish(fault, ttfb_s, now, reused=self._marks is not None and self._marks.reused)

    def over(self) -> None:
        """The exchange has ended, however it did; exactly once."""
        relay = self.relay
        if self not in relay.exchanges:
            return
        relay.exchanges.discard(self)
        self.phase = Phase.OVER
        now = self.waterfall.ended = relay.clock()
        self.client.receiver = NOBODY
        self._finish_edge(self.abort, now)
        if self.switched is not None:
            self.switched.forget()
        relay.record(self._recorded())
        self.leg = self.switched = self.kept = None

    def _recorded(self) -> RequestRecord:
        if self.passage is not None:
            self.passage.settle()
        head, marks, abort, observer = self.head, self._marks, self.abort, self.observer
        record = RequestRecord(
            self.id,
            self.waterfall.start + self.relay.epoch,
            head.method.decode("latin-1"),
            host_of(head.authority),
            head.target.split(b"?", 1)[0].decode("latin-1"),
            self.pool.config.name,
            self.waterfall,
            self.edge.id if self.edge is not None else "",
            self.origin.version,
        )
        record.status = self.status
        record.bytes_in, record.bytes_out = self.bytes_in, self.bytes_out
        if self._attempts is not None:
            record.attempts = 1 + self._attempts.moves
        if marks is not None:
            record.edge_version, record.reused, record.resumed = marks.version, marks.reused, marks.resumed
        if abort is not None:
            record.outcome, record.detail = f"{abort.by.value} {abort.cause.value}", abort.detail
        if observer is not None:
            record.events, record.usage, record.error_in_band = observer.events, observer.usage, observer.error
            record.incomplete = observer.incomplete
            record.first_token, record.last_token = observer.first_token, observer.last_token
        return record


def request_for_edge(
    relay: Relay, head: RequestHead, origin: Origin, pool: PoolState, edge: EdgeState, target: bytes
) -> RequestHead:
    """A client's head as `edge` shall see it."""
    fields = headers.request_fields(
        head,
        peer=origin.peer,
        scheme=origin.scheme,
        trusted=relay.trusted,
        version=origin.version,
        edge_fields=edge.header_fields,
    )
    if origin.early_data:
        fields.append((b"early-data", b"1"))  # RFC 8470 5.1
    if pool.priorities is not None:
        pool.priorities.add_to(fields, target)
    place = edge.place
    if place.base_path and target != b"*":
        target = place.base_path + target
    return RequestHead(
        head.method, target, place.scheme, place.authority, fields, head.length, head.protocol, head.expect_continue
    )


_STEPS: dict[Step, Callable[[Exchange], None] | None] = {
    Step.DIAL: Exchange._do_dial,
    Step.SEND: Exchange._do_send,
    Step.ANSWER: None,  # the edge's side passes the head on itself
    Step.JOIN: None,  # and joins the directions
    Step.FINISH: Exchange._do_finish,
    Step.CUT: Exchange._do_cut,
    Step.FAIL: Exchange._do_fail,
    Step.CANCEL: Exchange._do_cancel,
    Step.CANCEL_AND_FAIL: Exchange._do_fail,  # an own answer cancels whatever there is towards an edge
    Step.CANCEL_AND_CUT: Exchange._do_cut,
    Step.NOTHING: None,
}
