"""Where an upstream can be reached: its addresses in the order to try them, and how to get a connection to one.

Theory: the address that worked last comes first, one that failed goes last for a minute (a withdrawn IPv6 route costs
one failure, not one a query). `dial` starts the next address when the one before has not answered within 250 ms and
aborts none for it (RFC 8305 5).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import Protocol, TypeVar

from resolver.io.channel import Clock

STAGGER_S = 0.250
AVOID_S = 60.0


class Closable(Protocol):
    def shut(self) -> None: ...


Found = TypeVar("Found", bound=Closable)
Lookup = Callable[[str], Awaitable[Sequence[str]]]


class AddressBook:
    """The addresses of one upstream. `lookup` finds those of a host name (bootstrap); literals and given ones need none."""

    def __init__(self, host: str, given: Sequence[str], lookup: Lookup, clock: Clock) -> None:
        self.host = host
        self._lookup, self._clock = lookup, clock
        self._fixed = tuple(given) or _literal(host)
        self._failed_at: dict[str, float] = {}
        self._worked = ""

    def at_once(self) -> list[str]:
        """The addresses in order when they are known without a look-up, else []."""
        return self._ordered(self._fixed)

    async def find(self) -> list[str]:
        """The addresses in order. Raises OSError when the host cannot be found."""
        return self._ordered(self._fixed or await self._lookup(self.host))

    def worked(self, address: str) -> None:
        self._worked = address
        self._failed_at.pop(address, None)

    def failed(self, address: str) -> None:
        if len(self._failed_at) < 64:
            self._failed_at[address] = self._clock()

    def forget(self) -> None:
        """After a network change no memory of good and bad routes holds."""
        self._failed_at.clear()
        self._worked = ""

    def _ordered(self, addresses: Sequence[str]) -> list[str]:
        if len(addresses) < 2:
            return list(addresses)
        since = self._clock() - AVOID_S
        return sorted(addresses, key=lambda a: (self._failed_at.get(a, since) > since, a != self._worked))


def _discard(attempt: asyncio.Task[Found]) -> None:
    """A second connection that was completed in the very same moment, or in spite of its cancellation."""
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result().shut()


def _literal(host: str) -> tuple[str, ...]:
    with suppress(ValueError):
        return (str(ip_address(host)),)
    return ()


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


async def dial(book: AddressBook, connect: Callable[[str], Awaitable[Found]], timeout_s: float) -> Found:
    """The first connection that `connect(address)` completes, TLS included. Raises OSError with the last cause.

    Attempts that lose the race are cancelled once another one has won, never before.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _race(book, await book.find(), connect)
    except TimeoutError:
        raise TimeoutError(f"no connection in {timeout_s:.1f} s") from None


async def _race(book: AddressBook, addresses: list[str], connect: Callable[[str], Awaitable[Found]]) -> Found:
    attempts: dict[asyncio.Task[Found], str] = {}
    waiting, cause = list(addresses), OSError(f"no address of {book.host} is known")
    try:
        while waiting or attempts:
            if waiting:
                address = waiting.pop(0)
                attempts[asyncio.ensure_future(connect(address))] = address
            pause = STAGGER_S if waiting else None
            ended, _ = await asyncio.wait(attempts, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            for attempt in ended:
                address = attempts.pop(attempt)
                error = attempt.exception()
                if error is None:
                    book.worked(address)
                    return attempt.result()
                book.failed(address)
                if not isinstance(error, OSError):
                    raise error
                cause = error
        raise cause
    finally:
        for attempt in attempts:
            attempt.add_done_callback(_discard)
            attempt.cancel()
