"""Write to a connection once a loop turn, pause and resume its reading, and end it in the way that is meant.

Theory: a head and the first body bytes belong into one segment and one TLS record, and so do the events of one read. No
transport sees to that: uvloop's and asyncio's make a system call of each write (measured: 15 for a read of 15 events), TLS
a record of each. So while a rim hears what its peer said, `Turn`, whatever that makes anybody write on any connection is
kept, and leaves joined when the rim is through. What is written outside of a turn leaves joined a callback later.

Owner: the rim whose protocol the transport has. The loop's rims share its turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

from proxy.io.rims import HIGH_WATER, LOW_WATER

if TYPE_CHECKING:
    from proxy.io.splice import Splice

RESET_ON_CLOSE = struct.pack("ii", 1, 0)


def reset(transport: asyncio.Transport) -> None:
    """Close with RST, so that the peer knows at once that nothing more is wanted."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    transport.abort()


def _nowhere(piece: bytes) -> None: ...


class Turn:
    """Whether somebody is being heard on this loop, and who has written meanwhile.

    Most turns make one piece for one wire, which waits here; a second one sends both to their wires, which wait then.
    """

    __slots__ = ("is_open", "piece", "waiting", "wire")

    def __init__(self) -> None:
        self.is_open = False
        self.wire: Wire | None = None
        self.piece = b""
        self.waiting: list[Wire] = []

    def end(self) -> None:
        """What was written leaves."""
        self.is_open = False
        wire = self.wire
        if wire is not None:
            self.wire = None
            transport = wire.transport
            if transport is not None and not transport.is_closing():
                transport.write(self.piece)
        elif self.waiting:
            waiting, self.waiting = self.waiting, []
            for wire in waiting:
                wire.flush()

    def part(self) -> None:
        """The one piece becomes its wire's."""
        wire, self.wire = self.wire, None
        if wire is not None:
            wire.keep(self.piece)


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, Turn] = WeakKeyDictionary()
_last: tuple[weakref.ref[asyncio.AbstractEventLoop], Turn] | None = None


def _turn_of(loop: asyncio.AbstractEventLoop) -> Turn:
    """The loop's turn. A process has one loop but for tests, so the last one is looked at first."""
    global _last
    if _last is not None and _last[0]() is loop:
        return _last[1]
    turn = _turns.get(loop)
    if turn is None:
        turn = _turns[loop] = Turn()
    _last = weakref.ref(loop), turn
    return turn


