"""Upstreams over QUIC: broken rules, long answers, resumption and tokens."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator

import dns.edns
import dns.flags
import dns.message
import pytest
from aioquic.quic.configuration import QuicConfiguration

from resolver.io.clock import now
from resolver.io.quic import QuicLink, QuicMemory
from resolver.io.warm import Link, WarmChannel
from resolver.quirks import IdleLimit
from tests.patience import eventually
from tests.peers.authority import Authority
from tests.peers.dns import Ask, Peer
from tests.resolver.asking import GOOD, addresses, ask, asking, good

# --- doq -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["id", "question", "length"])
async def test_a_doq_reply_that_breaks_the_rules_ends_the_connection_with_protocol_error(
    fault: str, authority: Authority
) -> None:
    async def script(a: Ask) -> None:
        wire = a.reply(GOOD).to_wire()
        if a.connection is not peer.connections[0] or a.name == "warm.test.":
            a.answer(wire)
        elif fault == "id":
            a.answer(b"\0\7" + wire[2:])
        elif fault == "question":
            a.answer(dns.message.make_response(dns.message.make_query("other.test", "A", id=0)))
        else:
            a.connection.write(a.stream_id, struct.pack("!H", len(wire) + 5) + wire, end=True)

    async with Peer(script, "quic", authority) as peer, asking(peer) as of:
        await ask(of, "warm.test")
        assert addresses(await ask(of, "broken.test")) == ["192.0.2.1"]
        await eventually(lambda: peer.connections[0].close_code >= 0)
        assert peer.connections[0].close_code == 2


async def test_a_doq_answer_over_several_packets_is_joined(authority: Authority) -> None:
    async def script(a: Ask) -> None:
        wire = a.reply(*(f"60 A 198.51.{i}.1" for i in range(250))).to_wire(max_size=65535)
        for i in range(0, len(wire), 700):
            prefix = struct.pack("!H", len(wire)) if i == 0 else b""
            a.connection.write(a.stream_id, prefix + wire[i : i + 700], end=i + 700 >= len(wire))
            await asyncio.sleep(0.001)

    async with Peer(script, "quic", authority) as peer, asking(peer) as of:
        assert len(addresses(await ask(of, "big.test"))) == 250


@pytest.mark.parametrize("kind", ["tls", "https", "quic", "h3"])
async def test_the_second_connection_to_an_upstream_is_resumed(kind: str, authority: Authority) -> None:
    async with Peer(good, kind, authority) as peer, asking(peer) as of:
        for i in range(2):
            await ask(of, f"resumed{i}.test")
            of.network_changed()
        await eventually(lambda: len(peer.connections) == 2)
        last = peer.connections[-1]
        tls = last.transport.get_extra_info("ssl_object") if kind in ("tls", "https") else None
        assert tls.session_reused if tls else last.resumed


# --- tokens ----------------------------------------------------------------------------------------------------------


class Dialled(QuicLink):
    """A connection that is only made, never opened."""

    ALPN, NO_ERROR = "doq", 0


async def test_a_token_is_kept_where_a_retry_was_and_shown_once(channel: WarmChannel) -> None:
    memory = QuicMemory()
    for retried, shown in ((0, b""), (1, b"given")):
        link = Dialled(channel, now, QuicConfiguration(is_client=True), memory)
        link.quic._retry_count = retried
        assert link.quic._token_handler is not None
        link.quic._token_handler(b"given")
        for expected in (shown, b""):
            configuration = QuicConfiguration(is_client=True)
            memory.apply(configuration)
            assert configuration.token == expected


@pytest.fixture
async def channel() -> AsyncIterator[WarmChannel]:
    async def nowhere(_: WarmChannel) -> Link:
        raise ConnectionRefusedError

    made = WarmChannel(nowhere, encrypted=True, clock=now, idle=IdleLimit())
    yield made
    await made.close()
