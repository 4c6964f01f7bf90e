"""Keep those who wait for a connection to one edge, first in first out, in a line for each kind of connection that will do.

Theory: a request takes any version. A WebSocket that may share (RFC 8441, 9220) takes h1, or an h2 or h3 connection whose edge
said that it knows extended CONNECT; any other upgrade, and a WebSocket of an edge that does not, takes h1 alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from proxy.io.rims import Opening
from proxy.messages import Abort

ANY, OVER_H1, WEBSOCKET = range(3)
SERVED_BY_H1 = (OVER_H1, WEBSOCKET, ANY)
"""What an h1 connection serves: those first who can be served by little else."""


@dataclass(slots=True)
class Waiting:
    opening: Opening
    fresh: bool  # only on a connection dialled from now on
    since: float
    deadline: float  # of the loop's clock


class Lines:
    """The three lines; an opening stands in one of them at most."""

    def __init__(self) -> None:
        self._lines: tuple[dict[int, Waiting], ...] = ({}, {}, {})

    def __len__(self) -> int:
        return sum(map(len, self._lines))

    def __bool__(self) -> bool:
        first, second, third = self._lines
        return bool(first or second or third)

    def size(self, line: int) -> int:
        return len(self._lines[line])

    def join(self, line: int, waiting: Waiting) -> None:
        self._lines[line][id(waiting.opening)] = waiting

    def leave(self, opening: Opening) -> None:
        for line in self._lines:
            line.pop(id(opening), None)

    def next(self, line: int, *, new: bool) -> Waiting | None:
        """Who is first, taken out; `new`: the connection is one that the fresh may have."""
        waiting = self._lines[line]
        key = next((key for key, each in waiting.items() if new or not each.fresh), None)
        return None if key is None else waiting.pop(key)

    def move(self, line: int, to: int) -> None:
        """Everyone of one line goes to the end of another."""
        self._lines[to].update(self._lines[line])
        self._lines[line].clear()

    def fail(self, line: int, count: int, abort: Abort) -> None:
        """Tell the first `count` of a line that it is over."""
        waiting = self._lines[line]
        for failed in [waiting.pop(key) for key in list(waiting)[:count]]:
            failed.opening.on_open_failed(abort)

    def fail_all(self, abort: Abort, due: Callable[[Waiting], bool] = lambda _: True) -> None:
        """Tell everyone for whom it is due."""
        for line in self._lines:
            for failed in [line.pop(key) for key, each in list(line.items()) if due(each)]:
                failed.opening.on_open_failed(abort)

    @property
    def first_deadline(self) -> float | None:
        return min((each.deadline for line in self._lines for each in list(line.values())[:1]), default=None)
