"""Choose who sends next of the streams of one connection that wait: by urgency, among equals in turns or in order.

Theory (RFC 9218 10): the most urgent first; equals that are incremental a piece each in turn; equals that are not, one after
the other in the order of their ids. Where both kinds wait, those in order are one more in the ring of the others.

Strictness has one hole, on purpose: of `SHARE` turns a less urgent level gets one. A proxy's streams end at different
edges, and one that is told nothing for minutes looks like a dead client to its edge (RFC 9218 10.1 asks for this).

      urgency 0   ring: a, [b in order], c      <- next: a, b, c, a, b, c ... and every 16th from below
      urgency 3   ring: d
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

from proxy.priority import Priority

SHARE = 16
_IN_ORDER = -1

T = TypeVar("T")


class _Level(Generic[T]):
    """Those of one urgency who wait."""

    __slots__ = ("ordered", "passed", "ring")

    def __init__(self) -> None:
        self.ring: OrderedDict[int, T | None] = OrderedDict()  # None under _IN_ORDER: the turn of those in order
        self.ordered: dict[int, T] = {}
        self.passed = 0  # turns that more urgent levels had since this one's last

    def add(self, key: int, item: T, incremental: bool) -> None:
        if incremental:
            self.ring.setdefault(key, item)
        else:
            self.ordered.setdefault(key, item)
            self.ring.setdefault(_IN_ORDER, None)

    def remove(self, key: int) -> bool:
        if self.ordered.pop(key, None) is not None:
            if not self.ordered:
                del self.ring[_IN_ORDER]
            return True
        return self.ring.pop(key, None) is not None

    def take(self) -> T:
        self.passed = 0
        item = self.ring.popitem(last=False)[1]
        if item is None:
            item = self.ordered.pop(min(self.ordered))
            if self.ordered:
                self.ring[_IN_ORDER] = None
        return item


class Turns(Generic[T]):
    """Who waits. Each item has one place under its key (a stream id); what has more to send is added again after its turn."""

    __slots__ = ("_levels",)

    def __init__(self) -> None:
        self._levels: list[_Level[T]] = [_Level() for _ in range(8)]

    def __bool__(self) -> bool:
        return any(level.ring for level in self._levels)

    def __iter__(self) -> Iterator[T]:
        """Those who wait, in no order."""
        for level in self._levels:
            yield from (item for item in level.ring.values() if item is not None)
            yield from level.ordered.values()

    def add(self, key: int, item: T, priority: Priority) -> None:
        """Put it behind its equals; who waits already keeps its place."""
        self._levels[priority.urgency].add(key, item, priority.incremental)

    def remove(self, key: int) -> bool:
        """Whether it waited."""
        return any(level.remove(key) for level in self._levels)

    def next(self) -> T | None:
        """Whose turn it is, taken out; None when nobody waits."""
        chosen: _Level[T] | None = None
        for level in self._levels:
            if not level.ring:
                continue
            if chosen is None:
                chosen = level
                continue
            level.passed += 1
            if level.passed >= SHARE:
                chosen = level
                break
        return None if chosen is None else chosen.take()
