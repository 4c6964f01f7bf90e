"""Decide when a request may move to another edge, or to another connection of the same one.

Theory: one `Attempts` lives as long as one request. The relay asks it what to do first and after each failure; it
answers with `Dial` or with `GiveUp`. It never sees the client: after the first response byte went out (the commit
point) the relay does not ask any more.

What may have happened decides, not what would be convenient. In the order in which it is decided:

      stage    what came                             method   then                          counts  budget
   1  any      the client's own abort                any      give up                       -       -
   2  BODY     anything                              any      give up (past commit point)   -       -
   3  CONNECT  anything: no byte was sent            any      the next, else one that is out yes    free
   4  HEAD     anything, body no longer held         any      give up                       -       -
   5  HEAD     vouched unprocessed, by GOAWAY        any      the next, else the same edge  yes     free
   6  HEAD     vouched unprocessed, by a refusal     any      the next, else the same edge  yes     spends
   7  HEAD     lost on a reused connection, 1st time any      the same edge, fresh          no      free
   8  HEAD     anything else                         safe     the next candidate            yes     spends
   9  HEAD     anything else                         other    give up: it may have started  -       -

   status 421  (once; RFC 9110 15.5.20)              any      the same edge, fresh          no      free
   status 425  (once; RFC 8470 5.2)                  any      the same edge                 no      free
   status 429, 502, 503, 504                         idemp.   the next candidate            yes     spends
   status 307, 308 to an edge of the pool            any      that edge                     hops    free

`counts` is against `retry.attempts`, the moves a request may make beyond its first dial. The budget guards the edges
against retry storms: a retry amplifies work only where the first copy may have cost some. A request that reached
nobody (3, 5) amplifies nothing, and an edge that dies with half of the pool's traffic must not exhaust a budget
that the other half then lacks.

Row 3 ends with the edges that are out of service: one that was ejected is often back before its time is over, and nobody
is worse off for a dial that nothing was sent on. An answer is never left for such an edge.

Row 7 is the keep-alive race (RFC 9112 9.3.1): the edge closed an idle connection while the request was on its way. It
is spent once for each request, and every dial after it is a fresh one, because a second loss would have to be reported.
Row 8 takes safe methods only, though RFC 9110 9.2.2 allows idempotent ones: a repeated DELETE earns a 404 that its
sender never caused.

Rules for editing: 1. no clock here, `now` is given; 2. a new row needs a transcript in the tests; 3. no row may send a
request with an unsafe method a second time unless somebody vouches for the first (3, 5, 6) or row 7 applies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from config.model import Retry
from proxy.messages import Abort, Cause, Party, Stage

SAFE_METHODS = frozenset({b"GET", b"HEAD", b"OPTIONS", b"TRACE"})
"""RFC 9110 9.2.1."""

GOAWAY_CODES = frozenset({None, 0x0, 0x100})
"""Codes under which a connection goes away in good order (h2 NO_ERROR, h3 H3_NO_ERROR). Any other code that comes with
`unprocessed` pushes back: REFUSED_STREAM, H3_REQUEST_REJECTED, ENHANCE_YOUR_CALM."""

ELSEWHERE_STATUS = frozenset({429, 502, 503, 504})
"""Answers after which an idempotent request is worth another edge: this one is full, or in front of a dead one."""

BUDGET_WINDOW_S = 10.0
BUDGET_FLOOR_PER_S = 1.0
"""Retries a second that a quiet pool may always make: with one request a minute, a share of requests is none."""


@dataclass(frozen=True, slots=True)
class Dial:
    """Open a leg to this edge. `fresh`: on a new connection, never one from the pool of idle ones."""

    edge_id: str
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Nothing more may be tried. `abort` is the last failure, to be told to the client."""

    abort: Abort


NO_EDGE = Abort(Party.US, Stage.CONNECT, Cause.REFUSED, "no edge of the pool is usable", unprocessed=True)


class RetryBudget:
    """A bound on retries as a share of requests over the last 10 s, shared by all requests of a pool.

    Finagle's budget with Envoy's floor: without it, an edge that fails under load gets its load multiplied by the
    retries of everybody. Whole seconds are the grain, so a retry is forgotten after 10 to 11 s.
    """

    def __init__(self, ratio: float, min_per_s: float = BUDGET_FLOOR_PER_S, window_s: float = BUDGET_WINDOW_S) -> None:
        self.ratio = ratio
        self.floor = min_per_s * window_s
        self._window_s = window_s
        self._seconds: deque[list[int]] = deque()  # [second, requests, retries], oldest first; at most window_s + 1
        self.uncounted = 0
        """Requests up to `last_at` that are counted with the next that is: for whom even a call is too much."""
        self.last_at = 0.0
        self._requests = 0
        self._retries = 0

    def note_request(self, now: float) -> None:
        """A first attempt was made: it earns `ratio` of a retry."""
        self._second(now)[1] += 1
        self._requests += 1

    def spend(self, now: float) -> bool:
        """Take one retry; False, and nothing taken, when the window's share is used up."""
        second = self._second(now)
        if self._retries + 1 > self.ratio * self._requests + self.floor:
            return False
        second[2] += 1
        self._retries += 1
        return True

    def settle(self) -> None:
        """Count those that were only noted. At least once a second while there are any, so that each is in its second."""
        uncounted, self.uncounted = self.uncounted, 0
        if uncounted:
            self._second(self.last_at)[1] += uncounted
            self._requests += uncounted

    def _second(self, now: float) -> list[int]:
        if self.uncounted:
            self.settle()
        while self._seconds and self._seconds[0][0] <= now - self._window_s - 1:
            _, requests, retries = self._seconds.popleft()
            self._requests -= requests
            self._retries -= retries
        if not self._seconds or self._seconds[-1][0] < int(now):
            self._seconds.append([int(now), 0, 0])
        return self._seconds[-1]


