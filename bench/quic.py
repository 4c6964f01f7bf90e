"""HTTP/3 beside the library it stands on: our listener and aioquic's own server, asked by one client, taking turns.

Both make the answers themselves (no hop behind them), so that a figure is the cost of the rim and of QUIC alone. The
client is our edge connection for both. Work is divided by the CPU-seconds of the server's process.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.asyncio.server import serve
from aioquic.h3.connection import H3Connection
from aioquic.h3.events import HeadersReceived
from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration

from bench.measure import Figures, record, take_turns
from config.model import Listen, Tickets
from proxy.io.inbound_quic import listen_quic
from proxy.io.outbound_quic import H3EdgeConnection, QuicSessions, dial_quic
from proxy.io.rims import InboundConnection, Limits, Origin
from proxy.messages import Leg, NullReceiver, RequestHead, ResponseHead
from tests.peers.authority import Authority

CONTESTANTS = ("aioquic", "headrace")
STREAMS, EVENTS_PER_S = 100, 100
SMALL, LARGE = bytes(240), bytes(32 << 20)
UPLOAD = bytes(16 << 20)

Send = Callable[[bytes], None]


class Events:
    """Speaks an event on every stream, each at its own phase, once there are STREAMS of them."""

    def __init__(self) -> None:
        self._streams: list[Send] = []
        self.sent = 0

    def join(self, send: Send) -> None:
        self._streams.append(send)
        if len(self._streams) == STREAMS:
            loop = asyncio.get_running_loop()
            for number, each in enumerate(self._streams):
                loop.call_later(number / STREAMS / EVENTS_PER_S, self._tick, each, loop.time())

    def _tick(self, send: Send, due: float) -> None:
        send(b"data: %.6f %s\n\n" % (time.monotonic(), b"z" * 60))
        self.sent += 1
        due += 1 / EVENTS_PER_S
        asyncio.get_running_loop().call_at(due, self._tick, send, due)


# -- the contestants


class UploadEnd(NullReceiver):
    def __init__(self, leg: Leg) -> None:
        self._leg = leg

    def on_end(self) -> None:
        answer(self._leg, b"ok")


def answer(leg: Leg, body: bytes) -> None:
    leg.head(ResponseHead(200, [], len(body)))
    leg.data(body)
    leg.end()


class Gateway:
    limits = Limits()

    def __init__(self, ticking: Events) -> None:
        self._events = ticking

    def on_connected(self, connection: InboundConnection) -> bool:
        return True

    def on_disconnected(self, connection: InboundConnection) -> None: ...

    def shortcut(self, head: RequestHead, origin: Origin) -> None:
        return None

    def on_request(self, leg: Leg, head: RequestHead, origin: Origin) -> None:
        if head.target == b"/events":
            leg.head(ResponseHead(200, []))
            self._events.join(leg.data)
        elif head.target == b"/up":
            leg.receiver = UploadEnd(leg)
        else:
            answer(leg, LARGE if head.target == b"/large" else SMALL)


class Stock(QuicConnectionProtocol):
    """The server of aioquic's examples, with no more in it than the answers need."""

    ticking: Events
    http: H3Connection | None = None

    def quic_event_received(self, event: events.QuicEvent) -> None:
        if isinstance(event, events.ProtocolNegotiated):
            self.http = H3Connection(self._quic)
        for each in self.http.handle_event(event) if self.http else []:
            if isinstance(each, HeadersReceived):
                self._head(each.stream_id, dict(each.headers)[b":path"])
            elif each.stream_ended:
                self._whole(each.stream_id, b"ok")

    def _head(self, stream_id: int, path: bytes) -> None:
        if path == b"/events":
            assert self.http is not None
            self.http.send_headers(stream_id, [(b":status", b"200")])
            self.ticking.join(lambda chunk: self._send(stream_id, chunk, end=False))
        elif path != b"/up":
            self._whole(stream_id, LARGE if path == b"/large" else SMALL)

    def _whole(self, stream_id: int, body: bytes) -> None:
        assert self.http is not None
        self.http.send_headers(stream_id, [(b":status", b"200")])
        self._send(stream_id, body, end=True)

    def _send(self, stream_id: int, chunk: bytes, *, end: bool) -> None:
        assert self.http is not None
        self.http.send_data(stream_id, chunk, end)
        self._transmit_soon()


async def serving(contestant: str, pem_file: str) -> None:
    """Serve until stdin ends; each line on it is answered by CPU-seconds and events so far."""
    ticking = Events()
    if contestant == "headrace":
        listener = await listen_quic(
            Listen("h3", "127.0.0.1", 0), Gateway(ticking), cert_file=pem_file, key_file=pem_file, tickets=Tickets()
        )
        port = listener.address[1]
    else:
        Stock.ticking = ticking
        config = QuicConfiguration(is_client=False, alpn_protocols=["h3"])
        config.load_cert_chain(pem_file)
        server = await serve("127.0.0.1", 0, configuration=config, create_protocol=Stock)
        port = server._transport.get_extra_info("sockname")[1]
    print(port, flush=True)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():
        used = resource.getrusage(resource.RUSAGE_SELF)
        print(used.ru_utime + used.ru_stime, ticking.sent, flush=True)


