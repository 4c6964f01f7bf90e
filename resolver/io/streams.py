"""Answer DNS over TCP and TLS: many messages on a connection, each answered when it is known (RFC 7766, RFC 7858).

Theory: a connection takes messages in any number and pieces. All answers of one loop turn leave in one write, each with
its length in front. Reading stops while too many questions wait or the client does not read.

Who closes a connection: its own timer (idle, or a message that does not end), a client that does not read, the limit on
connections (the one that is longest without a question), `drain` and `abort`.
"""

from __future__ import annotations

import asyncio
from typing import cast

from resolver.io.service import STREAM_LIMIT, ResolverService, Wanted
from resolver.memos import Memos

IDLE_S = 10.0
"""RFC 7766 6.2.3 asks for seconds, not minutes; also the time a message may take from its first byte to its last."""
MOST_PENDING = 256
"""Questions of one connection that wait for an answer; reading stops above it."""
HIGH_WATER, MOST_UNREAD = 64 * 1024, 1024 * 1024
"""Bytes a client has not taken: above the first no more questions are read, above the second it is dropped."""


class StreamConnection(asyncio.Protocol):
    """One client over TCP, or TLS when `sealed`."""

    def __init__(self, service: ResolverService, idle_s: float, *, sealed: bool, open_ones: Connections) -> None:
        self._service = service
        self._idle_s = idle_s
        self._sealed = sealed
        self._replies = service.counter("tls" if sealed else "tcp")
        self._open = open_ones
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._out: list[bytes] = []  # each message's length, then the message, in as many pieces as they came
        self._pending = 0
        self._flushing = False
        self._stuck = False  # the client does not take what we wrote
        self._reading = True
        self._ending = False  # no more questions; close when the last answer is written
        self._last = self._loop.time()  # of the last whole message or answer
        self._begun: float | None = None  # when the first byte of an unfinished message came
        self._timer = self._loop.call_later(idle_s, self._on_timer)

    # --- what the transport says ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._peer: str = transport.get_extra_info("peername")[0]
        self._transport.set_write_buffer_limits(high=HIGH_WATER)
        self._open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._ending = True
        self._buffer.clear()
        self._open.discard(self)

    def data_received(self, data: bytes) -> None:
        if self._ending:
            return
        if not self._buffer:
            self._begun = self._loop.time()
        self._buffer += data
        self._take_messages()
        self._flush()

    def eof_received(self) -> bool:
        """A client may close its side and still wait (RFC 7766 6.2.3 lets it); over TLS there is no such half."""
        self._ending = True
        keep = bool(self._pending or self._out) and not self._sealed
        if not keep:
            self._timer.cancel()
        return keep

    def pause_writing(self) -> None:
        self._stuck = True
        self._steer()

    def resume_writing(self) -> None:
        self._stuck = False
        self._take_messages()
        self._flush()

    # --- messages ---------------------------------------------------------------------------------------------------

    def _take_messages(self) -> None:
        """One loop with everything in locals for what is known, as for datagrams."""
        buffer, at, service = self._buffer, 0, self._service
        known = (
            service.known(sealed=self._sealed) if service.rate_limit is None and service.query_log is None else Memos()
        )
        now, out, replies, hits = service.now(), self._out, self._replies, 0
        while self._pending < MOST_PENDING and not self._stuck and len(buffer) - at >= 2:
            size = buffer[at] << 8 | buffer[at + 1]
            end = at + 2 + size
            if len(buffer) < end:
                break
            asked = bytes(buffer[at + 4 : end])
            memo = known.get(asked)
            if memo is not None and not (now < memo.until and memo.entry.answer is memo.answer):
                memo = known.find(asked, now)
            if memo is not None:
                tail = memo.tail
                out += ((len(tail) + 2).to_bytes(2) + buffer[at + 2 : at + 4], tail)
                memo.entry.hits += 1
                replies[tail[1] & 15] += 1
                hits += 1
            else:
                self._take(bytes(buffer[at + 2 : end]))
            at = end
        service.count_known(hits)
        if at:
            del buffer[:at]
            self._last = self._loop.time()
            self._begun = self._last if buffer else None
        self._steer()

    def _take(self, wire: bytes) -> None:
        """A message too short for an id gets no answer, as over UDP; the connection stays in step either way."""
        limit = self._service.rate_limit
        if limit is not None and not limit.admits(self._peer, self._service.now()):
            reply: bytes | Wanted = self._service.refuse_rate(wire)
        else:
            reply = self._service.look(wire, STREAM_LIMIT, sealed=self._sealed, keepalive_s=self._idle_s)
        if isinstance(reply, Wanted):
            self._pending += 1
            self._service.wait(reply, self._answer)
        elif reply:
            self._give(reply, "")

    def _give(self, reply: bytes, source: str) -> None:
        self._out += (len(reply).to_bytes(2), reply)
        self._replies[reply[3] & 15] += 1
        if self._service.query_log is not None:
            self._service.query_log("tls" if self._sealed else "tcp", self._peer, reply, source)

    def _answer(self, reply: bytes, source: str) -> None:
        self._pending -= 1
        self._last = self._loop.time()
        if reply:
            self._give(reply, source)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._on_turn_end)

    def _on_turn_end(self) -> None:
        self._flushing = False
        if self._buffer and not self._ending:
            self._take_messages()
        self._flush()
        if self._ending and not self._pending:
            self._transport.close()

    def _flush(self) -> None:
        """One write for all that is ready: for TLS that is one record and one system call."""
        if not self._out:
            return
        out, self._out = self._out, []
        if self._transport.is_closing():
            return
        self._transport.write(b"".join(out))
        if self._transport.get_write_buffer_size() > MOST_UNREAD:
            self._transport.abort()

    def _steer(self) -> None:
        """Reads only while there is room for answers: a client that asks and never reads costs a bounded amount."""
        reading = not self._stuck and self._pending < MOST_PENDING and not self._ending
        if reading != self._reading and not self._transport.is_closing():
            self._reading = reading
            (self._transport.resume_reading if reading else self._transport.pause_reading)()

    # --- time -------------------------------------------------------------------------------------------------------

    @property
    def idle_since(self) -> float:
        """When it last did something; infinite while somebody waits for an answer on it."""
        return float("inf") if self._pending else self._last

    def _on_timer(self) -> None:
        now = self._loop.time()
        # A byte now and then keeps no connection open: an unfinished message counts from its first byte.
        oldest = self._begun if self._begun is not None and self._reading else self._last
        due = (now if self._pending else oldest) + self._idle_s
        if due <= now:
            self._close_idle()
        else:
            self._timer = self._loop.call_later(due - now, self._on_timer)

    def _close_idle(self) -> None:
        """A client that has not read what it asked for is reset; everybody else sees an orderly end."""
        if self._stuck or self._begun is not None:
            self._transport.abort()
        else:
            self._transport.close()

    def drain(self) -> None:
        """No more questions; closes when those that came are answered."""
        self._ending = True
        if not self._pending and not self._out:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()


class Connections:
    """The open stream connections of all listeners, bounded: room is made by closing the one longest idle."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._all: set[StreamConnection] = set()

    def __len__(self) -> int:
        return len(self._all)

    def add(self, connection: StreamConnection) -> None:
        if len(self._all) >= self.most:
            self.make_room()
        self._all.add(connection)

    def make_room(self) -> bool:
        """Closes the one longest idle; false when there is none."""
        if not self._all:
            return False
        idle = min(self._all, key=lambda c: c.idle_since)
        self._all.discard(idle)
        idle.abort()
        return True

    def discard(self, connection: StreamConnection) -> None:
        self._all.discard(connection)

    def all(self) -> list[StreamConnection]:
        return list(self._all)