class Wire:
    """One connection's transport. Every call is allowed at any time; before `attach` and after the end they do nothing."""

    __slots__ = (
        "_flush_due", "_loop", "_out", "_reading", "_send", "_splice", "direct", "transport", "turn", "write", "written_by",
    )  # fmt: skip

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.transport: asyncio.Transport | None = None
        self._out: list[bytes] = []
        self._flush_due = False
        self._reading = True
        self._splice: Splice | None = None  # reads in the transport's place
        self.written_by: Splice | None = None
        """Whoever writes past us until it ends."""
        self.turn = _turn_of(loop)
        """To be opened before what the peer said is passed on, and ended after it, come what may."""
        self.write: Callable[[bytes], None] = _nowhere
        """Send a piece with whatever else is written at this time."""
        self.direct: Callable[[bytes], None] = _nowhere
        """Outside of a turn: send a piece at once, or behind what waits."""
        self._send: Callable[[bytes], None] = _nowhere

    def attach(self, transport: asyncio.BaseTransport) -> None:
        made: asyncio.Transport = transport  # type: ignore[assignment]  # what both loops give
        self.transport = made
        made.set_write_buffer_limits(high=HIGH_WATER, low=LOW_WATER)
        self.write, self.direct, self._send = self._write, made.write, made.write

    @property
    def is_open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    @property
    def is_plain(self) -> bool:
        """Whether what is read from its socket is what the peer said."""
        transport = self.transport
        return transport is not None and self.is_open and transport.get_extra_info("sslcontext") is None

    @property
    def is_behind(self) -> bool:
        """Whether the peer has yet to take some of what was written."""
        return bool(self._out) or self.transport is None or self.transport.get_write_buffer_size() > 0

    @property
    def is_reading(self) -> bool:
        return self._reading

    def fileno(self) -> int:
        """Its socket's. Raises OSError when there is none."""
        sock = self.transport.get_extra_info("socket") if self.transport is not None else None
        if sock is None or sock.fileno() < 0:
            raise OSError("not connected")
        fd: int = sock.fileno()
        return fd

    def read_by(self, splice: Splice | None) -> None:
        """Have `splice` read in the transport's place until it ends, which says None."""
        self._splice = splice
        if self.is_open and self._reading:
            transport = cast(asyncio.Transport, self.transport)
            transport.resume_reading() if splice is None else transport.pause_reading()

    def _end_splices(self, *, flush: bool = False) -> None:
        if self._splice is not None:
            self._splice.end()
        if self.written_by is not None:
            self.written_by.end() if flush else self.written_by.drop()

    def name(self, which: str) -> tuple[str, int]:
        """`sockname` or `peername`."""
        found = self.transport.get_extra_info(which) if self.transport is not None else None
        return (found[0], found[1]) if found else ("", 0)

    def _write(self, piece: bytes) -> None:
        turn = self.turn
        if turn.is_open and turn.wire is None and not turn.waiting and not self._flush_due:
            turn.wire, turn.piece = self, piece
            return
        turn.part()
        self.keep(piece)

    def keep(self, piece: bytes) -> None:
        """Have it wait for the flush."""
        self._out.append(piece)
        if not self._flush_due:
            self._flush_due = True
            self.direct = self.write
            if self.turn.is_open:
                self.turn.waiting.append(self)
            else:
                self._loop.call_soon(self.flush)

    def write_whole(self, piece: bytes) -> None:
        """Send a whole message, which nothing else belongs to: at once, unless something is before it."""
        if self._out or self.turn.wire is self:
            self.write(piece)
        else:
            send = self._send
            send(piece)

    def flush(self) -> None:
        """Give what was gathered to the transport now."""
        if self.turn.wire is self:
            self.turn.part()
        self._flush_due = False
        self.direct = self._send
        out, transport = self._out, self.transport
        if out:
            self._out = []
            if transport is not None and not transport.is_closing():
                transport.write(out[0] if len(out) == 1 else b"".join(out))

    def pause(self) -> None:
        if self._reading and self.is_open:
            self._reading = False
            (self._splice or cast(asyncio.Transport, self.transport)).pause_reading()

    def resume(self) -> None:
        if not self._reading and self.is_open:
            self._reading = True
            (self._splice or cast(asyncio.Transport, self.transport)).resume_reading()

    def half_close(self) -> bool:
        """FIN after what was written; False where it cannot be said: TLS has no half-close in asyncio."""
        self.flush()
        if self.transport is None or not self.transport.can_write_eof():
            return False
        if self.is_open:
            self.transport.write_eof()
        return True

    def close(self) -> None:
        """Close once what was written has left."""
        self._end_splices(flush=True)
        self.flush()
        if self.is_open:
            cast(asyncio.Transport, self.transport).close()

    def reset(self) -> None:
        """Drop what was written and close with RST."""
        self._end_splices()
        if self.turn.wire is self:
            self.turn.wire = None
        self._out.clear()
        self.write = self.direct = self._send = _nowhere
        if self.transport is not None:
            reset(self.transport)

    def let_go(self) -> None:
        """The connection is gone. A wire refers to itself, and with TLS its transport holds a read buffer of 256 KiB: kept
        until the collector comes, every closed connection would cost that much."""
        self._end_splices()
        self._out.clear()
        self.write = self.direct = self._send = _nowhere
        self.transport = None
