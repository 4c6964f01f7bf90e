"""Cases D29 to D37: portals, dead networks, stampedes, prefetch, odd names, letters, bounds, the saved file, failures."""

from __future__ import annotations

import asyncio
import os
import random
import stat
import struct
import time
from collections import Counter
from pathlib import Path
from typing import Any

import dns.exception
import dns.message
import dns.name
import dns.rcode
import pytest

from config.model import DnsCache, Resolver
from resolver import snapshot
from resolver.cache import Cache
from resolver.io.service import ResolverService
from tests.patience import no_hang, timed
from tests.peers.authority import Authority
from tests.peers.dns import Ask, Peer
from tests.resolver.scripted import ScriptedUpstreams, answer
from tests.resolver.stage import CLIENTS, EVERY_CLIENT, GOOD, GOOD_IP, KINDS, ede, good, ips, query

ENCRYPTED = ["tls", "https", "quic"]


# --- D29 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ENCRYPTED)
@timed
async def test_d29_behind_a_portal_nothing_falls_to_plain_dns_and_all_is_well_once_it_opens(
    kind: str, chain_of: Any, authority: Authority
) -> None:
    """The portal's own server stands on the encrypted port; it cannot show our upstream's certificate."""
    fake = Authority(authority.directory, "the portal")
    async with Peer(good, kind, authority) as peer:
        port, trusted = peer.port, peer.upstream
        async with chain_of(peer, timeout_s=0.5) as chain:
            assert ips(await chain.ask(query("before.test"))) == GOOD_IP
            await peer.stop()
            async with Peer(good, kind, fake, port=port) as portal, Peer(good, "udp", port=0) as plain:
                chain.upstreams.network_changed()
                reply = await chain.ask(query("inside.test"))
                assert reply.rcode() == dns.rcode.SERVFAIL and "certificate" in " ".join(ede(reply).values())
                assert not portal.asks and not plain.asks
                (view,) = chain.upstreams.snapshot()
                assert view.state == "down" and "certificate" in view.reason
            async with Peer(good, kind, authority, port=port), no_hang():
                while not (await chain.ask(query(f"after{time.monotonic_ns()}.test"))).answer:
                    await asyncio.sleep(0.05)
        assert trusted.port == port


# --- D30: with real namespaces in tests/net ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@timed
async def test_d30_after_a_change_of_network_the_first_query_needs_no_timeout(
    kind: str, chain_of: Any, authority: Authority
) -> None:
    async with Peer(good, kind, authority) as peer, chain_of(peer) as chain:
        await chain.ask(query("warm.test"))
        for connection in peer.connections:
            connection.frozen = True
        chain.upstreams.network_changed()
        chain.service.network_changed()
        for name in ("first.test", "second.test"):
            begin = time.monotonic()
            assert ips(await chain.ask(query(name))) == GOOD_IP
            assert time.monotonic() - begin < 0.4


async def test_d30_time_asleep_counts_for_ttls(tmp_path: Path) -> None:
    """The clock is CLOCK_BOOTTIME; here it jumps as it does over a night."""
    now = [1000.0]
    upstreams = ScriptedUpstreams()
    config = Resolver(hosts_files=(), cache=DnsCache(persist=False, prefetch=False, serve_stale_s=0.0))
    service = ResolverService(config, state_dir=tmp_path, upstreams=upstreams, clock=lambda: now[0])
    asked = query("night.test").to_wire()
    await service.answer(asked, 512)
    now[0] += 30
    assert dns.message.from_wire(await service.answer(asked, 512) or b"").answer[0].ttl == 30
    now[0] += 8 * 3600
    await service.answer(asked, 512)
    assert len(upstreams.asked) == 2
    await service.close()


@timed
async def test_d30_an_upstream_address_that_leads_nowhere_is_passed_over(chain_of: Any) -> None:
    async with Peer(good, "tcp") as peer:
        nowhere = peer.upstream.__class__("tcp", "localhost", peer.port, "", ("::1", "127.0.0.1"))
        async with chain_of(nowhere) as chain:
            for name in ("first.test", "second.test"):
                begin = time.monotonic()
                assert ips(await chain.ask(query(name))) == GOOD_IP
                assert time.monotonic() - begin < 0.6


