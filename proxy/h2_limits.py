"""What one HTTP/2 connection may cost: sizes, windows, and budgets for frames that make work without doing any.

Theory: each known flood (rapid reset CVE-2023-44487, resets that the server is provoked into CVE-2025-8671, CONTINUATION
CVE-2024-27316, SETTINGS and PING CVE-2019-9512 and 9515, empty frames CVE-2019-9518) is cheap to send and legal one at a
time. So each kind has a budget that refills with time; when it is spent the connection ends with ENHANCE_YOUR_CALM.
Bursts are far above what any client was seen to do: an agent that hedges and cancels stays below a tenth.
"""

from __future__ import annotations

from dataclasses import dataclass

from proxy.h2_errors import Code, H2ConnectionError

MAX_CONTINUATIONS = 128
"""Frames of one header block; with 16 KiB frames a 64 KiB list needs 4."""
BOMB_FACTOR = 16
"""A list so many times over its limit is no mistake: indexes into a full table blow 1 byte up to 4 KiB."""
MAX_UNSENT_CONTROL_BYTES = 1024 * 1024
"""Replies (ACKs, credit, resets) held while the peer does not read."""
REMEMBERED_CLOSED = 512
"""Closed streams whose late frames are told from an unopened stream's."""
MAX_INTERIM = 64
"""1xx heads of one exchange."""


@dataclass(frozen=True, slots=True)
class H2Limits:
    """Bounds of one connection. The most it can hold of what the peer sent is `connection_window`, however many
    streams there are: credit goes back only for what was passed on. How long a body may be is the relay's to say."""

    max_streams: int = 256
    max_header_bytes: int = 64 * 1024
    stream_window: int = 1024 * 1024
    connection_window: int = 32 * 1024 * 1024


class Budget:
    """A token bucket: `burst` at once, `per_s` in the long run."""

    __slots__ = ("_burst", "_left", "_name", "_per_s", "_since")

    def __init__(self, name: str, burst: int, per_s: float) -> None:
        self._name = name
        self._burst = burst
        self._per_s = per_s
        self._left = float(burst)
        self._since = 0.0

    def spend(self, now: float) -> None:
        """Take one; raises H2ConnectionError(ENHANCE_YOUR_CALM) when none is left. `now` in s, never going back."""
        if self._left >= self._burst:
            self._since = now
        self._left -= 1
        if self._left < 0:
            self._left = min(self._burst, self._left + (now - self._since) * self._per_s)
            self._since = now
            if self._left < 0:
                raise H2ConnectionError(Code.ENHANCE_YOUR_CALM, f"more than {self._burst} {self._name} at once")


class Budgets:
    """One connection's budgets."""

    __slots__ = ("control", "empty", "ping", "reset", "settings")

    def __init__(self) -> None:
        self.reset = Budget("reset streams", 500, 50)
        self.settings = Budget("SETTINGS frames", 100, 5)
        self.ping = Budget("PING frames", 200, 20)
        self.empty = Budget("empty DATA frames", 1000, 100)
        # WINDOW_UPDATE, PRIORITY, PRIORITY_UPDATE, unknown types, late frames: a download at full speed makes thousands.
        self.control = Budget("control frames", 20_000, 10_000)
