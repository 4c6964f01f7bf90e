"""HTTP/3 in, HTTP/1.1 out: headrace beside Caddy (quic-go), asked by one client of neither's making (qh3), taking turns.

Both run as a whole program with one origin behind, so a figure is what a user gets for a CPU-second of the proxy. Caddy has
one thread (GOMAXPROCS=1) and flushes at once.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import uvloop

from bench.h3_client import Client
from bench.http_peers import start_caddy, start_headrace
from bench.measure import Figures, Server, free_port, record, take_turns
from tests.peers.authority import Authority

NAME = "bench.localhost"
SMALL, EVENTS = b"/big?bytes=240", b"/sse?rate=100"
STREAMS = 100
DOWN, UP = 64 << 20, 32 << 20
PEER = "caddy"


@dataclass(frozen=True)
class Contestant:
    server: Server
    port: int
    ca_file: str

    def client(self) -> Client:
        return Client(self.port, self.ca_file, NAME)


def caddy(stack: ExitStack, upstream: int, pem_file: str) -> tuple[Server, int]:
    port = free_port()
    options, tls = "servers {\n    protocols h1 h2 h3\n  }", f"tls {pem_file} {pem_file}"
    return start_caddy(stack, upstream, f"https://{NAME}:{port}", port, options=options, within=tls), port


def headrace(stack: ExitStack, upstream: int, pem_file: str) -> tuple[Server, int]:
    port = free_port()
    listen = [f"https://127.0.0.1:{port}", f"h3://127.0.0.1:{port}"]
    serves = f'hosts = ["{NAME}"]'
    return start_headrace(stack, upstream, listen, port, serves=serves, pem=(pem_file, pem_file)), port


MAKES = {PEER: caddy, "headrace": headrace}

# -- the work: each gives (units done, seconds that one took at p50)


async def small(client: Client, count: int, parallel: int) -> tuple[int, float]:
    took: list[float] = []

    async def one_after_another() -> None:
        for _ in range(count // parallel):
            began = time.monotonic()
            await client.ask(SMALL).done
            took.append(time.monotonic() - began)

    await asyncio.gather(*(one_after_another() for _ in range(parallel)))
    return len(took), statistics.median(took)


async def streams(client: Client, seconds: float) -> tuple[int, float]:
    await asyncio.sleep(0.1)  # the leave for one more stream than the first hundred comes with the first one's end
    asked = [client.ask(EVENTS, stamped=True) for _ in range(STREAMS)]
    await asyncio.sleep(seconds)
    delays = [delay for each in asked for delay in each.delays_ns]
    return len(delays), statistics.median(delays) / 1e9


async def body(client: Client, target: bytes, upload: bytes) -> tuple[int, float]:
    asked, began = client.ask(target, upload), time.monotonic()
    await asked.done
    return len(upload) or asked.got, time.monotonic() - began


async def measured(
    contestant: Contestant, work: Callable[[Client], Awaitable[tuple[int, float]]], within_s: float = 120.0
) -> tuple[float, float]:
    """(units for a CPU-second of the server, p50 in seconds). The handshake and a first request come before."""
    async with asyncio.timeout(within_s), contestant.client() as client:
        await client.ask(SMALL).done
        before = contestant.server.cpu_s()
        done, p50_s = await work(client)
        return done / max(contestant.server.cpu_s() - before, 0.01), p50_s


def measure(rounds: int, contestants: dict[str, Contestant]) -> list[Figures]:
    many = Figures("h3 to h1 small requests, 32 at a time", "requests per CPU-second", PEER)
    single = Figures("h3 to h1 small requests, one at a time", "requests per CPU-second", PEER)
    median = Figures("h3 to h1 small request, one at a time, p50", "us", PEER)
    events = Figures("h3 to h1 SSE 100 x 100/s, events", "events per CPU-second", PEER)
    delay = Figures("h3 to h1 SSE 100 x 100/s, delay p50", "us", PEER)
    down = Figures(f"h3 to h1 download of {DOWN >> 20} MiB", "MB per CPU-second", PEER)
    up = Figures(f"h3 to h1 upload of {UP >> 20} MiB", "MB per CPU-second", PEER)

    def turn(name: str) -> None:
        contestant = contestants[name]

        def run(work: Callable[[Client], Awaitable[tuple[int, float]]]) -> tuple[float, float]:
            return uvloop.run(measured(contestant, work))

        many.add(name, run(lambda client: small(client, 6400, 32))[0])
        rate, p50_s = run(lambda client: small(client, 600, 1))
        single.add(name, rate)
        median.add(name, p50_s * 1e6)
        rate, p50_s = run(lambda client: streams(client, 3.0))
        events.add(name, rate)
        delay.add(name, p50_s * 1e6)
        down.add(name, run(lambda client: body(client, b"/big?bytes=%d" % DOWN, b""))[0] / 1e6)
        up.add(name, run(lambda client: body(client, b"/up", bytes(UP)))[0] / 1e6)

    take_turns(rounds, {name: lambda name=name: turn(name) for name in contestants})  # type: ignore[misc]
    return [many, single, median, events, delay, down, up]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench h3", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    if shutil.which("caddy") is None:
        print("bench h3 needs caddy (Debian has it); nothing to compare with", file=sys.stderr)
        return 1
    with ExitStack() as stack:
        authority = Authority(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-h3-"))))
        pem_file = authority.issue((NAME, "localhost"))
        origin, upstream = stack.enter_context(Server("origin")), free_port()
        origin.start([sys.executable, "-m", "bench.origin", str(upstream)], upstream)
        contestants = {
            name: Contestant(*make(stack, upstream, pem_file), authority.ca_file) for name, make in MAKES.items()
        }
        figures = measure(options.rounds, contestants)
    record("h3", figures, ["client: qh3; Caddy: GOMAXPROCS=1, flush_interval -1; one kept-alive HTTP/1.1 origin"])
    return 0
