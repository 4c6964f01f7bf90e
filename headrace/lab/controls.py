"""How a lab edge is told to misbehave, and what it counted.

`Controls` can be set from Python or, as JSON, through the lab's control listener; both go through `change`, which
refuses unknown keys and wrong types and then changes nothing. `Tally` is what tests wait on instead of sleeping.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

MAX_ARRIVALS = 100_000
WAIT_S = 10.0


@dataclass(slots=True)
class Controls:
    """One edge's behaviour; the defaults are those of a quick and healthy one."""

    first_byte_s: float = 0.0  # before the head of an answer
    first_token_s: float = 0.0  # after the head, before the first token
    token_s: float = 0.0  # before each later token
    tokens: int = 24  # of a whole answer
    fail_status: int = 0  # answer API calls with this status, in the dialect of the path
    fail_times: int = -1  # how often; -1: until told otherwise
    retry_after_s: float = 0.0  # sent with 429 and 503, as retry-after and retry-after-ms
    drain_to: str = ""  # answer 307 to the edge with this id
    silent: bool = False  # take requests, answer none
    cut_after: int = -1  # reset the connection (h3: the stream) after this many tokens
    require_key: str = ""  # answer 401 unless the request carries this key
    greet: bool = True  # a realtime session says session.created at once; else with its first event
    websocket_idle_s: float = 0.0  # drop a WebSocket from which no byte, ping included, came for so long
    kv_cache_usage: float = 0.1  # shown in /metrics
    waiting: int = 0  # shown in /metrics

    def change(self, wanted: Mapping[str, Any]) -> None:
        """Set several at once. Raises ValueError and changes nothing when one is unknown or of another type."""
        known = {each.name: type(getattr(self, each.name)) for each in fields(self)}
        for name, value in wanted.items():
            if name not in known:
                raise ValueError(f"no control named {name!r}; there are {', '.join(known)}")
            if not _fits(value, known[name]):
                raise ValueError(f"control {name!r} takes {known[name].__name__}, got {value!r}")
        for name, value in wanted.items():
            setattr(self, name, known[name](value))

    def reset(self) -> None:
        """Back to quick and healthy."""
        for each in fields(self):
            setattr(self, each.name, each.default)

    def take_failure(self) -> int:
        """The status to fail with, or 0; uses up one of `fail_times`."""
        if not self.fail_status or self.fail_times == 0:
            return 0
        if self.fail_times > 0:
            self.fail_times -= 1
        return self.fail_status


@dataclass(slots=True)
class Tally:
    """What an edge saw. `numbers` has requests, answered, cancelled, cut, redirected, refused, tokens, websockets."""

    numbers: Counter[str] = field(default_factory=Counter)
    arrivals: Counter[str] = field(default_factory=Counter)  # by x-lab-request, else x-request-id
    versions: Counter[str] = field(default_factory=Counter)
    running: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, what: str, count: int = 1) -> None:
        self.numbers[what] += count
        self._wake()

    def arrive(self, request_id: str, version: str) -> None:
        self.versions[version] += 1
        if request_id and len(self.arrivals) < MAX_ARRIVALS:
            self.arrivals[request_id] += 1
        self.add("requests")

    def enter(self, count: int) -> None:
        """`count` more (or, negative, fewer) requests are being answered."""
        self.running += count
        self._wake()

    async def until(self, what: str, count: int, *, within_s: float = WAIT_S) -> None:
        """Wait until `numbers[what]`, or `running`, is at least `count`; for `running` 0 waits until none is left.
        Raises TimeoutError with the number seen."""
        try:
            async with asyncio.timeout(within_s):
                while not self._reached(what, count):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            seen = self.running if what == "running" else self.numbers[what]
            raise TimeoutError(f"waited {within_s:g} s for {count} {what}, saw {seen}") from None

    def view(self) -> dict[str, Any]:
        """For the control listener."""
        return {"running": self.running, "numbers": dict(self.numbers), "versions": dict(self.versions)}

    def _reached(self, what: str, count: int) -> bool:
        if what == "running":
            # At least: two may have come in one turn of the loop.
            return self.running >= count if count else self.running == 0
        return self.numbers[what] >= count

    def _wake(self) -> None:
        self._changed.set()


def _fits(value: object, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is kind
