"""What users of resolvers met, through the whole chain: a client's socket, the service, the upstream set, a lying peer.

Each test is named after its case: D1 to D8, D11 to D14, D31. `kind` is the transport to the upstream, `by` the client's.
"""

from __future__ import annotations

import asyncio
import random
import struct
import time
from typing import Any

import dns.edns
import dns.flags
import dns.message
import dns.rcode
import pytest

from tests.patience import timed
from tests.peers.authority import Authority
from tests.peers.dns import Ask, H2Connection, Peer
from tests.resolver.stage import CLIENTS, EVIL, GOOD, GOOD_IP, KINDS, QUICK_S, ede, good, ips, query

# --- D1 --------------------------------------------------------------------------------------------------------------


async def test_d1_a_truncated_answer_is_fetched_whole_and_never_cached_cut(chain_of: Any) -> None:
    async def script(a: Ask) -> None:
        reply = a.reply(*(f"60 A 198.51.100.{i}" for i in range(20)))
        if a.over_udp:
            reply.answer.clear()
            reply.flags |= dns.flags.TC
        a.answer(reply)

    async with Peer(script) as peer, chain_of(peer) as chain:
        for _ in range(2):
            assert len(ips(await chain.ask(query("cut.test", payload=1232)))) == 20
        assert [a.over_udp for a in peer.asks] == [True, False]


@pytest.mark.parametrize("kind", KINDS)
async def test_d1_a_big_answer_fits_the_client_or_says_tc_and_tcp_gets_it_all(
    kind: str, chain_of: Any, authority: Authority
) -> None:
    async def script(a: Ask) -> None:
        a.answer(a.reply(*(f"60 A 198.51.{i}.1" for i in range(180))))

    async with Peer(script, kind, authority) as peer, chain_of(peer) as chain:
        for size, room in ((0, 512), (300, 512), (512, 512), (1232, 1232), (4096, 1232)):
            asked = query("big.test", use_edns=0 if size else False, payload=size)
            wire = await chain.ask_wire(asked.to_wire())
            reply = dns.message.from_wire(wire)
            assert len(wire) <= room and reply.flags & dns.flags.TC
            assert (reply.edns == 0) is (size > 0)
            for by in ("tcp", "tls"):
                assert len(ips(await chain.ask(asked, by))) == 180
        assert len(peer.seen("big.test")) == (2 if kind == "udp" else 1)


# --- D2, D3 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", CLIENTS)
@timed
async def test_d2_a_ttl_falls_with_time_and_the_answer_is_asked_anew_after_it(by: str, chain_of: Any) -> None:
    async def script(a: Ask) -> None:
        a.answer(a.reply("2 A 198.51.100.1"))

    async with Peer(script) as peer, chain_of(peer) as chain:
        begin, last = time.monotonic(), 2
        while (elapsed := time.monotonic() - begin) < 1.7:
            ttl = (await chain.ask(query("ttl.test"), by)).answer[0].ttl
            assert 0 < ttl <= last and abs(2 - elapsed - ttl) <= 1.1
            last = ttl
            await asyncio.sleep(0.3)
        assert len(peer.asks) == 1
        await asyncio.sleep(2.1 - (time.monotonic() - begin))
        assert (await chain.ask(query("ttl.test"), by)).answer[0].ttl == 2
        assert len(peer.asks) == 2


@timed
async def test_d3_a_denial_lives_for_the_smaller_of_soa_ttl_and_minimum(chain_of: Any) -> None:
    async def script(a: Ask) -> None:
        a.answer(a.reply(rcode="NXDOMAIN", soa="test. 3600 1" if a.name.startswith("min") else "test. 1 3600"))

    async with Peer(script) as peer, chain_of(peer) as chain:
        for name in ("minimum.test", "soattl.test"):
            for _ in range(2):
                reply = await chain.ask(query(name))
                assert reply.rcode() == dns.rcode.NXDOMAIN and reply.authority[0].ttl <= 1
        assert len(peer.asks) == 2
        await asyncio.sleep(1.1)
        await chain.ask(query("minimum.test"))
        assert len(peer.asks) == 3


async def test_d3_nodata_hides_its_type_alone_and_nxdomain_hides_all_below(chain_of: Any) -> None:
    async def script(a: Ask) -> None:
        if "gone" in a.name:
            a.answer(a.reply(rcode="NXDOMAIN", soa="test. 60 60"))
        else:
            a.answer(a.reply(GOOD) if a.rdtype == "A" else a.reply(soa="test. 60 60"))

    async with Peer(script) as peer, chain_of(peer) as chain:
        assert not (await chain.ask(query("v4.test", "AAAA"))).answer
        assert ips(await chain.ask(query("v4.test"))) == GOOD_IP
        for name, rdtype in (("gone.test", "A"), ("gone.test", "TXT"), ("below.gone.test", "A")):
            assert (await chain.ask(query(name, rdtype))).rcode() == dns.rcode.NXDOMAIN
        assert len(peer.asks) == 3


