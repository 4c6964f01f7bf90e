"""The upstream set against scripted peers, on every transport: real sockets, real TLS."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import dns.edns
import dns.flags
import dns.message
import pytest
from aioquic.quic.configuration import QuicConfiguration

from config.model import DnsUpstream, Resolver, Zone
from resolver.errors import UpstreamsFailed
from resolver.io.clock import now
from resolver.io.quic import QuicLink, QuicMemory
from resolver.io.run import Reply
from resolver.io.upstream_set import UpstreamSet
from resolver.io.warm import Link, WarmChannel
from resolver.quirks import IdleLimit
from tests.patience import eventually, no_hang, timed
from tests.peers.authority import Authority
from tests.peers.dns import HOST, Ask, H2Connection, Peer

GOOD = "60 A 192.0.2.1"
KINDS = ["udp", "tcp", "tls", "https", "quic", "h3"]
STREAMS = ["tcp", "tls", "https", "quic", "h3"]
SEALED = ("tls", "https", "quic", "h3")


async def good(ask: Ask) -> None:
    ask.answer(ask.reply(GOOD))


def query(name: str, rdtype: str = "A", **kw: Any) -> bytes:
    return dns.message.make_query(name, rdtype, use_edns=0, **kw).to_wire()


@asynccontextmanager
async def asking(*peers: Peer | DnsUpstream, **kw: Any) -> AsyncIterator[UpstreamSet]:
    upstreams = tuple(p.upstream if isinstance(p, Peer) else p for p in peers)
    made = UpstreamSet(Resolver(upstreams=upstreams, strategy=kw.pop("strategy", "failover"), bootstrap=(), **kw))
    try:
        yield made
    finally:
        await made.close()


async def ask(of: UpstreamSet, name: str, rdtype: str = "A", within_s: float = 20.0, **kw: Any) -> Reply:
    return await of.ask(query(name, rdtype, **kw), zone=None, deadline=now() + within_s)


def addresses(reply: Reply) -> list[str]:
    return [r.to_text() for rrset in dns.message.from_wire(reply.wire).answer for r in rrset]


# --- the plain case --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_comes_back_with_the_callers_id_and_letters(kind: str, authority: Authority) -> None:
    async with Peer(good, kind, authority) as peer, asking(peer) as of:
        asked = query("WwW.Plain.Test", id=77)
        reply = await of.ask(asked, zone=None, deadline=now() + 20)
        message = dns.message.from_wire(reply.wire)
        assert (message.id, str(message.question[0].name)) == (77, "WwW.Plain.Test.")
        assert addresses(reply) == ["192.0.2.1"] and reply.upstream == peer.upstream.url
        assert reply.encrypted is (kind in SEALED) and reply.took_s > 0


@pytest.mark.parametrize("kind", STREAMS)
@timed
async def test_a_hundred_questions_share_one_connection_and_a_slow_one_holds_nobody(
    kind: str, authority: Authority
) -> None:
    release = asyncio.Event()

    async def script(a: Ask) -> None:
        if a.name.startswith("slow"):
            await release.wait()
        a.answer(a.reply(GOOD))

    async with Peer(script, kind, authority) as peer, asking(peer) as of:
        await ask(of, "warm.test")
        began = asyncio.get_running_loop().time()
        slow = asyncio.ensure_future(ask(of, "slow.test", id=5))
        async with no_hang():
            await asyncio.gather(*(ask(of, f"q{i}.test", id=5) for i in range(99)))
        assert not slow.done()
        release.set()
        assert addresses(await slow) == ["192.0.2.1"]
        # On a machine so busy that this took long, the slow question rightly made the connection suspect.
        held_s = asyncio.get_running_loop().time() - began
        assert len(peer.connections) == 1 or held_s > 0.4, f"{len(peer.connections)} connections after {held_s:.2f} s"
        if kind in ("tcp", "tls"):
            ids = [a.message.id for a in peer.asks[1:]]
            assert len(ids) == len(set(ids)), "ids in flight differ even when the clients' are the same"


async def test_messages_of_one_loop_turn_leave_in_one_write(authority: Authority) -> None:
    async with Peer(good, "tcp", authority) as peer, asking(peer) as of:
        await ask(of, "warm.test")
        await asyncio.gather(*(ask(of, f"q{i}.test") for i in range(10)))
        assert peer.connections[0].messages_per_read == [1, 10]


@pytest.mark.parametrize(("kind", "block"), [("udp", 1), ("tcp", 1), *((kind, 128) for kind in SEALED)])
async def test_only_encrypted_queries_are_padded(kind: str, block: int, authority: Authority) -> None:
    padding = dns.edns.GenericOption(12, bytes(100))
    async with Peer(good, kind, authority) as peer, asking(peer) as of:
        for name in ("a.test", "a-longer-name.test"):
            await ask(of, name, options=[padding])
        sizes = [len(a.wire) for a in peer.asks]
        assert all(size % block == 0 for size in sizes)
        assert block == 128 or all(size < 60 for size in sizes), "the client's own padding is not sent on"
        if kind in ("https", "quic", "h3"):
            assert [a.message.id for a in peer.asks] == [0, 0]


async def test_the_subnet_option_is_stripped_or_passed(authority: Authority) -> None:
    subnet = dns.edns.ECSOption("192.0.2.0", 24)
    async with Peer(good) as peer:
        for ecs, options in (("strip", ()), ("pass", (subnet,))):
            async with asking(peer, ecs=ecs) as of:
                await ask(of, f"{ecs}.test", options=[subnet])
            assert peer.asks[-1].message.options == options


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


# --- choosing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rcode", ["SERVFAIL", "REFUSED"])
@pytest.mark.parametrize("kind", KINDS)
async def test_servfail_and_refused_ask_the_next_upstream(kind: str, rcode: str, authority: Authority) -> None:
    async def script(a: Ask) -> None:
        a.answer(a.reply(rcode=rcode))

    async with Peer(script, kind, authority) as bad, Peer(good, kind, authority) as fine, asking(bad, fine) as of:
        assert addresses(await ask(of, "next.test")) == ["192.0.2.1"]


async def test_what_upstreams_say_of_dnssec_is_the_reason_for_the_client() -> None:
    async def script(a: Ask) -> None:
        reply = a.reply(rcode="SERVFAIL")
        reply.use_edns(0, options=[dns.edns.EDEOption(9, "no DNSKEY")])
        a.answer(reply)

    async with Peer(script) as peer, asking(peer) as of:
        with pytest.raises(UpstreamsFailed, match="EDE 9 no DNSKEY") as failed:
            await ask(of, "bogus.test")
        assert failed.value.ede == 9


async def test_nxdomain_is_an_answer_and_asks_nobody_else() -> None:
    async def script(a: Ask) -> None:
        a.answer(a.reply(rcode="NXDOMAIN", soa="test. 60 60"))

    async with Peer(script) as first, Peer(good) as second, asking(first, second) as of:
        assert dns.message.from_wire((await ask(of, "none.test")).wire).rcode() == 3
        assert not second.asks


async def test_when_all_fail_each_is_named_with_its_cause(authority: Authority) -> None:
    async def script(a: Ask) -> None:
        a.answer(a.reply(rcode="SERVFAIL"))

    stranger = DnsUpstream("tls", "localhost", 0, "", (HOST,))
    async with Peer(script) as bad, Peer(good, "tls", authority) as unknown:
        stranger = replace(unknown.upstream, ca_file="")
        closed = replace(bad.upstream, port=1)
        async with asking(bad, stranger, closed) as of:
            with pytest.raises(UpstreamsFailed) as failed:
                await ask(of, "all.test")
    causes = dict(failed.value.causes)
    assert causes[bad.upstream.url] == "SERVFAIL"
    assert "bad certificate" in causes[stranger.url]
    assert "refused" in causes[closed.url]


async def test_a_wrong_name_in_the_certificate_is_refused(authority: Authority) -> None:
    async with Peer(good, "tls", authority) as peer:
        async with asking(replace(peer.upstream, server_name="other.test")) as of:
            with pytest.raises(UpstreamsFailed, match="bad certificate"):
                await ask(of, "name.test")
        assert not peer.asks


async def test_a_missing_ca_file_is_this_upstreams_failure_alone(authority: Authority) -> None:
    async with Peer(good, "tls", authority) as peer, Peer(good) as other:
        broken = replace(peer.upstream, ca_file="/nonexistent.pem")
        async with asking(broken, other) as of:
            assert (await ask(of, "ca.test")).upstream == other.upstream.url


@timed
async def test_a_silent_first_upstream_is_hedged_and_later_asked_last() -> None:
    async with Peer(good) as silent, Peer(good) as second:
        silent.dark = True
        async with asking(silent, second) as of:
            for i in range(6):
                assert (await ask(of, f"hedge{i}.test")).upstream == second.upstream.url
            assert of.snapshot()[0].state == "down"
            begin = time.monotonic()
            await ask(of, "quick.test")
            assert time.monotonic() - begin < 0.1


async def test_a_zone_asks_its_own_upstreams_only() -> None:
    async with Peer(good) as public, Peer(good) as internal:
        zone = Zone("corp.test", (internal.upstream,))
        async with asking(public, zones=(zone,)) as of:
            reply = await of.ask(query("a.corp.test"), zone=zone, deadline=now() + 20)
            assert reply.upstream == internal.upstream.url and not public.asks


async def test_nobody_to_ask_is_said_at_once() -> None:
    async with asking() as of:
        with pytest.raises(UpstreamsFailed, match="no upstream"):
            await ask(of, "nobody.test")


@timed
async def test_silence_ends_at_the_deadline_with_the_time_waited() -> None:
    async with Peer(good) as peer:
        peer.dark = True
        async with asking(peer) as of:
            begin = time.monotonic()
            with pytest.raises(UpstreamsFailed, match=r"no answer in 0\.\d\d s"):
                await ask(of, "silence.test", within_s=0.4)
            assert 0.35 < time.monotonic() - begin < 0.6


# --- bootstrap, reload, network --------------------------------------------------------------------------------------


async def test_an_upstream_host_without_addresses_is_found_by_bootstrap_once(authority: Authority) -> None:
    async def book(a: Ask) -> None:
        a.answer(a.reply("300 A 127.0.0.1") if a.rdtype == "A" else a.reply())

    async with Peer(book) as bootstrap, Peer(good, "tls", authority) as peer:
        upstream = replace(peer.upstream, addresses=())
        config = Resolver(upstreams=(upstream,), bootstrap=(f"{HOST}:{bootstrap.port}",))
        of = UpstreamSet(config)
        for i in range(3):
            assert addresses(await ask(of, f"boot{i}.test")) == ["192.0.2.1"]
        assert {(a.name, a.rdtype) for a in bootstrap.asks} == {("localhost.", "A"), ("localhost.", "AAAA")}
        assert len(bootstrap.asks) == 2
        await of.close()


async def test_a_host_nobody_can_find_is_a_named_failure() -> None:
    upstream = DnsUpstream("udp", "dns.invalid", 53)
    async with asking(upstream) as of:
        with pytest.raises(UpstreamsFailed, match="bootstrap is empty"):
            await ask(of, "lost.test")


async def test_a_network_change_restarts_a_dial_that_leads_nowhere(authority: Authority) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.set()  # and never a word of TLS
        await reader.read()
        writer.close()

    seen = asyncio.Event()
    mute = await asyncio.start_server(greet, HOST, 0)
    port = mute.sockets[0].getsockname()[1]
    async with asking(DnsUpstream("tls", "localhost", port, "", (HOST,), ca_file=authority.ca_file)) as of:
        asked = asyncio.ensure_future(ask(of, "dial.test"))
        await seen.wait()
        mute.close()
        async with Peer(good, "tls", authority, port=port):
            of.network_changed()
            assert addresses(await asked) == ["192.0.2.1"]


async def test_a_truncated_answer_on_a_stream_asks_the_next_upstream(authority: Authority) -> None:
    async def script(a: Ask) -> None:
        reply = a.reply()
        reply.flags |= dns.flags.TC
        a.answer(reply)

    async with Peer(script, "tls", authority) as bad, Peer(good) as fine, asking(bad, fine) as of:
        assert (await ask(of, "cut.test")).upstream == fine.upstream.url


async def test_reconfigure_keeps_the_connections_of_unchanged_upstreams(authority: Authority) -> None:
    async with Peer(good, "tls", authority) as one, Peer(good, "tls", authority) as two, asking(one) as of:
        await ask(of, "before.test")
        of.reconfigure(Resolver(upstreams=(two.upstream, one.upstream), strategy="failover", bootstrap=()))
        assert (await ask(of, "after.test")).upstream == two.upstream.url
        await two.stop()
        assert (await ask(of, "again.test")).upstream == one.upstream.url
        assert len(one.connections) == 1
        assert [view.url for view in of.snapshot()] == [one.upstream.url, two.upstream.url]


async def test_a_question_in_flight_survives_the_removal_of_its_upstream(authority: Authority) -> None:
    release = asyncio.Event()

    async def script(a: Ask) -> None:
        await release.wait()
        a.answer(a.reply(GOOD))

    async with Peer(script, "tls", authority) as old, Peer(good) as new, asking(old) as of:
        asked = asyncio.ensure_future(ask(of, "flight.test"))
        await eventually(lambda: bool(old.asks))
        of.reconfigure(Resolver(upstreams=(new.upstream,), bootstrap=()))
        release.set()
        assert addresses(await asked) == ["192.0.2.1"]


@pytest.mark.parametrize("kind", KINDS)
@timed
async def test_after_a_network_change_what_is_in_flight_moves(kind: str, authority: Authority) -> None:
    async with Peer(good, kind, authority) as peer, asking(peer) as of:
        await ask(of, "warm.test")
        peer.dark = True
        asked = asyncio.ensure_future(ask(of, "moved.test"))
        await eventually(lambda: bool(peer.seen("moved.test")))
        peer.dark = False
        begin = time.monotonic()
        of.network_changed()
        assert addresses(await asked) == ["192.0.2.1"]
        assert time.monotonic() - begin < 0.2


async def test_a_cancelled_question_leaves_the_others_alone(authority: Authority) -> None:
    release = asyncio.Event()

    async def script(a: Ask) -> None:
        await release.wait()
        a.answer(a.reply(GOOD))

    async with Peer(script, "tls", authority) as peer, asking(peer) as of:
        leaver, stayer = (asyncio.ensure_future(ask(of, f"{n}.test")) for n in ("leaver", "stayer"))
        await eventually(lambda: len(peer.asks) == 2)
        leaver.cancel()
        release.set()
        assert addresses(await stayer) == ["192.0.2.1"]
