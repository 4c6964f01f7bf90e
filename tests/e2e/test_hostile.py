"""Clients that mean harm, against the real program: it goes on serving others, and holds nothing of them afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.lab import EdgeEntry, Lab
from headrace.lab.clients import Request, Target, ask, client_context
from headrace.lab.daemon import Daemon
from headrace.lab.story import Stage, chat
from tests.e2e.stage import answers, started, still_serves
from tests.patience import HANG_S, soon

pytestmark = pytest.mark.asyncio(loop_scope="session")
MIB = 1024 * 1024
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + struct.pack(">L", 0)[1:] + b"\x04\x00" + bytes(4)
GET = b"\x82\x87\x41\x09localhost\x84"  # HPACK: GET https localhost /


def descriptors(stage: Stage) -> int:
    return len(os.listdir(f"/proc/{stage.daemon.pid}/fd"))


def rss_bytes(stage: Stage) -> int:
    return int(Path(f"/proc/{stage.daemon.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def until(holds: Callable[[], bool], within_s: float = HANG_S) -> None:
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.02)


class Crowd:
    """Raw connections to one port, closed together."""

    def __init__(self, target: Target, alpn: str = "") -> None:
        self._target = target
        self._tls = client_context(target.ca_file, alpn) if alpn and target.ca_file else None
        self.members: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def grow(self, count: int, first: bytes = b"") -> None:
        name = self._target.server_name if self._tls else None
        for _ in range(count):
            made = await asyncio.open_connection("127.0.0.1", self._target.port, ssl=self._tls, server_hostname=name)
            made[1].write(first)
            self.members.append(made)

    def say(self, words: bytes) -> None:
        for _, writer in self.members:
            writer.write(words)

    async def all_closed(self, within_s: float = HANG_S) -> list[bytes]:
        """What each got until it was closed; TimeoutError when one was not."""
        async with asyncio.timeout(within_s):
            return list(await asyncio.gather(*(rest(reader) for reader, _ in self.members)))

    async def leave(self) -> None:
        for _, writer in self.members:
            writer.transport.abort()
        for _, writer in self.members:
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def rest(reader: asyncio.StreamReader) -> bytes:
    got = b""
    with contextlib.suppress(OSError):
        while more := await reader.read(65536):
            got += more
    return got


@asynccontextmanager
async def crowd(target: Target, count: int, first: bytes = b"", alpn: str = "") -> AsyncIterator[Crowd]:
    made = Crowd(target, alpn)
    try:
        await made.grow(count, first)
        yield made
    finally:
        await made.leave()


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">L", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">L", stream) + payload


# ------------------------------------------------------------------------------------------------ slow clients


@pytest.mark.parametrize("part", ["nothing", "a piece of the head"])
async def test_slow_heads_are_ended_by_header_timeout_while_others_are_served(part: str) -> None:
    async with started(proxy={"header_timeout": "1s"}) as stage:
        await answers(stage)
        before = descriptors(stage)
        first = b"" if part == "nothing" else b"GET / HTTP/1.1\r\nHost: local"
        async with crowd(stage.daemon.plain_target(), 100, first) as slow:
            for _ in range(8):
                assert (await answers(stage))[0].status == 200
                if first:
                    slow.say(b"h")  # a byte now and then buys no time
                await asyncio.sleep(0.1)
            seen = await slow.all_closed()
        assert all(not first or b" 408 " in answer[:20] for answer in seen)
        await until(lambda: descriptors(stage) <= before + 2)


@pytest.mark.parametrize("alpn", ["http/1.1", "h2"])
async def test_clients_that_shake_hands_and_say_nothing_are_closed(alpn: str) -> None:
    async with started(proxy={"header_timeout": "1s"}) as stage, crowd(stage.daemon.target(), 20, alpn=alpn) as slow:
        await slow.all_closed()
        assert await still_serves(stage)


async def test_a_handshake_that_never_ends_is_ended() -> None:
    async with (
        started(proxy={"header_timeout": "1s"}) as stage,
        crowd(stage.daemon.target(), 20, b"\x16\x03\x01\x02") as slow,
    ):
        await slow.all_closed()
        assert await still_serves(stage)


async def test_stalled_uploads_end_in_408_and_take_no_edge_away() -> None:
    async with started(pool={"timeouts": {"first_byte": "1s"}}) as stage:
        head = b"POST /lab/v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"
        async with crowd(stage.daemon.plain_target(), 12, head) as slow:
            seen = await slow.all_closed()
        assert {answer[9:12] for answer in seen} == {b"408"}
        edges = (await stage.daemon.admin("GET", "/edges"))["edges"]
        assert {edge["state"] for edge in edges} == {"healthy"}


async def test_one_reader_that_stops_delays_no_other(own: Stage) -> None:
    for edge in own.lab.edges.values():
        edge.controls.change({"tokens": 3000, "token_s": 0.0})
    request = b'{"model":"lab-small","stream":true,"messages":[{"role":"user","content":"long"}]}'
    head = b"POST /lab/v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(request)
    async with crowd(own.daemon.plain_target(), 1, head + request) as deaf:
        deaf.members[0][1].transport.pause_reading()  # type: ignore[attr-defined]
        for edge in own.lab.edges.values():
            edge.controls.reset()
        took = [answer.total_s for answer in await answers(own, 30)]
        assert sorted(took)[-2] < 1.0


async def test_a_thousand_idle_connections_cost_little_and_leave_nothing(own: Stage) -> None:
    await answers(own)
    before, memory = descriptors(own), rss_bytes(own)
    async with crowd(
        own.daemon.plain_target(), 1000, b"GET /lab/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    ) as idle:
        await asyncio.gather(*(reader.readuntil(b"\r\n\r\n") for reader, _ in idle.members))
        assert max(answer.total_s for answer in await answers(own, 5)) < 2.0
        assert rss_bytes(own) - memory < 40 * MIB
    # The edges keep some connections warm.
    await until(lambda: descriptors(own) <= before + 70)


async def test_more_connections_than_max_are_closed_and_the_others_live() -> None:
    async with started(proxy={"max_connections": 40}) as stage:
        plain = stage.daemon.plain_target()
        async with crowd(plain, 30) as early:
            async with crowd(plain, 60) as late:
                closed = [asyncio.ensure_future(rest(reader)) for reader, _ in late.members]
                await until(lambda: sum(each.done() for each in closed) >= 50)
                for each in closed:
                    each.cancel()
            early.say(b"GET /lab/v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert {answer[9:12] for answer in await early.all_closed(5)} == {b"200"}
        assert await still_serves(stage)


# ------------------------------------------------------------------------------------------------ floods


RESETS = b"".join(frame(1, 5, 2 * n + 1, GET) + frame(3, 0, 2 * n + 1, struct.pack(">L", 8)) for n in range(5000))
FLOODS = {
    "rapid reset": RESETS,
    "continuation": frame(1, 0, 1, GET) + frame(9, 0, 1, b"\x00\x01a\x01b" * 3000) * 40,
    "empty continuations": frame(1, 0, 1, GET) + frame(9, 0, 1, b"") * 20_000,
    "settings": frame(4, 0, 0, b"\x00\x03\x00\x00\x00\x64") * 20_000,
    "ping": frame(6, 0, 0, bytes(8)) * 20_000,
    "empty data": frame(1, 4, 1, b"\x83" + GET[1:]) + frame(0, 0, 1, b"") * 20_000,
    "priority": frame(2, 0, 1, bytes(5)) * 40_000,
    "window": frame(8, 0, 0, struct.pack(">L", 1)) * 40_000,
    "header bomb": frame(1, 5, 1, GET + b"\x40\x01a\x7f\xe1\x1e" + b"b" * 4000 + b"\xbe" * 12_000),
}


@pytest.mark.parametrize("flood", FLOODS)
async def test_an_h2_flood_ends_its_own_connection_at_most(stage: Stage, flood: str) -> None:
    memory = rss_bytes(stage)
    async with crowd(stage.daemon.target(), 2, PREFACE, alpn="h2") as attackers:
        attackers.say(FLOODS[flood])
        assert (await answers(stage))[0].status == 200, "in the middle of it"
        await asyncio.sleep(0.2)
    assert await still_serves(stage)
    assert rss_bytes(stage) - memory < 60 * MIB


@pytest.mark.parametrize("version", ["h1", "h2", "h3"])
async def test_ten_thousand_fields_are_refused_and_nothing_else(stage: Stage, version: str) -> None:
    fields = {f"x-{number}": "y" for number in range(10_000)}
    answer = await ask(version, stage.daemon.target(), Request("GET", "/lab/v1/models", fields=fields))
    assert answer.status in (0, 431), answer
    assert await still_serves(stage)


# ------------------------------------------------------------------------------------------------ other doors


HELLO = (
    b"GET /lab/v1/realtime?model=lab-small HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


@pytest.mark.parametrize(
    "words",
    [
        b"\xff" * 4096,
        b"\x89\xfe\x10\x00" + bytes(4100),  # a ping of 4096 bytes
        b"\x88\xff" + bytes(8) + bytes(4),  # a close with a 64-bit length
        b"\x09\x80" + bytes(4),  # a fragmented ping
        b"\x81\x05hello",  # not masked
        b"\x82\xff\x7f\xff\xff\xff\xff\xff\xff\xff" + bytes(4) + bytes(1000),  # a message of 2^63 bytes
        b"\x80\x80" + bytes(4),  # a continuation of nothing
    ],
)
async def test_broken_websocket_frames_end_their_own_socket(stage: Stage, words: bytes) -> None:
    async with crowd(stage.daemon.plain_target(), 3, HELLO) as sockets:
        for reader, _ in sockets.members:
            assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
        sockets.say(words)
        await asyncio.sleep(0.1)
    assert await still_serves(stage)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"host": "evil.test"}, 421),
        ({"host": "127.0.0.1.evil.test"}, 421),
        ({"origin": "https://evil.test"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Bearer "}, 401),
    ],
)
async def test_the_admin_interface_changes_nothing_for_strangers(
    stage: Stage, fields: dict[str, str], status: int
) -> None:
    words = "".join(f"{name}: {value}\r\n" for name, value in ({"host": "127.0.0.1"} | fields).items())
    target = Target(stage.daemon.ports.admin, None)
    async with crowd(target, 1, f"POST /reload HTTP/1.1\r\n{words}connection: close\r\n\r\n".encode()) as asked:
        (answer,) = await asked.all_closed(3)
    assert int(answer[9:12]) == status


@pytest.mark.parametrize(
    "target",
    ["127.0.0.1:22", "localhost:443", "169.254.169.254:80", "[::1]:443", "a.test:443", "x", ":1", "a:b", "a:99999"],
)
async def test_connect_leads_only_where_it_may(stage: Stage, target: str) -> None:
    words = f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\nConnection: close\r\n\r\n".encode()
    async with crowd(stage.daemon.plain_target(), 1, words + b"x" * 100_000) as asked:
        (answer,) = await asked.all_closed(4)
    assert answer[9:12] in (b"400", b"403")


# ------------------------------------------------------------------------------------------------ memory, cancels


class Sink(asyncio.Protocol):
    """An edge that takes whatever comes and answers when `size` bytes of body are there."""

    def __init__(self, size: int) -> None:
        self._left, self._head = size, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if not self._head.endswith(b"\r\n\r\n"):
            head, end, data = (self._head + data).partition(b"\r\n\r\n")
            self._head = head + end
        self._left -= len(data)
        if self._left <= 0:
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")  # type: ignore[attr-defined]


async def test_half_a_gibibyte_passes_through_a_few_mebibytes() -> None:
    size, loop = 511 * MIB, asyncio.get_running_loop()
    server = await loop.create_server(lambda: Sink(size), "127.0.0.1", 0)
    async with Lab() as lab, server:
        settings = lab.settings(edges=[EdgeEntry("sink", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")])
        async with Daemon(lab.write_settings(settings), settings.state_dir, settings.ports) as daemon:
            stage = Stage(lab, daemon)
            head = b"POST /lab/up HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % size
            async with crowd(daemon.plain_target(), 1, head) as sending:
                reader, writer = sending.members[0]
                memory, most, block = rss_bytes(stage), 0, bytes(MIB)
                for _ in range(size // MIB):
                    writer.write(block)
                    await writer.drain()
                    most = max(most, rss_bytes(stage))
                assert b" 200 " in await soon(reader.readuntil(b"\r\n\r\n"))
            assert most - memory < 24 * MIB


@pytest.mark.parametrize("version", ["h1", "h2", "h3"])
@pytest.mark.parametrize("moment", ["before the first byte", "in the middle"])
async def test_clients_that_leave_take_their_descriptors_along(own: Stage, version: str, moment: str) -> None:
    await answers(own, 3)
    before = descriptors(own)
    late = moment.startswith("before")
    for edge in own.lab.edges.values():
        edge.controls.change({"first_byte_s": 5.0 if late else 0.0, "token_s": 0.05, "tokens": 200})
    asking = [asyncio.create_task(ask(version, own.daemon.target(), chat(f"gone-{n}"))) for n in range(20)]
    await asyncio.sleep(0.7)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    await until(lambda: all(edge.tally.running == 0 for edge in own.lab.edges.values()))
    for edge in own.lab.edges.values():
        edge.controls.reset()
    # Warm connections to three edges may stay; the twenty clients may not.
    await until(lambda: descriptors(own) <= before + 8)
    assert await still_serves(own)
