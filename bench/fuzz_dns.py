"""Throw mutated packets at each listener's parser, in-process: no exception may escape, no step may take 50 ms of CPU.

Seeds are real queries (plain, EDNS with every option we read, DO and CD, long names, other opcodes and classes) and real
replies; a mutation flips bits, cuts, inserts, repeats pieces, overwrites counts and pointers, or joins two seeds. A step is
one datagram, one read of a stream, or one DoH request. Everything is drawn from a seed, so that a find can be had again.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import dns.edns
import dns.message

from bench.dns_origin import answer
from bench.measure import RESULTS
from config.model import DnsCache, Resolver
from resolver import outgoing, wire
from resolver.answer import Bounds, take
from resolver.errors import Malformed, UpstreamsFailed
from resolver.io.doh_server import DohService
from resolver.io.service import DATAGRAM_LIMIT, ResolverService, Wanted
from resolver.io.streams import Connections, StreamConnection
from resolver.question import Question, parse

LONGEST_STEP_S = 0.050


def seeds() -> list[bytes]:
    options: list[dns.edns.Option] = [
        dns.edns.ECSOption("192.0.2.0", 24),
        dns.edns.GenericOption(wire.PADDING, bytes(40)),
        dns.edns.GenericOption(wire.KEEPALIVE, b""),
        dns.edns.GenericOption(10, b"cookie!!"),
        dns.edns.EDEOption(3, "stale"),
    ]
    names = [
        "a.example",
        "www.example.com",
        ".",
        "x" * 63 + ".example",
        ".".join(["y" * 30] * 8),
        "1.0.0.127.in-addr.arpa",
    ]
    queries = [dns.message.make_query(name, kind) for name in names for kind in ("A", "HTTPS", "ANY", "SOA")]
    queries += [dns.message.make_query("a.example", "A", options=[option], want_dnssec=True) for option in options]
    queries += [
        dns.message.make_query("version.bind", "TXT", "CH"),
        dns.message.make_query("b.example", "A", options=options),
    ]
    wires = [query.to_wire() for query in queries]
    return [*wires, *(answer(one) for one in wires)]


class Mutator:
    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._seeds = seeds()

    def packet(self) -> bytes:
        dice = self._dice
        packet = bytearray(dice.choice(self._seeds))
        for _ in range(dice.choice((1, 1, 1, 2, 4, 8))):
            dice.choice(self._WAYS)(self, packet)
        return bytes(packet)

    def _at(self, packet: bytearray) -> int:
        return self._dice.randrange(len(packet) + 1)

    def _flip(self, packet: bytearray) -> None:
        if packet:
            packet[self._dice.randrange(len(packet))] ^= 1 << self._dice.randrange(8)

    def _overwrite(self, packet: bytearray) -> None:
        at = self._at(packet)
        packet[at : at + 2] = self._dice.choice(
            (b"\0\0", b"\xff\xff", b"\xc0\x0c", b"\xc0\x00", b"\x3f\x3f", b"\x00\x29")
        )

    def _count(self, packet: bytearray) -> None:
        if len(packet) >= wire.HEADER:
            packet[self._dice.randrange(4, 12)] = self._dice.choice((0, 1, 2, 255))

    def _cut(self, packet: bytearray) -> None:
        del packet[self._at(packet) :]

    def _remove(self, packet: bytearray) -> None:
        at = self._at(packet)
        del packet[at : at + self._dice.randrange(1, 12)]

    def _repeat(self, packet: bytearray) -> None:
        at = self._at(packet)
        piece = packet[at : at + self._dice.randrange(1, 40)]
        packet[at:at] = piece * self._dice.choice((1, 2, 30))

    def _insert(self, packet: bytearray) -> None:
        at = self._at(packet)
        packet[at:at] = self._dice.randbytes(self._dice.randrange(1, 9))

    def _join(self, packet: bytearray) -> None:
        packet += self._dice.choice(self._seeds)

    _WAYS = (_flip, _flip, _overwrite, _count, _cut, _remove, _repeat, _insert, _join)


class NoUpstreams:
    """Fails every question at once: nothing may leave, and nothing may be left waiting."""

    async def ask(self, query: bytes, **_: Any) -> Any:
        raise AssertionError(f"{len(query)} bytes were to be asked upstream")

    def begin(self, out: outgoing.Outgoing, *, heard: Callable[[Any], None], **_: Any) -> object:
        heard(UpstreamsFailed((("nobody", "a fuzz run"),)))
        return out


class Sink:
    """A transport that takes everything."""

    def __init__(self) -> None:
        self.closing = False

    def get_extra_info(self, _: str) -> tuple[str, int]:
        return "192.0.2.1", 4711

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    abort = close

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None: ...
    def set_write_buffer_limits(self, high: int) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


Step = Callable[[bytes], None]


def steps(service: ResolverService) -> dict[str, Step]:
    """What each listener does with a packet, but for what must be waited for. `reply` is what upstreams are read with."""
    doh = DohService(service)

    def udp(packet: bytes) -> None:
        said = service.look(packet, DATAGRAM_LIMIT)
        if isinstance(said, Wanted):
            service.wait(said, lambda reply, _: None)
        elif len(said) > DATAGRAM_LIMIT:
            raise AssertionError(f"reply of {len(said)} bytes over UDP")

    def stream() -> Step:
        connections = Connections(10)

        def step(packet: bytes) -> None:
            connection = StreamConnection(service, 10.0, sealed=False, open_ones=connections)
            connection.connection_made(cast(asyncio.BaseTransport, Sink()))
            connection.data_received(len(packet).to_bytes(2) + packet[: len(packet) // 2])
            connection.data_received(packet[len(packet) // 2 :] + packet)
            connection.connection_lost(None)

        return step

    def get(packet: bytes) -> None:
        doh.respond(b"GET", b"/dns-query?dns=" + base64.urlsafe_b64encode(packet), None, b"", lambda _: None)

    def post(packet: bytes) -> None:
        doh.respond(b"POST", b"/dns-query", b"application/dns-message", packet, lambda _: None)

    return {"udp": udp, "stream": stream(), "doh get": get, "doh post": post, "reply": reply_reader()}


def reply_reader() -> Step:
    """The other side: what comes from upstream, against a question that it may answer."""
    asked = parse(dns.message.make_query("a.example", "A", id=0).to_wire())
    assert isinstance(asked, Question)

    def step(packet: bytes) -> None:
        outgoing.match(packet, 0, asked.section)
        with suppress(Malformed):
            found = wire.scan(packet)
            outgoing.unwillingness(packet, found)
            take(packet, asked, Bounds(), trusted=False, layout=found)

    return step


def run(step: Step, mutator: Mutator, packets: int) -> tuple[float, float]:
    """(CPU seconds, the longest step's). Raises AssertionError with the packet, when a step raises or takes too long."""
    longest, begin = 0.0, time.thread_time()
    for _ in range(packets):
        packet = mutator.packet()
        took = timed(step, packet)
        if took > LONGEST_STEP_S / 5:
            # A virtual machine's own pauses are counted as ours: what a packet costs, it costs again.
            took = min(took, *(timed(step, packet) for _ in range(3)))
        if took > LONGEST_STEP_S:
            raise AssertionError(f"step of {took * 1000:.0f} ms for {packet.hex()}")
        longest = max(longest, took)
    return time.thread_time() - begin, longest


def timed(step: Step, packet: bytes) -> float:
    begin = time.thread_time()
    try:
        step(packet)
    except Exception as exc:
        raise AssertionError(f"{type(exc).__name__}: {exc} for {packet.hex()}") from exc
    return time.thread_time() - begin


async def fuzz(packets: int, seed: int, names: Sequence[str] = ()) -> list[dict[str, object]]:
    """Packets through each parser, or through those named."""
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        config = Resolver(hosts_files=(), cache=DnsCache(persist=False))
        service = ResolverService(config, state_dir=Path(folder), upstreams=NoUpstreams())
        for name, step in steps(service).items():
            if names and name not in names:
                continue
            mutator, took_s, longest_s = Mutator(seed), 0.0, 0.0
            for left in range(packets, 0, -2_000):
                took, longest = run(step, mutator, min(left, 2_000))
                took_s, longest_s = took_s + took, max(longest_s, longest)
                await asyncio.sleep(0)
            rows.append(
                {
                    "parser": name,
                    "packets": packets,
                    "cpu_s": round(took_s, 1),
                    "longest_step_ms": round(longest_s * 1000, 2),
                }
            )
            print(rows[-1])
        await service.close()
    return rows


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench fuzz_dns", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--packets", type=int, default=10_000_000, help="for each parser")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parsers", default="", help="by name, with commas; all when empty")
    options = parser.parse_args(argv)
    names = [name for name in options.parsers.split(",") if name]
    try:
        rows = asyncio.run(fuzz(options.packets, options.seed, names))
    except AssertionError as exc:
        print(exc, file=sys.stderr)
        return 1
    (RESULTS / "fuzz_dns.json").write_text(json.dumps({"seed": options.seed, "parsers": rows}, indent=1) + "\n")
    return 0
