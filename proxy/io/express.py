"""Take a request that is like an earlier one of its connection the short way: one call out, one call back.

Theory: an SDK's or a browser's connection asks the same thing again and again. What was decided for its head (guard, route,
pool, fields for the edge) holds for every head of the same shape until the configuration changes, and so does what an
edge's answer head becomes. So a whole known request goes out in one write, and a whole known answer comes back in one; what
is decided anew for each is what can change between two: which edge, its limits, deadlines, measures, counters, the record.

      whole request like a known one ──► Express.begin ──► edge's warm h1 connection
      whole answer in one read       ──► Express.take  ──► client, record: over
      anything else whatsoever       ──► unfold: an ordinary exchange in the phase ASKED, with two ordinary legs,
                                         that hears the event as if it had carried the request from the start

There is one outcome here, the good one. No ending, abort, retry, stream or limit has a second implementation: whatever is
not a whole plain answer goes to `Exchange`, which is made in the state that it would have had. The tests hold the two ways
against each other byte for byte.

The client's side is a `Front`: the h1 rim, which knows heads by their bytes and has one `Express` that it uses again and
again, or a stream of h2 or h3 (`proxy.io.express_streams`), whose head was decoded and is compared field by field.

Owner: the front; the relay has an `Express` among its exchanges while it is running.

Rules for editing: 1. a new event unfolds; 2. what the ordinary way counts or measures is counted here; 3. what a decision
rests on is part of the shape, of the connection, or of the configuration, or it is decided anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from proxy import headers
from proxy.h1 import HeadError, parse_response, write_request, write_response
from proxy.io.edge_state import EdgeState, Place
from proxy.io.exchange import Exchange, request_for_edge
from proxy.io.outbound_h1 import H1EdgeConnection, H1EdgeLeg
from proxy.io.relay import Relay
from proxy.io.sides import SECOND_LOOK
from proxy.known_heads import Shape
from proxy.messages import NAME, Abort, Leg, RequestHead, ResponseHead
from proxy.routing import host_of, is_loopback
from proxy.secret_fields import SECRET
from proxy.sse import observer_for
from proxy.waterfall import RequestRecord, Waterfall

if TYPE_CHECKING:
    from proxy.io.edges import PoolState
    from proxy.io.rims import Origin

KEPT_ANSWERS = 64
MAX_ANSWER_HEAD = 4096
MARK = b"\x00"  # in no field's value: FIELD_LINE of proxy.h1 refuses it
SLOW_PATH_METHODS = frozenset({b"HEAD", b"CONNECT"})  # their answers are framed by the method


class KnownAnswer:
    """What an edge's answer head becomes for a client, but for Server-Timing and our own hop's fields."""

    __slots__ = ("after", "before", "fields", "head", "idle_hint_s", "length")

    def __init__(self, head: ResponseHead, length: int, idle_hint_s: float, *, loopback: bool) -> None:
        self.head = head
        self.length = length
        self.idle_hint_s = idle_hint_s
        fields = headers.response_fields(head, server_timing=MARK, loopback=loopback)
        self.fields = fields[:-1]
        told = ResponseHead(head.status, fields, head.length, head.no_body, head.reason)
        raw, _ = write_response(told, http10=False, close=False)
        self.before, _, after = raw.partition(MARK)
        self.after = after[:-2]  # the connection's keep-alive line comes before the empty one


class Lane:
    """What all known requests of one configuration share. `is_open` ends when another configuration is applied."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.is_open = True
        self.taken = 0  # requests that began here
        self._answers: tuple[dict[bytes, KnownAnswer | None], dict[bytes, KnownAnswer | None]] = ({}, {})

    def close(self) -> None:
        self.is_open = False

    def answer(self, raw: bytes, *, loopback: bool) -> KnownAnswer | None:
        """What this head of an answer becomes; None: the ordinary way must read it."""
        answers = self._answers[loopback]
        try:
            return answers[raw]
        except KeyError:
            pass
        known = _read_answer(raw, loopback=loopback)
        if known is None or SECRET.isdisjoint(map(NAME, known.head.fields)):  # a secret stays no longer than its answer
            if len(answers) >= KEPT_ANSWERS:
                answers.clear()
            answers[raw] = known
        return known


def _read_answer(raw: bytes, *, loopback: bool) -> KnownAnswer | None:
    try:
        head, framing = parse_response(raw, b"GET")
    except HeadError:
        return None  # the ordinary way says what is wrong with it
    if head.status < 200 or head.status in SECOND_LOOK or framing.chunked or head.length is None or head.no_body:
        return None
    if head.get(b"location") is not None:  # which may have to be said otherwise to the client
        return None
    kind = head.get(b"content-type")
    if not framing.keep_alive or (kind is not None and observer_for(kind, head.get(b"content-encoding"), float)):
        return None
    return KnownAnswer(head, head.length, framing.idle_hint_s, loopback=loopback)