class Attempts:
    """The dials of one request. `candidates`: edge ids, best first. Bounded: at most
    1 + retry.attempts + follow_redirects dials, and one more each for a stale connection, a 421 and a 425."""

    def __init__(
        self,
        *,
        retry: Retry,
        budget: RetryBudget,
        candidates: Sequence[str],
        follow_redirects: int,
        last_resort: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._budget = budget
        self._last_resort = last_resort
        self._candidates = candidates
        self._moves_left = retry.attempts
        self._hops_left = follow_redirects
        self._spent: set[str] = set()  # edges that had their turn
        self._turned_away: set[str] = set()  # edges that redirected to another one
        self._once: set[int] = set()  # statuses that were answered by a second try
        self._fresh = False
        self._current = ""
        self.moves = 0
        """Dials beyond the first, of every kind."""
        self.replays = 0
        """Those of them that replaced a stale connection (row 7): they say nothing against the edge."""

    def first(self, now: float) -> Dial | GiveUp:
        """The first dial; counts the request into the budget."""
        self._budget.note_request(now)
        if not self._candidates:
            return GiveUp(NO_EDGE)
        return self._turn_of(self._candidates[0])

    def started(self, edge_id: str) -> None:
        """The first dial was made without asking, to the best candidate: most requests need no other, and never open this
        book. The budget was told."""
        self._turn_of(edge_id)

    def on_failed(
        self, edge_id: str, abort: Abort, *, reused: bool, replayable: bool, method: bytes, now: float
    ) -> Dial | GiveUp:
        """What to do after a failure that came before the first response byte.

        `reused`: the connection had carried an earlier request. `replayable`: the request's body is held from its
        first byte on (or has none); not asked for before a byte was sent. The table's rows, in its order.
        """
        self._spent.add(edge_id)
        if abort.by is Party.CLIENT or abort.stage is Stage.BODY:
            return GiveUp(abort)
        if abort.stage is Stage.CONNECT:
            return self._move(self._next() or self._any_left(), free=True, now=now) or GiveUp(abort)
        if not replayable:
            return GiveUp(abort)
        if abort.unprocessed:
            return self._move(self._next() or edge_id, free=abort.code in GOAWAY_CODES, now=now) or GiveUp(abort)
        if reused and abort.cause is Cause.LOST and not self._fresh:
            return self._replay(edge_id)
        if method in SAFE_METHODS:
            return self._move(self._next(), free=False, now=now) or GiveUp(abort)
        return GiveUp(abort)

    def on_status(self, edge_id: str, status: int, *, replayable: bool, idempotent: bool, now: float) -> Dial | None:
        """A second try after a final status that vouches for it, or None: the answer goes to the client.

        A 503 to a POST stays an answer: servers send it after work was done too, and the SDK decides better.
        """
        self._spent.add(edge_id)
        if not replayable:
            return None
        if status in (421, 425):
            return self._again(edge_id, status)
        if status in ELSEWHERE_STATUS and idempotent:
            return self._move(self._next(), free=False, now=now)
        return None

    def on_redirect(self, edge_id_target: str | None, *, replayable: bool, now: float) -> Dial | None:
        """Follow a 307 or 308 to an edge of the pool (None: it names no edge of ours), or None: not followed.

        An edge may redirect to itself, to another path, as long as hops last; going back to an edge that sent the
        request away is a loop. Free of budget: a draining edge redirects all it gets, which is no storm.
        """
        target = edge_id_target
        if target is None or not replayable or self._hops_left <= 0 or target in self._turned_away:
            return None
        self._hops_left -= 1
        if self._current != target:
            self._turned_away.add(self._current)
        self.moves += 1
        return self._turn_of(target)

    def _turn_of(self, edge_id: str) -> Dial:
        self._current = edge_id
        self._spent.add(edge_id)
        return Dial(edge_id, fresh=self._fresh)

    def _next(self) -> str | None:
        return next((edge_id for edge_id in self._candidates if edge_id not in self._spent), None)

    def _any_left(self) -> str | None:
        return next((edge_id for edge_id in self._last_resort() if edge_id not in self._spent), None)

    def _move(self, edge_id: str | None, *, free: bool, now: float) -> Dial | None:
        if edge_id is None or self._moves_left <= 0 or not (free or self._budget.spend(now)):
            return None
        self._moves_left -= 1
        self.moves += 1
        return self._turn_of(edge_id)

    def _replay(self, edge_id: str) -> Dial:
        self._fresh = True
        self.moves += 1
        self.replays += 1
        return self._turn_of(edge_id)

    def _again(self, edge_id: str, status: int) -> Dial | None:
        if status in self._once:
            return None
        self._once.add(status)
        self.moves += 1
        # 421: this connection was wrong for the authority, not the edge. 425: the handshake is over by now.
        return Dial(edge_id, fresh=self._fresh or status == 421)
