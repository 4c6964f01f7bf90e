"""Find how many requests an edge can have in flight before it only gets slower.

Theory: the rule for dynamic batch sizes, one level up. Every 100 ms with traffic is a sample:

      latency > 1.15 x usual and utilisation > 0.92   ->  limit x 0.8
      utilisation < 0.70 and nothing failed           ->  limit x 1.1

Utilisation of what? Of the edge, where it tells (scraped use of its KV cache, 0..1). Where it does not, the cut reads
requests in flight over this limit, at the sample's peak: only a limit that is reached can be too high. The lift cannot
read that number: on a quiet edge it is always below 0.7 and would lift the limit without end, for nothing. What shows
slack in an edge that says nothing is that its latency has not moved while the limit was in use (above 0.70 of it), so
that is the lift: the limit keeps ahead of a load that the edge carries, and one that was never reached stays
(the application-limited rule of congestion control, RFC 7661).

Latency is the time to the first byte. After a cut the next one waits for one usual latency: until then the answers
that arrive belong to requests that started under the old limit, and would cut again for the same fact.

The floor is high on purpose. Answers of language models vary with the prompt far more than 15 %; a limit that falls to
a few would refuse a developer's parallel agents for a long prompt. It is here to stop hundreds, not tens.

Rules for editing: 1. no clock, no timer: samples close when the next event comes; 2. `max_active` from the
configuration is a fixed limit that nothing moves.
"""

from __future__ import annotations

SAMPLE_S = 0.1
SLOWER = 1.15
FULL = 0.92
SLACK = 0.70
CUT = 0.8
LIFT = 1.1
FLOOR = 32
START = 256
CEILING = 4096
USUAL_SHARE = 0.05  # of a sample in the usual latency
USUAL_SHARE_FULL = 0.01  # while full: slowly, or overload itself becomes the usual


class Limiter:
    """The bound on one edge's requests in flight. `fixed` > 0: that number, always."""

    def __init__(self, fixed: int = 0, *, start: int = START, floor: int = FLOOR, ceiling: int = CEILING) -> None:
        self.fixed = fixed
        self._limit = float(start)
        self.limit = fixed or start
        """How many at a time. An attribute, because it is looked at twice for each request."""
        self._floor, self._ceiling = floor, ceiling
        self._usual_s: float | None = None
        self._no_cut_before = 0.0
        self._opened_at: float | None = None  # the sample in progress
        self._peak = 0
        self._latencies_s = 0.0
        self._answers = 0
        self._failures = 0

    def admits(self, active: int) -> bool:
        return active < self.limit

    def utilisation(self, active: int) -> float:
        """Requests in flight over the limit."""
        return active / self.limit

    def begun(self, active: int, now: float) -> None:
        """A request went out; `active` includes it."""
        if self._opened_at is None or now - self._opened_at >= SAMPLE_S:
            self._close_sample(None, now)
        if active > self._peak:
            self._peak = active

    def answered(self, latency_s: float, now: float, *, used: float | None = None) -> None:
        """A first byte came. `used`: the edge's own utilisation, 0..1, when it was scraped and is fresh."""
        self._latencies_s += latency_s
        self._answers += 1
        if self._opened_at is None or now - self._opened_at >= SAMPLE_S:
            self._close_sample(used, now)

    def failed(self, now: float) -> None:
        """The edge lost a request or refused it for its load (429, 5xx): the "out of memory" of the rule."""
        self._failures += 1
        self._close_sample(None, now)

    def _close_sample(self, used: float | None, now: float) -> None:
        """Judge the sample in progress when it is over."""
        if self._opened_at is None:
            self._opened_at = now
        if now - self._opened_at < SAMPLE_S:
            return
        if self._answers and not self.fixed:
            self._apply(self._latencies_s / self._answers, used, now)
        self._opened_at = now
        self._peak = self._answers = self._failures = 0
        self._latencies_s = 0.0

    def _apply(self, latency_s: float, used: float | None, now: float) -> None:
        reached = self._peak / self._limit
        slow = self._is_slow(latency_s)
        if slow and (reached if used is None else used) > FULL:
            self._cut(latency_s, now)
        elif not self._failures and (used < SLACK if used is not None else reached > SLACK and not slow):
            self._set(min(self._limit * LIFT, self._ceiling))
        self._learn(latency_s, reached)

    def _set(self, limit: float) -> None:
        self._limit = limit
        self.limit = self.fixed or int(limit)

    def _cut(self, latency_s: float, now: float) -> None:
        if now >= self._no_cut_before:
            self._set(max(self._limit * CUT, self._floor))
            self._no_cut_before = now + latency_s

    def _is_slow(self, latency_s: float) -> bool:
        return self._usual_s is not None and latency_s > SLOWER * self._usual_s

    def _learn(self, latency_s: float, utilisation: float) -> None:
        if self._usual_s is None:
            self._usual_s = latency_s
            return
        share = USUAL_SHARE_FULL if utilisation > FULL else USUAL_SHARE
        self._usual_s += share * (latency_s - self._usual_s)
