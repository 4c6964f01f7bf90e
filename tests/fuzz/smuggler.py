"""Send the corpus through a gateway to one real origin, and hold the origin's count against the gateway's own.

case ──► gateway ──► origin        seen by the origin  ⊆  forwarded by the gateway
after each: an innocent request on the same warm connections, whose answer must be its own
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aioquic.buffer import encode_uint_var

from config.model import Config, Edge, Listen, Pool, Tickets, Timeouts
from headrace.lab.ca import ThrowAwayCa
from headrace.lab.clients import Recorder, Target, connect_h3
from proxy.io.edges import EdgeSet
from proxy.io.gateway import Gateway
from proxy.io.inbound_quic import listen_quic
from proxy.io.inbound_tcp import PREFACE, listen_tcp
from proxy.waterfall import RequestRecord
from resolver.io.clock import now
from tests.fuzz.corpus import HOST, Case
from tests.fuzz.origins import Seen, origin
from tests.proxy.h2_wire import body, headers, settings

AT_ONCE = 16
QUIET_S, PATIENCE_S = 0.06, 1.0


@dataclass
class Verdict:
    """`holes`: what must never be. The counters say what became of the cases, for people."""

    holes: list[str] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    cases: int = 0
    forwarded: int = 0
    seen: int = 0


class NoResolver:
    async def endpoints(self, host: str, port: int) -> None:
        raise AssertionError(f"looked up {host}")


@dataclass
class Ports:
    plain: int
    h3: int


@asynccontextmanager
async def gateway_before(seen: Seen, ca: ThrowAwayCa, records: list[RequestRecord]) -> AsyncIterator[Ports]:
    edges = EdgeSet(resolver=NoResolver(), clock=now, rng=random.Random(3))  # type: ignore[arg-type]
    gateway = Gateway(edges=edges, resolver=None, doh=None, clock=now, record=lambda one: records.append(one.whole()))  # type: ignore[arg-type]
    edge = Edge("o", "http", "localhost", seen.port, addresses=("127.0.0.1",), max_active=1000)
    pool = Pool("o", (edge,), hosts=(HOST.decode(),), keep_warm=0, timeouts=Timeouts(first_byte_s=5, idle_s=5))
    gateway.apply(Config(state_dir=Path("/nonexistent"), pools=(pool,)))
    edges.apply((pool,))
    plain = await listen_tcp(Listen("http", "127.0.0.1", 0), gateway, tls=None)
    quic = await listen_quic(
        Listen("h3", "127.0.0.1", 0), gateway, cert_file=str(ca.cert_file), key_file=str(ca.key_file), tickets=Tickets()
    )
    try:
        yield Ports(plain.address[1], quic.address[1])
    finally:
        gateway.abort_all()
        await edges.close()
        plain.close()
        quic.close()


async def smuggle(name: str, cases: list[Case], ca: ThrowAwayCa) -> Verdict:
    """Every case through one gateway to the origin of that name."""
    verdict, records, running = Verdict(cases=len(cases)), [], asyncio.Semaphore(AT_ONCE)
    async with origin(name) as seen, gateway_before(seen, ca, records) as ports:

        async def one(case: Case) -> None:
            async with running:
                status = await SENDERS[case.version](case, ports, ca)
                verdict.statuses[f"{case.version} {case.family}: {status}"] += 1
                await innocent(case, ports, verdict)

        await asyncio.gather(*(one(case) for case in cases))
        judge(cases, records, seen.requests(), verdict)
    return verdict


def judge(cases: list[Case], records: list[RequestRecord], seen: list[str], verdict: Verdict) -> None:
    forwarded = Counter(f"{record.method.upper()} {record.path}" for record in records)
    # A line without a method is nginx's word for what it could not read and answered 400.
    counted = Counter(told(line) for line in seen if line.strip())
    verdict.forwarded, verdict.seen = forwarded.total(), counted.total()
    for line, count in (counted - forwarded).items():
        # A replay on a fresh connection is ours to make; it is in the record as a retry.
        retried = sum(r.retries for r in records if f"{r.method.upper()} {r.path}" == line)
        if count > retried:
            verdict.holes.append(f"the origin saw {line!r} {counted[line]} times, forwarded {forwarded[line]} times")
    alone = {f"/x/{case.number}": case for case in cases if case.alone}
    for line in counted:
        _, _, target = line.partition(" ")
        if target in alone:
            verdict.holes.append(f"hidden request of case {alone[target]} reached the origin")


def told(line: str) -> str:
    """Without the query, which no record holds; methods in capitals, into which hypercorn turns them."""
    method, _, target = line.partition(" ")
    return f"{method.upper()} {target.split('?', 1)[0]}"


async def innocent(case: Case, ports: Ports, verdict: Verdict) -> None:
    """Somebody else's request: the answer must be to it, whatever the case left on the connection to the origin."""
    target = b"/after/%d" % case.number
    reader, writer = await asyncio.open_connection("127.0.0.1", ports.plain)
    writer.write(b"GET %b HTTP/1.1\r\nHost: %b\r\nConnection: close\r\n\r\n" % (target, HOST))
    answer = await asyncio.wait_for(reader.read(), 10)
    await closed(writer)
    if not answer.endswith(b"GET " + target):
        verdict.holes.append(f"after case {case}: an innocent request got {answer[-200:]!r}")


