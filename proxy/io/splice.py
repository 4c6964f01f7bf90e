"""Pass the rest of a long body from one plain connection to another inside the kernel, by splice(2) through a pipe.

Theory: bytes that nobody here looks at need not come here. The source's transport stops reading; its socket is read into a
pipe, and the pipe into the sink's socket, by descriptors of our own. The rest goes the ordinary ways: `heard` counts every
piece and knows the deadlines, and a sink that is full says so as its transport would, which pauses the source's wire, and
that pauses this.

Whatever is out of the ordinary (an end in the middle, an error of either socket, a system that refuses) is not judged here:
the pipe's bytes are written to the sink's transport, in their place, and the transports go on and find out for themselves.

      READY ──begin──► RUNNING ──all passed, or anything odd──► over: `over(left)`, the source's transport reads again
                          └──either connection is ended───────► over, in silence: whoever ends it knows why

Owner: the source's connection. Both wires know it while it runs, and end it before they end. It has no timer.

Rules for editing: 1. only duplicates of descriptors are used: a number that a transport has closed may be somebody else's by
the time we are called; 2. the duplicates are closed before the transport is, or no FIN or RST would leave; 3. nobody else
writes to the sink while this runs; 4. after `heard` or a word to the sink, look whether it still runs.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, runtime_checkable

from proxy.io.wire import Wire

LEAST = 512 * 1024
"""Bytes that must be left. To begin and to end it costs as much as relaying 100 KiB does."""
PIECE = 256 * 1024
"""Bytes in the pipe at most: as many as a transport holds before it says that it is full."""
SLOTS_BYTES = 1024 * 1024
"""The pipe's size by its own count, a page for each fragment of a packet, however few bytes are in it. The most that a
process may ask for; with 64 KiB it moved 0.65 of what it moves so."""
STEPS = 16
"""Pieces in a row before others get their turn."""
MOST = 64
"""Bodies at a time: each holds four descriptors more than others do."""
IS_KNOWN = hasattr(os, "splice")
FLAGS = os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK if IS_KNOWN else 0

RUNNING: set[Splice] = set()


class Sink(Protocol):
    """Who owns the connection that takes the bytes; it is told of a full socket as by a transport."""

    wire: Wire

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...


class Splice:
    """The rest of one body. `heard(size)`: so many bytes came; `over(left)`: it has ended with so many still to come."""

    __slots__ = ("_full", "_heard", "_in_pipe", "_left", "_loop", "_over", "_pipe", "_sink", "_socks", "_source")

    def __init__(self, source: Wire, sink: Sink, heard: Callable[[int], None], over: Callable[[int], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._source, self._sink = source, sink
        self._heard, self._over = heard, over
        self._left = self._in_pipe = 0
        self._full = False
        self._pipe = self._socks = (-1, -1)

    @property
    def is_running(self) -> bool:
        return self in RUNNING

    def begin(self, left: int) -> bool:
        """Take over the source's bytes, of which `left` are to come. False, and nothing done: not now, or not here."""
        source, sink = self._source, self._sink.wire
        if left < LEAST or not IS_KNOWN or self.is_running or len(RUNNING) >= MOST:
            return False
        if not (source.is_plain and source.is_reading and sink.is_plain):
            return False
        sink.flush()
        if sink.is_behind or not self._open(source, sink):
            return False
        self._left = left
        RUNNING.add(self)
        source.read_by(self)
        sink.written_by = self
        self.resume_reading()
        return True

    def _open(self, source: Wire, sink: Wire) -> bool:
        fds: list[int] = []
        try:
            fds += os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            for wire in (source, sink):
                fds.append(os.dup(wire.fileno()))
        except OSError:  # out of descriptors: those that are there will do
            for fd in fds:
                os.close(fd)
            return False
        with suppress(OSError):  # beyond the user's share of pages: the pipe is a small one
            fcntl.fcntl(fds[1], fcntl.F_SETPIPE_SZ, SLOTS_BYTES)
        self._pipe, self._socks = (fds[0], fds[1]), (fds[2], fds[3])
        return True

    # ---------------------------------------------------------------- from the source's wire

    def pause_reading(self) -> None:
        self._loop.remove_reader(self._socks[0])

    def resume_reading(self) -> None:
        self._loop.add_reader(self._socks[0], self._on_readable)

    # ---------------------------------------------------------------- bytes

    def _on_readable(self) -> None:
        for _ in range(STEPS):
            try:
                size = os.splice(self._socks[0], self._pipe[1], min(self._left, PIECE), flags=FLAGS)
            except BlockingIOError:
                return
            except OSError:
                size = 0
            if not size:  # the source's transport will see the same
                self._hand_back()
                return
            self._left -= size
            self._in_pipe += size
            is_whole = self._pour()
            self._heard(size)
            if not self.is_running or self._full:
                return
            if not is_whole or not self._left:
                self._hand_back()
                return

    def _pour(self) -> bool:
        """The pipe into the sink, as far as it takes it. False: the sink is broken."""
        while self._in_pipe:
            try:
                taken = os.splice(self._pipe[0], self._socks[1], self._in_pipe, flags=FLAGS)
            except BlockingIOError:
                if not self._full:
                    self._wait_for_room()
                return True
            except OSError:
                taken = 0
            if not taken:
                return False
            self._in_pipe -= taken
        return True

    def _wait_for_room(self) -> None:
        self._full = True
        self.pause_reading()
        self._loop.add_writer(self._socks[1], self._on_writable)
        self._sink.pause_writing()

    def _on_writable(self) -> None:
        is_whole = self._pour()
        if is_whole and self._in_pipe:
            return
        if not is_whole or not self._left:
            self._hand_back()
            return
        self._loop.remove_writer(self._socks[1])
        self._full = False
        self._sink.resume_writing()
        if self.is_running and self._source.is_reading:
            self.resume_reading()

    # ---------------------------------------------------------------- ends

    def _hand_back(self) -> None:
        """The transports go on where we are."""
        self.end()
        self._over(self._left)

    def end(self) -> None:
        """End now; what is in the pipe is written to the sink, as all that came before it was. Idempotent."""
        if not self.is_running:
            return
        rest = os.read(self._pipe[0], self._in_pipe) if self._in_pipe else b""
        was_full = self._full
        self.drop()
        if rest:
            self._sink.wire.write_whole(rest)
        if was_full:  # what the transport holds now is not so much that it would ever say so
            self._sink.resume_writing()

    def drop(self) -> None:
        """End now; what is in the pipe is of no use. Idempotent."""
        if not self.is_running:
            return
        RUNNING.discard(self)
        self._loop.remove_reader(self._socks[0])
        self._loop.remove_writer(self._socks[1])
        for fd in (*self._pipe, *self._socks):
            os.close(fd)
        self._sink.wire.written_by = None
        self._source.read_by(None)


@runtime_checkable
class Spliced(Protocol):
    """A leg whose peer's body can pass unseen."""

    def splice_into(self, sink: Sink, heard: Callable[[int], None]) -> None:
        """From the next read on the rest of it may go straight into `sink`; `heard` counts it."""


@runtime_checkable
class Splicing(Protocol):
    """A leg that can take a body unseen."""

    @property
    def splice_sink(self) -> Sink | None:
        """Who takes the bytes; None where they are framed."""


def join(source: object, sink: object, heard: Callable[[int], None]) -> None:
    """Let the body that comes from the leg `source` pass to the leg `sink` unseen, where both can do that."""
    if isinstance(source, Spliced) and isinstance(sink, Splicing):
        taker = sink.splice_sink
        if taker is not None:
            source.splice_into(taker, heard)
