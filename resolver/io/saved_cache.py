"""Carry the cache over a restart: read in slices that leave room for answers, written whole in a thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

from resolver import snapshot
from resolver.cache import Cache
from resolver.errors import Malformed
from resolver.io import files

log = logging.getLogger("headrace.resolver")

SLICE = 500
"""Entries for each turn of the loop: about 3 ms."""


class SavedCache:
    """The file of one cache. `wall` is seconds since the epoch, the only clock that outlives a boot."""

    def __init__(self, state_dir: Path, cache: Cache, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._state_dir = state_dir
        self._cache = cache
        self._clock = clock
        self._wall = wall

    async def restore(self, allowed: Callable[[snapshot.Saved], bool]) -> None:
        """Puts back what is still of use and `allowed` today; a file that cannot be believed is one line of log."""
        content = await asyncio.to_thread(files.read_cache_file, self._state_dir)
        if not content:
            return
        try:
            saved = await asyncio.to_thread(snapshot.read, content, self._wall())
        except Malformed as exc:
            log.warning("saved DNS cache dropped: %s", exc)
            return
        read_at, entries, count = self._clock(), iter(saved), 0
        while batch := list(islice(entries, SLICE)):
            count += snapshot.restore(self._cache, filter(allowed, batch), read_at)
            await asyncio.sleep(0)
        log.info("DNS cache: %d of %d saved answers restored", count, len(saved))

    async def save(self) -> None:
        """Entries are copied here, where nobody else changes them; their messages are immutable bytes."""
        entries = [replace(entry) for entry in self._cache]
        now, wall = self._clock(), self._wall()
        await asyncio.to_thread(lambda: files.write_cache_file(self._state_dir, snapshot.write(entries, now, wall)))
