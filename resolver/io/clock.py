"""The clock that decisions are given: seconds that also count the time a laptop slept."""

from __future__ import annotations

import time

if hasattr(time, "CLOCK_BOOTTIME"):

    def now() -> float:
        """Seconds of CLOCK_BOOTTIME. CLOCK_MONOTONIC stops in suspend: a cache would believe expired answers."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:  # pragma: no cover - a system without the clock also has no suspend that stops the other one
    now = time.monotonic
