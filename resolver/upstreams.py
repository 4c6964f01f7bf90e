"""Decide which upstream to ask, when to ask a second one beside it, and what a failure means for the next query.

Theory: a `Standing` is what we know of one upstream (`standing.py`), a `Group` ranks a set of them, an `Attempt` is one query's
way through a group: events in (`Answered`, `Failed`, `Ticked`), commands out (`Ask`, `WakeAt`, `Deliver`, `GiveUp`).

    start --> Ask(first) [Ask(beside)] WakeAt(hedge)
    Ticked(hedge)    the first is slower than its own p90: Ask(second), while the hedge budget lasts
    Ticked(patience) the first is late beyond doubt: Ask(next), free of the budget
    Failed           Ask(next), or GiveUp when nobody is left and nothing is in flight
    Answered         Deliver, once; later answers still teach, and who is still silent was outrun

An ask is never taken back: the loser of a hedge is heard to its end, so that it is measured too.
Rules for editing: 1. no clock and no dice here, `now` and draws are arguments; 2. each upstream is asked at most once
in an attempt (resends belong to the transport); 3. an upstream that is down is asked last, never skipped: with all
of them down the first one back answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from resolver.standing import (
    BACKOFF_MAX_S,
    HALF_LIFE_S,
    HEDGE_MIN_S,
    OUTRUN_TO_SUSPECT,
    PATIENCE_MIN_S,
    Fault,
    Standing,
)

Strategy = Literal["fastest", "race", "failover", "weighted"]

RACE_WIDTH = 3
HEDGE_RATIO, HEDGE_BURST = 0.10, 5.0


@dataclass(frozen=True, slots=True)
class Ask:
    url: str


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send `Ticked` at this time; replaces an earlier wish."""

    at: float


@dataclass(frozen=True, slots=True)
class Deliver:
    """This upstream's answer is the answer."""

    url: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    causes: tuple[tuple[str, str], ...]  # (url, reason), in the order they were asked


Command = Ask | WakeAt | Deliver | GiveUp


@dataclass(frozen=True, slots=True)
class Answered:
    url: str
    took_s: float
    now: float


@dataclass(frozen=True, slots=True)
class Failed:
    url: str
    fault: Fault
    reason: str
    now: float


@dataclass(frozen=True, slots=True)
class Ticked:
    now: float


Event = Answered | Failed | Ticked


