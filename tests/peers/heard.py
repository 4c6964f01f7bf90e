"""A receiver that a test can wait on: for a word, or for so many bytes."""

from __future__ import annotations

import asyncio

from tests.patience import no_hang
from tests.peers.fakeleg import Recorder


class Heard(Recorder):
    """Writes down what it hears and wakes whoever waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = asyncio.Event()

    def __getattribute__(self, name: str) -> object:
        if name.startswith("on_"):
            self.changed.set()
        return super().__getattribute__(name)

    async def until(self, *words: str) -> None:
        """Until one of them was heard."""
        async with no_hang():
            while not set(words) & set(self.words):
                self.changed.clear()
                await self.changed.wait()

    async def until_bytes(self, size: int) -> None:
        async with no_hang():
            while len(self.body) < size:
                self.changed.clear()
                await self.changed.wait()
