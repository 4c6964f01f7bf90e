"""One connection to an edge and what its pool knows of it, with the bounds and times of a pool.

Rules for editing: nothing here decides; `proxy.io.outbound` does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from proxy.io.dial import Dialled
from proxy.io.rims import DialMarks, EdgeConnection
from resolver.io.tls_client import remember


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Bounds and times of one edge's connections."""

    waiting: int = 1024
    dials: int = 64
    idle: int = 256
    """As many as one HTTP/2 client has streams, so that a wave of them finds the connections of the last one: with 64, waves
    of 128 closed and dialled one connection for every tenth request, and that cost more than all the rest (2.5 times)."""
    idle_s: float = 55.0
    """Servers close at 60 s (nginx 75, envoy 3600, the big providers 60 to 400): before them, or a POST is lost."""
    warm_pause_s: float = 15.0
    """Between dials that only keep warm: an edge that closes idle ones at once is not dialled all day."""
    look_up_s: float = 5.0
    """At least this between look-ups of a name in use, whatever its TTL; `look_up_idle_s` when it was not used."""
    look_up_idle_s: float = 30.0
    hint_margin_s: float = 2.0  # taken off a server's Keep-Alive: timeout


class Held:
    """A connection and what the pool knows of it."""

    __slots__ = ("connection", "dialled", "idle_since", "marks", "remembered", "serving", "used")

    def __init__(self, dialled: Dialled) -> None:
        self.connection: EdgeConnection = dialled.connection
        self.dialled = dialled
        self.marks = replace(dialled.marks, reused=True, resolve_s=0.0, connect_s=0.0, tls_s=0.0)
        self.idle_since: float | None = None
        self.used = False
        self.remembered = False
        self.serving = False  # its room is being given out

    @property
    def is_shared(self) -> bool:
        return self.connection.version != "h1"

    @property
    def takes_websockets(self) -> bool:
        """Shared ones: whether the edge takes extended CONNECTs, as far as it has said so."""
        return bool(getattr(self.connection, "allows_websocket", False))

    def remember(self) -> None:
        """Keep its TLS session. Tickets come after the handshake, so not before an answer, or before it is closed."""
        if self.dialled.transport is not None:
            remember(self.dialled.transport)

    def idle_limit_s(self, limits: PoolLimits) -> float:
        hint_s: float = getattr(self.connection, "idle_hint_s", 0.0) or 0.0
        return min(limits.idle_s, max(hint_s - limits.hint_margin_s, hint_s / 2)) if hint_s else limits.idle_s


def clipped(marks: DialMarks, waited_s: float) -> DialMarks:
    """The part of a dial that somebody waited for who came while it was under way: its end.

    Otherwise the parts of a waterfall would sum to more than the request took.
    """
    tls_s = min(marks.tls_s, waited_s)
    connect_s = min(marks.connect_s, waited_s - tls_s)
    resolve_s = min(marks.resolve_s, waited_s - tls_s - connect_s)
    return replace(marks, resolve_s=resolve_s, connect_s=connect_s, tls_s=tls_s)