# -- the client


class Counted(NullReceiver):
    def __init__(self) -> None:
        self.done = asyncio.get_running_loop().create_future()

    def on_end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


def ask(edge: H3EdgeConnection, target: bytes, body: bytes = b"") -> Counted:
    leg = edge.open()
    leg.receiver = counted = Counted()
    fields = [(b"user-agent", b"bench/1"), (b"accept", b"*/*")]
    leg.head(RequestHead(b"POST" if body else b"GET", target, b"https", b"localhost", fields))
    leg.data(body)
    leg.end()
    return counted


class Contestant:
    """A server's process and a connection to it."""

    def __init__(self, name: str, pem_file: str, ca_file: str) -> None:
        argv = [sys.executable, "-m", "bench.quic", "serve", name, pem_file]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._ca_file = ca_file
        self._port = int(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def mark(self) -> tuple[float, int]:
        """(CPU-seconds, events sent) so far."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        cpu_s, sent = self._line().split()
        return float(cpu_s), int(sent)

    async def dial(self) -> H3EdgeConnection:
        edge = await dial_quic(
            "127.0.0.1",
            self._port,
            server_name="localhost",
            ca_file=self._ca_file,
            timeout_s=5,
            sessions=QuicSessions(),
        )
        await ask(edge, b"/small").done
        return edge

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


async def small(contestant: Contestant, count: int, parallel: int) -> tuple[float, float]:
    """(requests per CPU-second, median seconds of one)."""
    edge = await contestant.dial()
    took: list[float] = []

    async def one_after_another() -> None:
        for _ in range(count // parallel):
            began = time.monotonic()
            await ask(edge, b"/small").done
            took.append(time.monotonic() - began)

    before, _ = contestant.mark()
    await asyncio.gather(*(one_after_another() for _ in range(parallel)))
    after, _ = contestant.mark()
    edge.abandon()
    return len(took) / (after - before), statistics.median(took)


async def body(contestant: Contestant, target: bytes, upload: bytes) -> float:
    """Megabytes per CPU-second."""
    edge = await contestant.dial()
    before, _ = contestant.mark()
    await ask(edge, target, upload).done
    after, _ = contestant.mark()
    edge.abandon()
    return len(upload or LARGE) / 1e6 / (after - before)


async def streams(contestant: Contestant, watch_s: float) -> float:
    """Events per CPU-second."""
    edge = await contestant.dial()
    for _ in range(STREAMS):
        ask(edge, b"/events")
    await asyncio.sleep(0.5)
    before = contestant.mark()
    await asyncio.sleep(watch_s)
    after = contestant.mark()
    edge.abandon()
    return (after[1] - before[1]) / (after[0] - before[0])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench quic", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority(Path(folder))
        figures = measure(options.rounds, authority.issue(), authority.ca_file)
    record("quic", figures, [__doc__.split("\n\n")[1].replace("\n", " ").strip()] if __doc__ else [])
    return 0


def measure(rounds: int, pem_file: str, ca_file: str) -> list[Figures]:
    per_cpu = [
        Figures("h3 small requests, 32 at a time", "requests per CPU-second", "aioquic"),
        Figures("h3 small requests, one at a time", "requests per CPU-second", "aioquic"),
        Figures("h3 events, 100 streams x 100/s", "events per CPU-second", "aioquic"),
        Figures("h3 download of 32 MiB", "MB per CPU-second", "aioquic"),
        Figures("h3 upload of 16 MiB", "MB per CPU-second", "aioquic"),
    ]
    median = Figures("h3 small request, one at a time, median", "seconds", "aioquic")

    def with_server(name: str, work: Callable[[Contestant], Any]) -> Any:
        contestant = Contestant(name, pem_file, ca_file)
        try:
            return uvloop.run(work(contestant))
        finally:
            contestant.close()

    def turn(name: str) -> None:
        per_cpu[0].add(name, with_server(name, lambda c: small(c, 6400, 32))[0])
        rate, median_s = with_server(name, lambda c: small(c, 600, 1))
        per_cpu[1].add(name, rate)
        median.add(name, median_s)
        per_cpu[2].add(name, with_server(name, lambda c: streams(c, 3.0)))
        per_cpu[3].add(name, with_server(name, lambda c: body(c, b"/large", b"")))
        per_cpu[4].add(name, with_server(name, lambda c: body(c, b"/up", UPLOAD)))

    take_turns(rounds, {name: lambda name=name: turn(name) for name in CONTESTANTS})  # type: ignore[misc]
    return [*per_cpu, median]


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        uvloop.run(serving(*sys.argv[2:4]))
    else:
        sys.exit(main(sys.argv[1:]))