async def send_h1(case: Case, ports: Ports, ca: ThrowAwayCa) -> str:
    answer = await exchange(ports.plain, case.h1, lambda got: False)
    return answer[9:12].decode("latin-1") or "nothing"


async def send_h2(case: Case, ports: Ports, ca: ThrowAwayCa) -> str:
    """By prior knowledge on the plain listener, frames by hand: no library of ours or theirs refuses to send it."""
    ends_at_once = not (case.body or case.trailers)
    wire = PREFACE + settings() + headers(1, list(case.fields), end=ends_at_once)
    if case.body:
        wire += body(1, case.body, end=not case.trailers)
    if case.trailers:
        wire += headers(1, list(case.trailers), end=True)
    answer = await exchange(ports.plain, wire, lambda got: False)
    return "+".join(frame_kinds(answer))


async def send_h3(case: Case, ports: Ports, ca: ThrowAwayCa) -> str:
    recorder = Recorder("h3")
    with contextlib.suppress(OSError, TimeoutError):
        async with connect_h3(Target(ports.h3, ca.ca_file), recorder) as client:
            stream_id = client._quic.get_next_available_stream_id()
            wire = framed(1, section(case.fields))
            wire += framed(0, case.body) if case.body else b""
            wire += framed(1, section(case.trailers)) if case.trailers else b""
            client._quic.send_stream_data(stream_id, wire, end_stream=True)
            client.transmit()
            await asyncio.wait_for(recorder.done.wait(), PATIENCE_S)
    return str(recorder.answer.status or recorder.answer.ending[:20])


def section(fields: tuple[tuple[bytes, bytes], ...]) -> bytes:
    """A QPACK field section of literals (RFC 9204 4.5.6): libraries refuse to send what must be refused."""
    out = b"\x00\x00"
    for name, value in fields:
        out += prefixed(len(name), 3, 0x20) + name + prefixed(len(value), 7, 0x00) + value
    return out


def prefixed(number: int, bits: int, first: int) -> bytes:
    """RFC 7541 5.1."""
    most = (1 << bits) - 1
    if number < most:
        return bytes([first | number])
    out, number = bytes([first | most]), number - most
    while number >= 128:
        out, number = out + bytes([number % 128 + 128]), number // 128
    return out + bytes([number])


def framed(kind: int, payload: bytes) -> bytes:
    return encode_uint_var(kind) + encode_uint_var(len(payload)) + payload


SENDERS = {"h1": send_h1, "h2": send_h2, "h3": send_h3}


async def exchange(port: int, wire: bytes, enough: Callable[[bytes], bool]) -> bytes:
    """Send, then read until the other side closes or has been quiet for a while after it spoke."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        writer.write(wire)
        while not enough(answer):
            more = await asyncio.wait_for(reader.read(65536), QUIET_S if answer else PATIENCE_S / 4)
            if not more:
                break
            answer += more
    except (TimeoutError, OSError):
        pass
    await closed(writer)
    return answer


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def frame_kinds(answer: bytes) -> list[str]:
    names = {1: "HEADERS", 3: "RST_STREAM", 7: "GOAWAY"}
    found = []
    while len(answer) >= 9:
        size = int.from_bytes(answer[:3], "big")
        found += [names[answer[3]]] if answer[3] in names else []
        answer = answer[9 + size :]
    return found
