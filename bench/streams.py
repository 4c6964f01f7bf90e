"""Event streams and large bodies through headrace beside nginx, HAProxy and Caddy, HTTP/1.1 on loopback.

100 streams of 100 events a second: events delivered for a CPU-second of the proxy, and how late an event is at p50. Then one
large download and some large uploads: bytes for a CPU-second, and how much the proxy grew meanwhile. Any answer but 200 ends
the bench: a proxy that refuses a body, as nginx does by default above 1 MiB, is done with it in no time.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import cast

import uvloop

from bench.http_peers import PROXIES, WIDE, installed
from bench.measure import Figures, Server, free_port, record, take_turns

STREAMS, RATE = 100, 100
STAMP = b'"created":'
DOWN, UP = 1 << 30, 256 << 20
UPLOADS = 4  # in a turn: one takes an eighth of a second, and its figure varies by a third


class Reader(asyncio.Protocol):
    """One client: sends a request and looks at what comes."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.delays: list[int] = []
        self.received = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.wanted = 0
        self.counting = False
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self.request)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("closed"))


class EventReader(Reader):
    def data_received(self, data: bytes) -> None:
        if not self.counting:
            return
        now = time.monotonic_ns()
        at = data.find(STAMP)
        while at >= 0:
            end = data.find(b",", at)
            self.delays.append(now - int(data[at + len(STAMP) : end]))
            at = data.find(STAMP, end)


class BodyReader(Reader):
    def data_received(self, data: bytes) -> None:
        if not self.wanted:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            status = self._head.split(b" ", 2)[1]
            if status != b"200":
                self.done.set_exception(RuntimeError(f"answered {status.decode()}, not 200"))
            length = self._head[:end].lower().partition(b"content-length: ")[2].split(b"\r", 1)[0]
            self.wanted = int(length)
            data = self._head[end + 4 :]
        self.received += len(data)
        if self.received >= self.wanted and not self.done.done():
            self.done.set_result(None)


def get(target: str) -> bytes:
    fields = "Host: bench.localhost\r\nUser-Agent: OpenAI/Python 3.0.0\r\nAccept: text/event-stream\r\n\r\n"
    return f"GET {target} HTTP/1.1\r\n{fields}".encode()


async def streams(port: int, server: Server, seconds: float, count: int = STREAMS) -> tuple[float, float, float]:
    """(events for a CPU-second, p50 delay in us, share delivered)."""
    loop = asyncio.get_running_loop()
    readers = []
    for _ in range(count):
        _, reader = await loop.create_connection(lambda: EventReader(get(f"/sse?rate={RATE}")), "127.0.0.1", port)
        readers.append(reader)
    await asyncio.sleep(0.5)
    before, began = server.cpu_s(), time.monotonic()
    for reader in readers:
        reader.counting = True
    await asyncio.sleep(seconds)
    took, used = time.monotonic() - began, server.cpu_s() - before
    delays = [delay for reader in readers for delay in reader.delays]
    for reader in readers:
        reader.done.cancel()
        reader.transport.abort()
    return len(delays) / max(used, 0.01), statistics.median(delays) / 1000, len(delays) / (took * count * RATE)


async def body(port: int, server: Server, request: bytes, payload: int) -> tuple[float, int, int]:
    """(CPU-seconds, bytes taken, growth of the proxy in bytes). Raises RuntimeError for any answer but 200."""
    rss, before = server.rss_bytes(), server.cpu_s()
    _, reader = await asyncio.get_running_loop().create_connection(lambda: BodyReader(request), "127.0.0.1", port)
    peak = rss
    sent = 0
    block = bytes(256 * 1024)
    try:
        while sent < payload and not reader.done.done():
            reader.transport.write(block)
            sent += len(block)
            while reader.transport.get_write_buffer_size() > 4 << 20 and not reader.done.done():
                await asyncio.sleep(0.002)
        while not reader.done.done():
            await asyncio.wait({reader.done}, timeout=0.2)
            peak = max(peak, server.rss_bytes())
        reader.done.result()
    except (RuntimeError, OSError) as exc:
        raise RuntimeError(f"{server.name}: {request.split(b' HTTP', 1)[0].decode()}: {exc}") from exc
    finally:
        reader.transport.abort()
    return server.cpu_s() - before, sent or reader.received, peak - rss


def bodies(port: int, server: Server, request: bytes, payload: int, times: int = 1) -> tuple[float, int]:
    """(bytes for a CPU-second, the most that the proxy grew)."""
    done = [uvloop.run(body(port, server, request, payload)) for _ in range(times)]
    used, moved = sum(each[0] for each in done), sum(each[1] for each in done)
    return moved / max(used, 0.001), max(each[2] for each in done)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench streams", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4)
    options = parser.parse_args(argv)
    events = Figures("SSE 100 x 100/s over h1, events", "events per CPU-second", "nginx")
    delay = Figures("SSE 100 x 100/s over h1, delay p50", "us", "nginx")
    share = Figures("SSE 100 x 100/s over h1, delivered", "share", "nginx")
    down = Figures("download 1 GiB, plain h1", "bytes per CPU-second", "nginx")
    up = Figures("upload 256 MiB, plain h1", "bytes per CPU-second", "nginx")
    grown = Figures("RSS growth during the download", "bytes", "nginx")
    post = f"POST /up HTTP/1.1\r\nHost: bench.localhost\r\nContent-Length: {UP}\r\n\r\n".encode()
    with ExitStack() as stack:
        origin, upstream = stack.enter_context(Server("origin")), free_port()
        origin.start([sys.executable, "-m", "bench.origin", str(upstream)], upstream)
        makes, left_out = installed(PROXIES | WIDE)
        proxies = {name: make(stack, upstream) for name, make in makes.items()}

        def turn(name: str) -> None:
            server, port = proxies[name]
            if name not in WIDE:
                got, late, delivered = uvloop.run(streams(port, server, options.seconds))
                events.add(name, got)
                delay.add(name, late)
                share.add(name, delivered)
            rate, growth = bodies(port, server, get(f"/big?bytes={DOWN}"), 0)
            down.add(name, rate)
            grown.add(name, max(growth, 1))
            up.add(name, bodies(port, server, post, UP, UPLOADS)[0])

        turns: dict[str, Callable[[], None]] = {name: (lambda name=name: turn(name)) for name in proxies}  # type: ignore[misc]
        take_turns(options.rounds, turns)
    record(
        "streams",
        [events, delay, share, down, up, grown],
        [
            "nginx: proxy_buffering off, proxy_request_buffering off; HAProxy: option http-no-delay; Caddy: flush_interval -1",
            "nginx-256k: the same nginx with buffers of 256 KiB for bodies, in place of 8 and 16",
            f"headrace x nginx-256k: download {down.ratio('headrace', 'nginx-256k'):.2f}, "
            f"upload {up.ratio('headrace', 'nginx-256k'):.2f}",
            *left_out,
        ],
    )
    return 0
