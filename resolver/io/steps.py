"""Drive a machine of `resolver.dnssec_chain`: bring it what it asks for, and let others run when it pauses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from resolver.dnssec_chain import Ask, Need, Steps, V

Bring = Callable[[tuple[Need, ...]], Awaitable[Sequence[bytes | None]]]
"""The messages for some needs in their order; None for what could not be had."""


async def drive(steps: Steps[V], bring: Bring) -> V:
    """What the machine returns. Raises what it raises, and what `bring` does."""
    replies: Sequence[bytes | None] | None = None
    try:
        while True:
            command = next(steps) if replies is None else steps.send(replies)
            if isinstance(command, Ask):
                replies = await bring(command.needs)
            else:
                await asyncio.sleep(0)
                replies = ()
    except StopIteration as done:
        result: V = done.value
        return result
    finally:
        steps.close()