# --- D4 --------------------------------------------------------------------------------------------------------------


async def test_d4_forged_datagrams_are_never_used_nor_cached(chain_of: Any) -> None:
    async def script(a: Ask) -> None:
        evil = a.reply(EVIL).to_wire()
        others = [query("other.test", id=a.message.id), query(a.written_name, "TXT", id=a.message.id)]
        if a.over_udp:
            for forged in (
                struct.pack("!H", a.message.id ^ 1) + evil[2:],
                evil[:2] + bytes([evil[2] & 0x7F]) + evil[3:],
                *(dns.message.make_response(other).to_wire() for other in others),
            ):
                a.answer(forged)
            await asyncio.sleep(0.1)
        a.answer(a.reply(GOOD))

    async with Peer(script) as peer, chain_of(peer) as chain:
        for name in ("one.test", "two.test", "one.test", "two.test"):
            assert ips(await chain.ask(query(name))) == GOOD_IP


@pytest.mark.parametrize("kind", ["tcp", "tls", "https"])
async def test_d4_a_mismatched_reply_on_a_stream_is_an_error_not_an_answer(
    kind: str, chain_of: Any, authority: Authority
) -> None:
    async def lie(a: Ask) -> None:
        other = dns.message.make_response(query("other.test", id=a.message.id))
        a.answer(other)

    async with Peer(lie, kind, authority) as liar, Peer(good) as honest, chain_of(liar, honest) as chain:
        assert ips(await chain.ask(query("lied.test"))) == GOOD_IP


# --- D5 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tcp", "tls", "https"])
@timed
async def test_d5_a_query_after_a_pause_never_fails(kind: str, chain_of: Any, authority: Authority) -> None:
    async with Peer(good, kind, authority, idle_s=0.15) as peer, chain_of(peer) as chain:
        for i in range(8):
            begin = time.monotonic()
            assert ips(await chain.ask(query(f"idle{i}.test"))) == GOOD_IP
            assert time.monotonic() - begin < QUICK_S
            await asyncio.sleep(0.25 if i % 2 else 0.15)  # at the limit and well past it
        assert len({a.name for a in peer.asks}) == 8


# --- D6, D7 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_d6_unknown_types_pass_byte_for_byte(kind: str, chain_of: Any, authority: Authority) -> None:
    async def script(a: Ask) -> None:
        a.answer(a.reply(r"60 TYPE65280 \# 20 000102030405060708090a0b0c0d0e0f10111213"))

    async with Peer(script, kind, authority) as peer, chain_of(peer) as chain:
        for _ in range(2):
            reply = await chain.ask(query("type.test", "TYPE65280"))
            assert reply.answer[0][0].data == bytes(range(20))
        assert len(peer.asks) == 1


async def test_d6_new_edns_things_break_nothing_and_stay_here(chain_of: Any) -> None:
    async with Peer(good) as peer, chain_of(peer) as chain:
        odd = query("odd.test", ednsflags=0x0040, options=[dns.edns.GenericOption(65001, b"hello")])
        assert ips(await chain.ask(odd)) == GOOD_IP
        assert peer.asks[0].message.options == () and not peer.asks[0].message.ednsflags & 0x0040
        version = await chain.ask(query("version.test", use_edns=1))
        assert version.rcode() == dns.rcode.BADVERS and version.edns == 0
        assert len(peer.asks) == 1


@pytest.mark.parametrize("by", CLIENTS)
async def test_d7_garbage_is_answered_or_ignored_and_the_next_query_works(by: str, chain_of: Any) -> None:
    seeded = random.Random(7)
    async with Peer(good) as peer, chain_of(peer) as chain:
        for _ in range(60):
            junk = seeded.randbytes(seeded.randrange(0, 80))
            if by == "udp":
                transport, _ = await chain.datagrams()
                transport.sendto(junk)
                transport.close()
            else:
                stream = await chain.stream(by)
                stream.send(junk)
                await stream.close()
        assert ips(await chain.ask(query("after.test"), by)) == GOOD_IP
        response = bytearray(query("loop.test").to_wire())
        response[2] |= 0x80
        with pytest.raises(TimeoutError):
            await chain.ask_wire(bytes(response), "udp", 0.2)


# --- D8 --------------------------------------------------------------------------------------------------------------


async def refuse(a: Ask) -> None:
    a.answer(a.reply(rcode="REFUSED"))


async def servfail(a: Ask) -> None:
    a.answer(a.reply(rcode="SERVFAIL"))


