"""Waiting in tests: for events, with a guard that only a hang meets, and for what is promised to be quick.

The suite must hold on a machine that gives it a tenth of a core. So a test waits for what happens, however long that
takes; no bound on wall time is an assertion, unless the bound is the promise itself: then `promptly` tries it more than
once, since a busy machine delays any one try and a slow program delays them all.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

import pytest

T = TypeVar("T")

HANG_S = 40.0
"""Longer than anything here takes on any machine, shorter than the limit of a whole test."""
TRIES = 5


def no_hang() -> asyncio.Timeout:
    """`async with no_hang():` what waits inside has surely hung when this runs out."""
    return asyncio.timeout(HANG_S)


async def soon(work: Awaitable[T]) -> T:
    """What `work` gives; TimeoutError when it hangs."""
    return await asyncio.wait_for(work, HANG_S)


async def eventually(condition: Callable[[], object], timeout_s: float = HANG_S) -> None:
    """Wait for what no event tells of."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def promptly(limit_s: float, act: Callable[[], Awaitable[T]], tries: int = TRIES) -> T:
    """What `act` gives in the first of several tries that keeps the limit; AssertionError when none does."""
    took = []
    for _ in range(tries):
        begin = time.monotonic()
        found = await act()
        took.append(time.monotonic() - begin)
        if took[-1] < limit_s:
            return found
    raise AssertionError(f"never under {limit_s} s: {', '.join(f'{each:.3f}' for each in took)}")


def timed(test: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a test whose subject is a time of the program's own (patience, a hedge, an idle limit) beside real peers.

    It runs alone, after the others. A machine that stops for as long as that time makes any one try meaningless, so it
    may be tried again; what is wrong in the program is wrong in each try.
    """
    if not inspect.iscoroutinefunction(test):
        return several_times(test)

    @functools.wraps(test)
    async def several(*args: Any, **kw: Any) -> None:
        for left in reversed(range(TRIES)):
            try:
                await test(*args, **kw)
            except Exception as failure:
                _judge(failure, left)
            else:
                return

    return cast(Callable[..., Any], pytest.mark.alone(several))


def several_times(test: Callable[..., None]) -> Callable[..., None]:
    """`timed` for a plain function."""

    @functools.wraps(test)
    def several(*args: Any, **kw: Any) -> None:
        for left in reversed(range(TRIES)):
            try:
                test(*args, **kw)
            except Exception as failure:
                _judge(failure, left)
            else:
                return

    return cast(Callable[..., None], pytest.mark.alone(several))


def _judge(failure: Exception, left: int) -> None:
    if not left:
        raise failure
    print(f"tried again after {failure!r}")
