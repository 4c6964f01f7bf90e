"""Connections to upstreams that end, die, lie about replies or come in pieces."""

from __future__ import annotations

import asyncio
import struct
import time

import dns.edns
import dns.flags
import dns.message
import pytest

from resolver.errors import UpstreamsFailed
from tests.patience import eventually, timed
from tests.peers.authority import Authority
from tests.peers.dns import Ask, Peer
from tests.resolver.asking import GOOD, STREAMS, addresses, ask, asking, good

# --- connections that end --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STREAMS)
@timed
async def test_an_idle_close_by_the_peer_costs_no_error(kind: str, authority: Authority) -> None:
    idle_s = 0.4 if kind in ("quic", "h3") else 0.1  # QUIC counts the handshake too
    async with Peer(good, kind, authority, idle_s=idle_s) as peer, asking(peer) as of:
        for i in range(6):
            assert addresses(await ask(of, f"idle{i}.test")) == ["192.0.2.1"]
            await eventually(lambda: not peer.connections[-1].open)
        assert len(peer.asks) == 6 and len(peer.connections) == 6
        assert of.snapshot()[0].failed == 0


@pytest.mark.parametrize("kind", STREAMS)
@timed
async def test_a_close_that_crosses_the_query_costs_one_retry_on_a_fresh_connection(
    kind: str, authority: Authority
) -> None:
    async with Peer(good, kind, authority) as peer, asking(peer) as of:
        await ask(of, "warm.test")
        peer.connections[0].resets_next = True
        begin = time.monotonic()
        assert addresses(await ask(of, "crossed.test")) == ["192.0.2.1"]
        assert time.monotonic() - begin < 0.4, "moved when the close came, not when the silence was judged"
        assert len(peer.connections) == 2 and len(peer.seen("crossed.test")) == 1
        assert of.snapshot()[0].failed == 0


@pytest.mark.parametrize("kind", STREAMS)
async def test_a_peer_that_always_hangs_up_is_not_asked_for_ever(kind: str, authority: Authority) -> None:
    async def script(a: Ask) -> None:
        a.connection.reset()

    async with Peer(script, kind, authority) as peer, asking(peer) as of:
        with pytest.raises(UpstreamsFailed) as failed:
            await ask(of, "never.test")
        assert len(peer.asks) == 1
        assert failed.value.causes[0][0] == peer.upstream.url


@pytest.mark.parametrize("kind", STREAMS)
@timed
async def test_a_connection_that_died_silently_is_found_though_new_queries_are_written(
    kind: str, authority: Authority
) -> None:
    async with Peer(good, kind, authority) as peer, asking(peer) as of:
        await ask(of, "warm.test")
        peer.connections[0].frozen = True
        begin = time.monotonic()
        asked = []
        for i in range(8):  # at 10 a second: none of them may push the time of death on
            asked.append(asyncio.ensure_future(ask(of, f"dead{i}.test")))
            await asyncio.sleep(0.1)
        for reply in await asyncio.gather(*asked):
            assert addresses(reply) == ["192.0.2.1"]
        assert time.monotonic() - begin < 1.5
        assert len(peer.connections) == 2


@pytest.mark.parametrize("kind", ["tcp", "tls"])
async def test_a_reply_to_nothing_ends_the_connection_and_the_question_moves(kind: str, authority: Authority) -> None:
    async def script(a: Ask) -> None:
        if a.name == "lie.test." and a.connection is peer.connections[0]:
            other = dns.message.make_query("other.test", "A", id=a.message.id)
            a.answer(dns.message.make_response(other))
        else:
            a.answer(a.reply(GOOD))

    async with Peer(script, kind, authority) as peer, asking(peer) as of:
        await ask(of, "warm.test")
        assert addresses(await ask(of, "lie.test")) == ["192.0.2.1"]
        assert len(peer.connections) == 2 and not peer.connections[0].open


async def test_answers_in_pieces_and_glued_together_are_read_right() -> None:
    async def script(a: Ask) -> None:
        wire = a.reply(GOOD).to_wire()
        if a.name == "pieces.test.":
            for byte in struct.pack("!H", len(wire)) + wire:
                a.connection.write(bytes([byte]))
                await asyncio.sleep(0)
            return
        glued.append(struct.pack("!H", len(wire)) + wire)
        if len(glued) == 3:
            a.connection.write(b"".join(glued))

    glued: list[bytes] = []
    async with Peer(script, "tcp") as peer, asking(peer) as of:
        assert addresses(await ask(of, "pieces.test")) == ["192.0.2.1"]
        replies = await asyncio.gather(*(ask(of, f"glued{i}.test") for i in range(3)))
        assert all(addresses(r) == ["192.0.2.1"] for r in replies)
        assert len(peer.connections) == 1


@timed
async def test_the_idle_limit_named_by_the_peer_is_kept() -> None:
    async def script(a: Ask) -> None:
        reply = a.reply(GOOD)
        reply.use_edns(0, options=[dns.edns.GenericOption(11, b"\0\x05")])
        a.answer(reply)

    async with Peer(script, "tcp") as peer, asking(peer) as of:
        await ask(of, "keepalive.test")
        begin = time.monotonic()
        await eventually(lambda: not peer.connections[0].open)
        assert 0.2 < time.monotonic() - begin < 0.8
        assert [o.otype for o in peer.asks[0].message.options] == [11]