async def hang_up(a: Ask) -> None:
    if a.connection is not None:
        a.connection.reset()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("script", "cause"), [(refuse, "REFUSED"), (servfail, "SERVFAIL"), (hang_up, "")])
@timed
async def test_d8_when_all_upstreams_fail_the_client_is_told_which_and_why(
    kind: str, script: Any, cause: str, chain_of: Any, authority: Authority
) -> None:
    async with Peer(script, kind, authority) as peer, chain_of(peer, timeout_s=0.5) as chain:
        begin = time.monotonic()
        reply = await chain.ask(query("why.test"))
        assert time.monotonic() - begin < 0.5 + 0.2
        assert reply.rcode() == dns.rcode.SERVFAIL and not reply.answer
        (text,) = (text for code, text in ede(reply).items() if code in (22, 23))
        assert str(peer.port) in text and cause in text


@pytest.mark.parametrize("kind", KINDS)
@timed
async def test_d8_an_expired_answer_bridges_the_outage_and_then_comes_at_once(
    kind: str, chain_of: Any, authority: Authority
) -> None:
    async def script(a: Ask) -> None:
        a.answer(a.reply("1 A 198.51.100.1"))

    async with Peer(script, kind, authority) as peer, chain_of(peer, stale_s=3600.0, timeout_s=2.0) as chain:
        await chain.ask(query("stale.test"))
        peer.dark = True
        await asyncio.sleep(1.1)
        begin = time.monotonic()
        reply = await chain.ask(query("stale.test"))
        assert 0.4 < time.monotonic() - begin < 0.9
        assert ips(reply) == GOOD_IP and reply.answer[0].ttl <= 30 and 3 in ede(reply)
        await asyncio.sleep(2.0)  # the refresh has failed by now
        begin = time.monotonic()
        assert ips(await chain.ask(query("stale.test"))) == GOOD_IP
        assert time.monotonic() - begin < 0.2


async def test_d8_nxdomain_asks_nobody_else_and_servfail_does(chain_of: Any) -> None:
    async def script(a: Ask) -> None:
        a.answer(
            a.reply(rcode="NXDOMAIN", soa="test. 60 60") if a.name.startswith("none") else a.reply(rcode="SERVFAIL")
        )

    async with Peer(script) as first, Peer(good) as second, chain_of(first, second) as chain:
        assert (await chain.ask(query("none.test"))).rcode() == dns.rcode.NXDOMAIN
        assert not second.asks
        assert ips(await chain.ask(query("other.test"))) == GOOD_IP


# --- D11, D12 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tcp", "tls", "https"])
@timed
async def test_d11_a_half_dead_connection_is_left_while_new_queries_come(
    kind: str, chain_of: Any, authority: Authority
) -> None:
    async with Peer(good, kind, authority) as peer, chain_of(peer) as chain:
        await chain.ask(query("warm.test"))
        peer.connections[0].frozen = True
        begin = time.monotonic()
        asked = []
        for i in range(6):
            asked.append(asyncio.ensure_future(chain.ask(query(f"q{i}.test"))))
            await asyncio.sleep(0.2)
        assert all(ips(reply) == GOOD_IP for reply in await asyncio.gather(*asked))
        assert time.monotonic() - begin < 3.0
        begin = time.monotonic()
        await chain.ask(query("later.test"))
        assert time.monotonic() - begin < 0.2


@timed
async def test_d11_refused_streams_and_goaway_are_retried_unseen(chain_of: Any, authority: Authority) -> None:
    async def script(a: Ask) -> None:
        assert isinstance(a.connection, H2Connection)
        if a.name == "refused.test." and len(peer.seen("refused.test")) == 1:
            a.connection.reset_stream(a, 7)
        elif a.name == "going.test." and len(peer.seen("going.test")) == 1:
            a.connection.goaway(a.stream_id - 2)
        else:
            a.answer(a.reply(GOOD))

    async with Peer(script, "https", authority) as peer, chain_of(peer) as chain:
        for name in ("warm.test", "refused.test", "going.test", "after.test"):
            assert ips(await chain.ask(query(name))) == GOOD_IP
        assert len(peer.connections) == 3


@pytest.mark.parametrize("status", [200, 302, 429, 503])
async def test_d12_a_portal_page_is_never_an_answer(status: int, chain_of: Any, authority: Authority) -> None:
    async def script(a: Ask) -> None:
        fields = [("content-type", "text/html"), ("location", "http://portal.test/")]
        a.connection.respond(a, status, fields, b"<html>")

    async with Peer(script, "https", authority) as peer, Peer(good) as other:
        async with chain_of(peer, other) as chain:
            assert ips(await chain.ask(query("portal.test"))) == GOOD_IP
        async with chain_of(peer) as chain:
            reply = await chain.ask(query("portal.test"))
            assert reply.rcode() == dns.rcode.SERVFAIL
            assert f"HTTP {status}" in " ".join(ede(reply).values())