class Group:
    """A ranked set of upstreams with one strategy and one hedge budget (hedges <= 10 % of queries)."""

    def __init__(self, standings: Mapping[str, Standing], weights: Mapping[str, int], strategy: Strategy) -> None:
        """`standings` in configured order; they may be shared with another group that asks the same upstream."""
        self.standings = dict(standings)
        self.weights = weights
        self.strategy: Strategy = strategy
        self.hedge_tokens = HEDGE_BURST / 2

    def plan(self, now: float, deadline: float, draw: float, avoid: str = "") -> Attempt:
        """One query's way through the group, past the upstream to `avoid`. `draw` in [0, 1); same standings, now and draw,
        same order."""
        self.hedge_tokens = min(HEDGE_BURST, self.hedge_tokens + HEDGE_RATIO)
        order = self.ranked(now, draw)
        if avoid:
            order = [url for url in order if url != avoid]
        width = RACE_WIDTH if self.strategy == "race" else 1
        beside = self._beside(order, now, width)
        return Attempt(self, order, width, beside, now, deadline)

    def ranked(self, now: float, draw: float) -> list[str]:
        """All upstreams, best first; those that are down or recovering come last, the one back soonest before others."""
        well = [url for url, standing in self.standings.items() if standing.down_until == 0.0]
        if len(well) == len(self.standings) == 1:
            return well
        ill = [url for url, standing in self.standings.items() if standing.down_until != 0.0]
        ill.sort(key=lambda url: self.standings[url].down_until)
        if len(well) > 1:
            well = self._by_strategy(well, now, draw)
        return well + ill

    def take_hedge(self) -> bool:
        if self.hedge_tokens < 1.0:
            return False
        self.hedge_tokens -= 1.0
        return True

    def _by_strategy(self, urls: list[str], now: float, draw: float) -> list[str]:
        if self.strategy == "failover":
            return urls
        if self.strategy == "weighted":
            return self._by_weight(urls, draw)
        measured = sorted(s.rtt_s for s in self.standings.values() if s.rtt_s is not None)
        median = measured[len(measured) // 2] if measured else 0.0
        return sorted(urls, key=lambda url: self.standings[url].score(now, median))

    def _by_weight(self, urls: list[str], draw: float) -> list[str]:
        """The first by lot, the rest by weight; weight 0 is a last resort."""
        mark = draw * sum(self.weights[url] for url in urls)
        rest = sorted(urls, key=lambda url: -self.weights[url])
        for url in urls:
            mark -= self.weights[url]
            if mark < 0:
                return [url, *(other for other in rest if other != url)]
        return rest

    def _beside(self, order: list[str], now: float, width: int) -> str | None:
        """An upstream to ask along with the first, for knowledge: one whose backoff is over, or (`fastest`) one that
        was never measured or not within a minute. The first good answer wins, so that no client waits for it."""
        if len(order) <= width:
            return None
        if self.standings[order[0]].down_until != 0.0:
            return None
        for url in order[width:]:
            standing = self.standings[url]
            if standing.is_recovering(now):
                # Take the next turn already: until it answers only one query per backoff is spent on it.
                standing.down_until = now + min(2.0 ** min(standing.failures_in_row, 10), BACKOFF_MAX_S)
                return url
            if self.strategy == "fastest" and not standing.is_down(now):
                if standing.rtt_s is None and standing.asked == 0:
                    return url
                if now - standing.measured_at > HALF_LIFE_S and self.take_hedge():
                    return url
        return None


class Attempt:
    """One query's way through a group; see the module's head for the transitions."""

    __slots__ = (
        "_beside",
        "_causes",
        "_deadline",
        "_group",
        "_hedge_at",
        "_in_flight",
        "_late",
        "_left",
        "_newest",
        "_patience_at",
        "_width",
        "done",
    )

    def __init__(
        self, group: Group, order: Sequence[str], width: int, beside: str | None, now: float, deadline: float
    ) -> None:
        self._group = group
        self._left = deque(order)
        self._width = width
        self._beside = beside
        self._deadline = deadline
        self._in_flight: dict[str, float] = {}  # url -> asked at
        self._late: set[str] = set()
        self._causes: list[tuple[str, str]] = []
        self._newest = ""
        self._hedge_at = self._patience_at = deadline
        self.done = False

    def start(self, now: float) -> list[Command]:
        commands: list[Command] = [self._ask(now) for _ in range(min(self._width, len(self._left)))]
        first = self._newest
        if self._beside is not None:
            self._left.remove(self._beside)
            self._left.appendleft(self._beside)
            commands.append(self._ask(now))
        if self._left:
            self._hedge_at = now + self._group.standings[first].hedge_after_s()
        return [*commands, self._wake()]

    def on(self, event: Event) -> list[Command]:
        if isinstance(event, Answered):
            return self._answered(event)
        if isinstance(event, Failed):
            return self._failed(event)
        return [] if self.done else self._ticked(event.now)

    def _answered(self, event: Answered) -> list[Command]:
        self._in_flight.pop(event.url, None)
        self._group.standings[event.url].answered(event.took_s, event.now)
        if self.done:
            return []
        self.done = True
        for url, asked_at in self._in_flight.items():
            standing, after_s = self._group.standings[url], event.now - asked_at
            if url == self._beside or url in self._late or after_s < standing.hedge_after_s():
                continue
            if standing.outrun(after_s, event.now):
                self._late.add(url)
        return [Deliver(event.url)]

    def _failed(self, event: Failed) -> list[Command]:
        self._in_flight.pop(event.url, None)
        standing = self._group.standings[event.url]
        if event.fault is Fault.UNWILLING:
            standing.refused(event.reason)
        elif event.url not in self._late:  # its lateness was counted already
            standing.lost(event.fault, event.reason, event.now)
        self._causes.append((event.url, event.reason))
        if self.done:
            return []
        if self._left:
            return [self._ask(event.now), self._wake()]
        return [] if self._in_flight else self._give_up()

    def _ticked(self, now: float) -> list[Command]:
        if now >= self._deadline:
            return self._out_of_time(now)
        if self._left and now >= self._patience_at:
            self._count_late(now)
            return [self._ask(now), self._wake()]
        if self._left and now >= self._hedge_at:
            if self._is_suspect() or self._group.take_hedge():
                self._hedge_at = self._deadline
                patience_at = self._patience_at  # of the first: the hedge does not make it less late
                ask = self._ask(now)
                self._patience_at = patience_at
                return [ask, self._wake()]
            # Out of tokens: what the hedges of others find out meanwhile may make this one free.
            self._hedge_at = now + HEDGE_MIN_S / 2
        return [self._wake()]

    def _is_suspect(self) -> bool:
        """Whether those asked have lately been beaten by hedges and said nothing since: hedging them costs no token."""
        return all(self._group.standings[url].outrun_in_row >= OUTRUN_TO_SUSPECT for url in self._in_flight)

    def _ask(self, now: float) -> Ask:
        url = self._left.popleft()
        standing = self._group.standings[url]
        standing.asked += 1
        self._in_flight[url] = now
        self._newest = url
        self._patience_at = min(now + standing.patience_s(), now + max(0.0, self._deadline - now) / 2)
        return Ask(url)

    def _wake(self) -> WakeAt:
        return WakeAt(min(self._hedge_at, self._patience_at, self._deadline) if self._left else self._deadline)

    def _count_late(self, now: float) -> None:
        for url, asked_at in self._in_flight.items():
            standing = self._group.standings[url]
            if url not in self._late and now - asked_at >= min(standing.patience_s(), PATIENCE_MIN_S):
                self._late.add(url)
                standing.lost(Fault.SILENT, f"late: no answer in {now - asked_at:.2f} s", now)

    def _out_of_time(self, now: float) -> list[Command]:
        for url, asked_at in self._in_flight.items():
            reason = f"no answer in {now - asked_at:.2f} s"
            self._causes.append((url, reason))
            if url not in self._late:
                self._late.add(url)
                self._group.standings[url].lost(Fault.SILENT, reason, now)
        return self._give_up()

    def _give_up(self) -> list[Command]:
        self.done = True
        return [GiveUp(tuple(self._causes))]