# --- D31: the stampede itself in test_cases_dns.py ----------------------------------------------------------------------


@timed
async def test_d31_types_and_bits_are_flights_of_their_own(chain_of: Any) -> None:
    async def script(a: Ask) -> None:
        await asyncio.sleep(0.1)
        a.answer(a.reply(GOOD if a.rdtype == "A" else "60 AAAA 2001:db8::1"))

    async with Peer(script) as peer, chain_of(peer) as chain:
        checked = query("many.test")
        checked.flags |= dns.flags.CD
        kinds = [query("many.test"), query("many.test", "AAAA"), query("many.test", want_dnssec=True), checked]
        await asyncio.gather(*(chain.ask(kind, "tcp") for kind in kinds for _ in range(5)))
        assert len(peer.asks) == 4


# --- D32 -------------------------------------------------------------------------------------------------------------


async def test_d32_a_prefetch_that_hangs_is_bridged_when_its_entry_ends(tmp_path: Path) -> None:
    now = [0.0]
    upstreams = ScriptedUpstreams(script=lambda q: answer(q, "20 A 192.0.2.1"))
    cache = DnsCache(persist=False, stale_answer_after_s=0.05)
    service = ResolverService(
        Resolver(hosts_files=(), cache=cache), state_dir=tmp_path, upstreams=upstreams, clock=lambda: now[0]
    )
    asked = query("popular.test").to_wire()
    for now[0] in (0.0, 1.0):
        await service.answer(asked, 512)
    upstreams.held = asyncio.Event()
    for now[0] in (18.5, 19.0):
        await service.answer(asked, 512)
    while len(upstreams.asked) < 2:
        await asyncio.sleep(0)
    now[0] = 21.0
    async with no_hang():  # what it waits for stays away
        reply = dns.message.from_wire(await service.answer(asked, 512) or b"")
    assert ips(reply) == ["192.0.2.1"] and 3 in ede(reply)
    upstreams.held.set()
    await service.close()


async def test_d32_one_query_a_second_is_one_upstream_query_a_ttl(tmp_path: Path) -> None:
    now = [0.0]
    upstreams = ScriptedUpstreams(script=lambda q: answer(q, "20 A 192.0.2.1"))
    config = Resolver(hosts_files=(), cache=DnsCache(persist=False))
    service = ResolverService(config, state_dir=tmp_path, upstreams=upstreams, clock=lambda: now[0])
    asked = query("popular.test").to_wire()
    waited = 0
    for second in range(200):
        now[0] = float(second)
        if service.answer_cached(asked, 512) is None:
            waited += 1
            await service.answer(asked, 512)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert waited == 1 and len(upstreams.asked) <= 200 / 18 + 1
    count = len(upstreams.asked)
    now[0] += 100
    await asyncio.sleep(0.01)
    assert count == len(upstreams.asked)  # nobody asks: nothing is refreshed
    await service.close()


# --- D33, D34 --------------------------------------------------------------------------------------------------------

ODD = [
    dns.name.root,
    dns.name.Name([b"x" * 63] * 3 + [b"y" * 61, b""]),
    dns.name.Name([b"a"] * 126 + [b""]),
    *(
        dns.name.Name([label, b"test", b""])
        for label in (b"n\0l", b"d.t", b"s p", b"b\\s", "\u00fc".encode(), b"_", b"*")
    ),
    dns.name.Name([b"\xff\xfe", b'"', b"\x1b[31m", b"test", b""]),
]


