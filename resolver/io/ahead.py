"""Ask upstream before somebody asks us: what `resolver/foresight.py` names, when it names it.

Owned by the service. There is no task: one timer for what comes again by itself, and what was asked is thought about in the
turn of the loop that follows, with a few refreshes in each, so that neither that question nor other clients wait for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from resolver.cache import Entry, is_denial
from resolver.chain import Chain
from resolver.foresight import MOST_HEARD
from resolver.io.asking import Asking
from resolver.memos import Memos
from resolver.question import Question

EACH_TURN = 8
"""Refreshes for a turn of the loop: at 0.1 ms each other callbacks wait no longer than for a large reply."""
MOST_WAITING = 256
LATEST_S = 3600.0
"""How long the timer sleeps at most: loops count another clock, which stands still while the machine sleeps."""


class Ahead:
    """`asked` and `asked_again` are told what clients ask; everything else follows by itself, until `close`."""

    def __init__(self, chain: Chain, asking: Asking, clock: Callable[[], float], replies: Iterable[Memos]) -> None:
        self._chain, self._asking, self._clock = chain, asking, clock
        self._foresight = chain.foresight
        self._replies = tuple(replies)
        for memos in self._replies:
            memos.renewed = self.asked_again
        self._heard: list[tuple[bytes, float]] = []
        self._waiting: deque[bytes] = deque()
        self._turn: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")

    def listen(self, wanted: bool) -> None:
        self._foresight.listen(wanted)
        self._tell_when_deaf()

    def asked(self, question: Question, now: float) -> None:
        """A question that memory or an upstream answers; local names and refusals teach nothing."""
        if now >= self._foresight.deaf_until and question.keys is not None and not question.ecs:
            self._note(question.keys[1], now)

    def asked_again(self, entry: Entry, now: float) -> None:
        """The first use of a ready reply in a second of its entry's age."""
        if not is_denial(entry.key):
            self._note(entry.key, now)

    def _note(self, key: bytes, now: float) -> None:
        """To be thought about when this question was answered, or is on its way."""
        if len(self._heard) < MOST_HEARD:
            self._heard.append((key, now))
        self._take_turn()

    def _take_turn(self) -> None:
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._on_turn)

    def _on_turn(self) -> None:
        self._turn = None
        heard, self._heard = self._heard, []
        for key, now in heard:
            self._waiting.extend(self._foresight.asked(key, now))
        self._tell_when_deaf()
        now = self._clock()
        if self._foresight.next_at <= now:  # also when the machine slept, which the timer does not know of
            self._waiting.extend(self._foresight.due(now))
        self._depart()
        self._set_timer(now)

    def _depart(self) -> None:
        while len(self._waiting) > MOST_WAITING:
            self._waiting.pop()
        for _ in range(min(EACH_TURN, len(self._waiting))):
            question = self._chain.again(self._waiting.popleft())
            if question is not None:
                self._asking.refresh(question)
        if self._waiting:
            self._take_turn()

    def _tell_when_deaf(self) -> None:
        for memos in self._replies:
            memos.deaf_until = self._foresight.deaf_until

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
        self._take_turn()

    def close(self) -> None:
        self._heard.clear()
        self._waiting.clear()
        for handle in (self._timer, self._turn):
            if handle is not None:
                handle.cancel()
        self._timer = self._turn = None
