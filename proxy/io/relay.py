"""Join a client's leg and an edge's leg for one exchange: the one pump.

Theory: `proxy.exchange` decides, this does. An `Exchange` is the receiver of both legs (through two small sides, so that a
word of an abandoned edge leg is told from one of the current leg). Body bytes take the short way: one call in, one call out,
no queue, no task, no timer. What is counted or observed hangs here, never in a rim.

  request bytes are held (`_kept`) until the answer begins, at most REPLAY_BYTES; while they are all there the request may be
  sent again where `proxy.failover` allows it. While no edge is open yet, the client is paused instead of held without bound.

Deadlines: each exchange has one moment at which it is overdue; the relay looks at all of them four times a second. A timer
for each exchange, armed anew for each chunk, would cost more than the chunk.

Owner: the gateway's Relay owns every exchange; an exchange ends itself in `_over`, exactly once, and is then forgotten.
Who may cancel: the client's leg (on_abort), a deadline, `Relay.abort_all` at the hard stop.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable

from proxy import errors, headers
from proxy.exchange import Event, Phase, Step, decide
from proxy.failover import SAFE_METHODS, Attempts, Dial, GiveUp
from proxy.io.edges import EdgeState, PoolState
from proxy.io.reopening import Reopening
from proxy.io.rims import DialMarks, Origin
from proxy.io.upgrades import PlainTunnel, Tunnel, join_websocket
from proxy.messages import NOBODY, Abort, Cause, Fields, Leg, Party, RequestHead, ResponseHead, Stage
from proxy.redirects import Redirection, follow
from proxy.routing import host_of, is_loopback
from proxy.sse import Observer
from proxy.waterfall import RequestRecord, Waterfall

REPLAY_BYTES = 1024 * 1024
"""Request bytes kept for a second try; a larger body is sent once (it cannot be replayed, and the client is told so)."""
HOLD_BYTES = 64 * 1024
"""Request bytes taken before an edge is open; then the client is paused."""
TICK_S = 0.25
IDEMPOTENT = SAFE_METHODS | {b"PUT", b"DELETE"}
SECOND_LOOK = frozenset({307, 308, 421, 425, 429, 502, 503, 504})


class Relay:
    """What all exchanges share: clock, bounds, the set of living exchanges, and where records go."""

    def __init__(self, *, clock: Callable[[], float], record: Callable[[RequestRecord], None]) -> None:
        self.clock = clock
        self.record = record
        self.now = clock()  # the time of the last tick: good enough for deadlines
        self.exchanges: set[Exchange] = set()
        self.max_body_bytes = 512 * 1024 * 1024
        self.trusted: tuple[headers.Network, ...] = ()
        self._ids = (f"{os.urandom(3).hex()}-{n:x}" for n in itertools.count(1))
        self._ticking: asyncio.TimerHandle | None = None

    def begin(self, leg: Leg, head: RequestHead, origin: Origin, pool: PoolState, target: bytes) -> Exchange:
        """Take over a client's leg: sets its receiver and starts dialling."""
        exchange = Exchange(self, leg, head, origin, pool, target, next(self._ids))
        if not self.exchanges:
            self.now = self.clock()
        self.exchanges.add(exchange)
        if self._ticking is None:
            self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        exchange.start()
        return exchange

    def _tick(self) -> None:
        self.now = now = self.clock()
        self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._tick) if self.exchanges else None
        for exchange in [x for x in self.exchanges if x.deadline <= now or x.total_deadline <= now]:
            exchange.overdue(now)

    def drain(self) -> None:
        """Tell tunnels that we are going; other exchanges end by themselves or at the hard stop."""
        for exchange in list(self.exchanges):
            exchange.drain()

    def abort_all(self, detail: str) -> None:
        """The hard stop: every exchange ends now, none of them cleanly."""
        for exchange in list(self.exchanges):
            exchange.refuse(Abort(Party.US, Stage.BODY, Cause.REFUSED, detail))


