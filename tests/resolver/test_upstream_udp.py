"""Upstreams over plain UDP: forged datagrams, letters, EDNS, sends that are repeated."""

from __future__ import annotations

import asyncio
import struct

import dns.edns
import dns.flags
import dns.message
import pytest

from tests.patience import timed
from tests.peers.dns import HOST, Ask, Peer
from tests.resolver.asking import GOOD, addresses, ask, asking, good

# --- udp -------------------------------------------------------------------------------------------------------------


async def test_each_udp_send_has_a_port_an_id_and_letters_of_its_own() -> None:
    async with Peer(good) as peer, asking(peer) as of:
        for _ in range(8):
            await ask(of, "a-rather-long-name-with-many-letters.test")
        assert len({a.source[1] for a in peer.asks}) == 8
        assert len({a.message.id for a in peer.asks}) > 6
        assert len({a.written_name for a in peer.asks}) == 8


async def test_a_truncated_answer_is_fetched_over_tcp() -> None:
    async def script(a: Ask) -> None:
        a.answer(a.reply(*(f"60 A 192.0.2.{i}" for i in range(100))))

    async with Peer(script) as peer, asking(peer) as of:
        assert len(addresses(await ask(of, "big.test"))) == 100
        assert [a.over_udp for a in peer.asks] == [True, False]


def forge(kind: str, a: Ask) -> bytes:
    evil = a.reply("60 A 203.0.113.66").to_wire()
    other = dns.message.make_query("other.test", "A", id=a.message.id)
    return {
        "id": struct.pack("!H", a.message.id ^ 1) + evil[2:],
        "qr": evil[:2] + bytes([evil[2] & 0x7F]) + evil[3:],
        "name": dns.message.make_response(other).to_wire(),
        "type": evil[:12] + a.wire[12 : 12 + len(a.name) + 1] + b"\0\x10" + evil[12 + len(a.name) + 3 :],
        "case": evil[:12] + bytes(c ^ 0x20 if chr(c).isalpha() else c for c in evil[12:20]) + evil[20:],
        "cut": evil[:11],
    }[kind]


@pytest.mark.parametrize("kind", ["id", "qr", "name", "type", "case", "cut"])
@timed
async def test_a_forged_datagram_neither_answers_nor_ends_the_wait(kind: str) -> None:
    async def script(a: Ask) -> None:
        if a.over_udp:
            a.answer(forge(kind, a))
            await asyncio.sleep(0.15)
        a.answer(a.reply(GOOD))

    async with Peer(script) as peer, asking(peer) as of:
        for name in ("one.test", "two.test"):
            assert addresses(await ask(of, f"forged-{name}")) == ["192.0.2.1"]
        assert of.snapshot()[0].ignored == 2
        assert any(c.isupper() for a in peer.asks[-3:] for c in a.written_name), "no forger can turn 0x20 off"


async def test_a_datagram_from_another_port_is_not_heard() -> None:
    async def script(a: Ask) -> None:
        loop = asyncio.get_running_loop()
        stranger, _ = await loop.create_datagram_endpoint(asyncio.DatagramProtocol, (HOST, 0))
        stranger.sendto(a.reply("60 A 203.0.113.66").to_wire(), a.source)
        await asyncio.sleep(0.1)
        a.answer(a.reply(GOOD))
        stranger.close()

    async with Peer(script) as peer, asking(peer) as of:
        assert addresses(await ask(of, "port.test")) == ["192.0.2.1"]


def lowered(a: Ask) -> bytes:
    wire = a.reply(GOOD).to_wire()
    return wire[:12] + wire[12:24].lower() + wire[24:]


async def test_a_peer_that_answers_in_lower_case_is_asked_over_tcp_once_and_then_without_0x20() -> None:
    async def script(a: Ask) -> None:
        a.answer(lowered(a))

    async with Peer(script) as peer, asking(peer) as of:
        for i in range(4):
            assert addresses(await ask(of, f"lowercase{i}.test")) == ["192.0.2.1"]
        assert [a.over_udp for a in peer.asks] == [True, False, True, True, True]
        assert peer.asks[-1].written_name == "lowercase3.test."


async def test_a_lower_case_peer_without_tcp_still_answers() -> None:
    async def script(a: Ask) -> None:
        a.answer(lowered(a))

    async with Peer(script) as peer:
        peer._server.close()
        async with asking(peer) as of:
            assert addresses(await ask(of, "lowercase.test")) == ["192.0.2.1"]
            assert addresses(await ask(of, "lowercase.test")) == ["192.0.2.1"]
            assert len(peer.asks) == 3, "once in mixed letters; neither they nor TCP are tried again"


async def test_a_peer_that_cannot_bear_edns_is_asked_without_and_remembered() -> None:
    async def script(a: Ask) -> None:
        a.answer(a.reply(rcode="FORMERR") if a.message.edns >= 0 else a.reply(GOOD))

    async with Peer(script) as peer, asking(peer) as of:
        for i in range(3):
            assert addresses(await ask(of, f"noedns{i}.test")) == ["192.0.2.1"]
        assert [a.message.edns for a in peer.asks] == [0, -1, -1, -1]


@timed
async def test_a_resend_does_not_forget_the_first_send() -> None:
    async def script(a: Ask) -> None:
        if a is peer.asks[0]:
            await asyncio.sleep(0.8)
            a.answer(a.reply(GOOD))

    async with Peer(script) as peer, asking(peer) as of:
        assert addresses(await ask(of, "slow.test")) == ["192.0.2.1"]
        assert len(peer.asks) == 2