@pytest.mark.parametrize("name", ODD, ids=lambda n: repr(n.to_text()[:20]))
@pytest.mark.parametrize("kind", ["udp", "https"])
async def test_d33_odd_names_go_up_and_come_back_byte_for_byte(
    name: dns.name.Name, kind: str, chain_of: Any, authority: Authority
) -> None:
    async def script(a: Ask) -> None:
        a.answer(a.reply("60 TXT ok"))

    async with Peer(script, kind, authority) as peer, chain_of(peer) as chain:
        for by in ("udp", "tls", "quic"):
            asked = dns.message.make_query(name, "TXT")
            reply = await chain.ask(asked, by)
            assert reply.question[0].name.labels == name.labels and reply.answer[0].name == name
        assert peer.asks[0].message.question[0].name == name and len(peer.asks) == 1


@pytest.mark.parametrize("by", EVERY_CLIENT)
async def test_d34_the_question_comes_back_in_the_letters_it_was_asked_in(by: str, chain_of: Any) -> None:
    async with Peer(good) as peer, chain_of(peer) as chain:
        for name in ("MiXeD.TeSt", "mixed.test", "MIXED.TEST"):
            asked = query(name).to_wire()
            wire = await chain.ask_wire(asked, by)
            assert wire[12 : 12 + len(name) + 6] == asked[12 : 12 + len(name) + 6]
            assert dns.message.from_wire(wire).answer[0].name.to_text() == name + "."
        assert len(peer.asks) == 1


# --- D35 -------------------------------------------------------------------------------------------------------------


def zipf(count: int, draws: int, seeded: random.Random) -> list[int]:
    weights = [1 / (rank + 1) for rank in range(count)]
    return seeded.choices(range(count), weights, k=draws)


async def test_d35_a_flood_of_names_keeps_the_bounds_and_the_hot_names(tmp_path: Path) -> None:
    """A twentieth of the case, for the suite; the whole runs in bench/."""
    config = Resolver(hosts_files=(), cache=DnsCache(entries=5_000, size_bytes=4 << 20, persist=False, prefetch=False))
    service = ResolverService(config, state_dir=tmp_path, upstreams=ScriptedUpstreams())
    seeded = random.Random(1)

    async def load(draws: int, flood: int) -> float:
        hits = 0
        for draw in zipf(3_000, draws, seeded):
            asked = query(f"hot{draw}.test").to_wire()
            hits += service.answer_cached(asked, 512) is not None or (await service.answer(asked, 512)) is None
            for _ in range(flood):
                await service.answer(query(f"f{seeded.getrandbits(40):x}.test").to_wire(), 512)
            stats = service.stats()
            assert stats["entries"] <= 5_000 and stats["bytes"] <= 4 << 20
        return hits / draws

    await load(6_000, 0)
    before, during = await load(2_000, 0), await load(2_000, 3)
    assert during > before - 0.10
    await service.close()


async def test_d35_large_answers_are_bounded_by_bytes(tmp_path: Path) -> None:
    def large(asked: dns.message.Message) -> bytes:
        return answer(asked, *(f'60 TXT "{i}{"x" * 240}"' for i in range(230)))

    config = Resolver(hosts_files=(), cache=DnsCache(size_bytes=1 << 20, persist=False))
    service = ResolverService(config, state_dir=tmp_path, upstreams=ScriptedUpstreams(script=large))
    for i in range(60):
        await service.answer(query(f"big{i}.test", "TXT").to_wire(), 65535)
        assert service.stats()["bytes"] <= 1 << 20
    assert service.stats()["entries"] > 5
    await service.close()


# --- D36 -------------------------------------------------------------------------------------------------------------


def saved_file(written_s: float) -> bytes:
    from resolver.answer import Bounds, take
    from resolver.question import Question, parse

    cache = Cache(entries=10, size=1 << 20)
    asked = query("kept.test")
    question = parse(asked.to_wire())
    assert isinstance(question, Question)
    cache.put(question, take(answer(asked, "600 A 192.0.2.44"), question, Bounds(), trusted=False), 0.0)
    return snapshot.write(cache, 0.0, written_s)