class Exchange:
    """One request and its answer, from the head to the end."""

    __slots__ = (
        "__weakref__", "_abort", "_attempts", "_client", "_client_ended", "_client_full", "_command", "_continued",
        "_edge", "_edge_begun", "_edge_full", "_held_back", "_kept", "_kept_bytes", "_leg", "_marks", "_opening",
        "_phase", "_relay", "_reopening", "_side", "_status", "_target", "_trailers", "_tunnel", "bytes_in",
        "bytes_out", "deadline", "head", "id", "observer", "origin", "pool", "started_at", "total_deadline",
        "waterfall",
    )  # fmt: skip

    def __init__(
        self, relay: Relay, client: Leg, head: RequestHead, origin: Origin, pool: PoolState, target: bytes, name: str
    ) -> None:
        now = relay.clock()
        self._relay = relay
        self._client = client
        self.head = head
        self.origin = origin
        self.pool = pool
        self.id = name
        self._target = target
        self._phase = Phase.DIALING
        self._leg: Leg | None = None
        self._side: _EdgeSide | None = None
        self._edge: EdgeState | None = None
        self._edge_begun = False
        self._opening: _Opening | None = None
        self._attempts: Attempts | None = None
        self._command: Dial | None = None
        self._marks = DialMarks()
        self._kept: list[bytes] | None = []
        self._kept_bytes = 0
        self._client_ended = bool(head.protocol)  # an upgrade has no end of its own
        self._client_full = self._edge_full = self._held_back = self._continued = False
        self._trailers: Fields = []
        self._tunnel: Tunnel | None = None
        self._reopening: Reopening | None = None
        self._status = 0
        self._abort: Abort | None = None
        self.observer: Observer | None = None
        self.bytes_in = self.bytes_out = 0
        self.started_at = time.time()
        self.waterfall = Waterfall(now)
        timeouts = pool.config.timeouts
        self.deadline = float("inf")
        self.total_deadline = now + timeouts.total_s if timeouts.total_s else float("inf")
        client.receiver = _ClientSide(self)

    def __repr__(self) -> str:
        edge = self._edge.id if self._edge is not None else "-"
        pool = self.pool.config.name
        return (
            f"<Exchange {self.id} {self._phase.value} pool={pool} edge={edge} in={self.bytes_in} out={self.bytes_out}>"
        )

    # ---------------------------------------------------------------- attempts

    def start(self) -> None:
        now = self.waterfall.start
        config = self.pool.config
        candidates = self.pool.choose(now, self.origin.peer.encode())
        self._attempts = Attempts(
            retry=config.retry,
            budget=self.pool.budget,
            candidates=candidates,
            follow_redirects=config.websocket.follow_redirects,
        )
        command = self._attempts.first(now)
        if isinstance(command, GiveUp):
            self._shed(now)
        else:
            self._dial(command)

    def _shed(self, now: float) -> None:
        """Nobody may be tried: say why and when to come again, rather than queue without bound."""
        shed = self.pool.shed(now)
        self._abort = Abort(Party.US, Stage.CONNECT, Cause.REFUSED, shed.reason, unprocessed=True)
        self._phase = Phase.OVER
        dialect = errors.dialect_of(self._target)
        self._say(
            *errors.own_answer(
                503,
                f"pool {self.pool.config.name}: {shed.reason}",
                code="no_edge_available",
                dialect=dialect,
                should_retry=True,
                retry_after_s=shed.retry_after_s,
            )
        )
        self._over()

    def _dial(self, command: Dial) -> None:
        self._command = command
        edge = self._edge = self.pool.edges[command.edge_id]
        if edge.config.standby and self._offers_redirect:
            self._send_to_standby(edge)
            return
        edge.begin(self._relay.clock())
        self._edge_begun = True
        self.deadline = float("inf")  # the dial has its own: timeouts.connect
        self._opening = opening = _Opening(self)
        edge.connections.open(opening, fresh=command.fresh, tunnel=bool(self.head.protocol))

    @property
    def _offers_redirect(self) -> bool:
        return self.head.protocol == b"websocket" and self.pool.config.websocket.on_edge_failure == "redirect"

    def _send_to_standby(self, edge: EdgeState) -> None:
        """No active edge takes the upgrade: the client is told where the standby is (RFC 9110 15.4.8)."""
        config = edge.config
        scheme = "https" if config.is_tls else "http"
        location = f"{scheme}://{config.authority}{config.base_path}".encode() + self._target
        self._phase = Phase.OVER
        message = "no active edge takes this WebSocket; a standby does"
        dialect = errors.dialect_of(self._target)
        self._say(*errors.own_answer(307, message, code="standby", dialect=dialect, fields=[(b"location", location)]))
        self._over()

    def on_open(self, leg: Leg, marks: DialMarks) -> None:
        self._opening = None
        if self._phase is not Phase.DIALING:
            leg.abort(Abort(Party.US, Stage.CONNECT, Cause.CANCELLED, "no longer wanted"))
            return
        now = self._relay.clock()
        self._marks = marks
        self.waterfall.open(now, marks.resolve_s, marks.connect_s, marks.tls_s)
        self._leg = leg
        self._side = leg.receiver = _EdgeSide(self)
        self._step(Event.OPENED)

    def on_open_failed(self, abort: Abort) -> None:
        self._opening = None
        if self._phase is Phase.DIALING:
            self._attempt_failed(abort)

    def _attempt_failed(self, abort: Abort) -> None:
        """The attempt ended before the first byte of an answer: another one, or the end."""
        now = self._relay.clock()
        assert self._attempts is not None and self._edge is not None
        self._finish_edge(abort, now)
        self._leg = self._side = None
        command = self._attempts.on_failed(
            self._edge.id,
            abort,
            reused=self._marks.reused,
            replayable=self._kept is not None,
            method=self.head.method,
            now=now,
        )
        self._next(command)

    def _next(self, command: Dial | GiveUp) -> None:
        if isinstance(command, GiveUp):
            self._give_up(command.abort)
        else:
            self._command = command
            self._step(Event.RETRY)

    def _give_up(self, abort: Abort) -> None:
        self._abort = abort
        self._step(Event.GAVE_UP)

    def _try_again(self, command: Dial) -> None:
        """Leave the current edge's answer unread and dial another."""
        now = self._relay.clock()
        self._finish_edge(None, now)
        if self._leg is not None:
            self._leg.receiver = NOBODY
            self._leg.abort(Abort(Party.US, Stage.HEAD, Cause.CANCELLED, "answered by another edge"))
        self._leg = self._side = None
        self._command = command
        self._step(Event.RETRY)

    # ---------------------------------------------------------------- the table's steps

    def _step(self, event: Event) -> None:
        self._phase, step = decide(self._phase, event)
        _STEPS[step](self)

    def _do_dial(self) -> None:
        assert self._command is not None
        self._dial(self._command)

    def _do_send(self) -> None:
        leg, edge = self._leg, self._edge
        assert leg is not None and edge is not None
        self._edge_full = False
        self._touch_first_byte()
        leg.head(self._edge_head(edge, leg.version))
        for chunk in self._kept or ():
            leg.data(chunk)
        if self._client_ended:
            self._end_request(leg)
        elif self._held_back and not self._edge_full:
            self._held_back = False
            self._client.resume()

    def _edge_head(self, edge: EdgeState, version: str) -> RequestHead:
        head, config = self.head, edge.config
        fields = headers.request_fields(
            head,
            peer=self.origin.peer,
            trusted=headers.is_trusted(self.origin.peer, self._relay.trusted),
            version=self.origin.version,
            edge_fields=edge.header_fields,
        )
        if self.origin.early_data:
            fields.append((b"early-data", b"1"))  # RFC 8470 5.1
        scheme = b"https" if config.is_tls else b"http"
        target = config.base_path.encode() + self._target if config.base_path else self._target
        return RequestHead(
            head.method,
            target,
            scheme,
            config.authority.encode(),
            fields,
            head.length,
            head.protocol,
            head.expect_continue,
        )

    def _end_request(self, leg: Leg) -> None:
        self.waterfall.sent = self._relay.clock()
        if self.head.protocol:
            return
        if self._trailers:
            leg.trailers(self._trailers)
        leg.end()

    def _do_cancel(self) -> None:
        """The client is gone, or we end it: nothing may go on working for it."""
        if self._opening is not None and self._edge is not None:
            self._edge.connections.cancel(self._opening)
            self._opening = None
        if self._leg is not None:
            self._leg.receiver = NOBODY
            self._leg.abort(self._abort or Abort(Party.CLIENT, Stage.BODY, Cause.CANCELLED))
        self._over()

    def _do_fail(self) -> None:
        abort = self._abort
        assert abort is not None
        dialect = errors.dialect_of(self._target)
        edge = self._edge.id if self._edge is not None else ""
        sent = self.waterfall.opened >= 0
        self._say(*errors.for_abort(abort, dialect, edge=edge, sent=sent))
        self._over()

    def _do_cancel_and_fail(self) -> None:
        self._cancel_edge()
        self._do_fail()

    def _do_cut(self) -> None:
        assert self._abort is not None
        self._client.receiver = NOBODY
        self._client.abort(self._abort)
        self._over()

    def _do_cancel_and_cut(self) -> None:
        self._cancel_edge()
        self._do_cut()

    def _cancel_edge(self) -> None:
        assert self._abort is not None
        if self._opening is not None and self._edge is not None:
            self._edge.connections.cancel(self._opening)
            self._opening = None
        if self._leg is not None:
            self._leg.receiver = NOBODY
            self._leg.abort(self._abort)

    def _do_finish(self) -> None:
        self._client.receiver = NOBODY
        if self._leg is not None:
            self._leg.receiver = NOBODY
            if not self._client_ended:
                # The answer is whole and the rest of the upload is of no use (RFC 9110 9.3, RFC 9113 8.1).
                self._leg.abort(Abort(Party.US, Stage.BODY, Cause.CANCELLED, "answered before the request ended"))
        self._client.end()
        self._over()

    def _do_nothing(self) -> None:
        self._over()

    def _say(self, head: ResponseHead, body: bytes) -> None:
        """An answer of our own."""
        self._status = head.status
        self._client.receiver = NOBODY
        if self.head.method == b"HEAD":
            head.no_body = True
        if self._held_back or self._edge_full:
            self._client.resume()
        self._client.head(head)
        if not head.no_body:
            self._client.data(body)
        self._client.end()

    # ---------------------------------------------------------------- from the client

    def client_data(self, chunk: bytes) -> None:
        self.bytes_in += len(chunk)
        leg = self._leg
        if self.bytes_in > self._relay.max_body_bytes and self._phase is not Phase.TUNNEL:
            self._body_too_large()
            return
        kept = self._kept
        if kept is not None:
            self._kept_bytes += len(chunk)
            if leg is not None and self._kept_bytes > REPLAY_BYTES:
                self._kept = None
            else:
                kept.append(chunk)
        if leg is not None:
            self.deadline = self._relay.now + self.pool.config.timeouts.first_byte_s
            leg.data(chunk)
        elif self._kept_bytes > HOLD_BYTES and not self._held_back:
            self._held_back = True
            self._client.pause()

    def _body_too_large(self) -> None:
        limit = self._relay.max_body_bytes
        self._abort = Abort(Party.US, Stage.BODY, Cause.REFUSED, f"request body of more than {limit} bytes")
        if self._phase is Phase.ANSWERING:
            self._step(Event.REFUSED)
            return
        self._cancel_edge()
        self._phase = Phase.OVER
        message = f"request body of more than {limit} bytes; raise proxy.max_body_size"
        self._say(*errors.own_answer(413, message, code="body_too_large", dialect=errors.dialect_of(self._target)))
        self._over()

    def client_end(self, trailers: Fields) -> None:
        self._client_ended = True
        self._trailers = trailers
        if self._leg is not None and self._phase in (Phase.ASKED, Phase.ANSWERING):
            self._end_request(self._leg)
            if self._phase is Phase.ASKED:
                self._touch_first_byte()

    def client_abort(self, abort: Abort) -> None:
        self._abort = abort
        self._step(Event.CLIENT_LOST)

    def client_full(self) -> None:
        self._client_full = True
        if self._leg is not None:
            self._leg.pause()

    def client_drained(self) -> None:
        self._client_full = False
        if self._leg is not None:
            self._leg.resume()

    # ---------------------------------------------------------------- from the edge

    def edge_head(self, head: ResponseHead) -> None:
        if self._phase is not Phase.ASKED:
            return
        now = self._relay.clock()
        self.waterfall.head = now
        if head.status in SECOND_LOOK and self._second_look(head, now):
            return
        if head.status == 101:
            self._join(head)
        elif self.head.protocol == b"websocket" and 200 <= head.status < 300:
            self._not_a_websocket()
        else:
            self._answer(head, now)

    def _second_look(self, head: ResponseHead, now: float) -> bool:
        """Whether a redirect is followed or a status gets a second try; True: this answer is not for the client."""
        assert self._attempts is not None and self._edge is not None
        replayable = self._kept is not None and self._client_ended
        if head.status in (307, 308):
            return self._redirected(follow(head, self.pool.config, self._edge.config), replayable=replayable, now=now)
        idempotent = self.head.method in IDEMPOTENT
        command = self._attempts.on_status(
            self._edge.id, head.status, replayable=replayable, idempotent=idempotent, now=now
        )
        if command is None:
            return False
        self._edge.note_status(head, now)
        self._try_again(command)
        return True

    def _redirected(self, redirection: Redirection | None, *, replayable: bool, now: float) -> bool:
        if redirection is None:
            return False  # not ours: the client decides (RFC 9110 15.4)
        assert self._attempts is not None
        command = self._attempts.on_redirect(redirection.edge_id, replayable=replayable, now=now)
        if command is not None:
            self._target = redirection.target
            self._try_again(command)
            return True
        # Passing it on would hand out the address of an edge, which the client may not reach and must not know.
        self._cancel_edge_quietly()
        self._phase = Phase.OVER
        status, code, message = (
            (508, "redirect_loop", "the edges of the pool redirect in a loop")
            if replayable
            else (503, "redirect_not_followed", "the edge moved, and the request's body is no longer held")
        )
        dialect = errors.dialect_of(self._target)
        self._say(*errors.own_answer(status, message, code=code, dialect=dialect, should_retry=not replayable))
        self._over()
        return True

    def _cancel_edge_quietly(self) -> None:
        self._abort = self._abort or Abort(Party.US, Stage.HEAD, Cause.CANCELLED, "the answer is not passed on")
        self._cancel_edge()
        self._abort = None

    def _not_a_websocket(self) -> None:
        self._cancel_edge_quietly()
        self._phase = Phase.OVER
        message = "the edge does not speak WebSocket on this path"
        fields: Fields = [(b"upgrade", b"websocket")] if self.origin.version == "h1" else []
        self._say(
            *errors.own_answer(
                426, message, code="no_websocket", dialect=errors.dialect_of(self._target), fields=fields
            )
        )
        self._over()

    def _answer(self, head: ResponseHead, now: float) -> None:
        """The commit point."""
        edge = self._edge
        assert edge is not None
        self._status = head.status
        self._kept = None
        edge.note_status(head, now, ttfb_s=now - self.waterfall.opened)
        self.deadline = self._relay.now + self.pool.config.timeouts.idle_s
        if (content_type := head.get(b"content-type")) is not None and content_type[
            :17
        ].lower() == b"text/event-stream":
            self.observer = Observer() if head.get(b"content-encoding") is None else None
        self._step(Event.ANSWERED)
        if self._phase is Phase.ANSWERING:
            self._client.head(self._client_head(head))

    def _client_head(self, head: ResponseHead) -> ResponseHead:
        assert self._edge is not None
        timing = self.waterfall.server_timing(self._describe())
        loopback = is_loopback(host_of(self.head.authority))
        fields = headers.response_fields(head, server_timing=timing, loopback=loopback)
        return ResponseHead(head.status, fields, head.length, head.no_body, head.reason)

    def _describe(self) -> str:
        assert self._edge is not None
        reused = " reused" if self._marks.reused else " resumed" if self._marks.resumed else ""
        attempts = self._attempts.moves if self._attempts is not None else 0
        return f"{self.id} {self._edge.id} {self._marks.version}{reused}{f' retries={attempts}' if attempts else ''}"

    def edge_interim(self, head: ResponseHead) -> None:
        if self._phase is not Phase.ASKED:
            return
        self._touch_first_byte()
        if head.status == 100:
            # One 100 at most, and only to a client that waits for it (RFC 9110 10.1.1): the edge owns the handshake.
            if not self.head.expect_continue or self._continued:
                return
            self._continued = True
        self._client.interim(
            ResponseHead(head.status, headers.response_fields(head, server_timing=b"", loopback=False))
        )

    def edge_data(self, chunk: bytes) -> None:
        if self._phase is not Phase.ANSWERING:
            return
        relay = self._relay
        if not self.bytes_out:
            self.waterfall.first = relay.clock()
        self.bytes_out += len(chunk)
        self.deadline = relay.now + self.pool.config.timeouts.idle_s
        if self.observer is not None:
            self.observer.feed(chunk)
        self._client.data(chunk)

    def edge_trailers(self, fields: Fields) -> None:
        if self._phase is Phase.ANSWERING:
            self._client.trailers(fields)

    def edge_end(self) -> None:
        if self._phase is Phase.ANSWERING:
            self._step(Event.EDGE_ENDED)

    def edge_abort(self, abort: Abort) -> None:
        if self._phase is Phase.ASKED:
            self._attempt_failed(abort)
        elif self._phase is not Phase.OVER:
            self._abort = abort
            self._leg = None
            self._step(Event.EDGE_LOST)

    def edge_full(self) -> None:
        self._edge_full = True
        self._client.pause()

    def edge_drained(self) -> None:
        self._edge_full = False
        self._client.resume()

    # ---------------------------------------------------------------- tunnels

    def _join(self, head: ResponseHead) -> None:
        assert self._leg is not None and self._edge is not None
        self._status = 101
        self._kept = None
        self.deadline = self.total_deadline = float("inf")  # a tunnel has its own keepalive
        self._step(Event.SWITCHED)
        fields = headers.response_fields(head, server_timing=b"", loopback=False)
        self._client.head(ResponseHead(101, fields, reason=head.reason))
        if self.head.protocol == b"websocket":
            reopening = self._reopening = Reopening(self)
            reconnect = None if self._offers_redirect else reopening.begin
            websocket = self.pool.config.websocket
            tunnel = join_websocket(self._client, self._leg, websocket, on_over=self._tunnel_over, reconnect=reconnect)
            reopening.tunnel, reopening.accepted, self._tunnel = tunnel, head, tunnel
        else:
            self._tunnel = PlainTunnel(self._client, self._leg, self._tunnel_over)

    # What a search for another edge needs of the exchange; see proxy.io.reopening.

    @property
    def is_over(self) -> bool:
        return self._phase is Phase.OVER

    def next_edge(self, abort: Abort) -> Dial | GiveUp:
        """The current edge failed the tunnel: whom to try now."""
        assert self._attempts is not None and self._edge is not None
        now = self._relay.clock()
        self._finish_edge(abort, now)
        edge_id = self._edge.id
        return self._attempts.on_failed(edge_id, abort, reused=False, replayable=True, method=self.head.method, now=now)

    def open_edge(self, command: Dial, opening: Reopening) -> None:
        edge = self._edge = self.pool.edges[command.edge_id]
        edge.begin(self._relay.clock())
        self._edge_begun = True
        edge.connections.open(opening, fresh=command.fresh, tunnel=True)

    def ask(self, leg: Leg, marks: DialMarks) -> None:
        """Say the upgrade again, to another edge."""
        assert self._edge is not None
        self._marks = marks
        leg.head(self._edge_head(self._edge, leg.version))

    def _tunnel_over(self, abort: Abort | None, bytes_in: int, bytes_out: int) -> None:
        """The tunnel has ended both legs by itself; `abort` when it was not a clean end."""
        self.bytes_in += bytes_in
        self.bytes_out += bytes_out
        self._abort = abort
        self._phase = Phase.OVER
        self._over()

    def drain(self) -> None:
        if self._tunnel is not None:
            self._tunnel.drain()

    # ---------------------------------------------------------------- ends

    def _touch_first_byte(self) -> None:
        self.deadline = self._relay.clock() + self.pool.config.timeouts.first_byte_s

    def overdue(self, now: float) -> None:
        timeouts = self.pool.config.timeouts
        if now >= self.total_deadline:
            detail = f"not done within timeouts.total = {timeouts.total_s:g} s"
        elif self._phase is Phase.ANSWERING:
            who = "client took" if self._client_full else "edge sent"
            detail = f"{who} nothing for timeouts.idle = {timeouts.idle_s:g} s"
        else:
            detail = f"no answer within timeouts.first_byte = {timeouts.first_byte_s:g} s"
        by = Party.CLIENT if self._client_full else Party.EDGE
        self._abort = Abort(
            by, Stage.HEAD if self._phase is not Phase.ANSWERING else Stage.BODY, Cause.TIMED_OUT, detail
        )
        self._step(Event.TIMED_OUT)

    def refuse(self, abort: Abort) -> None:
        if self._tunnel is not None:
            self._tunnel.close_now()
            return
        self._abort = abort
        self._step(Event.REFUSED)

    def _finish_edge(self, abort: Abort | None, now: float) -> None:
        if self._edge is not None and self._edge_begun:
            self._edge_begun = False
            ttfb = (
                self.waterfall.head - self.waterfall.opened
                if self.waterfall.head >= 0 <= self.waterfall.opened
                else None
            )
            # What the client or we ended says nothing about the edge.
            fault = abort if abort is not None and abort.by is Party.EDGE else None
            self._edge.finish(fault, ttfb, now, reused=self._marks.reused)

    def _over(self) -> None:
        relay = self._relay
        if self not in relay.exchanges:
            return
        relay.exchanges.discard(self)
        now = self.waterfall.ended = relay.clock()
        self._client.receiver = NOBODY
        self._finish_edge(self._abort, now)
        relay.record(self._recorded())
        if self._reopening is not None:
            self._reopening.cancel()
        self._leg = self._side = self._tunnel = self._reopening = None

    def _recorded(self) -> RequestRecord:
        head, marks, observer = self.head, self._marks, self.observer
        record = RequestRecord(
            id=self.id,
            started_at=self.started_at,
            method=head.method.decode("latin-1"),
            host=host_of(head.authority),
            path=head.target.split(b"?", 1)[0].decode("latin-1"),
            pool=self.pool.config.name,
            edge=self._edge.id if self._edge is not None else "",
            client_version=self.origin.version,
            edge_version=marks.version if self.waterfall.opened >= 0 else "",
            status=self._status,
            fall=self.waterfall,
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
            attempts=1 + (self._attempts.moves if self._attempts is not None else 0),
            reused=marks.reused,
            resumed=marks.resumed,
        )
        if self._abort is not None:
            record.outcome = f"{self._abort.by.value} {self._abort.cause.value}"
            record.detail = self._abort.detail
        if observer is not None:
            record.events, record.usage, record.error_in_band = observer.events, observer.usage, observer.error
            record.incomplete = observer.incomplete
        return record


