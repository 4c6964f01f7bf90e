"""Keep house behind the answers: blocklists, hosts files, the saved cache, each when its time has come.

Owned by the service's task, which `close` cancels; a save that is cut short leaves the old file.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace

from config import model
from resolver.answer import Answer
from resolver.cache import name_of, scope_of
from resolver.chain import Chain
from resolver.hosts import LocalNames
from resolver.io import files
from resolver.io.asking import Asking
from resolver.io.fetch import ContentRefused
from resolver.io.saved_cache import SLICE, SavedCache

_SAVE_EVERY_S, _LOOK_EVERY_S = 300.0, 10.0


class Housekeeping:
    """`forget_memos` is called when what is known here no longer decides as it did."""

    config: model.Resolver

    def __init__(
        self,
        chain: Chain,
        asking: Asking,
        saved: SavedCache,
        clock: Callable[[], float],
        forget_memos: Callable[[], None],
    ) -> None:
        self.loaded = asyncio.Event()
        self._chain, self._asking, self._saved = chain, asking, saved
        self._clock = clock
        self._forget_memos = forget_memos
        self._policy_changed = asyncio.Event()
        self._hosts_stamps: tuple[tuple[int, int], ...] = ()

    async def run(self) -> None:
        await self._take_policy()
        if self.config.cache.persist:
            await self._saved.restore(lambda saved: self._allowed(saved.key, saved.answer))
        self.loaded.set()
        saved_at = self._clock()
        while True:
            await within(self._policy_changed, _LOOK_EVERY_S)
            if self._policy_changed.is_set():
                await self._take_policy()
            if files.stamps(self.config.hosts_files) != self._hosts_stamps:
                self.read_hosts()
            if self.config.cache.persist and self._clock() - saved_at >= _SAVE_EVERY_S:
                saved_at = self._clock()
                await self._saved.save()

    async def save(self) -> None:
        """At the end. A cache that was not read back yet must not take the place of the one on disk."""
        if self.loaded.is_set() and self.config.cache.persist:
            await self._saved.save()

    def policy_changed(self) -> None:
        """Lists are read in the background: until they are there the old ones go on blocking."""
        self._policy_changed.set()

    def read_hosts(self) -> None:
        self._hosts_stamps = files.stamps(self.config.hosts_files)
        self._chain.local = LocalNames(files.read_hosts(self.config.hosts_files), self.config.records)
        self._forget_memos()

    async def _take_policy(self) -> None:
        """Reads the blocklists, then forgets what today's policy would have refused, a slice for each turn of the loop."""
        self._policy_changed.clear()
        self._chain.blocklist = await asyncio.to_thread(files.read_blocklists, self.config.blocklists)
        self._asking.fetcher = replace(self._asking.fetcher, blocklist=self._chain.blocklist)
        self._forget_memos()
        for number, entry in enumerate(self._chain.cache):
            if entry.answer is not None and not self._allowed(entry.key, entry.answer):
                self._chain.cache.remove(entry.key)
            if number % SLICE == SLICE - 1:
                await asyncio.sleep(0)

    def _allowed(self, key: bytes, answer: Answer) -> bool:
        """Whether a kept answer may still be given: its zone is there, and its content would pass today."""
        scope, zone = self._chain.zones.zone_of(name_of(key))
        if scope != scope_of(key):
            return False
        try:
            self._asking.fetcher.judge(answer, zone)
        except ContentRefused:
            return False
        return True


async def within(event: asyncio.Event, seconds: float) -> None:
    """Returns when the event is set or the time is over. Not wait_for(): before 3.12 it loses a cancellation that comes
    together with the event, and whoever closes would wait for ever."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
