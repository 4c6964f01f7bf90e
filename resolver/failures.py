"""Remember questions that just failed, so that each is not asked again at once (RFC 9520).

Theory: a failure is kept for a second, longer when it repeats, and five seconds at most: a name must be back soon after
its network is. It is nobody's answer, so no TTL bound touches it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

HELD_S = (1.0, 2.0, 4.0, 5.0)
"""By how often in a row it failed: at least 1 s (RFC 9520 3.2), growing, and never the 5 minutes that are allowed."""
MOST = 8192

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class _Failure(Generic[V]):
    until: float
    times: int
    verdict: V


class Failures(Generic[V]):
    """Verdicts by cache key, at most MOST of them; the oldest give way."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, _Failure[V]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: bytes, now: float) -> V | None:
        failure = self._kept.get(key)
        return failure.verdict if failure is not None and now < failure.until else None

    def failed(self, key: bytes, verdict: V, now: float) -> None:
        """One more failure; it is in a row with the last one when that ended less than HELD_S's longest ago."""
        before = self._kept.get(key)
        times = before.times + 1 if before is not None and now < before.until + HELD_S[-1] else 1
        self.keep(key, verdict, now + HELD_S[min(times, len(HELD_S)) - 1], times)

    def keep(self, key: bytes, verdict: V, until: float, times: int = 0) -> None:
        self._kept[key] = _Failure(until, times, verdict)
        self._kept.move_to_end(key)
        if len(self._kept) > MOST:
            self._kept.popitem(last=False)

    def forget(self, key: bytes | None = None) -> None:
        """One key, or all: the failures of another network or configuration say nothing."""
        if key is None:
            self._kept.clear()
        else:
            self._kept.pop(key, None)
