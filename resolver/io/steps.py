"""Drive a machine of `resolver.dnssec_chain`: bring it what it asks for, and let others run when it pauses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic

from resolver.dnssec_chain import Ask, Command, Need, Steps, V

Bring = Callable[[tuple[Need, ...]], Awaitable[Sequence[bytes | None]]]
"""The messages for some needs in their order; None for what could not be had."""


@dataclass(frozen=True, slots=True)
class _Done(Generic[V]):
    value: V


async def drive(steps: Steps[V], bring: Bring, *, heavy: bool = False) -> V:
    """What the machine returns. Raises what it raises, and what `bring` does.

    `heavy`: each step in a thread. A hand-over costs as much as a usual step, so only those pay that need it.
    """
    replies: Sequence[bytes | None] | None = None
    while True:
        step = await asyncio.to_thread(_step, steps, replies) if heavy else _step(steps, replies)
        match step:
            case _Done(value):
                return value
            case Ask(needs):
                replies = await bring(needs)
            case _:
                await asyncio.sleep(0)
                replies = ()


def _step(steps: Steps[V], replies: Sequence[bytes | None] | None) -> Command | _Done[V]:
    """One command, or the end: StopIteration cannot leave a thread."""
    try:
        return next(steps) if replies is None else steps.send(replies)
    except StopIteration as done:
        return _Done(done.value)
