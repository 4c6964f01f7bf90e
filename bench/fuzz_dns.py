"""Throw mutated packets at each listener's parser, in-process: no exception may escape, no step may take 50 ms of CPU.

Seeds are real queries (plain, EDNS with every option we read, DO and CD, long names, other opcodes and classes) and real
replies; a mutation flips bits, cuts, inserts, repeats pieces, overwrites counts and pointers, or joins two seeds. A step is
one datagram, one read of a stream, one DoH request (its message mutated, or the target that holds it), or one HTTP answer of
an upstream. Everything is drawn from a seed, so that a find can be had again. The processor's time of the thread is what
counts: a pause of the machine is no fault of a packet.
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
from functools import partial
from pathlib import Path
from typing import Any, cast

import dns.edns
import dns.message
import dns.name
import dns.rdatatype
import dns.rrset

from bench.dns_origin import answer
from bench.measure import RESULTS
from config.model import DnsCache, Resolver
from resolver import outgoing, wire
from resolver.answer import Bounds
from resolver.blocklist import Blocklist
from resolver.errors import Malformed, UpstreamsFailed
from resolver.io.doh_reply import judge_body
from resolver.io.doh_server import DohService, freshness_s
from resolver.io.fetch import ContentRefused, Fetcher
from resolver.io.run import Reply
from resolver.io.service import DATAGRAM_LIMIT, ResolverService, Wanted
from resolver.io.streams import Connections, StreamConnection
from resolver.question import Question, parse
from resolver.scrub import only_strangers
from resolver.zones import Zones

LONGEST_STEP_S = 0.050


RECORDS = {
    dns.rdatatype.A: ("A", "192.0.2.1"),
    dns.rdatatype.HTTPS: ("HTTPS", '1 . alpn="h2,h3" ipv4hint=192.0.2.1'),
    dns.rdatatype.SOA: ("SOA", "ns.example. h.example. 1 2 3 4 60"),
    dns.rdatatype.ANY: ("MX", "10 mail.end.example."),
    dns.rdatatype.TXT: ("TXT", '"a" "' + "b" * 250 + '"'),
}
"""What is found at the end of a chain, by what was asked."""


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
    # Id 0, which DoH and DoQ use: an id drawn here would make the same seed another run.
    ask = partial(dns.message.make_query, id=0)
    queries = [ask(name, kind) for name in names for kind in ("A", "HTTPS", "ANY", "SOA")]
    queries += [ask("a.example", "A", options=[option], want_dnssec=True) for option in options]
    queries += [ask("version.bind", "TXT", "CH"), ask("b.example", "A", options=options)]
    wires = [query.to_wire() for query in queries]
    return [*wires, *(answer(one) for one in wires), *(rich_reply(query) for query in queries)]


def rich_reply(query: dns.message.Message) -> bytes:
    """All that a reply may hold and a parser has to walk: a chain, a denial, signatures, unknown types, an OPT that speaks."""
    reply = dns.message.make_response(query)
    asked = query.question[0]
    zone = dns.name.from_text("example.")
    for owner, kind, text in (
        (asked.name, "CNAME", "Alias.example."),
        ("alias.example.", "CNAME", "end.example."),
        ("end.example.", *RECORDS[asked.rdtype]),
        ("end.example.", "TYPE65280", r"\# 20 " + "c0" * 20),
    ):
        reply.answer.append(dns.rrset.from_text(owner, 300, "IN", kind, text))
    for kind, text in (
        ("SOA", "ns.example. h.example. 1 2 3 4 60"),
        ("NSEC", "b.example. A RRSIG NSEC"),
        ("RRSIG", "SOA 13 1 300 20300101000000 20200101000000 1 example. " + "A" * 88),
    ):
        reply.authority.append(dns.rrset.from_text(zone, 4_000_000_000, "IN", kind, text))
    reply.use_edns(options=[dns.edns.EDEOption(22, "no one"), dns.edns.GenericOption(wire.ECS, b"\0\1\x18\0\xc0\0\2")])
    return reply.to_wire()


def targets() -> list[bytes]:
    """Request targets of DoH by GET: as they should be, and with what clients were seen to do to them."""
    found = [b"/dns-query?dns=" + base64.urlsafe_b64encode(one) for one in seeds()[:40]]
    return [
        *found,
        *(target.rstrip(b"=") for target in found),
        *(target.replace(b"=", b"%3D") + b"&ct=application/dns-message" for target in found),
        b"/dns-query",
        b"/dns-query?name=a.example&type=A",
        b"/dns-query?dns=&dns=AAAA",
    ]


class Mutator:
    def __init__(self, seed: int, seeds: Sequence[bytes]) -> None:
        self._dice = random.Random(seed)
        self._seeds = seeds

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


class OneUpstream:
    """Answers the names of the seeds and fails all others, at once: nothing may leave, and nothing may be left waiting."""

    def __init__(self) -> None:
        self._known = {one.section[:-4] for one in questions()}

    async def ask(self, query: bytes, **_: Any) -> Any:
        raise AssertionError(f"{len(query)} bytes were to be asked upstream")

    def begin(self, out: outgoing.Outgoing, *, heard: Callable[[Any], None], **_: Any) -> object:
        if out.question[:-4].lower() in self._known:
            said = answer(bytes(wire.HEADER) + out.question)
            heard(Reply(said, "udp://192.0.2.53", 0.0, False, wire.scan(said)))
        else:
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

    def target(packet: bytes) -> None:
        doh.ready(packet)
        doh.respond(b"GET", packet, None, b"", lambda _: None)

    def post(packet: bytes) -> None:
        doh.respond(b"POST", b"/dns-query", b"application/dns-message", packet, lambda _: None)

    return {
        "udp": udp,
        "stream": stream(),
        "doh get": get,
        "doh target": target,
        "doh post": post,
        "reply": reply_reader(),
        "doh reply": doh_reply_reader(),
    }


def asked_by(packet: bytes, asked: Sequence[Question]) -> Question:
    """The question that a reply may be to: most mutations leave its own standing, and then it is read to its end."""
    return next((one for one in asked if packet.startswith(one.section, wire.HEADER)), asked[0])


def questions() -> list[Question]:
    found = (parse(one) for one in seeds())
    return [one for one in found if isinstance(one, Question)]


def reply_reader() -> Step:
    """The other side: what comes from upstream, against a question that it may answer."""
    asked = questions()
    fetcher = Fetcher(OneUpstream(), Zones(), Bounds(), True, Blocklist())

    def step(packet: bytes) -> None:
        question = asked_by(packet, asked)
        outgoing.match(packet, 0, question.section)
        with suppress(Malformed, UpstreamsFailed, ContentRefused):
            found = wire.scan(packet)
            outgoing.unwillingness(packet, found)
            only_strangers(packet, found)
            fetcher.read(Reply(packet, "udp://192.0.2.53", 0.0, False, found), question, None)

    return step


def doh_reply_reader() -> Step:
    """What an upstream says over HTTP: kept 40 s by a cache on the way, so that its TTLs are written anew."""
    asked = questions()

    def step(packet: bytes) -> None:
        freshness_s(packet)
        said = judge_body(packet, asked_by(packet, asked).section, 40)
        if isinstance(said, bytes) and len(said) != len(packet):
            raise AssertionError(f"{len(packet)} bytes became {len(said)} by ageing")

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
        service = ResolverService(config, state_dir=Path(folder), upstreams=OneUpstream())
        for name, step in steps(service).items():
            if names and name not in names:
                continue
            mutator = Mutator(seed, targets() if name == "doh target" else seeds())
            took_s = longest_s = 0.0
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
