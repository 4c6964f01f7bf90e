"""Decide which answers to ask for before somebody does: companions of what was asked, and what comes again by itself.

Theory: an answer that has expired makes its client wait for one round trip, and to give the old one instead is wrong while
a fresh one can be had (RFC 8767 5). What is left is to have asked already. Prefetch near the end of a TTL (unbound, and
`cache.py`) keeps a name that is hit all the time; two thirds of the questions that wait on a workstation are of names that
are asked now and then, and these have a pattern:

      asked ---> companions.py  who follows this question, now            --+
            `--> recurrence.py  when this question comes again, later   --+ |
                                                                          | |   expired, or about to, and
      next_at, due <---- one look for each question, when it expires -----+ +-> still held as stale? tokens left?
                                                                            |
                                                                            `-> asked upstream, by whoever called

What is foreseen is never new: only questions that a client asked, that are not ECS-bound, and whose answer is still held. It is
not recursive: a refresh is no question of a client, and teaches nothing. It is bounded: a token comes with each question of
a client, and each refresh takes one (SHARE); what is learned is bounded in entries, and in a second no more than MOST_HEARD
questions are listened to, since a resolver that is that busy keeps its names warm by prefetch.

Learned in memory and nowhere else. Whoever watches the upstreams sees earlier questions again, before they are asked.
Rules for editing: 1. `now` is an argument; 2. keys are the cache's; 3. `asked` is on the way of every miss: 10 us.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

from resolver import wire as w
from resolver.cache import Cache, name_of
from resolver.companions import TOGETHER_S, Companions
from resolver.recurrence import EARLY_S, LONGEST_S, Recurrence

RECURRING, ONCE = 4_096, 2_048
"""Questions whose intervals are kept; those seen once have a table of their own, so that a flood of names empties only that."""
SHARE, BURST = 0.75, 200.0
"""Refreshes for each question asked, and how many may be saved up: a page takes up to eighty at once."""
MOST_HEARD = 500


class Foresight:
    """What is expected. `asked` and `due` name keys that are to be asked upstream now."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._companions = Companions()
        self._recurring: OrderedDict[bytes, Recurrence] = OrderedDict()
        self._once: OrderedDict[bytes, float] = OrderedDict()
        self._looks: list[tuple[float, bytes]] = []  # a heap; true is what `_look_at` says too
        self._look_at: dict[bytes, float] = {}
        self._ahead: OrderedDict[bytes, None] = OrderedDict()  # refreshed, and not asked for since
        self._tokens = BURST / 2
        self._left = MOST_HEARD
        self._second_ends = float("-inf")
        self.deaf_until = float("-inf")
        """Before it nothing is listened to: for callers that can save themselves the call."""
        self.refreshed = self.used = self.starved = 0

    def __len__(self) -> int:
        return len(self._recurring) + len(self._once) + len(self._companions)

    def asked(self, key: bytes, now: float) -> list[bytes]:
        """Takes note of a question that a client asked; who should be refreshed because of it, most likely first."""
        if now < self.deaf_until or not self._hears(now):
            return []
        if self._tokens < BURST:
            self._tokens += SHARE
        if key in self._ahead:
            del self._ahead[key]
            self.used += 1
        if self._recurs(key, now):
            entry = self._cache.known(key)
            self._plan(key, max(entry.expires_at - EARLY_S if entry is not None else 0.0, now + 1))
        return [
            one for one in self._companions.asked(key, now) if self._ends(one, now + TOGETHER_S) and self._take(one)
        ]

    def _hears(self, now: float) -> bool:
        if now >= self._second_ends:
            self._second_ends, self._left = now + 1, MOST_HEARD
        self._left -= 1
        if self._left < 0:
            self.deaf_until = self._second_ends
            return False
        return True

    def _recurs(self, key: bytes, now: float) -> bool:
        """Whether it came before, so that there is an interval."""
        known = self._recurring.get(key)
        if known is None:
            first_at = self._once.pop(key, None)
            if first_at is None or now - first_at > LONGEST_S:
                self._once[key] = now
                if len(self._once) > ONCE:
                    self._once.popitem(last=False)
                return False
            known = self._recurring[key] = Recurrence(first_at)
            if len(self._recurring) > RECURRING:
                self._look_at.pop(self._recurring.popitem(last=False)[0], None)
        else:
            self._recurring.move_to_end(key)
        known.asked(now)
        return True

    def _ends(self, key: bytes, by: float) -> bool:
        entry = self._cache.known(key)
        return entry is not None and entry.expires_at < by

    def _take(self, key: bytes) -> bool:
        if self._tokens < 1:
            self.starved += 1
            return False
        self._tokens -= 1
        self.refreshed += 1
        self._ahead[key] = None
        if len(self._ahead) > RECURRING:
            self._ahead.popitem(last=False)
        return True

    # --- what comes again by itself -----------------------------------------------------------------------------------

    def _plan(self, key: bytes, at: float) -> None:
        if self._look_at.get(key) == at:
            return
        self._look_at[key] = at
        heapq.heappush(self._looks, (at, key))
        if len(self._looks) > 2 * RECURRING:
            self._looks = [(at, key) for key, at in self._look_at.items()]
            heapq.heapify(self._looks)

    @property
    def next_at(self) -> float:
        """When `due` should be called next; infinite when there is nothing to expect."""
        looks = self._looks
        while looks and self._look_at.get(looks[0][1]) != looks[0][0]:
            heapq.heappop(looks)
        return looks[0][0] if looks else float("inf")

    def due(self, now: float) -> list[bytes]:
        """Who should be refreshed now, since it will be asked for again before long."""
        keys = []
        while self.next_at <= now:
            _, key = heapq.heappop(self._looks)
            del self._look_at[key]
            if self._is_due(key, now) and self._take(key):
                keys.append(key)
        return keys

    def _is_due(self, key: bytes, now: float) -> bool:
        entry, known = self._cache.known(key), self._recurring.get(key)
        if entry is None or known is None:
            return False
        ends_at, ttl_s = entry.expires_at - EARLY_S, entry.expires_at - entry.stored_at
        # Somebody else refreshed it, or not yet: the look moves to its end, or to where a question can be expected.
        at = ends_at if ends_at > now else known.refresh_at(now, ttl_s)
        if at is None:
            return False
        # After a refresh the next look is at the end of what it should bring; one that failed is not tried again before.
        self._plan(key, at if at > now else now + max(ttl_s, 1.0))
        return at <= now

    def is_ahead(self, key: bytes) -> bool:
        """Whether it was refreshed before anybody asked, and nobody has since."""
        return key in self._ahead

    # --- forgetting -------------------------------------------------------------------------------------------------

    def listen(self, wanted: bool) -> None:
        """Whether to take note of anything. What was learned is forgotten when not."""
        self.deaf_until = float("-inf") if wanted else float("inf")
        if not wanted:
            self.forget()

    def forget(self, name: bytes | None = None) -> None:
        """Everything; or when `name` and those below it are asked. Of groups all is forgotten in any case."""
        self._companions.forget()
        for table in (self._recurring, self._once, self._look_at, self._ahead):
            for key in [key for key in table if name is None or name in w.suffixes(name_of(key))]:
                del table[key]
