"""Answer a request here, without an edge: collect a bounded body, say one answer.

Theory: the same leg as for a relayed exchange, with a receiver that only gathers. A client that goes away is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable

from proxy.messages import NOBODY, Abort, Fields, Leg, ResponseHead
from proxy.priority import Priority


def say(leg: Leg, head: ResponseHead, body: bytes) -> None:
    """One whole answer on a client's leg."""
    leg.head(head)
    if body and not head.no_body:
        leg.data(body)
    leg.end()


class LocalAnswer:
    """Gathers a request's body of at most `limit` bytes, then calls `done` once: with None when there was more."""

    __slots__ = ("_body", "_done", "_left", "_leg", "_over")

    def __init__(self, leg: Leg, limit: int, done: Callable[[bytes | None], None]) -> None:
        self._leg = leg
        self._left = limit
        self._body: list[bytes] = []
        self._done = done
        self._over = False
        leg.receiver = self

    @staticmethod
    def refuse(leg: Leg, head: ResponseHead, body: bytes) -> None:
        """Answer without waiting for the body; what still comes of it is dropped by the rim."""
        leg.receiver = NOBODY
        say(leg, head, body)

    def give_up(self) -> None:
        """Take the body for one over the limit without waiting for it."""
        self._finish(None)

    def on_data(self, chunk: bytes) -> None:
        self._left -= len(chunk)
        if self._left < 0:
            self._finish(None)
        else:
            self._body.append(chunk)

    def on_end(self) -> None:
        self._finish(b"".join(self._body))

    def _finish(self, body: bytes | None) -> None:
        if not self._over:
            self._over = True
            self._leg.receiver = NOBODY
            self._done(body)

    def on_abort(self, abort: Abort) -> None:
        self._over = True
        self._leg.receiver = NOBODY

    def on_head(self, head: ResponseHead) -> None: ...
    def on_interim(self, head: ResponseHead) -> None: ...
    def on_trailers(self, fields: Fields) -> None: ...
    def on_full(self) -> None: ...
    def on_drained(self) -> None: ...
    def on_priority(self, priority: Priority) -> None: ...
