"""One HTTP/2 connection over TLS with many event streams, and how late each event is. The frames of the answers are not read:
the windows are as wide as can be, and an event is found by its time stamp.
"""

from __future__ import annotations

import asyncio
import ssl
import statistics
import time
from typing import cast

from bench.measure import Server
from bench.streams import RATE, STAMP, STREAMS
from proxy.h2_frames import (
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_WINDOW,
    PREFACE,
    SETTINGS_ACK,
    frame,
    settings,
    window_update,
)
from proxy.hpack_encoder import standing_block

SETTLE_S = 0.5


class EventsReader(asyncio.Protocol):
    """Asks for `count` streams at once."""

    def __init__(self, target: bytes, count: int) -> None:
        block = standing_block(
            [(b":method", b"GET"), (b":scheme", b"https"), (b":authority", b"localhost"), (b":path", target)]
        )
        opened = [frame(HEADERS, END_HEADERS | END_STREAM, 2 * i + 1, block) for i in range(count)]
        hello = settings({INITIAL_WINDOW_SIZE: MAX_WINDOW}) + window_update(0, MAX_WINDOW - DEFAULT_WINDOW)
        self._asked = PREFACE + hello + SETTINGS_ACK + b"".join(opened)
        self._cut = b""
        self.delays: list[int] = []
        self.counting = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self._asked)

    def data_received(self, chunk: bytes) -> None:
        now, chunk = time.monotonic_ns(), self._cut + chunk
        rest, at = 1 - len(STAMP), chunk.find(STAMP)
        while at >= 0:
            end = chunk.find(b",", at)
            if end < 0:
                rest = at
                break
            stamp = chunk[at + len(STAMP) : end]
            if self.counting and stamp.isdigit():  # else a frame ended inside it
                self.delays.append(now - int(stamp))
            at = chunk.find(STAMP, end)
        self._cut = chunk[rest:]


async def events(port: int, server: Server, context: ssl.SSLContext, seconds: float) -> tuple[float, float, float]:
    """(events for a CPU-second of the server, p50 delay in us, share delivered)."""
    _, reader = await asyncio.get_running_loop().create_connection(
        lambda: EventsReader(b"/bench/sse?rate=%d" % RATE, STREAMS),
        "127.0.0.1",
        port,
        ssl=context,
        server_hostname="localhost",
    )
    await asyncio.sleep(SETTLE_S)
    before, began = server.cpu_s(), time.monotonic()
    reader.counting = True
    await asyncio.sleep(seconds)
    took, used = time.monotonic() - began, server.cpu_s() - before
    reader.transport.abort()
    if not reader.delays:
        raise RuntimeError("no event came")
    wanted = took * STREAMS * RATE
    return len(reader.delays) / max(used, 0.01), statistics.median(reader.delays) / 1000, len(reader.delays) / wanted
