"""Ask upstream before somebody asks us: what `resolver/foresight.py` names, when it names it.

Owned by the service. There is no task: one timer for what comes again by itself, and companions go in the turns of the loop
that follow, a few in each, so that neither the question which they belong to nor other clients wait for them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from resolver.cache import Entry, is_denial
from resolver.chain import Chain
from resolver.io.asking import Asking
from resolver.question import Question

EACH_TURN = 8
"""Refreshes for a turn of the loop: at 0.1 ms each other callbacks wait no longer than for a large reply."""
MOST_WAITING = 256
LATEST_S = 3600.0
"""How long the timer sleeps at most: loops count another clock, which stands still while the machine sleeps."""


class Ahead:
    """`asked` and `asked_again` are told what clients ask; everything else follows by itself, until `close`."""

    def __init__(self, chain: Chain, asking: Asking, clock: Callable[[], float]) -> None:
        self._chain, self._asking, self._clock = chain, asking, clock
        self._foresight = chain.foresight
        self._waiting: deque[bytes] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._turn: asyncio.Handle | None = None

    def asked(self, question: Question, now: float) -> None:
        """A question that memory or an upstream answers; local names and refusals teach nothing."""
        if now >= self._foresight.deaf_until and question.keys is not None and not question.ecs:
            self._take(self._foresight.asked(question.keys[1], now), now)

    def asked_again(self, entry: Entry, now: float) -> None:
        """The first use of a ready reply in a second of its entry's age."""
        if now >= self._foresight.deaf_until and not is_denial(entry.key):
            self._take(self._foresight.asked(entry.key, now), now)

    def _take(self, keys: Iterable[bytes], now: float) -> None:
        self._waiting.extend(keys)
        if self._foresight.next_at <= now:  # also when the machine slept, which the timer does not know of
            self._waiting.extend(self._foresight.due(now))
        while len(self._waiting) > MOST_WAITING:
            self._waiting.pop()
        if self._waiting and self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._depart)
        self._set_timer(now)

    def _depart(self) -> None:
        self._turn = None
        for _ in range(min(EACH_TURN, len(self._waiting))):
            question = self._chain.again(self._waiting.popleft())
            if question is not None:
                self._asking.refresh(question)
        if self._waiting:
            self._turn = asyncio.get_running_loop().call_soon(self._depart)

    def _set_timer(self, now: float) -> None:
        at = self._foresight.next_at
        if at >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = asyncio.get_running_loop().call_later(min(max(0.0, at - now), LATEST_S), self._on_time)

    def _on_time(self) -> None:
        self._timer, self._timer_at = None, float("inf")
        self._take((), self._clock())

    def close(self) -> None:
        self._waiting.clear()
        for handle in (self._timer, self._turn):
            if handle is not None:
                handle.cancel()
        self._timer = self._turn = None