NOW = 1_900_000_000.0
FILES = {
    "whole": (saved_file(NOW - 100), True),
    "cut short": (saved_file(NOW - 100)[:-7], False),
    "one bit": (
        bytes([*saved_file(NOW - 100)[:-40], saved_file(NOW - 100)[-40] ^ 1, *saved_file(NOW - 100)[-39:]]),
        False,
    ),
    "noise": (random.Random(3).randbytes(5000), False),
    "another version": (saved_file(NOW - 100).replace(b"headrace-dns 1", b"headrace-dns 9"), False),
    "from the future": (saved_file(NOW + 86_400), False),
    "not ours": (b"#!/bin/sh\necho hello\n", False),
    "too old": (saved_file(NOW - 7 * 86_400), False),
}


@pytest.mark.parametrize(("content", "of_use"), FILES.values(), ids=FILES)
async def test_d36_a_file_is_believed_whole_or_dropped_and_ages_while_off(
    content: bytes, of_use: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "dns-cache").write_bytes(content)
    upstreams = ScriptedUpstreams()
    config = Resolver(hosts_files=())
    service = ResolverService(config, state_dir=tmp_path, upstreams=upstreams, wall=lambda: NOW)
    await service.start()
    reply = dns.message.from_wire(await service.answer(query("kept.test").to_wire(), 512) or b"")
    assert ips(reply) == (["192.0.2.44"] if of_use else ["192.0.2.1"])
    if of_use:
        assert 495 <= reply.answer[0].ttl <= 500
    assert len([r for r in caplog.records if r.levelname in ("WARNING", "ERROR")]) <= 1
    await service.close()
    assert stat.S_IMODE(os.stat(tmp_path / "dns-cache").st_mode) == 0o600


async def test_d36_a_state_dir_that_takes_nothing_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    service = ResolverService(Resolver(hosts_files=()), state_dir=tmp_path / "file", upstreams=ScriptedUpstreams())
    await service.start()
    assert await service.answer(query("still.test").to_wire(), 512)
    await service.close()


async def test_d36_two_processes_leave_a_whole_file(tmp_path: Path) -> None:
    services = [
        ResolverService(Resolver(hosts_files=()), state_dir=tmp_path, upstreams=ScriptedUpstreams()) for _ in range(2)
    ]
    for number, service in enumerate(services):
        await service.start()
        await service.answer(query(f"n{number}.test").to_wire(), 512)
    await asyncio.gather(*(service.close() for service in services))
    assert len(snapshot.read((tmp_path / "dns-cache").read_bytes(), time.time())) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["dns-cache"]


# --- D37 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", CLIENTS)
@timed
async def test_d37_a_failure_is_kept_for_a_second_and_no_blip_takes_a_name_away(by: str, chain_of: Any) -> None:
    failing = True

    async def script(a: Ask) -> None:
        a.answer(a.reply(rcode="SERVFAIL") if failing else a.reply(GOOD))

    async with Peer(script) as peer, chain_of(peer) as chain:
        for _ in range(10):
            assert (await chain.ask(query("blip.test"), by)).rcode() == dns.rcode.SERVFAIL
        assert len(peer.asks) == 1
        assert (await chain.ask(query("blip.test", "AAAA"), by)).rcode() == dns.rcode.SERVFAIL
        assert Counter(a.rdtype for a in peer.asks) == {"A": 1, "AAAA": 1}
        failing = False
        begin = time.monotonic()
        while not (await chain.ask(query("blip.test"), by)).answer:
            await asyncio.sleep(0.05)
        assert 0.5 < time.monotonic() - begin < 1.5


async def test_d37_a_peer_that_understands_nothing_is_not_an_answer(chain_of: Any) -> None:
    async def formerr(a: Ask) -> None:
        a.answer(struct.pack("!HHHHHH", a.message.id, 0x8181, 0, 0, 0, 0))

    async with Peer(formerr, "tcp") as peer, Peer(good) as other, chain_of(peer, other) as chain:
        assert ips(await chain.ask(query("odd.test"))) == GOOD_IP
        assert ips(await chain.ask(query("odd.test"))) == GOOD_IP
        assert len(other.asks) == 1
