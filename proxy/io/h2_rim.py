"""The write side of an HTTP/2 connection, either role: one write for what a loop turn said, or a burst over several turns.

Theory: whatever anybody says gathers in the sender and leaves in one write, since each write is a TLS record, a system call
and a wake-up of the peer (measured: 1.5x requests a CPU second against a write a frame). Events of many streams come in
bursts over several rounds of the loop, and a write between two rounds costs three events. So while each round still brings
more, writing waits for the next one: for a round that brings nothing, for HOLD_BYTES, or for the loop's clock to move, which
with uvloop is a millisecond. What comes alone is a few frames and waits for nothing.

Owner: the rim whose protocol the transport has.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.h2 import Connection

HOLD_BYTES = 8 * 1024
"""Beyond it a write is worth its price, and the peer has something to do meanwhile."""
BURST_PIECES = 5
"""Of output: a head with a body has four, an event two."""
BURST_S = 0.001


class H2Rim(asyncio.Protocol):
    """What writes. Those who derive say `_over()`: the connection failed and its last frames were written."""

    _h2: Connection

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._woken_at = 0.0
        self._pieces = 0  # that there were a round before

    @abstractmethod
    def _over(self) -> None: ...

    def pause_writing(self) -> None:
        self._h2.sender.blocked = True

    def resume_writing(self) -> None:
        sender = self._h2.sender
        sender.blocked = False
        if sender.queued and not sender.awake:
            sender.wake()

    def _wake(self) -> None:
        loop = self._loop
        self._woken_at = loop.time()
        self._pieces = BURST_PIECES - 1
        loop.call_soon(self._flush_unless_growing)

    def _flush_unless_growing(self) -> None:
        sender, loop = self._h2.sender, self._loop
        pieces = len(sender.out)
        if pieces > self._pieces and sender.unsent < HOLD_BYTES and loop.time() - self._woken_at < BURST_S:
            self._pieces = pieces
            loop.call_soon(self._flush_unless_growing)
        else:
            self._flush()

    def _flush(self) -> None:
        taken = self._h2.sender.take()
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if taken:
            transport.write(taken)
        if self._h2.failed is not None:
            self._over()
