"""Upstreams over HTTP: answers that are none, streams that are refused, connections that go away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import dns.edns
import dns.flags
import dns.message
import pytest

from resolver.errors import UpstreamsFailed
from tests.peers.authority import Authority
from tests.peers.dns import Ask, H2Connection, Peer
from tests.resolver.asking import GOOD, addresses, ask, asking, good

# --- doh -------------------------------------------------------------------------------------------------------------


def portal(a: Ask) -> None:
    a.connection.respond(a, 200, [("content-type", "text/html")], b"<html>please log in</html>")


def dressed_as_html(a: Ask) -> None:
    a.connection.respond(a, 200, [("content-type", "text/html")], a.reply(GOOD).to_wire())


def redirect(a: Ask) -> None:
    a.connection.respond(a, 302, [("location", "http://portal.test/")])


def limited(a: Ask) -> None:
    a.connection.respond(a, 429, [("retry-after", "1")])


def unavailable(a: Ask) -> None:
    a.connection.respond(a, 503)


def cut_short(a: Ask) -> None:
    a.connection.answer(a, a.reply(GOOD).to_wire()[:-3])


def other_question(a: Ask) -> None:
    a.connection.answer(a, dns.message.make_response(dns.message.make_query("other.test", "A", id=0)).to_wire())


LIES = [portal, dressed_as_html, redirect, limited, unavailable, cut_short, other_question]


@pytest.mark.parametrize("kind", ["https", "h3"])
@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
async def test_a_doh_lie_is_never_an_answer_and_the_next_upstream_is_asked_at_once(
    lie: Callable[[Ask], None], kind: str, authority: Authority
) -> None:
    async def script(a: Ask) -> None:
        lie(a)

    async with Peer(script, kind, authority) as liar, Peer(good, kind, authority) as honest:
        async with asking(liar, honest) as of:
            reply = await ask(of, "lied.test")
            assert addresses(reply) == ["192.0.2.1"] and reply.upstream == honest.upstream.url
        async with asking(liar) as of:
            with pytest.raises(UpstreamsFailed) as failed:
                await ask(of, "lied.test")
            assert failed.value.causes[0][1]


async def test_an_endless_body_is_cut_off(authority: Authority) -> None:
    async def script(a: Ask) -> None:
        states = a.connection.h2
        states.send_headers(a.stream_id, [(":status", "200"), ("content-type", "application/dns-message")])
        for _ in range(100):
            if a.stream_id not in states.streams or states.streams[a.stream_id].closed:
                return
            if states.local_flow_control_window(a.stream_id) >= 8192:
                states.send_data(a.stream_id, bytes(8192))
                a.connection.flush()
            await asyncio.sleep(0.001)
        raise AssertionError("read on without a bound")

    async with Peer(script, "https", authority) as peer, asking(peer) as of:
        with pytest.raises(UpstreamsFailed, match="more than 65535 bytes"):
            await ask(of, "endless.test")


@pytest.mark.parametrize(("kind", "stream_id"), [("https", 1), ("h3", 0)])
async def test_a_request_is_a_post_of_a_dns_message_to_the_configured_authority(
    kind: str, stream_id: int, authority: Authority
) -> None:
    async with Peer(good, kind, authority) as peer, asking(peer) as of:
        await ask(of, "post.test")
        assert peer.connections[0].requests[stream_id] == {
            ":method": "POST",
            ":scheme": "https",
            ":authority": f"localhost:{peer.port}",
            ":path": "/dns-query",
            "accept": "application/dns-message",
            "content-type": "application/dns-message",
            "content-length": "128",
        }


async def test_the_time_in_an_http_cache_counts(authority: Authority) -> None:
    async def script(a: Ask) -> None:
        fields = [("content-type", "application/dns-message"), ("age", "40")]
        a.connection.respond(a, 200, fields, a.reply(GOOD).to_wire())

    async with Peer(script, "https", authority) as peer, asking(peer) as of:
        assert dns.message.from_wire((await ask(of, "aged.test")).wire).answer[0].ttl == 20


@pytest.mark.parametrize(("kind", "refused"), [("https", 0x7), ("h3", 0x10B)])
async def test_a_refused_stream_moves_to_a_fresh_connection(kind: str, refused: int, authority: Authority) -> None:
    async def script(a: Ask) -> None:
        if len(peer.connections) == 1 and a.name == "refused.test.":
            a.connection.reset_stream(a, refused)
        else:
            a.answer(a.reply(GOOD))

    async with Peer(script, kind, authority) as peer, asking(peer) as of:
        assert addresses(await ask(of, "refused.test")) == ["192.0.2.1"]
        assert len(peer.connections) == 2


async def test_goaway_moves_what_was_not_looked_at_and_hears_the_rest_out(authority: Authority) -> None:
    async def script(a: Ask) -> None:
        assert isinstance(a.connection, H2Connection)
        if a.name == "kept.test.":
            await going.wait()
            await asyncio.sleep(0.05)
        elif a.name == "unseen.test." and a.connection is peer.connections[0]:
            a.connection.goaway(a.stream_id - 2)
            going.set()
            return
        a.answer(a.reply(GOOD))

    going = asyncio.Event()
    async with Peer(script, "https", authority) as peer, asking(peer) as of:
        await ask(of, "warm.test")
        both = await asyncio.gather(ask(of, "kept.test"), ask(of, "unseen.test"))
        assert [addresses(r) for r in both] == [["192.0.2.1"], ["192.0.2.1"]]
        assert [a.connection for a in peer.seen("kept.test")] == peer.connections[:1], "heard out, not asked again"
        assert [a.connection for a in peer.seen("unseen.test")] == peer.connections[:2]


async def test_a_peer_that_allows_one_stream_gets_one_at_a_time(authority: Authority) -> None:
    async with Peer(good, "https", authority, max_streams=1) as peer, asking(peer) as of:
        await ask(of, "warm.test")
        replies = await asyncio.gather(*(ask(of, f"q{i}.test") for i in range(20)))
        assert all(addresses(r) == ["192.0.2.1"] for r in replies)
        assert len(peer.connections) == 1
