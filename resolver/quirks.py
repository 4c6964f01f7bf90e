"""Remember what a peer cannot bear: features it breaks on, and how long it lets a connection idle."""

from __future__ import annotations


class Intolerance:
    """A feature that a peer showed it cannot bear: left out for 5 minutes, then tried again, twice as long each
    time it fails anew, up to 6 h (the shape of systemd-resolved's feature levels)."""

    __slots__ = ("_until", "_wait_s")

    FIRST_S, LONGEST_S = 300.0, 21_600.0

    def __init__(self) -> None:
        self._until = self._wait_s = 0.0

    def spares(self, now: float) -> bool:
        """Whether the feature is to be left out now."""
        return now < self._until

    def broke(self, now: float) -> None:
        if not self.spares(now):
            self._wait_s = min(max(self._wait_s * 2, self.FIRST_S), self.LONGEST_S)
            self._until = now + self._wait_s

    def worked(self) -> None:
        self._wait_s = 0.0


class IdleLimit:
    """How long an upstream lets a connection idle, learned from its closing; ours close at 80 % of that.

    Public services were measured to close at 8 to 11 s, one at 1.5 s. A close is normal (RFC 7766 6.2.3), but a query
    that crosses it pays a handshake. Each idle close of ours raises the guess by 5 %, so that it can grow again.
    """

    __slots__ = ("_learned_s",)

    UNKNOWN_S, SHORTEST_S = 30.0, 0.5

    def __init__(self) -> None:
        self._learned_s = self.UNKNOWN_S

    @property
    def close_after_s(self) -> float:
        return 0.8 * self._learned_s

    def closed_by_peer(self, idle_s: float) -> None:
        # Below half a second it is rather a restart than a limit: learning it would cost a handshake a query.
        if idle_s >= self.SHORTEST_S:
            self._learned_s = min(idle_s, self._learned_s * 1.5, self.UNKNOWN_S)

    def closed_by_us(self) -> None:
        if self._learned_s < self.UNKNOWN_S:
            self._learned_s *= 1.05

    def told(self, timeout_s: float) -> None:
        """The peer named its limit (edns-tcp-keepalive, RFC 7828)."""
        self._learned_s = min(max(timeout_s, self.SHORTEST_S), self.UNKNOWN_S * 4)
