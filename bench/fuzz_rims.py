"""Mutated conversations through every rim and every parser that hears a client or an edge, without a socket.

A case is a number: its dice draw the bytes, how they are cut into reads, and what the relay does meanwhile. What must hold:
nothing is raised, into the rim or out of it; each leg keeps its contract and every exchange that began ends once the
connection is lost; what a connection keeps is bounded; a case takes no more than 50 ms of processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence

from bench.fuzz_parsers import PARSERS
from bench.fuzz_streams import H2Client, H2Server, H3Client, H3Server
from bench.fuzz_way import BothWays
from bench.measure import RESULTS
from bench.rim_mutations import Mutator, reads
from bench.rim_seeds import H1_ANSWERS, H1_REQUESTS
from bench.rim_stage import MAX_HEAD, FuzzService, Transport, Watched, held_bytes
from proxy.io.inbound_h1 import H1ServerConnection
from proxy.io.outbound_h1 import MAX_RESPONSE_HEAD, H1EdgeConnection
from proxy.io.rims import Origin
from proxy.messages import RequestHead

LONGEST_CASE_S = 0.050
Case = Callable[[random.Random], Awaitable[None]]


class H1Server:
    def __init__(self) -> None:
        self._mutator = Mutator(H1_REQUESTS)

    async def __call__(self, dice: random.Random) -> None:
        service = FuzzService(dice)
        rim = H1ServerConnection(service, Origin("192.0.2.1", 5, "http://127.0.0.1:1", b"http", "h1"))
        wire = Transport(rim, half_closes=bool(dice.randrange(2)))
        rim.connection_made(wire)
        largest = 0
        for read in reads(dice, self._mutator.pieces(dice)):
            if wire.closing or not wire.reading:
                break
            largest = max(largest, len(read))
            rim.data_received(read)
            await _meanwhile(dice, rim, service.taken)
        bound = 2 * MAX_HEAD + largest + len(wire.sent)
        assert (kept := held_bytes(rim)) <= bound + 4096, f"{kept} bytes are kept"
        if not wire.closing and not dice.randrange(3) and not rim.eof_received():
            wire.close()
        await end(wire, dice, service.taken)
        assert not service.connected


class H1Client:
    def __init__(self) -> None:
        self._mutator = Mutator(H1_ANSWERS)

    async def __call__(self, dice: random.Random) -> None:
        rim = H1EdgeConnection()
        wire = Transport(rim)
        rim.connection_made(wire)
        asked: list[Watched] = []
        largest = 0
        for read in reads(dice, [piece for _ in range(2) for piece in self._mutator.pieces(dice)]):
            if rim.room:
                asked.append(open_leg(dice, rim))
            if wire.closing or not wire.reading:
                break
            largest = max(largest, len(read))
            rim.data_received(read)
            await _meanwhile(dice, rim, asked)
        assert (kept := held_bytes(rim)) <= MAX_RESPONSE_HEAD + largest + 8192, f"{kept} bytes are kept"
        if not wire.closing and not dice.randrange(2) and not rim.eof_received():
            wire.close()
        await end(wire, dice, asked)
        assert (rim.active, rim.room, rim.closed) == (0, 0, True)


def open_leg(dice: random.Random, rim: H1EdgeConnection) -> Watched:
    way = dice.randrange(5)
    fields = [(b"x-mine", b"1")]
    head = RequestHead(b"GET", b"/x", b"http", b"a.test", fields)
    if way == 1:
        head.method, head.length = b"POST", None
    elif way == 2:
        head.method = b"HEAD"
    elif way == 3:
        head.protocol = b"websocket"
        fields += [(b"sec-websocket-key", b"dGhlIHNhbXBsZSBub25jZQ=="), (b"sec-websocket-version", b"13")]
    return Watched.asking(rim, head, open_end=way == 1)


async def _meanwhile(dice: random.Random, rim: H1ServerConnection | H1EdgeConnection, legs: Sequence[Watched]) -> None:
    if legs:
        legs[-1].act(dice)
    if not dice.randrange(6):
        rim.pause_writing()
        rim.resume_writing()
    await asyncio.sleep(
        0
    )  # a transport brings one read a loop turn, and what was called for soon comes before the next


async def end(wire: Transport, dice: random.Random, legs: Sequence[Watched]) -> None:
    """The connection is lost: every exchange must be over then."""
    for watched in legs:
        watched.act(dice)
    await asyncio.sleep(0)
    wire.lose(ConnectionResetError() if dice.randrange(2) else None)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for watched in legs:
        assert watched.over, f"{watched!r} was left alone"


def rims() -> dict[str, Callable[[], Case]]:
    made: dict[str, Callable[[], Case]] = {
        "h1 server": H1Server,
        "h1 client": H1Client,
        "h2 server": H2Server,
        "h2 client": H2Client,
        "h3 server": H3Server,
        "h3 client": H3Client,
        "both ways": BothWays,
    }
    return made | dict(PARSERS)


async def play(case: Case, seed: int, number: int) -> float:
    """One case; its processor time. AssertionError, with what it takes to have it again, for whatever must not be."""
    loop, raised = asyncio.get_running_loop(), list[BaseException]()
    loop.set_exception_handler(lambda _, context: raised.append(context.get("exception") or AssertionError(context)))
    begin = time.thread_time()
    try:
        await case(random.Random(f"{seed}/{number}"))
    except Exception as exc:
        raised.insert(0, exc)
    finally:
        loop.set_exception_handler(None)
    if raised:
        exc = raised[0]
        raise AssertionError(f"seed {seed}, case {number}: {type(exc).__name__}: {exc}") from exc
    return time.thread_time() - begin


async def fuzz(
    name: str,
    cases: int,
    seed: int,
    *,
    first: int = 0,
    until: float = float("inf"),
    known: dict[str, Callable[[], Case]] | None = None,
) -> dict[str, object]:
    """Cases through one rim of `known`, as many as are begun before `until` on the monotonic clock."""
    case, longest_s, begin = (known or rims())[name](), 0.0, time.thread_time()
    number = first
    for number in range(first, first + cases):
        took_s = await play(case, seed, number)
        if took_s > LONGEST_CASE_S / 5:
            # A virtual machine's own pauses are counted as ours: what a case costs, it costs again.
            took_s = min([took_s, *[await play(case, seed, number) for _ in range(3)]])
        assert took_s <= LONGEST_CASE_S, f"seed {seed}, case {number}: {took_s * 1000:.0f} ms"
        longest_s = max(longest_s, took_s)
        if not number % 100:
            if time.monotonic() > until:
                break
            await asyncio.sleep(0)
    return {
        "rim": name,
        "cases": number + 1 - first,
        "cpu_s": round(time.thread_time() - begin, 1),
        "longest_case_ms": round(longest_s * 1000, 2),
    }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench fuzz_rims", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=1_000_000, help="for each rim")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for each rim, whatever is over first")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first case: to have one again")
    parser.add_argument("--rims", default="", help="by name, with commas; all when empty")
    options = parser.parse_args(argv)
    names = [name for name in options.rims.split(",") if name] or list(rims())
    rows: list[dict[str, object]] = []
    failed = False
    for name in names:
        until = time.monotonic() + options.seconds
        try:
            rows.append(asyncio.run(fuzz(name, options.cases, options.seed, first=options.first, until=until)))
            print(rows[-1], flush=True)
        except AssertionError as exc:
            print(f"{name}: {exc}", file=sys.stderr)
            failed = True
    if failed:
        return 1
    if not options.rims:  # the record is of all of them
        (RESULTS / "fuzz_rims.json").write_text(json.dumps({"seed": options.seed, "rims": rows}, indent=1) + "\n")
    return 0
