"""What is known of one upstream: how quick it is, how often it failed, whether it is worth asking first.

Rules for editing: 1. `now` is an argument; 2. a failure says only what its `Fault` allows it to say.
"""

from __future__ import annotations

import math
from collections import deque
from enum import Enum

HEDGE_MIN_S, HEDGE_MAX_S = 0.050, 0.300
PATIENCE_MIN_S, PATIENCE_MAX_S = 0.250, 1.0
GAIN = 1 / 8  # of the moving averages, as TCP's srtt (RFC 6298)
HALF_LIFE_S = 60.0  # how fast an old measurement is forgotten
BACKOFF_MAX_S = 60.0
OUTRUN_TO_SUSPECT = 2
SILENCES_TO_FALL = 2  # one lost datagram takes nobody down


class Fault(Enum):
    """What went wrong with an ask; it decides what the failure says about the upstream."""

    UNREACHABLE = "unreachable"  # refused, reset, bad certificate: down at once
    SILENT = "silent"  # no answer in time: down at the second in a row
    LYING = "lying"  # a portal page, another question: down at once
    UNWILLING = "unwilling"  # SERVFAIL, REFUSED: alive, yet no answer to this question


class Standing:
    """What is known of one upstream. Measurements older than a minute or two weigh little: see `score`."""

    __slots__ = (
        "_p90_s",
        "_samples",
        "asked",
        "down_until",
        "failed",
        "failures_in_row",
        "loss",
        "measured_at",
        "outrun_in_row",
        "reason",
        "rtt_s",
    )

    def __init__(self) -> None:
        self.rtt_s: float | None = None
        self.loss = 0.0
        self.measured_at = 0.0
        self.asked = self.failed = 0
        self.failures_in_row = 0
        self.outrun_in_row = 0  # hedges that beat it since its last answer
        self.down_until = 0.0
        self.reason = ""
        self._samples: deque[float] = deque(maxlen=64)
        self._p90_s: float | None = None

    def answered(self, took_s: float, now: float) -> None:
        self.rtt_s = took_s if self.rtt_s is None else self.rtt_s + (took_s - self.rtt_s) * GAIN
        self.loss -= self.loss * GAIN
        self.measured_at = now
        self.failures_in_row, self.outrun_in_row, self.down_until, self.reason = 0, 0, 0.0, ""
        self._samples.append(took_s)
        # A sort of 64 floats is 3 us: the percentile may lag by eight answers, the first ones excepted.
        if self._p90_s is None or len(self._samples) < 8 or self.asked % 8 == 0:
            ordered = sorted(self._samples)
            self._p90_s = ordered[min(len(ordered) - 1, len(ordered) * 9 // 10)]

    def lost(self, fault: Fault, reason: str, now: float) -> None:
        """A failure that speaks against the upstream; backoff 1, 2, 4 .. 60 s once it is down."""
        self.loss += (1 - self.loss) * GAIN
        self.measured_at = now
        self.failed += 1
        self.failures_in_row += 1
        self.reason = reason
        beyond = self.failures_in_row - (SILENCES_TO_FALL if fault is Fault.SILENT else 1)
        if beyond >= 0:
            self.down_until = now + min(2.0 ** min(beyond, 10), BACKOFF_MAX_S)

    def outrun(self, after_s: float, now: float) -> bool:
        """A hedge was answered before it. Once is chance; twice, and without any answer between, makes it suspect; more
        is a silent death, which counts as silence before its patience is up. True when it was counted so."""
        self.outrun_in_row += 1
        if self.outrun_in_row <= OUTRUN_TO_SUSPECT:
            self.loss += (1 - self.loss) * GAIN
            return False
        self.lost(Fault.SILENT, f"outrun: no answer in {after_s:.2f} s", now)
        return True

    def refused(self, reason: str) -> None:
        """An answer that helps nobody (SERVFAIL, REFUSED). One broken domain must not take a resolver down."""
        self.failed += 1
        self.reason = reason

    def forgive(self) -> None:
        """The network changed: old failures say nothing about the new one."""
        self.failures_in_row, self.outrun_in_row, self.down_until = 0, 0, 0.0

    def is_down(self, now: float) -> bool:
        return self.down_until > now

    def is_recovering(self, now: float) -> bool:
        """Was down, and its backoff is over: ask it beside another one, so that no client pays for the try."""
        return 0.0 < self.down_until <= now

    def state(self, now: float) -> str:
        if self.is_down(now):
            return "down"
        if self.down_until:
            return "recovering"
        return "unused" if self.rtt_s is None else "healthy"

    def hedge_after_s(self) -> float:
        return HEDGE_MAX_S if self._p90_s is None else min(max(self._p90_s, HEDGE_MIN_S), HEDGE_MAX_S)

    def patience_s(self) -> float:
        """How long until an answer is late beyond doubt: three times the p90, 250 ms to 1 s."""
        return PATIENCE_MAX_S if self._p90_s is None else min(max(3 * self._p90_s, PATIENCE_MIN_S), PATIENCE_MAX_S)

    def score(self, now: float, median_s: float) -> float:
        """Seconds, lower is better: rtt * (1 + 4 loss), drifting to the median by half each minute unmeasured.

        Without the drift one bad hour marks an upstream for days (dnsproxy's load_balance never forgets).
        """
        if self.rtt_s is None:
            return median_s
        fresh = math.exp2(-max(0.0, now - self.measured_at) / HALF_LIFE_S)
        own = self.rtt_s * (1 + 4 * self.loss)
        return median_s + (own - median_s) * fresh
