"""The listeners over real sockets: framing in pieces, answers out of order, clients that stall, flood or hang up."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import dns.edns
import dns.flags
import dns.message
import dns.rcode
import pytest

from config.model import Listen
from resolver.io.listen import DnsListeners, listen_dns
from resolver.io.service import ResolverService
from tests.patience import HANG_S, no_hang, soon, timed
from tests.peers.authority import Authority
from tests.resolver.scripted import ScriptedUpstreams, answer
from tests.resolver.service_lab import QUIET, addresses, until

HOST = "127.0.0.1"
GOOD = ["192.0.2.1"]


class Served:
    """A resolver on three real ports."""

    def __init__(self, listeners: DnsListeners, service: ResolverService, upstreams: ScriptedUpstreams) -> None:
        self.listeners, self.service, self.upstreams = listeners, service, upstreams
        self.udp, self.tcp, self.tls = (listen.port for listen in listeners.addresses)

    async def over_udp(self, wire: bytes, wait_s: float = HANG_S) -> bytes | None:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
            sock.connect((HOST, self.udp))
            sock.send(wire)
            try:
                return await asyncio.wait_for(loop.sock_recv(sock, 65535), wait_s)
            except TimeoutError:
                return None


@pytest.fixture
async def served(tmp_path: Path, authority: Authority) -> AsyncIterator[Served]:
    upstreams = ScriptedUpstreams()
    service = ResolverService(QUIET, state_dir=tmp_path, upstreams=upstreams)
    listens = [Listen(scheme, HOST, 0) for scheme in ("udp", "tcp", "tls", "quic")]
    opened = await listen_dns(listens, service, tls=authority.server_context(["dot"]), idle_s=0.5)
    yield Served(opened, service, upstreams)
    await opened.close()
    await service.close()


class Stream:
    """A client connection that speaks length-prefixed messages."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, port: int, tls: ssl.SSLContext | None = None) -> Stream:
        name = "localhost" if tls else None
        return cls(*await asyncio.open_connection(HOST, port, ssl=tls, server_hostname=name))

    def send(self, *wires: bytes) -> None:
        self.writer.write(b"".join(struct.pack("!H", len(wire)) + wire for wire in wires))

    async def receive(self) -> bytes:
        async with no_hang():
            return await self.reader.readexactly(struct.unpack("!H", await self.reader.readexactly(2))[0])

    async def reply(self) -> dns.message.Message:
        return dns.message.from_wire(await self.receive())

    async def closed(self) -> bool:
        """Whether the other side ends it, in order or not, within the time of the test."""
        async with no_hang():
            try:
                return await self.reader.read(65536) == b""
            except ConnectionError:
                return True

    async def close(self) -> None:
        self.writer.transport.abort()
        await asyncio.sleep(0)


def query(name: str = "a.example", rdtype: str = "A", **options: object) -> bytes:
    return dns.message.make_query(name, rdtype, **options).to_wire()  # type: ignore[arg-type]


def big(asked: dns.message.Message) -> bytes:
    return answer(asked, *(f"60 A 11.22.{i}.1" for i in range(150)))


# --- datagrams --------------------------------------------------------------------------------------------------------


async def test_fresh_and_cached_answers_over_udp(served: Served) -> None:
    for _ in range(3):
        wire = query("A.example")
        reply = await served.over_udp(wire)
        assert reply is not None and reply[:2] == wire[:2]
        assert dns.message.from_wire(reply).question[0].name.to_text() == "A.example."
    assert len(served.upstreams.asked) == 1


@pytest.mark.parametrize(
    "wire",
    [b"", b"x", b"x" * 11, query()[:2] + b"\x81" + query()[3:]],
    ids=["nothing", "one byte", "eleven bytes", "a response"],
)
async def test_udp_silence_and_then_service_as_before(served: Served, wire: bytes) -> None:
    assert await served.over_udp(wire, wait_s=0.1) is None
    assert await served.over_udp(query()) is not None


