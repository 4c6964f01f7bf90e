"""Keep one warm connection to an upstream, replace it when it is dead, and move what was on it once.

Theory: a `Link` is one connection and knows its protocol; the `WarmChannel` owns it and decides.

    errand --> link up and has room: submit
           --> no link: wait for the dial that is under way, or start one
    peer closes, nothing in flight    normal: learn its idle limit (RFC 7766 6.2.3)
    lost with errands in flight       each moves to a fresh connection once if this one ever answered, else it fails
    oldest errand unanswered too long and nothing heard since: the link is dead. Its errands move together; it is heard
                                      on, without new ones, until they are all answered or out of time

The dead-connection time runs from the oldest unanswered errand and no new write moves it on (a connection that died
silently under traffic was never found dead by PowerDNS and cloudflared). The task of a dial belongs to the channel;
`close` cancels it.
Rules for editing: 1. an errand finishes once; 2. an errand moves once; 3. nothing is re-sent on a connection that lost
it already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from typing import Protocol

from resolver.io.channel import Clock, Done, Failure, failure_of
from resolver.outgoing import Outgoing
from resolver.quirks import IdleLimit
from resolver.standing import Fault

MAX_IN_FLIGHT = 1000  # questions on one connection; more fail at once
SILENCE_MIN_S, SILENCE_MAX_S = 0.5, 1.0
DIAL_TIMEOUT_S = 5.0
REDIAL_PAUSE_S = 0.1  # after a failed dial: a dead host is not dialled for each question
MAX_RETIRED = 4


class Errand:
    """One question given to a channel; it may live on two links at a time, the one believed dead and the fresh one."""

    __slots__ = ("_done", "deadline", "finished", "moved", "out", "question", "sent_at")

    def __init__(self, out: Outgoing, question: bytes, deadline: float, done: Done) -> None:
        self.out, self.question, self.deadline = out, question, deadline
        self._done = done
        self.sent_at = 0.0
        self.moved = self.finished = False

    def finish(self, result: bytes | Failure) -> None:
        if not self.finished:
            self.finished = True
            self._done(result)


class Link(Protocol):
    """One connection. `heard_at` moves with every byte received, `answers` counts replies."""

    heard_at: float
    answers: int

    def submit(self, errand: Errand) -> None: ...
    def takes_more(self) -> bool:
        """False once the peer said that it will serve no new question here."""
        ...

    def errands(self) -> Iterable[Errand]:
        """Those submitted and not answered here, in that order; finished ones may stay as holders of their id."""
        ...

    def shut(self) -> None:
        """Close the connection now; `WarmChannel.lost` follows."""
        ...


class WarmChannel:
    """A `Channel` over connections that `connect` makes. `connect` raises OSError; `lost` is called for each link once."""

    def __init__(
        self, connect: Callable[[WarmChannel], Awaitable[Link]], *, encrypted: bool, clock: Clock, idle: IdleLimit
    ) -> None:
        self._connect = connect
        self.encrypted = encrypted
        self._clock = clock
        self.idle = idle
        self.link: Link | None = None
        self._retired: list[Link] = []
        self._waiting: list[Errand] = []
        self._dialling: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = 0.0
        self._rtt_s: float | None = None
        self._last_refusal: tuple[float, Failure] = (-1e9, Failure(Fault.UNREACHABLE, ""))
        self._quiet_since = 0.0
        self._closed = False
        self._gone = asyncio.Event()

    # --- questions ---------------------------------------------------------------------------------------------------

    def ask(self, out: Outgoing, deadline: float, done: Done, *, question: bytes = b"") -> None:
        self._place(Errand(out, question or out.folded, deadline, done))

    def _place(self, errand: Errand) -> None:
        if self._closed:
            errand.finish(Failure(Fault.UNREACHABLE, "closed by us"))
        elif self.link is not None and self.link.takes_more():
            self._submit(self.link, errand)
        elif len(self._waiting) >= MAX_IN_FLIGHT:
            errand.finish(Failure(Fault.SILENT, f"{MAX_IN_FLIGHT} questions wait for a connection"))
        else:
            refused_at, refusal = self._last_refusal
            if self._dialling is None and self._clock() - refused_at < REDIAL_PAUSE_S:
                errand.finish(refusal)
                return
            self._waiting.append(errand)
            self._wake_by(errand.deadline, self._clock())
            self._dial()

    def _submit(self, link: Link, errand: Errand) -> None:
        errand.sent_at = now = self._clock()
        link.submit(errand)
        self._wake_by(min(errand.deadline, now + self._silence_s()), now)

    def answered(self, link: Link, errand: Errand, reply: bytes) -> None:
        """For links: `reply` matches the errand's question."""
        now = self._clock()
        took_s = now - errand.sent_at
        self._rtt_s = took_s if self._rtt_s is None else self._rtt_s + (took_s - self._rtt_s) / 8
        link.answers += 1
        self._quiet_since = now
        self._wake_by(now + self.idle.close_after_s, now)
        errand.finish(reply)

    # --- connections -------------------------------------------------------------------------------------------------

    def _dial(self) -> None:
        if self._dialling is None:
            self._dialling = asyncio.ensure_future(self._dial_once())

    async def _dial_once(self) -> None:
        """Cancelled by `close` and `drop` alone, which take care of those that wait."""
        try:
            link = await self._connect(self)
        except OSError as exc:
            self._dialling = None
            self._refuse(failure_of(exc))
            return
        self._dialling = None
        if not link.takes_more():
            self._refuse(Failure(Fault.UNREACHABLE, "closed by the peer at once"))
            return
        if self.link is not None:  # full, or told to end: that is why we dialled
            self.retire(self.link)
        self.link = link
        self._quiet_since = now = self._clock()
        self._wake_by(now + self.idle.close_after_s, now)
        waiting, self._waiting = self._waiting, []
        for errand in waiting:
            self._place(errand)

    def _refuse(self, failure: Failure) -> None:
        self._last_refusal = (self._clock(), failure)
        waiting, self._waiting = self._waiting, []
        for errand in waiting:
            errand.finish(failure)

    def lost(self, link: Link, reason: str) -> None:
        """For links: the connection is gone."""
        left = list(_live(link))
        if link is self.link:
            self.link = None
            if not left and not self._closed:
                self.idle.closed_by_peer(self._clock() - self._quiet_since)
        elif link in self._retired:
            self._retired.remove(link)
        self.move(left, reason, ever_answered=link.answers > 0)
        if self._closed and self.link is None and not self._retired:
            self._gone.set()

    def move(self, errands: Iterable[Errand], reason: str, *, ever_answered: bool) -> None:
        """To a fresh connection, each errand once; those that moved before, or lay on a link that never answered, fail.

        This retry is free of any budget: the peer closed an idle connection and the question crossed it on the wire.
        Links call it too, for questions that the peer said it never looked at.
        """
        for errand in errands:
            if errand.finished:
                continue
            if errand.moved or not ever_answered or self._closed:
                errand.finish(Failure(Fault.UNREACHABLE, reason))
            else:
                errand.moved = True
                self._place(errand)

    def retire(self, link: Link) -> None:
        """No new question goes on this link, yet what it still answers counts."""
        if link is self.link:
            self.link = None
            self._retired.append(link)
            if len(self._retired) > MAX_RETIRED:
                self._retired[0].shut()

    def drop(self) -> None:
        self._last_refusal = (-1e9, self._last_refusal[1])
        if self._dialling is not None:  # to where the old network led
            self._dialling.cancel()
            self._dialling = None
            self._dial()
        if self.link is not None:
            link = self.link
            self.retire(link)
            self.move(list(_live(link)), "the network changed", ever_answered=True)
            self._watch()

    async def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._dialling is not None:
            self._dialling.cancel()
            await asyncio.wait([self._dialling])
        self._refuse(Failure(Fault.UNREACHABLE, "closed by us"))
        links = self._links()
        for link in links:
            link.shut()
        if links:
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._gone.wait()

    # --- time --------------------------------------------------------------------------------------------------------

    def _wake_by(self, due_at: float, now: float) -> None:
        """One timer for the whole channel: it is moved only towards now, so that a busy link arms it once a second."""
        if self._timer is not None:
            if self._due_at <= due_at:
                return
            self._timer.cancel()
        self._due_at = due_at
        self._timer = asyncio.get_running_loop().call_later(max(0.0, due_at - now), self._watch)

    def _watch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._closed:
            return
        now = self._clock()
        if self.link is not None:
            self._judge_silence(self.link, now)
        for link in self._links():
            _end_overdue(_live(link), now)
        _end_overdue(self._waiting, now)
        self._waiting = [errand for errand in self._waiting if not errand.finished]
        for link in list(self._retired):
            if next(_live(link), None) is None:
                link.shut()
        if self.link is not None and next(_live(self.link), None) is None:
            self._close_idle(self.link, now)
        due_at = self._next_due()
        if due_at is not None:
            self._wake_by(max(due_at, now + 0.005), now)

    def _links(self) -> list[Link]:
        return [*self._retired, *([self.link] if self.link else [])]

    def _silence_s(self) -> float:
        return SILENCE_MAX_S if self._rtt_s is None else min(max(4 * self._rtt_s, SILENCE_MIN_S), SILENCE_MAX_S)

    def _judge_silence(self, link: Link, now: float) -> None:
        oldest = next(_live(link), None)
        if oldest is None or now - max(oldest.sent_at, link.heard_at) < self._silence_s():
            return
        # A question that moved already waits where it is: a third copy would not make the peer quicker.
        errands = [errand for errand in _live(link) if not errand.moved]
        self.retire(link)
        self.move(errands, "silent connection", ever_answered=True)

    def _close_idle(self, link: Link, now: float) -> None:
        if now - self._quiet_since >= self.idle.close_after_s:
            self.idle.closed_by_us()
            self.retire(link)
            link.shut()

    def _next_due(self) -> float | None:
        due = [errand.deadline for link in self._links() for errand in _live(link)]
        due += [errand.deadline for errand in self._waiting]
        if self.link is not None:
            oldest = next(_live(self.link), None)
            if oldest is None:
                due.append(self._quiet_since + self.idle.close_after_s)
            else:
                due.append(max(oldest.sent_at, self.link.heard_at) + self._silence_s())
        return min(due, default=None)


def _live(link: Link) -> Iterator[Errand]:
    return (errand for errand in link.errands() if not errand.finished)


def _end_overdue(errands: Iterable[Errand], now: float) -> None:
    for errand in list(errands):
        if errand.deadline <= now and not errand.finished:
            what = f"no answer in {now - errand.sent_at:.2f} s" if errand.sent_at else "no connection in time"
            errand.finish(Failure(Fault.SILENT, what))
