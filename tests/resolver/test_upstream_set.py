"""The set of upstreams over every transport: the plain case, who is asked, bootstrap, reload and new networks."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import dns.edns
import dns.flags
import dns.message
import pytest

from config.model import DnsUpstream, Resolver, Zone
from resolver.errors import UpstreamsFailed
from resolver.io.clock import now
from resolver.io.upstream_set import UpstreamSet
from tests.patience import eventually, no_hang, timed
from tests.peers.authority import Authority
from tests.peers.dns import HOST, Ask, Peer
from tests.resolver.asking import GOOD, KINDS, SEALED, STREAMS, addresses, ask, asking, good, query

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