# --- D13, D14 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by", ["tcp", "tls"])
async def test_d13_one_slow_answer_holds_nobody(by: str, kind: str, chain_of: Any, authority: Authority) -> None:
    release = asyncio.Event()

    async def script(a: Ask) -> None:
        if a.name.startswith("slow"):
            await release.wait()
        a.answer(a.reply(GOOD))

    async with Peer(script, kind, authority) as peer, chain_of(peer) as chain:
        stream = await chain.stream(by)
        asked = [query("slow.test", id=1), *(query(f"q{i}.test", id=i) for i in range(2, 101))]
        stream.send(*(m.to_wire() for m in asked))
        got = [dns.message.from_wire(await stream.receive()) for _ in range(99)]
        assert {m.id for m in got} == set(range(2, 101))
        release.set()
        assert dns.message.from_wire(await stream.receive()).id == 1
        await stream.close()


@pytest.mark.parametrize("by", ["tcp", "tls"])
async def test_d14_messages_in_pieces_and_glued_together_are_read_right(by: str, chain_of: Any) -> None:
    async with Peer(good) as peer, chain_of(peer) as chain:
        stream = await chain.stream(by)
        wires = [query(f"piece{i}.test", id=i).to_wire() for i in range(1, 6)]
        flow = b"".join(struct.pack("!H", len(w)) + w for w in wires)
        whole = len(wires[0]) + 2
        for part in (flow[:1], flow[1:9], *(flow[i : i + 1] for i in range(9, whole)), flow[whole:]):
            stream.writer.write(part)
            await asyncio.sleep(0.002)
        got = {dns.message.from_wire(await stream.receive()).id for _ in wires}
        assert got == {1, 2, 3, 4, 5}
        await stream.close()


async def test_d14_a_half_closed_client_is_still_answered(chain_of: Any) -> None:
    async with Peer(good) as peer, chain_of(peer) as chain:
        stream = await chain.stream()
        stream.send(query("half.test", id=9).to_wire())
        stream.writer.write_eof()
        assert dns.message.from_wire(await stream.receive()).id == 9
        await stream.close()


# --- D31 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@timed
async def test_d31_a_stampede_is_one_upstream_query(kind: str, chain_of: Any, authority: Authority) -> None:
    name = "stampede.test"

    async def script(a: Ask) -> None:
        await asyncio.sleep(0.2)
        a.answer(a.reply(GOOD))

    def cased(i: int) -> str:
        return "".join(c.upper() if i >> k % 8 & 1 else c for k, c in enumerate(name))

    async with Peer(script, kind, authority) as peer, chain_of(peer) as chain:
        streams = [await chain.stream() for _ in range(10)]
        for s, stream in enumerate(streams):
            stream.send(*(query(cased(i), id=i).to_wire() for i in range(s * 50, s * 50 + 50)))
        for stream in streams:
            for _ in range(50):
                reply = dns.message.from_wire(await stream.receive())
                assert ips(reply) == GOOD_IP
                assert reply.question[0].name.to_text() == cased(reply.id) + "."
        assert len(peer.asks) == 1
        await asyncio.gather(*(stream.close() for stream in streams))


@timed
async def test_d31_when_the_upstream_fails_all_are_told_at_once_after_one_try(chain_of: Any) -> None:
    async def script(a: Ask) -> None:
        await asyncio.sleep(0.1)
        a.answer(a.reply(rcode="SERVFAIL"))

    async with Peer(script) as peer, chain_of(peer) as chain:
        stream = await chain.stream()
        stream.send(*(query("fails.test", id=i).to_wire() for i in range(200)))
        got = [dns.message.from_wire(await stream.receive()) for _ in range(200)]
        assert all(m.rcode() == dns.rcode.SERVFAIL for m in got)
        assert len(peer.asks) == 1
        await stream.close()


@timed
async def test_d31_the_first_client_may_leave(chain_of: Any) -> None:
    async def script(a: Ask) -> None:
        await asyncio.sleep(0.15)
        a.answer(a.reply(GOOD))

    async with Peer(script) as peer, chain_of(peer) as chain:
        leaver, stayer = await chain.stream(), await chain.stream()
        leaver.send(query("shared.test", id=1).to_wire())
        await asyncio.sleep(0.05)
        stayer.send(query("shared.test", id=2).to_wire())
        await leaver.close()
        assert ips(dns.message.from_wire(await stayer.receive())) == GOOD_IP
        assert len(peer.asks) == 1
        await stayer.close()
