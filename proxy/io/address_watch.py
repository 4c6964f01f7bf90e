"""Look an edge's name up again when its answer has expired, for as long as connections to it live.

A busy pool dials nothing new: without this it would stay for days with an address that the name has left. Only an answer
that has nothing of the old one is a move. Names that answer with a few of many addresses in turn would otherwise close
good connections all day.

Owner: `EdgeConnections`. The look-up is one task, cancelled by `close`; between look-ups there is one timer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from proxy.io.dial import Dialler
from proxy.io.eyeballs import DialError


class AddressWatch:
    """`legs()` counts the legs given so far, None when no connection is left to watch for. `moved` hears of a move."""

    def __init__(
        self,
        dialler: Dialler,
        *,
        min_s: float,
        idle_s: float,
        legs: Callable[[], int | None],
        moved: Callable[[frozenset[str]], None],
    ) -> None:
        self._dialler = dialler
        self._min_s, self._idle_s = min_s, idle_s
        self._legs, self._moved = legs, moved
        self._legs_before: int | None = 0
        self._addresses: frozenset[str] = frozenset()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def dialled(self) -> None:
        """A dial has ended well: its answer is news too, and there is something to watch for."""
        found = self._dialler.found
        if found is None or self._closed:
            return
        self._found(frozenset(found.addresses))
        if self._timer is None and self._task is None:
            self._schedule(max(found.ttl_s, self._min_s))

    async def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _schedule(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._start)

    def _start(self) -> None:
        self._timer = None
        if self._legs() is not None:  # else the next dial asks anyway
            self._task = asyncio.get_running_loop().create_task(self._look_up(), name="look up an edge")

    async def _look_up(self) -> None:
        ttl_s = self._idle_s
        try:
            found = await self._dialler.endpoints()
        except DialError:
            pass  # a resolver that is down moves nobody
        else:
            ttl_s = found.ttl_s
            self._found(frozenset(found.addresses))
        self._task = None
        legs = self._legs()
        in_use = legs != self._legs_before
        self._legs_before = legs
        self._schedule(max(ttl_s, self._min_s if in_use else self._idle_s))

    def _found(self, addresses: frozenset[str]) -> None:
        moved = bool(self._addresses) and addresses.isdisjoint(self._addresses)
        self._addresses = addresses
        if moved:
            self._moved(addresses)
