"""Hold the connections to one edge: hand out a warm one at once, else dial, and close idle ones before the edge does.

Theory: an opening is served by the first of these that can: a shared (h2, h3) connection with room; the h1 connection
that became idle last (LIFO: a few stay warm, the others grow old and leave); a connection whose exchange ends while the
opening waits; a new one. A warm one costs a `list.pop()`: no task, no future, no timer.

      open ──► room on a warm one ──► on_open, inside open()
        └────► a line, first in first out ◄── served by whatever gets room first
                  └─ dials: one for each that waits while the edge speaks h1, a single one while it shares or is not known

A WebSocket goes over h2 or h3 where the edge takes extended CONNECTs (RFC 8441, 9220), which only its SETTINGS say: a warm
connection that has it serves it, an edge configured as h2 or h3 is dialled and waited for, any other is dialled for h1.

Whether an edge shares is learnt from its last connection. Before the first, one dial goes ahead: a hundred requests at
start must not be a hundred handshakes to an edge that speaks h2.

Who may cancel: the dial tasks are owned here, `close()` cancels them, nobody else does.
`cancel(opening)` only leaves the line: its dial completes into the pool.

Bounds: `PoolLimits`; whoever waits leaves the line by `connect_s`.
What is in use is bounded by whoever opens (the edge's limiter).

Rules for editing: 1. a connection without `room` is never handed out; 2. a callback may re-enter `open`: state is
complete before each call out; 3. an opening hears exactly one of on_open and on_open_failed, or nothing after cancel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from config.model import Edge
from proxy.io.address_watch import AddressWatch
from proxy.io.dial import Dialled, Dialler, Pace, Resolves, Rims
from proxy.io.eyeballs import DialError
from proxy.io.held import Held, PoolLimits, clipped
from proxy.io.lines import ANY, OVER_H1, SERVED_BY_H1, WEBSOCKET, Lines, Waiting
from proxy.io.rims import DialMarks, Opening
from proxy.messages import Abort, Cause, Party, Stage
from proxy.reach import Reach


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """For people and tests."""

    idle: int
    shared: int
    busy: int
    dialling: int
    waiting: int


class EdgeConnections:
    """The connections to one edge. `on_new` is called for each leg that waited for its dial, before its opening hears of it."""

    def __init__(
        self,
        edge: Edge,
        *,
        resolver: Resolves,
        reach: Reach,
        clock: Callable[[], float],
        connect_s: float = 5.0,
        rims: Rims | None = None,
        limits: PoolLimits | None = None,
        pace: Pace | None = None,
        on_new: Callable[[], None] | None = None,
    ) -> None:
        self.edge = edge
        self.connect_s = connect_s
        self.limits = limits or PoolLimits()
        self.keep_warm = 0
        self.version = "h1" if edge.protocol == "h1" or (edge.scheme == "http" and edge.protocol != "h2") else ""
        """What the last connection spoke; "" before the first one of an edge that may speak several."""
        self._clock = clock
        self._on_new = on_new
        self._dialler = Dialler(edge, resolver=resolver, reach=reach, clock=clock, rims=rims, pace=pace)
        self._dialler.on_stray = self._adopt
        self._loop = asyncio.get_running_loop()
        self._idle: list[Held] = []  # h1, the one idle for the longest first
        self._shared: list[Held] = []  # h2 and h3, newest last
        self._busy: set[Held] = set()  # h1 with an exchange
        self._lines = Lines()
        self._dials: dict[asyncio.Task[None], int] = {}  # -> for which line
        self._extended: bool | None = None  # whether the edge's last shared connection takes extended CONNECTs
        self._retired = False
        self._idle_timer: asyncio.TimerHandle | None = None
        self._line_timer: asyncio.TimerHandle | None = None
        self._warm_timer: asyncio.TimerHandle | None = None
        self._warm_not_before = 0.0
        self._watch = AddressWatch(
            self._dialler,
            min_s=self.limits.look_up_s,
            idle_s=self.limits.look_up_idle_s,
            legs=lambda: None if self._retired or self.is_empty else self.legs,
            moved=self._moved,
        )
        self.legs = 0

    # ---------------------------------------------------------------- for the relay

    def open(self, opening: Opening, *, fresh: bool = False, upgrade: bytes = b"") -> None:
        """Give `opening` a leg: inside this call when a warm connection has room, later otherwise.

        `fresh`: only on a connection dialled from now on. `upgrade`: the protocol to switch to, which only h1 can, but for
        b"websocket" where the edge takes extended CONNECTs.
        """
        held = None if fresh else self._warm(upgrade)
        if held is not None:
            self._give(held, opening, self._marks(held, None))
        elif self._retired:
            opening.on_open_failed(_refusal(f"edge {self.edge.id} was removed"))
        elif len(self._lines) >= self.limits.waiting:
            opening.on_open_failed(
                _refusal(f"{self.limits.waiting} requests wait for a connection to edge {self.edge.id}")
            )
        else:
            now = self._loop.time()
            self._lines.join(
                self._line_for(upgrade), Waiting(opening, fresh, self._clock(), now + self.connect_s + 0.1)
            )
            self._watch_lines()
            self._dial_for_lines()

    def borrow(self) -> Held | None:
        """A warm HTTP/1.1 connection for whoever can do without an opening, given out as `open` would; None: no such one,
        or a shared one should be taken."""
        if self._shared or not self._idle:
            return None
        held = self._idle.pop()
        if held.connection.room <= 0:
            return None
        held.used = True
        held.idle_since = None
        self._busy.add(held)
        self.legs += 1
        if self._on_new is not None and not held.marks.reused:
            self._on_new()
        return held

    def give_back(self, held: Held) -> None:
        """A borrowed connection has room again."""
        if self._retired or not held.remembered or self._lines or len(self._idle) >= self.limits.idle:
            self._changed(held)
            return
        held.idle_since = self._loop.time()
        self._busy.discard(held)
        self._idle.append(held)
        if self._idle_timer is None:
            self._watch_idle()

    def cancel(self, opening: Opening) -> None:
        """`opening` does not wait any more and hears nothing. A dial that was for it completes into the pool."""
        self._lines.leave(opening)

    @property
    def counts(self) -> PoolCounts:
        return PoolCounts(len(self._idle), len(self._shared), len(self._busy), len(self._dials), len(self._lines))

    @property
    def is_empty(self) -> bool:
        return not (self._idle or self._shared or self._busy or self._dials)

    # ---------------------------------------------------------------- for the edge set

    def prepare(self) -> None:
        """Do now what a first dial would wait for."""
        self._dialler.prepare()

    def warm(self, wanted: int) -> None:
        """Hold `wanted` connections ready from now on (0: none is dialled for it)."""
        self.keep_warm = wanted
        self._dial_to_warm()

    def retire(self) -> None:
        """Take no new opening; close what is idle now and the rest when its exchanges end."""
        self._retired = True
        self.keep_warm = 0
        for held in (*self._idle, *self._shared, *self._busy):
            self._leave(held)

    async def close(self) -> None:
        """Retire, fail whoever waits, cancel the dials. Exchanges in progress are their owners' to end."""
        self.retire()
        self._dialler.close()
        tasks: list[asyncio.Task[object]] = [*self._dials, *self._dialler.strays]
        for task in tasks:
            task.cancel()
        await self._watch.close()
        for timer in (self._idle_timer, self._line_timer, self._warm_timer):
            if timer is not None:
                timer.cancel()
        self._lines.fail_all(_refusal(f"edge {self.edge.id} is closing"))
        await asyncio.gather(*tasks, return_exceptions=True)
        self._dials.clear()  # one that was cancelled before it began has not left by itself

    def drop_idle(self) -> None:
        """Close what is idle: after a network change or a long sleep it is dead without saying so. A shared one with work
        gets nothing more: TCP tries a dead path again after 3, 6, 12 s, and a new request would wait for that."""
        for held in (*self._idle, *self._shared):
            self._leave(held)

    # ---------------------------------------------------------------- giving out

    def _line_for(self, upgrade: bytes) -> int:
        if not upgrade:
            return ANY
        # An edge asked for h2 or h3 gets one try; one of any version is spared it until a connection of its has said so.
        shares = self.edge.protocol in ("h2", "h3") or self.edge.scheme == "h3"
        expected = shares if self._extended is None else self._extended
        return WEBSOCKET if upgrade == b"websocket" and expected else OVER_H1

    def _warm(self, upgrade: bytes) -> Held | None:
        if not upgrade or upgrade == b"websocket":
            for held in reversed(self._shared):
                if held.connection.room > 0 and (not upgrade or held.takes_websockets):
                    return held
        while self._idle:
            held = self._idle.pop()
            if held.connection.room > 0:
                return held
        return None

    def _give(self, held: Held, opening: Opening, marks: DialMarks) -> None:
        held.used = True
        held.idle_since = None
        if not held.is_shared:
            self._busy.add(held)
        self.legs += 1
        leg = held.connection.open()
        if self._on_new is not None and not marks.reused:
            self._on_new()
        opening.on_open(leg, marks)

    def _marks(self, held: Held, waiting: Waiting | None) -> DialMarks:
        """How the leg's connection came to be, as far as its opening waited for it.

        A connection dialled to keep warm is a reused one to whoever gets it: nobody waited for its dial, and its edge
        may have closed it meanwhile just like one that carried a request (RFC 9112 9.3.1).
        """
        if held.used or waiting is None:
            return held.marks
        return clipped(held.dialled.marks, self._clock() - waiting.since)

    def _serve(self, held: Held, *, new: bool) -> None:
        """Give the connection's room to those in line."""
        if held.serving:
            return  # open() told of the room it took: nested, hundreds in line would be as many calls deep
        held.serving = True
        lines = SERVED_BY_H1 if not held.is_shared else (WEBSOCKET, ANY) if held.takes_websockets else (ANY,)
        for line in lines:
            while held.connection.room > 0 and (waiting := self._lines.next(line, new=new)) is not None:
                self._give(held, waiting.opening, self._marks(held, waiting))
        held.serving = False

    # ---------------------------------------------------------------- what connections do

    def _adopt(self, dialled: Dialled, *, line: int = ANY) -> None:
        held = Held(dialled)
        connection = held.connection
        if (
            line != OVER_H1
        ):  # which always gets h1: that says nothing of what other dials get, nor of how many are needed
            self.version = connection.version
        self._warm_not_before = self._loop.time() + self.limits.warm_pause_s
        if held.is_shared:
            self._shared.append(held)
        connection.on_change = lambda: self._changed(held)
        if self._retired:
            self._leave(held)
            return
        if held.is_shared:
            self._learn(held)  # over h3 its SETTINGS may have come with the handshake's end
        self._serve(held, new=True)
        self._settle(held)
        self._dial_for_lines()

    def _changed(self, held: Held) -> None:
        connection = held.connection
        if connection.closed:
            self._forget(held)
            self._dial_to_warm()
            if self._lines.size(WEBSOCKET):  # they waited for its SETTINGS
                self._dial_for_lines()
            return
        if held.is_shared:
            self._learn(held)
        if connection.room > 0 and len(self._lines):
            self._serve(held, new=held.is_shared and not held.used)
        self._settle(held)

    def _learn(self, held: Held) -> None:
        """Note whether the edge takes extended CONNECTs; if not, who waited for that needs an h1 connection."""
        if getattr(held.connection, "is_settled", False):
            self._extended = held.takes_websockets
            if not self._extended and self._lines.size(WEBSOCKET):
                self._lines.move(WEBSOCKET, OVER_H1)
                self._dial_for_lines()

    def _settle(self, held: Held) -> None:
        """Put a connection where it belongs after anything happened to it."""
        connection = held.connection
        if connection.closed or connection.active:
            return
        if held.used and not held.remembered:
            held.remembered = True
            held.remember()
        if self._retired or not connection.room:
            return  # going away: it closes itself
        if held.idle_since is None:
            held.idle_since = self._loop.time()
            if not held.is_shared:
                self._busy.discard(held)
                self._idle.append(held)
                if len(self._idle) > self.limits.idle:
                    self._leave(self._idle[0])
        self._watch_idle()

    def _forget(self, held: Held) -> None:
        self._busy.discard(held)
        if held in self._shared:
            self._shared.remove(held)
        if held in self._idle:
            self._idle.remove(held)

    def _leave(self, held: Held) -> None:
        """Give it nothing more; it closes when its exchanges have ended."""
        if not held.connection.closed:
            held.remember()
        if held in self._idle:
            self._idle.remove(held)
        held.connection.close()

    def _moved(self, addresses: frozenset[str]) -> None:
        for held in (*self._idle, *self._shared, *self._busy):
            if held.marks.address not in addresses:
                self._leave(held)

    # ---------------------------------------------------------------- dialling

    def _dial_for_lines(self) -> None:
        for line in (ANY, OVER_H1, WEBSOCKET):
            waiting = self._lines.size(line)
            wanted = waiting if self._needs_one_each(line) else min(waiting, 1)
            running = sum(1 for for_line in self._dials.values() if for_line == line)
            if line == WEBSOCKET and any(not self._is_settled(held) for held in self._shared):
                continue  # its SETTINGS will say
            for _ in range(min(wanted - running, self.limits.dials - len(self._dials))):
                self._start_dial(line)

    def _needs_one_each(self, line: int) -> bool:
        return line == OVER_H1 or self.version == "h1"

    @staticmethod
    def _is_settled(held: Held) -> bool:
        return bool(getattr(held.connection, "is_settled", True))

    def _start_dial(self, line: int) -> None:
        task = self._loop.create_task(self._dial(line), name=f"dial {self.edge.id}")
        self._dials[task] = line

    async def _dial(self, line: int) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            dialled = await self._dialler.dial(self.connect_s, h1_only=line == OVER_H1)
        except DialError as exc:
            del self._dials[task]
            self._dial_failed(line, exc.abort)
        except BaseException:
            del self._dials[task]
            raise
        else:
            del self._dials[task]
            self._adopt(dialled, line=line)
            self._watch.dialled()

    def _dial_failed(self, line: int, abort: Abort) -> None:
        """One that waits hears of it where each has its dial; all of them where one dial was for all."""
        self._warm_not_before = self._loop.time() + self.limits.warm_pause_s
        self._lines.fail(line, 1 if self._needs_one_each(line) else self._lines.size(line), abort)
        self._dial_for_lines()

    def _dial_to_warm(self) -> None:
        """Dial when fewer than `keep_warm` connections are ready; not again within `warm_pause_s` of the last dial."""
        ready = len(self._idle) + sum(1 for h in self._shared if h.connection.room > 0) + len(self._dials)
        if ready >= self.keep_warm or self._retired:
            return
        pause_s = self._warm_not_before - self._loop.time()
        if pause_s <= 0:
            self._start_dial(ANY)
        elif self._warm_timer is None:
            self._warm_timer = self._loop.call_later(pause_s, self._warm_again)

    def _warm_again(self) -> None:
        self._warm_timer = None
        self._dial_to_warm()

    # ---------------------------------------------------------------- time

    def _watch_idle(self) -> None:
        """One timer for all idle ones; it finds out itself what is due, so that taking one never touches it."""
        if self._idle_timer is None:
            idle = [h for h in (*self._idle, *self._shared) if h.idle_since is not None]
            due = min(
                (h.idle_since + h.idle_limit_s(self.limits) for h in idle if h.idle_since is not None), default=None
            )
            if due is not None:
                self._idle_timer = self._loop.call_at(due, self._expire)

    def _expire(self) -> None:
        self._idle_timer = None
        now = self._loop.time()
        for held in (*self._idle, *self._shared):
            if held.idle_since is not None and now >= held.idle_since + held.idle_limit_s(self.limits) - 0.01:
                self._leave(held)
        self._watch_idle()

    def _watch_lines(self) -> None:
        if self._line_timer is None:
            due = self._lines.first_deadline
            if due is not None:
                self._line_timer = self._loop.call_at(due, self._overdue)

    def _overdue(self) -> None:
        self._line_timer = None
        now = self._loop.time()
        said = f"no connection to edge {self.edge.id} became free in {self.connect_s:g} s"
        abort = Abort(Party.EDGE, Stage.CONNECT, Cause.TIMED_OUT, said, unprocessed=True)
        self._lines.fail_all(abort, lambda waiting: waiting.deadline <= now)
        self._watch_lines()


def _refusal(said: str) -> Abort:
    return Abort(Party.US, Stage.CONNECT, Cause.REFUSED, said, unprocessed=True)
