"""Learn when a question comes again, and say when to ask it upstream so that it finds a fresh answer.

Theory: the last eight intervals between the occasions of one question are kept as they are. No shape is assumed: background
software that polls gives eight like values, a name of a page gives many short ones while somebody reads. Of a question that
has been quiet for `a` seconds only the intervals longer than `a` still say something, and a refresh at `s`, good until
`s + ttl`, is worth its cost when enough of these end in between (the empirical hazard; one interval more is counted that
never ends, so that a single memory proves little):

        asked                    expired           s .......... s + ttl
          |------- a -------------->|              |   3 of 4 end here
          |-----------------------------------------------x
          |-------------------------------------------------x
          |----------------------------------------------------x
          |-------------------------------------------------------------- ...

Rules for editing: 1. `now` is an argument; 2. an interval above LONGEST_S tells only that the others ended: what comes once a
day is a person's habit, and no refresh can be meant for it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right

KEPT = 8
"""Intervals of one question: enough to tell a poll from a reader, few enough to forget a visit in the next one."""
SHORTEST_S = 2.0
"""Questions closer together are one occasion: a retry, or two programs at once."""
LONGEST_S = 3_600.0
WORTH = 0.25
"""A refresh that is used with this probability is asked for: up to four for one that is. Above it the modelled day waits
more, below it asks more (at 0.2 a twentieth more questions for a thousandth less of waiting)."""
EARLY_SHARE, EARLY_S = 0.05, 0.5
"""How much before the shortest interval a refresh is planned: timers of programs drift, and asking takes its time."""


class Recurrence:
    """The occasions of one question."""

    __slots__ = ("_intervals", "last_at")

    def __init__(self, now: float) -> None:
        self.last_at = now
        self._intervals: array[float] = array("f")

    def asked(self, now: float) -> None:
        interval_s = now - self.last_at
        if interval_s < SHORTEST_S:
            return
        self.last_at = now
        self._intervals.append(interval_s)
        if len(self._intervals) > KEPT:
            del self._intervals[0]

    def refresh_at(self, now: float, ttl_s: float) -> float | None:
        """When to ask, `now` or later, for an answer that lives `ttl_s`; None when nothing says that it will be used."""
        quiet_s = now - self.last_at
        longer = sorted(one for one in self._intervals if one > quiet_s)
        ends = longer[: bisect_right(longer, LONGEST_S)]
        for passed, end_s in enumerate(ends):
            begin_s = max(quiet_s, end_s * (1 - EARLY_SHARE) - EARLY_S)
            used = bisect_right(ends, begin_s + ttl_s) - passed
            if used >= WORTH * (len(longer) - passed + 1):
                return self.last_at + begin_s
        return None