@pytest.mark.parametrize("size", [0, 100, 512, 1232, 4096])
async def test_a_large_answer_is_cut_for_udp_and_whole_over_tcp_from_one_upstream_query(
    served: Served, size: int
) -> None:
    served.upstreams.script = big
    asked = query(use_edns=0 if size else False, payload=size)
    wire = await served.over_udp(asked)
    assert wire is not None and len(wire) <= min(max(512, size), 1232)
    cut = dns.message.from_wire(wire)
    assert cut.flags & dns.flags.TC and cut.edns == (0 if size else -1)
    stream = await Stream.to(served.tcp)
    stream.send(asked)
    assert len(addresses(await stream.reply())) == 150
    assert len(served.upstreams.asked) == 1
    await stream.close()


async def test_a_flood_of_datagrams_does_not_stop_other_work(served: Served) -> None:
    await served.over_udp(query())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((HOST, served.udp))
        for _ in range(500):
            sock.send(query())
        turns = 0
        while served.service.stats()["queries"] < 400:
            turns += 1
            await asyncio.sleep(0)
    assert turns > 4, "no more than 64 datagrams for each turn of the loop"


async def test_a_taken_port_is_named_and_nothing_stays_open(served: Served) -> None:
    listens = [Listen("tcp", HOST, 0), Listen("udp", HOST, served.udp)]
    with pytest.raises(OSError, match=rf"udp://127\.0\.0\.1:{served.udp}.*in use"):
        await listen_dns(listens, served.service, tls=None)
    with pytest.raises(OSError, match=rf"tcp://127\.0\.0\.1:{served.tcp}.*in use"):
        await listen_dns([Listen("tcp", HOST, served.tcp)], served.service, tls=None)


async def test_ipv6_is_served_beside_ipv4(served: Served) -> None:
    opened = await listen_dns([Listen("tcp", "::1", 0)], served.service, tls=None)
    stream = Stream(*await asyncio.open_connection("::1", opened.addresses[0].port))
    stream.send(query())
    assert addresses(await stream.reply()) == GOOD
    await stream.close()
    await opened.close()


@pytest.mark.parametrize(("bound", "asked"), [("0.0.0.0", "127.0.0.2"), ("::", "::1")])
async def test_a_reply_leaves_from_the_address_that_was_asked(served: Served, bound: str, asked: str) -> None:
    opened = await listen_dns([Listen("udp", bound, 0)], served.service, tls=None)
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in asked else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
        sock.connect((asked, opened.addresses[0].port))
        for _ in range(2):
            sock.send(query("b.example"))
            reply = await soon(loop.sock_recv(sock, 4096))
            assert addresses(dns.message.from_wire(reply)) == GOOD
    await opened.close()


# --- streams ----------------------------------------------------------------------------------------------------------


async def test_a_slow_answer_holds_no_other_and_ids_are_the_clients(served: Served) -> None:
    held = asyncio.Event()

    async def script(asked: dns.message.Message) -> bytes:
        if asked.question[0].name.to_text().startswith("slow"):
            await held.wait()
        return answer(asked, "60 A 192.0.2.1")

    served.upstreams.script = script
    streams = [await Stream.to(served.tcp) for _ in range(2)]
    for stream in streams:
        stream.send(query("slow.example", id=1), *(query(f"q{i}.example", id=i) for i in range(2, 101)))
    for stream in streams:
        assert {(await stream.reply()).id for _ in range(99)} == set(range(2, 101))
    held.set()
    for stream in streams:
        assert (await stream.reply()).id == 1
        await stream.close()


async def test_messages_in_any_pieces(served: Served) -> None:
    wires = [query(f"piece{i}.example", id=i) for i in range(1, 4)]
    flow = b"".join(struct.pack("!H", len(wire)) + wire for wire in wires)
    stream = await Stream.to(served.tcp)
    for at in range(len(flow)):
        stream.writer.write(flow[at : at + 1])
        await asyncio.sleep(0)
    assert {(await stream.reply()).id for _ in wires} == {1, 2, 3}
    stream.writer.write(flow)
    assert {(await stream.reply()).id for _ in wires} == {1, 2, 3}
    await stream.close()


async def test_an_empty_message_leaves_the_connection_in_step(served: Served) -> None:
    stream = await Stream.to(served.tcp)
    stream.send(b"", b"short", query(id=7))
    assert (await stream.reply()).id == 7
    await stream.close()


async def test_prefix_and_message_leave_in_one_write_and_a_turns_answers_together(served: Served) -> None:
    await served.over_udp(query())
    stream = await Stream.to(served.tcp)
    stream.send(*(query(id=i) for i in range(20)))
    first = await stream.reader.read(65536)
    assert len(first) == 20 * (2 + struct.unpack("!H", first[:2])[0])
    await stream.close()


