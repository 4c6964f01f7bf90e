"""Say where the time of one exchange went, in parts that sum to the whole.

Theory: an exchange passes a few marks in order; a part is the time between two of them, so nothing is counted twice and
nothing is lost. What a dial reports of itself (resolve, connect, tls) is taken out of the time before the leg was open;
the rest of that time, failed attempts included, is `queue`.

      start ...queue... [resolve][connect][tls] open ..upload.. sent ..wait.. head ..first_byte.. body ..answer.. end

Rules for editing: no clock here; marks only move forward.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

SHOWN_S = 0.00005
"""Parts below 0.05 ms round to nothing in Server-Timing."""
PARTS = ("queue", "resolve", "connect", "tls", "upload", "wait", "first_byte", "answer")


class Waterfall:
    """The marks of one exchange; every time is a caller's `now` in seconds."""

    __slots__ = ("connect_s", "ended", "first", "head", "opened", "resolve_s", "sent", "start", "tls_s")

    def __init__(self, now: float) -> None:
        self.start = now
        self.opened = self.sent = self.head = self.first = self.ended = -1.0
        self.resolve_s = self.connect_s = self.tls_s = 0.0

    def open(self, now: float, resolve_s: float, connect_s: float, tls_s: float) -> None:
        """A leg to an edge is open. A later attempt replaces an earlier one, whose time becomes `queue`."""
        self.opened, self.sent = now, -1.0
        self.resolve_s, self.connect_s, self.tls_s = resolve_s, connect_s, tls_s

    def parts(self, now: float) -> dict[str, float]:
        """Seconds by part up to `now` (or to the end mark when it is set), in the order of PARTS; zero parts left out.

        >>> w = Waterfall(10.0); w.open(10.5, 0.1, 0.2, 0.1); w.sent = 10.6; w.head = 11.0
        >>> {k: round(v, 3) for k, v in w.parts(11.5).items()}
        {'queue': 0.1, 'resolve': 0.1, 'connect': 0.2, 'tls': 0.1, 'upload': 0.1, 'wait': 0.4, 'first_byte': 0.5}
        """
        end = self.ended if self.ended >= 0 else now
        head = self.head if self.head >= 0 else end
        opened = self.opened if self.opened >= 0 else head
        sent = self.sent if 0 <= self.sent <= head else head
        first = self.first if self.first >= 0 else end
        # A dial that was shared began before this exchange did: it can claim no more than there was.
        left = opened - self.start
        tls = min(self.tls_s, left)
        connect = min(self.connect_s, left - tls)
        resolve = min(self.resolve_s, left - tls - connect)
        whole = (
            ("queue", left - resolve - connect - tls),
            ("resolve", resolve),
            ("connect", connect),
            ("tls", tls),
            ("upload", max(0.0, sent - opened)),
            ("wait", head - max(sent, opened)),
            ("first_byte", first - head),
            ("answer", end - first),
        )
        return {name: seconds for name, seconds in whole if seconds > 0}

    def server_timing(self, description: str) -> bytes:
        """The value of a Server-Timing field (W3C) for an answer whose head is there, in milliseconds; some 120 bytes."""
        opened, sent = self.opened, self.sent
        if not opened <= sent <= self.head:
            sent = self.head
        value = f'headrace;desc="{description}", wait;dur={(self.head - sent) * 1e3:.1f}'
        # Most requests meet a warm connection: what took no time worth a digit is left out.
        if opened - self.start > SHOWN_S:
            value += self._dial_timing()
        if sent - opened > SHOWN_S:
            value += f", upload;dur={(sent - opened) * 1e3:.1f}"
        return value.encode("latin-1")

    def _dial_timing(self) -> str:
        queue = self.opened - self.start - self.resolve_s - self.connect_s - self.tls_s
        parts = (("queue", queue), ("resolve", self.resolve_s), ("connect", self.connect_s), ("tls", self.tls_s))
        return "".join([f", {name};dur={seconds * 1e3:.1f}" for name, seconds in parts if seconds > SHOWN_S])


class Finished(Protocol):
    """What is counted of a finished exchange, and how to get at the whole of its record."""

    @property
    def pool(self) -> str: ...
    @property
    def edge(self) -> str: ...
    @property
    def outcome(self) -> str: ...
    @property
    def status(self) -> int: ...
    @property
    def bytes_in(self) -> int: ...
    @property
    def bytes_out(self) -> int: ...
    @property
    def attempts(self) -> int: ...
    @property
    def reused(self) -> bool: ...
    @property
    def resumed(self) -> bool: ...
    @property
    def wall_s(self) -> float: ...
    @property
    def first_byte_s(self) -> float | None: ...
    def whole(self) -> RequestRecord: ...


@dataclass
class RequestRecord:
    """One finished exchange, for `headrace requests`, the log and the metrics. Holds no query, header or body.

    `outcome`: ok, client cancelled, edge lost, edge broke the protocol, timed out, refused, our error.
    `fall`: the marks; what people read of them is worked out when they ask. `started_at`: seconds since the epoch.
    """

    id: str
    started_at: float
    method: str
    host: str
    path: str
    pool: str
    fall: Waterfall
    edge: str = ""
    client_version: str = ""
    edge_version: str = ""
    status: int = 0
    outcome: str = "ok"
    detail: str = ""
    bytes_in: int = 0
    bytes_out: int = 0
    attempts: int = 1
    reused: bool = False
    resumed: bool = False
    events: int = 0
    incomplete: bool = False
    error_in_band: bool = False
    first_token: float = -1.0
    last_token: float = -1.0
    usage: dict[str, int] = field(default_factory=dict)

    def whole(self) -> RequestRecord:
        return self

    @property
    def retries(self) -> int:
        return max(0, self.attempts - 1)

    @property
    def wall_s(self) -> float:
        """Seconds from the head to the end."""
        return self.fall.ended - self.fall.start

    @property
    def first_byte_s(self) -> float | None:
        """Seconds from the head to the first byte of the answer's body; None when there was none."""
        return self.fall.first - self.fall.start if self.fall.first >= 0 else None

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the head to the first event with content of an event stream; None when none was seen."""
        return self.first_token - self.fall.start if self.first_token >= 0 else None

    @property
    def last_token_s(self) -> float | None:
        """Seconds from the head to the last of its tokens."""
        return self.last_token - self.fall.start if self.last_token >= 0 else None

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by name of PARTS; they sum to `wall_s`."""
        return self.fall.parts(self.fall.ended)
