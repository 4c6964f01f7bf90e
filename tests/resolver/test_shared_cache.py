"""A Redis that a fleet shares: of use when it is well, never in the way when it is not."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import dns.flags
import dns.message
import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.model import DnsCache, DnsUpstream, Record, Resolver, Secret, Zone
from resolver import outgoing as o
from resolver import shared_cache
from resolver.io.clock import now
from resolver.io.service import ResolverService
from resolver.io.shared_cache import FAILS, WAIT_S, SharedCache
from tests.patience import no_hang, timed
from tests.peers.redis import RedisServer, needs_redis
from tests.resolver.scripted import ScriptedUpstreams, answer

ASKED = dns.message.make_query("name.test", "A", use_edns=0, id=7)


def outgoing(name: str = "name.test", **kw: Any) -> o.Outgoing:
    return o.read(dns.message.make_query(name, "A", **{"use_edns": 0, "id": 7, **kw}).to_wire())


class Node:
    """One resolver of the fleet."""

    def __init__(self, service: ResolverService, shared: SharedCache, upstreams: ScriptedUpstreams) -> None:
        self.service, self.shared, self.upstreams = service, shared, upstreams

    async def ask(self, name: str, **kw: Any) -> dns.message.Message:
        query = dns.message.make_query(name, "A", **{"use_edns": 0, **kw})
        wire = await self.service.answer(query.to_wire(), 65535)
        assert wire is not None
        return dns.message.from_wire(wire)


@asynccontextmanager
async def node(url: str, folder: Path, upstreams: ScriptedUpstreams | None = None, **kw: Any) -> AsyncIterator[Node]:
    upstreams = upstreams or ScriptedUpstreams()
    shared = SharedCache(Secret(url), upstreams, clock=now, **({"wall": kw.pop("wall")} if "wall" in kw else {}))
    config = Resolver(hosts_files=(), timeout_s=10.0, cache=DnsCache(persist=False, prefetch=False), **kw)
    service = ResolverService(config, state_dir=folder, upstreams=shared)
    await service.start()
    try:
        yield Node(service, shared, upstreams)
    finally:
        await service.close()
        await shared.close()


@needs_redis
@timed  # the store has 4 ms to answer
async def test_what_one_node_learnt_another_need_not_ask(tmp_path: Path) -> None:
    async with RedisServer(tmp_path) as redis, node(redis.url, tmp_path) as one, node(redis.url, tmp_path) as two:
        assert await one.shared.ready() and await two.shared.ready()
        await one.ask("shared.test")
        reply = await two.ask("SHARED.test", id=77)
        assert reply.id == 77 and reply.question[0].name.to_text() == "SHARED.test."
        assert reply.answer[0][0].to_text() == "192.0.2.1" and 58 <= reply.answer[0].ttl <= 60
        assert one.upstreams.asked == [("shared.test.", "A")] and two.upstreams.asked == []
        assert two.shared.counts.hits == 1
        # It is in the node's own cache now: the store is not asked again.
        await two.ask("shared.test")
        assert two.shared.counts.hits == 1


@needs_redis
@timed  # the store has 4 ms to answer
async def test_values_end_with_their_ttl_and_keys_name_nobody(tmp_path: Path) -> None:
    async with RedisServer(tmp_path, "s3cret") as redis, node(redis.url, tmp_path) as one:
        assert await one.shared.ready()
        await one.ask("diary.test")
        (key,) = await redis.keys()
        assert "diary" not in key and key.startswith("headrace:dns:1:")
        left_ms = int(await redis.command("PTTL", key))
        assert 58_000 < left_ms <= 60_000


@needs_redis
@timed  # the store has 4 ms to answer
async def test_failures_and_subnets_are_not_shared_and_denials_are(tmp_path: Path) -> None:
    def script(query: dns.message.Message) -> bytes:
        name = query.question[0].name.to_text()
        if name.startswith("none"):
            return answer(query, rcode="NXDOMAIN", soa="test. 3600 30")
        return answer(query, rcode="SERVFAIL")

    upstreams = ScriptedUpstreams(script=script)
    async with RedisServer(tmp_path) as redis, node(redis.url, tmp_path, upstreams) as one:
        assert await one.shared.ready()
        await one.ask("fails.test")
        assert await redis.keys() == []
        await one.ask("none.test")
        (key,) = await redis.keys()
        assert 28_000 < int(await redis.command("PTTL", key)) <= 30_000
    assert not shared_cache.may_share(o.Outgoing(1, 0, b"\1a\0\0\1\0\1", subnet=b"\0\1\x18\0\xc0\0\2"))


@needs_redis
@timed  # the store has 4 ms to answer
async def test_do_cd_and_zones_have_values_of_their_own(tmp_path: Path) -> None:
    corp = Zone("corp.test", (DnsUpstream("udp", "192.0.2.53", 53),))
    async with RedisServer(tmp_path) as redis, node(redis.url, tmp_path, zones=(corp,)) as one:
        assert await one.shared.ready()
        await one.ask("a.corp.test")
        await one.ask("b.test")
        await one.ask("b.test", want_dnssec=True)
        cd = dns.message.make_query("b.test", "A", use_edns=0)
        cd.flags |= dns.flags.CD
        await one.service.answer(cd.to_wire(), 65535)
        assert len(await redis.keys()) == 4
    async with RedisServer(tmp_path) as redis, node(redis.url, tmp_path) as public:
        assert await public.shared.ready()
        assert shared_cache.key_for(outgoing(), "corp.test") != shared_cache.key_for(outgoing(), "")


@needs_redis
@timed  # the store has 4 ms to answer
async def test_what_the_store_says_is_judged_as_an_upstreams_word_is(tmp_path: Path) -> None:
    """Rebinding through the store: an older or careless node may have written a private address."""
    careless = ScriptedUpstreams(script=lambda q: answer(q, "60 A 10.0.0.1"))
    async with RedisServer(tmp_path) as redis:
        async with node(redis.url, tmp_path, careless, rebind_protection=False) as one:
            assert await one.shared.ready()
            assert (await one.ask("inside.test")).answer
        async with node(redis.url, tmp_path) as two:
            assert await two.shared.ready()
            assert not (await two.ask("inside.test")).answer
            assert two.shared.counts.hits == 1


@needs_redis
@timed  # the store has 4 ms to answer
async def test_local_answers_never_reach_the_store(tmp_path: Path) -> None:
    record = Record("edge.test", "A", "127.0.0.1")
    async with RedisServer(tmp_path) as redis, node(redis.url, tmp_path, records=(record,)) as one:
        assert await one.shared.ready()
        await one.ask("edge.test")
        await one.ask("x.onion")
        assert await redis.keys() == []


# --- when it is not well ---------------------------------------------------------------------------------------------


@needs_redis
@timed
async def test_its_death_and_return_are_not_noticed_by_clients(tmp_path: Path) -> None:
    async with RedisServer(tmp_path) as redis, node(redis.url, tmp_path) as one:
        assert await one.shared.ready()
        await one.ask("before.test")
        await redis.stop()
        for i in range(20):
            begin = time.monotonic()
            assert (await one.ask(f"dead{i}.test")).answer
            assert time.monotonic() - begin < 0.1
        assert one.shared.stats()["state"] == "not in use"
        await redis.start()
        async with no_hang():
            while one.shared.stats()["state"] != "in use":
                assert (await one.ask(f"back{time.monotonic_ns()}.test")).answer
                await asyncio.sleep(0.05)


@needs_redis
@timed
async def test_a_deaf_store_costs_a_few_milliseconds_a_few_times(tmp_path: Path) -> None:
    async with RedisServer(tmp_path) as redis, node(redis.url, tmp_path) as one:
        assert await one.shared.ready()
        redis.freeze()
        took = []
        for i in range(FAILS + 10):
            begin = time.monotonic()
            assert (await one.ask(f"deaf{i}.test")).answer
            took.append(time.monotonic() - begin)
        assert one.shared.counts.late == FAILS and one.shared.counts.skipped >= 9
        assert sorted(took)[len(took) // 2] < WAIT_S and max(took) < WAIT_S + 0.1
        redis.thaw()


class Liar(asyncio.Protocol):
    """Speaks RESP well enough to be believed, and answers every GET with `value` or with raw `bytes`."""

    def __init__(self, reply: Callable[[bytes], bytes]) -> None:
        self.reply = reply
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        for command in data.split(b"*")[1:]:
            self.transport.write(self.reply(command) if b"GET" in command else b"+OK\r\n")


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def of(name: str, *records: str, keep_s: int = 60, wall: float = 0.0) -> bytes:
    wire = answer(dns.message.make_query(name, "A", use_edns=False), *records)
    return shared_cache.pack(wire, keep_s, wall or time.time())


LIES = {
    "another name": bulk(of("other.test", "60 A 203.0.113.66")),
    "noise": bulk(bytes(range(256))),
    "cut": bulk(of("name.test", "60 A 203.0.113.66")[:-3]),
    "expired": bulk(of("name.test", "60 A 203.0.113.66", wall=time.time() - 61)),
    "from the future": bulk(of("name.test", "60 A 203.0.113.66", wall=time.time() + 3600)),
    "kept longer than its records": bulk(of("name.test", "60 A 203.0.113.66", keep_s=3600)),
    "kept for ever": bulk(of("name.test", "4000000 A 203.0.113.66", keep_s=4_000_000)),
    "a query": bulk(shared_cache.pack(ASKED.to_wire(), 60, time.time())),
    "an error": b"-OOM not now\r\n",
    "a number": b":12\r\n",
    "an array": b"*1\r\n$1\r\na\r\n",
    "a huge value": b"$999999999\r\n",
    "no end of line": b"$" + b"1" * 600,
    "two replies": bulk(b"x") + bulk(b"y"),
    "http": b"HTTP/1.1 400 Bad Request\r\n\r\n",
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_a_lying_store_is_never_believed(lie: bytes, tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Liar(lambda _: lie), "127.0.0.1", 0)
    url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    try:
        async with node(url, tmp_path) as one:
            assert await one.shared.ready()
            assert (await one.ask("name.test")).answer[0][0].to_text() == "192.0.2.1"
            assert one.shared.counts.hits == 0
    finally:
        server.close()


@given(st.binary(max_size=200))
def test_no_value_raises_or_passes_by_chance(noise: bytes) -> None:
    assert shared_cache.unpack(noise, outgoing(), 1.0) is None


@given(st.integers(0, 200))
def test_a_cut_or_changed_value_answers_the_question_or_nothing(at: int) -> None:
    whole = bytearray(of("name.test", "60 A 192.0.2.1", wall=1000.0))
    at %= len(whole)
    assert shared_cache.unpack(bytes(whole[:at]), outgoing(), 1000.0) is None
    whole[at] ^= 0xFF
    wire = shared_cache.unpack(bytes(whole), outgoing(), 1000.0)
    if wire is not None:
        assert dns.message.from_wire(wire).question == dns.message.from_wire(ASKED.to_wire()).question


def test_a_value_ages_by_the_time_it_lay_there() -> None:
    value = of("name.test", "60 A 192.0.2.1", "50 A 192.0.2.2", keep_s=50, wall=1000.0)
    wire = shared_cache.unpack(value, outgoing(id=9), 1012.0)
    assert wire is not None
    assert struct.unpack_from("!H", wire)[0] == 9
    assert {rrset.ttl for rrset in dns.message.from_wire(wire).answer} == {38}
    assert shared_cache.unpack(value, outgoing(), 1050.0) is None


@timed
async def test_a_store_that_was_never_there_is_not_waited_for(tmp_path: Path) -> None:
    async with node("redis://127.0.0.1:1/0", tmp_path) as one:
        for i in range(5):
            begin = time.monotonic()
            assert (await one.ask(f"q{i}.test")).answer
            assert time.monotonic() - begin < 0.05
        assert one.shared.stats()["state"] == "not in use" and one.shared.stats()["reason"]


@needs_redis
@timed  # the store has 4 ms to answer
async def test_a_wrong_password_is_said_and_not_repeated_in_the_reason(tmp_path: Path) -> None:
    async with RedisServer(tmp_path, "right") as redis:
        url = redis.url.replace("right", "wr0ng")
        async with node(url, tmp_path) as one:
            assert not await one.shared.ready()
            reason = str(one.shared.stats()["reason"])
            assert "auth" in reason and "wr0ng" not in reason