async def test_a_client_that_says_nothing_is_closed_in_order_after_the_idle_time(served: Served) -> None:
    stream = await Stream.to(served.tcp)
    begun = asyncio.get_running_loop().time()
    assert await stream.closed()
    assert asyncio.get_running_loop().time() - begun > 0.4
    await stream.close()


async def test_bytes_now_and_then_do_not_keep_a_message_open(served: Served) -> None:
    stream = await Stream.to(served.tcp)
    ended = asyncio.ensure_future(stream.closed())
    wire = struct.pack("!H", 3000) + bytes(2998)
    for at in range(len(wire)):  # for five minutes, if it is let
        if ended.done():
            break
        stream.writer.write(wire[at : at + 1])
        await asyncio.sleep(0.1)
    assert await ended and at < len(wire) - 1
    await stream.close()


@timed
async def test_a_message_has_its_own_time_from_its_first_byte(served: Served) -> None:
    stream = await Stream.to(served.tcp)
    wire = struct.pack("!H", len(query())) + query()
    await asyncio.sleep(0.3)
    stream.writer.write(wire[:10])
    await asyncio.sleep(0.35)
    stream.writer.write(wire[10:])
    assert addresses(await stream.reply()) == GOOD
    await stream.close()


async def test_answers_that_nobody_takes_are_bounded(served: Served) -> None:
    text = " ".join(f'"{"x" * 250}"' for _ in range(200))
    made = answer(dns.message.make_query("n000.example", "TXT"), f"60 TXT {text}")
    end = len(query("n000.example"))
    served.upstreams.script = lambda asked: made[:12] + asked.to_wire()[12:end] + made[end:]
    served.upstreams.held = asyncio.Event()
    opened = await listen_dns([Listen("tcp", HOST, 0)], served.service, tls=None, idle_s=60)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, (HOST, opened.addresses[0].port))
        wires = [query(f"n{i:03}.example", "TXT") for i in range(200)]
        await loop.sock_sendall(sock, b"".join(struct.pack("!H", len(wire)) + wire for wire in wires))
        await until(lambda: served.service.stats()["waiting"] == 200)
        served.upstreams.held.set()
        await until(lambda: len(opened.connections) == 0)
    await opened.close()


async def test_waiting_for_an_answer_is_not_idle(served: Served) -> None:
    served.upstreams.held = asyncio.Event()
    stream = await Stream.to(served.tcp)
    stream.send(query())
    asyncio.get_running_loop().call_later(1.2, served.upstreams.held.set)
    assert addresses(await stream.reply()) == GOOD
    await stream.close()


async def test_keepalive_is_told_to_those_who_ask_over_a_stream(served: Served) -> None:
    asked = query(use_edns=0, options=[dns.edns.GenericOption(11, b"")])
    stream = await Stream.to(served.tcp)
    for _ in range(2):
        stream.send(asked)
        options = (await stream.reply()).options
        assert [(int(o.otype), o.to_wire()) for o in options] == [(11, b"\0\5")], "units of 100 ms"
    wire = await served.over_udp(asked)
    assert wire is not None and not dns.message.from_wire(wire).options
    await stream.close()


async def test_a_query_then_half_close_is_still_answered(served: Served) -> None:
    served.upstreams.held = asyncio.Event()
    stream = await Stream.to(served.tcp)
    stream.send(query("late.example", id=5))
    stream.writer.write_eof()
    await until(lambda: len(served.upstreams.asked) == 1)
    served.upstreams.held.set()
    assert (await stream.reply()).id == 5
    assert await stream.closed()
    await stream.close()


async def test_a_client_that_never_reads_is_dropped_at_a_bounded_backlog(served: Served) -> None:
    served.upstreams.script = big
    await served.over_udp(query())
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, (HOST, served.tcp))
        batch = b"".join(struct.pack("!H", len(wire)) + wire for wire in [query()] * 100)

        async def ask_for_ever() -> None:
            while True:
                await loop.sock_sendall(sock, batch)

        with pytest.raises(ConnectionError):
            await soon(ask_for_ever())
    await until(lambda: len(served.listeners.connections) == 0)
    assert await served.over_udp(query()) is not None


