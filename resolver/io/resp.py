"""Speak to a Redis server: commands out, replies in, in step (RESP2, redis.io/docs/reference/protocol-spec).

Theory: replies come in the order of the commands, so a queue of callbacks is all the state there is. Whoever stops waiting
for a reply leaves a callback that does nothing in the queue: the order holds. Only the reply types that GET, SET, AUTH and
SELECT have are read; anything else, or a reply above LARGEST, ends the connection. A client library was weighed: redis-py
is 30 000 lines, with a stream reader and a task for what is one dictionary look-up here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import cast

LARGEST = 64 * 1024
MOST_PENDING = 512

Heard = Callable[[bytes | None], None]
"""Called once: the value, or None for no value, an error reply or a lost connection."""


class RespConnection(asyncio.Protocol):
    """One connection. `lost` is called once, with why; `errors` counts error replies, the last one in `complaint`."""

    def __init__(self, lost: Callable[[RespConnection, str], None]) -> None:
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._pending: deque[Heard] = deque()
        self._unread = b""
        self._reason = "closed by the server"
        self.errors = 0
        self.complaint = ""

    @property
    def pending(self) -> int:
        return len(self._pending)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, heard: Heard, *words: bytes) -> None:
        """One command. When too many are unanswered `heard` gets None at once."""
        if self._transport is None or self._transport.is_closing() or len(self._pending) >= MOST_PENDING:
            heard(None)
            return
        self._pending.append(heard)
        self._transport.write(b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(x), x) for x in words]))

    def data_received(self, data: bytes) -> None:
        self._unread += data
        try:
            while self._unread and (found := _reply(self._unread)) is not None:
                value, is_error, size = found
                self._unread = self._unread[size:]
                self._take(value, is_error)
        except ValueError as exc:
            self.close(f"not a reply of Redis: {exc}")

    def _take(self, value: bytes | None, is_error: bool) -> None:
        if not self._pending:
            raise ValueError("a reply to nothing")
        if is_error:
            self.errors += 1
            # The first word names the kind (NOAUTH, OOM, READONLY); the rest may repeat what was sent.
            self.complaint = (value or b"").split(b" ")[0][:32].decode("ascii", "replace")
        self._pending.popleft()(None if is_error else value)

    def close(self, reason: str) -> None:
        self._reason = reason
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        pending, self._pending = self._pending, deque()
        self._lost(self, str(exc) if exc else self._reason)
        for heard in pending:
            heard(None)


def _reply(unread: bytes) -> tuple[bytes | None, bool, int] | None:
    """(value, is it an error, bytes used), None while it is not whole. Raises ValueError for what is no reply."""
    kind = unread[:1]
    if kind not in b"+-:$":
        raise ValueError(f"begins with {kind!r}")
    end = unread.find(b"\r\n", 1, 512)
    if end < 0:
        if len(unread) > 512:
            raise ValueError("a line without an end")
        return None
    line = unread[1:end]
    if kind != b"$":
        return line, kind == b"-", end + 2
    size = int(line)
    if size == -1:
        return None, False, end + 2
    if not 0 <= size <= LARGEST:
        raise ValueError(f"a value of {size} bytes")
    if len(unread) < end + size + 4:
        return None
    if unread[end + 2 + size : end + size + 4] != b"\r\n":
        raise ValueError("a value that does not end where it says")
    return unread[end + 2 : end + 2 + size], False, end + size + 4
