"""The clock that decisions are given: seconds that also count the time a laptop slept."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

now: Callable[[], float] = (
    # CLOCK_MONOTONIC stops in suspend: a cache would believe expired answers. A partial, because this is called several
    # times for each request and a Python frame would cost more than the clock.
    partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
)
"""Seconds of CLOCK_BOOTTIME (of the monotonic clock where there is none)."""
