"""Serve HTTP/1.1 on one connection: each request becomes an exchange with a leg of its own.

Theory: one exchange at a time; bytes of the next request wait in `_buffer` (bounded: reading stops when they exceed one
head). While an answer is due, reading goes on, because a reset is only seen by a socket that is read; a bare FIN after a
whole request is no cancel (RFC 9112 9.6), a FIN in the middle of one is.

      HEAD --head whole--> BODY --request whole--> ANSWER --answer whole--> HEAD (kept alive) or LINGER (closing)
                             `--answer whole first--> LINGER: the rest of the upload is read and dropped for a while, since
                                closing at once would reset the connection and lose the answer (RFC 9112 9.6)

A head that comes again, but for the digits of its length, becomes known: from then on whole requests like it go the
short way (`proxy.io.express`), for which the phase is ANSWER and `_leg` stays None. Whatever but their answer happens
meanwhile asks `_unfolded` for an ordinary leg first.

Owner: the transport owns this object; the listener's service may call drain() and close_now(). One timer at a time, re-armed
lazily: setting `_deadline` costs nothing, the timer looks at it when it fires.

Writes of one loop turn leave together: head and first body bytes in one segment, one TLS record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum

from proxy import errors
from proxy.h1 import Framing, HeadError, head_end, parse_request, write_response
from proxy.h1_bodies import BodyReader, LengthReader, request_reader
from proxy.io.express import Express, Known, KnownAnswer
from proxy.io.first_heads import FirstHeads
from proxy.io.inbound_h1_leg import H1ClientLeg
from proxy.io.orphans import peer_is_gone
from proxy.io.rims import Origin, Service
from proxy.io.splice import Sink, Splice
from proxy.io.wire import Wire
from proxy.known_heads import Shape
from proxy.messages import Abort, Cause, Party, RequestHead, Stage

LINGER_S = 2.0
LINGER_BYTES = 1024 * 1024
FLUSH_S = 10.0  # how long a cut stream's last bytes may take to leave
GONE_AFTER_S, GONE_EVERY_S = (
    0.02,
    1.0,
)  # after a FIN: when to ask whether anybody is left to answer, and how often again


class Phase(Enum):
    HEAD = "head"
    BODY = "body"
    ANSWER = "answer"
    TUNNEL = "tunnel"
    LINGER = "linger"
    CLOSED = "closed"


# By names of their own: Python 3.11 finds a member of an Enum by an exception inside, 0.1 us each time.
HEAD, BODY, ANSWER, TUNNEL, LINGER, CLOSED = Phase


class H1ServerConnection(asyncio.Protocol):
    """The server's side of one HTTP/1.x connection; an InboundConnection."""

    def __init__(self, service: Service, origin: Origin, firsts: FirstHeads | None = None) -> None:
        """`firsts`: what its listener remembers of the first heads of other connections."""
        self.service = service
        self.origin = origin
        self.limits = service.limits
        # Clients that are told close first, before a request of theirs can meet our close (RFC 9112 9.3).
        self._idle_timeout_s = self.limits.idle_timeout_s
        idle_s = int(self._idle_timeout_s)
        self.keep_alive = b"keep-alive: timeout=%d\r\n" % idle_s if idle_s else b""
        self._loop = asyncio.get_running_loop()
        self.wire = Wire(self._loop)
        self._phase = HEAD
        self._buffer = b""
        self._searched = 0
        self._leg: H1ClientLeg | None = None
        self._seen: Shape | None = None  # of the last head that went the ordinary way
        self._known: Known | None = None
        self._shape: Shape | None = None  # of `_known`
        self._firsts = firsts
        if firsts is not None and (recalled := firsts.recall(origin)) is not None:
            self._shape, self._known = recalled
        self._express = Express(self)
        self._reader: BodyReader | None = None
        self._splice: Splice | None = None  # may take the rest of the body
        self._request_whole = False
        self._eof = self._fin_sent = False
        self._draining = False
        self._served = 0
        self._full = False
        self._lingered = 0
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    # ---------------------------------------------------------------- the transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.wire.attach(transport)
        if not self.service.on_connected(self):
            self._close()
            return
        self._set_deadline(self.limits.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        leg, self._leg = self._unfolded(), None
        self._phase = CLOSED
        if self._timer is not None:
            self._timer.cancel()
        if leg is not None:
            detail = "connection reset" if exc is not None else "connection closed"
            leg.receiver.on_abort(Abort(Party.CLIENT, Stage.BODY, Cause.CANCELLED, detail))
        self.wire.let_go()
        self.service.on_disconnected(self)

    def data_received(self, data: bytes) -> None:
        if self._known is not None and self._phase is HEAD and not self._buffer and self._begin_known(data):
            return
        turn = self.wire.turn
        turn.is_open = True
        try:
            self._hear(data)
        finally:
            turn.end()

    def _hear(self, data: bytes) -> None:
        phase = self._phase
        if phase is BODY:
            self._on_body(data, 0)
        elif phase is TUNNEL:
            if self._leg is not None:
                self._leg.receiver.on_data(data)
        elif phase is HEAD:
            self._buffer = self._buffer + data if self._buffer else data
            self._next_request()
        elif phase is ANSWER:
            self._keep_for_later(data)
        elif phase is LINGER:
            self._lingered += len(data)
            if self._lingered > LINGER_BYTES:
                self._close()

    def eof_received(self) -> bool:
        """True keeps our direction open: the answer is still owed. (TLS transports close regardless.)"""
        leg = self._unfolded()
        self._eof = True
        if self._phase is TUNNEL and leg is not None:
            leg.receiver.on_end()
            return not self._fin_sent
        if self._phase is HEAD and self._served and self._buffer:  # pipelined requests, not looked at yet
            self._loop.call_soon(self._resume_head)
            return True
        return self._after_fin(leg)

    def _after_fin(self, leg: H1ClientLeg | None) -> bool:
        """No byte comes any more: a request that is whole is answered, one that is not will never be. True: answered."""
        if self._phase is BODY and leg is not None:
            self._leg = None
            leg.receiver.on_abort(
                Abort(Party.CLIENT, Stage.BODY, Cause.CANCELLED, "connection closed inside the request")
            )
            self._abort_transport()
            return False
        if self._phase is ANSWER and leg is not None:
            self._loop.call_later(GONE_AFTER_S, self._cancel_if_gone, leg)
        return self._phase is ANSWER

    def _cancel_if_gone(self, leg: H1ClientLeg) -> None:
        """After a FIN: end an exchange that nobody waits for. Asked again while it lasts, for a client that first shut
        down and then closed tells us nothing the second time."""
        if self._leg is not leg or self._phase is not ANSWER:
            return
        gone = peer_is_gone(self.wire.name("sockname"), self.wire.name("peername"))
        if gone:
            self._leg = None
            leg.receiver.on_abort(Abort(Party.CLIENT, Stage.BODY, Cause.CANCELLED, "connection closed"))
            self._abort_transport()
        elif gone is False:
            self._loop.call_later(GONE_EVERY_S, self._cancel_if_gone, leg)

    def pause_writing(self) -> None:
        self._full = True
        if self._leg is not None:
            self._leg.receiver.on_full()

    def resume_writing(self) -> None:
        self._full = False
        if self._leg is not None:
            self._leg.receiver.on_drained()

    # ---------------------------------------------------------------- requests

    def _next_request(self) -> None:
        """Look for a whole head in the buffer and start its exchange."""
        if self._searched == 0:
            self._buffer = self._buffer.lstrip(b"\r\n")  # RFC 9112 2.2: an empty line before a request is ignored
            if not self._buffer:
                self._await_more()
                return
            self._set_deadline(self.limits.header_timeout_s)
        try:
            end = head_end(self._buffer, self._searched, self.limits.max_header_bytes)
            if end < 0:
                self._searched = len(self._buffer)
                self._await_more()
                return
            raw, rest = self._buffer[:end], self._buffer[end:]
            head, framing = parse_request(raw, self.origin.scheme)
        except HeadError as problem:
            self._refuse(problem)
            return
        self._buffer, self._searched = rest, 0
        if framing.keep_alive:
            self._make_known(raw, head)
        self._begin(head, framing)

    def _await_more(self) -> None:
        """The buffer holds no whole head. After a FIN nothing can complete it: what was whole has been answered."""
        if self._eof:
            self._linger()

    def _make_known(self, raw: bytes, head: RequestHead) -> None:
        """Twice the same shape, and the next will not be read. The first head of a connection is for those of others: most
        connections that carry one request carry no other."""
        if not self._served:
            if self._firsts is not None:
                self._firsts.note(raw, head, self.origin, self.service)
            return
        try:
            shape = Shape(raw)
        except ValueError:
            return
        if self._seen == shape:
            self._known, self._shape = self.service.known(head, self.origin), shape
        self._seen = shape

    def _begin_known(self, message: bytes) -> bool:
        """Send a whole request of the known shape the short way; False: it is for the ordinary way."""
        assert self._known is not None and self._shape is not None
        body_at = self._shape.body_at(message)
        if not body_at or self._draining or not self._express.begin(self._known, message[body_at:]):
            return False
        self._served += 1
        self._deadline = float("inf")
        self._request_whole = True
        self._phase = ANSWER
        return True

    def answer_known(self, answer: KnownAnswer, timing: bytes, body: bytes) -> bool:
        """Send a whole answer and go on; False, and nothing sent, when only an ordinary leg can answer now."""
        if self._draining or self._full:
            return False
        self._express.is_running = False
        direct = self.wire.direct
        direct(b"%b%b%b%b\r\n%b" % (answer.before, timing, answer.after, self.keep_alive, body))
        self._phase = HEAD
        self._searched = 0
        self._set_deadline(self._idle_timeout_s)
        if self._buffer:
            self.wire.resume()
            self._loop.call_soon(self._resume_head)
        return True

    def unfold(self) -> H1ClientLeg:
        """Go on with an ordinary leg for the request in progress, whose head is whole and whose body was read."""
        leg = self._leg = H1ClientLeg(self, Framing(), b"")
        return leg

    def _unfolded(self) -> H1ClientLeg | None:
        """The leg in progress; a request on the short way gets an ordinary one."""
        if self._express.is_running:
            self._express.unfold()
        return self._leg

    def _begin(self, head: RequestHead, framing: Framing) -> None:
        self._served += 1
        self._deadline = float("inf")
        leg = self._leg = H1ClientLeg(self, framing, head.method)
        if head.protocol == b"websocket":
            leg.websocket_key = head.get(b"sec-websocket-key") or b""
        self._reader = request_reader(head, framing)
        self._request_whole = self._reader.done
        self._phase = ANSWER if self._request_whole else BODY
        self.service.on_request(leg, head, self.origin)
        if self._leg is not leg:  # answered or aborted inside the call
            return
        if not self._request_whole:
            rest, self._buffer = self._buffer, b""
            self._on_body(rest, 0)
        elif self._phase is ANSWER:
            self._keep_for_later(b"")
            if not head.protocol:
                leg.receiver.on_end()
        if self._eof and self._leg is leg:  # pipelined before the FIN
            self._after_fin(leg)

    def _on_body(self, chunk: bytes, start: int) -> None:
        leg, reader = self._leg, self._reader
        if leg is None or reader is None:
            return
        try:
            at = reader.feed(chunk, start, leg.receiver.on_data)
        except HeadError as problem:
            self._broken_body(leg, problem)
            return
        if self._leg is not leg or not reader.done:
            if self._splice is not None and isinstance(reader, LengthReader):
                self._splice.begin(reader.left)
            return
        self._splice = None
        self._request_whole = True
        if self._phase is BODY:
            self._phase = ANSWER
            # Whoever stopped the upload may never let it go on, now that it is whole: a client that leaves must be seen.
            self.wire.resume()
        if at < len(chunk):
            self._keep_for_later(chunk[at:])
        if reader.trailers:
            leg.receiver.on_trailers(reader.trailers)
        leg.receiver.on_end()

    def splice_into(self, leg: H1ClientLeg, sink: Sink, heard: Callable[[int], None]) -> None:
        """What is left of the request of `leg` may pass into `sink` unseen, where only its end has to be known."""
        if self._leg is leg and self._phase is BODY and isinstance(self._reader, LengthReader):
            self._splice = Splice(self.wire, sink, heard, self._on_spliced)

    def _on_spliced(self, left: int) -> None:
        """The body, of which `left` bytes are to come, goes on the ordinary way."""
        if not isinstance(self._reader, LengthReader):
            return
        self._reader.left, self._splice = left, None
        if not left:
            self._on_body(b"", 0)

    def _broken_body(self, leg: H1ClientLeg, problem: HeadError) -> None:
        """The rest of this connection has no meaning any more: answer 400 if nothing was said yet, and close."""
        self._leg = None
        leg.receiver.on_abort(Abort(Party.CLIENT, Stage.BODY, Cause.BROKEN, problem.detail))
        if leg.answered:
            self._abort_transport()
        else:
            self._refuse(problem)

    def _keep_for_later(self, data: bytes) -> None:
        """Pipelined bytes. Reading stops at one head's worth: the limit of what is kept is that of a head."""
        if self._phase is TUNNEL:
            return
        self._buffer = self._buffer + data if self._buffer else data
        if len(self._buffer) > self.limits.max_header_bytes:
            self.wire.pause()

    def _refuse(self, problem: HeadError) -> None:
        head, body = errors.own_answer(problem.status, problem.detail, code="bad_request")
        raw, _ = write_response(head, http10=False, close=True)
        self.wire.write(raw + body)
        self._linger()

    # ---------------------------------------------------------------- answers, called by the leg

    def finish(self, leg: H1ClientLeg, *, keep_alive: bool) -> None:
        """The answer of `leg` is out. Serve the next request, or close in a way that loses nothing."""
        if self._leg is not leg:
            return
        self._leg = self._reader = self._splice = None
        if not keep_alive or self.closing or not self._request_whole:
            self._linger()
        else:
            self._await_next()

    def _await_next(self) -> None:
        self._phase = HEAD
        self._searched = 0
        self._set_deadline(self.limits.idle_timeout_s)
        self.wire.resume()
        if self._buffer:
            # Not from inside the answer's call: a burst of pipelined requests must not nest.
            self._loop.call_soon(self._resume_head)

    def _resume_head(self) -> None:
        if self._phase is HEAD and self._buffer:
            self._next_request()

    def abandon(self, leg: H1ClientLeg, *, flush: bool) -> None:
        """End `leg` uncleanly: what was written leaves, then the connection closes without the last chunk."""
        if self._leg is not leg:
            return
        self._leg = None
        if not flush:
            self._abort_transport()
            return
        self._close()
        self._set_deadline(FLUSH_S)

    def start_tunnel(self) -> None:
        self._phase = TUNNEL
        self._request_whole = True
        early, self._buffer = self._buffer, b""
        self.wire.resume()
        if early and self._leg is not None:
            self._loop.call_soon(self.data_received, early)
        if self._eof:  # its half-close came before the tunnel stood
            self._loop.call_soon(self.eof_received)

    def half_close(self) -> None:
        """Say FIN after what was written; the other direction goes on. Over TLS the connection stays whole until the peer
        ends it, or whoever holds the tunnel loses patience."""
        self._fin_sent = True
        if self._eof:
            self.wire.close()
        else:
            self.wire.half_close()

    def close_tunnel(self) -> None:
        """FIN after what was written where that can be said, the end of the connection where it cannot: over TLS a client
        that closed its WebSocket would wait for us as long as we for it (RFC 6455 7.1.1: the server closes first)."""
        self._fin_sent = True
        if self._eof or not self.wire.half_close():
            self.wire.close()

    def stop_reading(self, leg: H1ClientLeg) -> None:
        if self._leg is leg and self._phase in (BODY, TUNNEL):
            self.wire.pause()

    def start_reading(self, leg: H1ClientLeg) -> None:
        # Pipelined bytes beyond a head's worth wait for this answer.
        if self._leg is leg and len(self._buffer) <= self.limits.max_header_bytes:
            self.wire.resume()

    @property
    def in_tunnel(self) -> bool:
        return self._phase is TUNNEL

    @property
    def request_whole(self) -> bool:
        return self._request_whole

    @property
    def closing(self) -> bool:
        """Whether no request follows. After a FIN those that were pipelined before it do (RFC 9112 9.3.2)."""
        return self._draining or (self._eof and not self._buffer)

    # ---------------------------------------------------------------- ends

    def drain(self) -> None:
        """Answer what is in progress with `Connection: close`; close at once when idle."""
        self._draining = True
        if self._phase is HEAD and not self._buffer:
            self._close()

    def close_now(self) -> None:
        leg, self._leg = self._unfolded(), None
        if leg is not None:
            leg.receiver.on_abort(Abort(Party.US, Stage.BODY, Cause.REFUSED, "stopping"))
        self._abort_transport()

    def _linger(self) -> None:
        """Half-close, then read and drop for a while, so that the peer gets our last bytes before any reset."""
        if self._phase is CLOSED:
            return
        self._phase = LINGER
        owed = not self._eof and (not self._request_whole or bool(self._buffer))
        if owed and self.wire.half_close():
            self.wire.resume()
            self._set_deadline(LINGER_S)
        else:
            self.wire.close()
            self._set_deadline(FLUSH_S)

    def _close(self) -> None:
        self._phase = LINGER
        self.wire.close()

    def _abort_transport(self) -> None:
        if self._phase is not CLOSED:
            self._phase = LINGER
            self.wire.reset()

    # ---------------------------------------------------------------- time

    def _set_deadline(self, seconds: float) -> None:
        self._deadline = deadline = self._loop.time() + seconds
        # An armed timer that fires too late for the new deadline is replaced; an early one just looks again.
        if self._timer is None or self._timer_at > deadline + 0.5:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = deadline
            self._timer = self._loop.call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now = self._loop.time()
        if self._phase is CLOSED or self._deadline == float("inf"):
            return
        if now + 0.001 < self._deadline:
            self._timer_at = self._deadline
            self._timer = self._loop.call_at(self._deadline, self._on_timer)
        elif self._phase is HEAD and self._buffer:
            self._refuse(HeadError(f"no whole head within {self.limits.header_timeout_s:g} s", 408))
        elif self._phase is LINGER:
            self._abort_transport()
        else:
            self._close()