_STEPS: dict[Step, Callable[[Exchange], None]] = {
    Step.DIAL: Exchange._do_dial,
    Step.SEND: Exchange._do_send,
    Step.ANSWER: lambda exchange: None,
    Step.JOIN: lambda exchange: None,
    Step.FINISH: Exchange._do_finish,
    Step.CUT: Exchange._do_cut,
    Step.FAIL: Exchange._do_fail,
    Step.CANCEL: Exchange._do_cancel,
    Step.CANCEL_AND_FAIL: Exchange._do_cancel_and_fail,
    Step.CANCEL_AND_CUT: Exchange._do_cancel_and_cut,
    Step.NOTHING: Exchange._do_nothing,
}


class _ClientSide:
    """What the client's leg says."""

    __slots__ = ("_exchange", "_trailers")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._trailers: Fields = []

    def on_head(self, head: ResponseHead) -> None: ...
    def on_interim(self, head: ResponseHead) -> None: ...

    def on_data(self, chunk: bytes) -> None:
        self._exchange.client_data(chunk)

    def on_trailers(self, fields: Fields) -> None:
        self._trailers = fields

    def on_end(self) -> None:
        self._exchange.client_end(self._trailers)

    def on_abort(self, abort: Abort) -> None:
        self._exchange.client_abort(abort)

    def on_full(self) -> None:
        self._exchange.client_full()

    def on_drained(self) -> None:
        self._exchange.client_drained()


class _EdgeSide:
    """What the current edge's leg says. The exchange replaces it by NOBODY when it lets a leg go."""

    __slots__ = ("_exchange",)

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def on_head(self, head: ResponseHead) -> None:
        self._exchange.edge_head(head)

    def on_interim(self, head: ResponseHead) -> None:
        self._exchange.edge_interim(head)

    def on_data(self, chunk: bytes) -> None:
        self._exchange.edge_data(chunk)

    def on_trailers(self, fields: Fields) -> None:
        self._exchange.edge_trailers(fields)

    def on_end(self) -> None:
        self._exchange.edge_end()

    def on_abort(self, abort: Abort) -> None:
        self._exchange.edge_abort(abort)

    def on_full(self) -> None:
        self._exchange.edge_full()

    def on_drained(self) -> None:
        self._exchange.edge_drained()


class _Opening:
    """One wait for a leg: a late answer to a cancelled wait must not reach the exchange's next one."""

    __slots__ = ("_exchange",)

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def on_open(self, leg: Leg, marks: DialMarks) -> None:
        self._exchange.on_open(leg, marks)

    def on_open_failed(self, abort: Abort) -> None:
        self._exchange.on_open_failed(abort)