async def test_many_idle_connections_do_not_stop_a_new_client(served: Served) -> None:
    served.listeners.connections.most = 20
    idle = [await Stream.to(served.tcp) for _ in range(40)]
    stream = await Stream.to(served.tcp)
    stream.send(query())
    assert addresses(await stream.reply()) == GOOD
    assert len(served.listeners.connections) <= 20
    for one in [*idle, stream]:
        await one.close()


async def test_clients_that_never_finish_tls_do_not_stop_a_new_one(served: Served, trusting: ssl.SSLContext) -> None:
    served.listeners.connections.most = 20
    silent = [await Stream.to(served.tls) for _ in range(40)]
    stream = await Stream.to(served.tls, trusting)
    stream.send(query())
    assert addresses(await stream.reply()) == GOOD
    assert await silent[0].closed(), "the one that waits longest gives way"
    for one in [*silent, stream]:
        await one.close()


async def test_a_client_that_goes_away_leaves_the_answer_to_others(served: Served) -> None:
    served.upstreams.held = asyncio.Event()
    first, second = await Stream.to(served.tcp), await Stream.to(served.tcp)
    first.send(query())
    second.send(query())
    await until(lambda: served.service.stats()["waiting"] == 2)
    await first.close()
    served.upstreams.held.set()
    assert addresses(await second.reply()) == GOOD
    await second.close()


async def test_drain_answers_what_was_asked_and_takes_nothing_new(served: Served) -> None:
    served.upstreams.held = asyncio.Event()
    stream, idle = await Stream.to(served.tcp), await Stream.to(served.tcp)
    stream.send(query(id=9))
    await until(lambda: len(served.upstreams.asked) == 1 and len(served.listeners.connections) == 2)
    served.listeners.drain()
    assert await idle.closed()
    with pytest.raises(OSError, match=r"refused|Connect"):
        await Stream.to(served.tcp)
    served.upstreams.held.set()
    assert (await stream.reply()).id == 9
    assert await stream.closed()
    for one in (stream, idle):
        await one.close()


# --- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def trusting(authority: Authority) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.ca_file)
    context.set_alpn_protocols(["dot"])
    return context


async def test_dot_answers_in_any_order_and_pads_for_those_who_pad(served: Served, trusting: ssl.SSLContext) -> None:
    stream = await Stream.to(served.tls, trusting)
    padded = query("p.example", use_edns=0, pad=128, id=3)
    stream.send(query("a.example", id=1), query("b.example", id=2), padded)
    sizes = {}
    for _ in range(3):
        wire = await stream.receive()
        sizes[dns.message.from_wire(wire).id] = len(wire)
    assert sizes[3] == 468 and sizes[1] < 100
    stream.send(padded)
    assert len(await stream.receive()) == 468, "from the cache too"
    await stream.close()


async def test_dot_closes_an_idle_client(served: Served, trusting: ssl.SSLContext) -> None:
    stream = await Stream.to(served.tls, trusting)
    assert await stream.closed()
    await stream.close()


async def test_garbage_on_the_tls_port_hurts_nobody(served: Served, trusting: ssl.SSLContext) -> None:
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\x16\x03\x01\xff\xff" + bytes(64)):
        stream = await Stream.to(served.tls)
        stream.writer.write(garbage)
        await stream.closed()
        await stream.close()
    stream = await Stream.to(served.tls, trusting)
    stream.send(query())
    assert addresses(await stream.reply()) == GOOD
    await stream.close()


async def test_a_tls_listener_without_a_certificate_is_an_error(served: Served) -> None:
    with pytest.raises(ValueError, match="no certificate"):
        await listen_dns([Listen("tls", HOST, 0)], served.service, tls=None)


async def test_a_failure_is_servfail_within_the_timeout(tmp_path: Path) -> None:
    upstreams = ScriptedUpstreams(held=asyncio.Event())
    service = ResolverService(replace(QUIET, timeout_s=0.2), state_dir=tmp_path, upstreams=upstreams)
    opened = await listen_dns([Listen(scheme, HOST, 0) for scheme in ("udp", "tcp", "tcp")], service, tls=None)
    served = Served(opened, service, upstreams)
    wire = await served.over_udp(query(use_edns=0), wait_s=0.35)
    assert wire is not None
    assert dns.message.from_wire(wire).rcode() == dns.rcode.SERVFAIL
    await opened.close()
    await service.close()