class About:
    """What records say of all requests like one. Unlike `Known` it holds no field, so that no record keeps a secret."""

    __slots__ = ("host", "method", "path", "pool", "version")

    def __init__(self, head: RequestHead, pool: str, version: str) -> None:
        self.method = head.method.decode("latin-1")
        self.host = host_of(head.authority)
        self.path = head.target.split(b"?", 1)[0].decode("latin-1")
        self.pool = pool
        self.version = version


class Known:
    """A head of a client's connection that was judged and routed, for all heads of the connection like it."""

    __slots__ = ("_length_at", "about", "head", "lane", "loopback", "origin", "pool", "priority", "sent", "target")

    def __init__(self, head: RequestHead, origin: Origin, lane: Lane, pool: PoolState, target: bytes) -> None:
        self.head = head
        self.origin = origin
        self.lane = lane
        self.pool = pool
        self.target = target
        self.about = About(head, pool.config.name, origin.version)
        self.loopback = is_loopback(host_of(head.authority))
        self.priority = pool.priorities.of(target) if pool.priorities is not None else None
        names = [name for name, _ in head.fields]
        self._length_at = names.index(b"content-length") if b"content-length" in names else -1
        self.sent: dict[str, tuple[Place, bytes, bytes, bool]] = {}
        """By edge: where it is, and the head it gets, before and after the digits of its length, if it has one. Good as
        long as the edge is there."""

    def for_edge(self, edge: EdgeState) -> tuple[Place, bytes, bytes, bool]:
        """Make the entry of `sent` for an edge."""
        head = request_for_edge(self.lane.relay, self.head, self.origin, self.pool, edge, self.target)
        shape = Shape(write_request(head)[0])
        made = self.sent[edge.id] = (edge.place, shape.before, shape.after, shape.has_length)
        return made

    def head_of(self, length: int) -> RequestHead:
        """The head of a request with a body of `length` bytes."""
        head = self.head
        fields = head.fields.copy()
        if self._length_at >= 0:
            fields[self._length_at] = (b"content-length", b"%d" % length)
        return RequestHead(head.method, head.target, head.scheme, head.authority, fields, length)


def known_request(head: RequestHead, origin: Origin, lane: Lane, pool: PoolState, target: bytes) -> Known | None:
    """Make a judged head known; None where the short way has no business."""
    if head.length is None or head.protocol or head.expect_continue or head.method in SLOW_PATH_METHODS:
        return None
    if origin.early_data or not any(edge.connections.version == "h1" for edge in pool.edges.values()):
        return None
    try:
        known = Known(head, origin, lane, pool, target)
        for edge in pool.edges.values():
            known.for_edge(edge)
    except ValueError:
        return None
    return known


class KnownRecord:
    """What is counted of a request that went the short way; `whole` works out the rest, for those few that people read."""

    __slots__ = (
        "_about",
        "_number",
        "_relay",
        "bytes_in",
        "bytes_out",
        "edge",
        "first_byte_s",
        "pool",
        "resumed",
        "start",
        "status",
        "wall_s",
    )

    outcome = "ok"
    attempts = 1
    reused = True

    def __init__(self, relay: Relay, about: About, number: int, edge: str, start: float, wall_s: float) -> None:
        self._relay = relay
        self._about = about
        self._number = number
        self.pool = about.pool
        self.edge = edge
        self.start = start
        self.wall_s = wall_s
        self.first_byte_s: float | None = wall_s
        self.status = self.bytes_in = self.bytes_out = 0
        self.resumed = False

    def whole(self) -> RequestRecord:
        """The record that the ordinary way would have made."""
        relay, about = self._relay, self._about
        fall = Waterfall(self.start)
        fall.opened = fall.sent = self.start
        fall.head = fall.ended = self.start + self.wall_s
        if self.first_byte_s is not None:
            fall.first = fall.head
        return RequestRecord(
            relay.id_of(self._number).decode(),
            self.start + relay.epoch,
            about.method,
            about.host,
            about.path,
            about.pool,
            fall,
            self.edge,
            about.version,
            "h1",
            self.status,
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
            reused=True,
            resumed=self.resumed,
        )


class Front(Protocol):
    """The client's connection, as an Express sees it."""

    def answer_known(self, answer: KnownAnswer, timing: bytes, body: bytes) -> bool:
        """Send a whole answer and go on; False, and nothing sent, when only an ordinary leg can answer now."""

    def unfold(self) -> Leg:
        """Go on with an ordinary leg for the request in progress, whose head is whole and whose body was read."""


