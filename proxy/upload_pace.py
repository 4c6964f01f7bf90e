"""Judge an upload by its pace, so that a byte now and then does not hold a place for ever.

Theory: `timeouts.first_byte` is how long we wait for a client that says nothing. If every byte started it anew, one byte a
minute would be a request without end. So the wait is a store: silence draws on it, bytes fill it at SLOWEST bytes a second,
and it never holds more than it began with. Who sends faster than that never notices; who sends nothing is cut after
`first_byte` as before; who drips is cut soon after it. Time in which the edge, or we, held the client back draws nothing.

Beside others: Apache's mod_reqtimeout has the same rule and the same rate (`body=20,MinRate=500`); nginx and HAProxy
start their timers anew with every byte; Envoy bounds the whole request, which would cut honest large uploads on slow lines.

Only until the answer begins: from there on a slow body may be half of a conversation, and `timeouts.idle` and `total` hold.
"""

from __future__ import annotations

SLOWEST = 500
"""Bytes a second. A microphone's Opus stream brings 2000, a 2G line 3000."""


class UploadPace:
    """One request's store; `patience_s` is `timeouts.first_byte`."""

    __slots__ = ("_at", "_left_s", "_patience_s")

    def __init__(self, patience_s: float) -> None:
        self._patience_s = self._left_s = patience_s
        self._at = -1.0

    def held(self) -> None:
        """The client was held back: the time until its next bytes is not its own."""
        self._at = -1.0

    def came(self, size: int, now: float) -> float:
        """When the next bytes are due after these."""
        drawn_s = now - self._at if self._at >= 0 else 0.0
        self._at = now
        self._left_s = min(self._patience_s, self._left_s - drawn_s + size / SLOWEST)
        return now + self._left_s