class Express:
    """One known request in progress, or none. To the edge's connection it is the leg; see the module's picture."""

    __slots__ = (
        "_body",
        "_candidates",
        "_connection",
        "_edge",
        "_front",
        "_held",
        "_known",
        "_number",
        "_start",
        "deadline",
        "is_running",
        "total_deadline",
    )

    switched = None

    def __init__(self, front: Front) -> None:
        self._front = front
        self.is_running = False

    def begin(self, known: Known, body: bytes) -> bool:
        """Send a whole request like `known`; False, and nothing done, when the ordinary way must take it."""
        lane, pool = known.lane, known.pool
        relay = lane.relay
        if not lane.is_open or len(body) > relay.max_body_bytes:
            return False
        clock = relay.clock
        now = clock()
        edge = pool.only(now)
        if edge is None:
            candidates = pool.choose(now, known.origin.peer.encode() if pool.config.strategy == "hash" else b"")
            if not candidates:
                return False
            edge = pool.edges[candidates[0]]
        else:
            candidates = [edge.id]
        sent = known.sent.get(edge.id)
        if sent is None or sent[0] is not edge.place:
            try:
                sent = known.for_edge(edge)
            except ValueError:  # a reload of the edge made it too long
                return False
        _, head, after, has_length = sent
        held = edge.connections.borrow()
        if held is None:
            return False
        connection: H1EdgeConnection = held.connection  # type: ignore[assignment]  # it lends no other
        self._known, self._body, self._start = known, body, now
        self._edge, self._held, self._candidates = edge, held, candidates
        timeouts = pool.config.timeouts
        self.deadline = now + timeouts.first_byte_s
        self.total_deadline = now + timeouts.total_s if timeouts.total_s else float("inf")
        self.is_running = True
        lane.taken += 1
        self._number = relay.enter(self, now)
        budget = pool.budget
        budget.uncounted += 1
        budget.last_at = now
        edge.begin(now)
        if has_length:
            head = b"%b%d%b%b" % (head, len(body), after, body)
        self._connection = connection
        connection.lend(self, self.take, head)
        return True

    # ---------------------------------------------------------------- from the edge's connection, as its leg

    def take(self, chunk: bytes) -> bool:
        """Bytes of the answer; False, and unfolded, when they are for an ordinary leg."""
        end = chunk.find(b"\r\n\r\n") + 4
        known, answer = self._known, None
        relay = known.lane.relay
        if 4 <= end <= MAX_ANSWER_HEAD:
            answer = known.lane.answer(chunk[:end], loopback=known.loopback)
        if answer is None or len(chunk) != end + answer.length:
            self._unfold()
            return False
        clock = relay.clock
        now = clock()
        tenths = round((now - self._start) * 1e4)
        timing = b'headrace;desc="%b-%x %b h1 reused", wait;dur=%d.%d' % (
            relay.run,
            self._number,
            self._edge.name,
            tenths // 10,
            tenths % 10,
        )
        if not self._front.answer_known(answer, timing, chunk[end:]):
            self._unfold()
            return False
        self._over(answer, now)
        return True

    def _over(self, answer: KnownAnswer, now: float) -> None:
        known, edge, held, wall_s = self._known, self._edge, self._held, now - self._start
        relay = known.lane.relay
        edge.served(answer.head, now, wall_s)
        relay.exchanges.discard(self)
        if self._connection.restore(answer.idle_hint_s):
            edge.connections.give_back(held)
        record = KnownRecord(relay, known.about, self._number, edge.id, self._start, wall_s)
        record.status = answer.head.status
        record.bytes_in = len(self._body)
        record.bytes_out = answer.length
        if not answer.length:
            record.first_byte_s = None
        record.resumed = held.marks.resumed
        self._body = b""
        relay.record(record)

    def take_eof(self) -> bool:
        return self._unfold()[1].take_eof()

    def lost(self, detail: str, *, clean: bool) -> None:
        self._unfold()[1].lost(detail, clean=clean)

    def wire_full(self) -> None:
        """The request is written; there is nobody to stop."""

    def wire_drained(self) -> None: ...

    # ---------------------------------------------------------------- from the relay and the client's connection

    def overdue(self, now: float) -> None:
        self._unfold()[0].overdue(now)

    def stop(self, abort: Abort) -> None:
        self._unfold()[0].stop(abort)

    def unfold(self) -> None:
        """Go on as an ordinary exchange with ordinary legs."""
        self._unfold()

    def _unfold(self) -> tuple[Exchange, H1EdgeLeg]:
        known, body = self._known, self._body
        head = known.head_of(len(body))
        self.is_running = False
        self._body = b""
        relay = known.lane.relay
        relay.exchanges.discard(self)
        client = self._front.unfold()
        leg = self._connection.unfold(head.method)
        name = relay.id_of(self._number).decode()
        exchange = Exchange(relay, client, head, known.origin, known.pool, known.target, name, now=self._start)
        relay.exchanges.add(exchange)
        exchange.was_sent(self._edge, leg, self._held.marks, body, self._candidates)
        exchange.deadline, exchange.total_deadline = self.deadline, self.total_deadline
        return exchange, leg
