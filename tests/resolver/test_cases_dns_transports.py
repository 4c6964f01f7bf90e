"""Cases D9 to D17: DoH's statuses and freshness, streams that are abused, DoQ, and sizes that betray names."""

from __future__ import annotations

import asyncio
import base64
import struct
import time
from typing import Any

import dns.edns
import dns.message
import dns.rcode
import pytest

from tests.patience import no_hang, promptly
from tests.peers.authority import Authority
from tests.peers.dns import Ask, Peer
from tests.peers.doq_client import doq_client, framed
from tests.resolver.stage import EVERY_CLIENT, GOOD, GOOD_IP, KINDS, ede, good, ips, query

DNS = b"application/dns-message"


def encoded(message: dns.message.Message | bytes) -> bytes:
    wire = message if isinstance(message, bytes) else message.to_wire()
    return b"/dns-query?dns=" + base64.urlsafe_b64encode(wire).rstrip(b"=")


# --- D9, D10 ---------------------------------------------------------------------------------------------------------


async def test_d9_every_answer_is_a_200_with_the_querys_id_whatever_its_rcode(chain_of: Any) -> None:
    async def script(a: Ask) -> None:
        if a.name.startswith("fails"):
            a.answer(a.reply(rcode="SERVFAIL"))
        else:
            a.answer(a.reply(rcode="NXDOMAIN", soa="test. 60 60") if a.name.startswith("none") else a.reply(GOOD))

    async with Peer(script) as peer, chain_of(peer) as chain:
        for name, rcode in (("here.test", 0), ("none.test", 3), ("fails.test", 2)):
            asked = query(name, id=0xBEEF)
            for reply in (
                await chain.http(b"GET", encoded(asked)),
                await chain.http(b"POST", b"/dns-query", DNS, asked.to_wire()),
            ):
                assert reply.status == 200 and (b"content-type", DNS) in reply.fields
                said = dns.message.from_wire(reply.body)
                assert (said.id, said.rcode()) == (0xBEEF, rcode)


@pytest.mark.parametrize(
    ("method", "target", "kind", "body", "status"),
    [
        (b"GET", b"/dns-query", None, b"", 400),
        (b"GET", b"/dns-query?dns=", None, b"", 400),
        (b"GET", b"/dns-query?dns=!!!!", None, b"", 400),
        (b"GET", encoded(bytes(11)), None, b"", 400),
        (b"POST", b"/dns-query", b"text/plain", bytes(12), 415),
        (b"POST", b"/dns-query", None, bytes(12), 415),
        (b"POST", b"/dns-query", DNS, bytes(65_536), 413),
        (b"PUT", b"/dns-query", DNS, bytes(12), 405),
        (b"GET", b"/other?dns=AAAA", None, b"", 404),
    ],
)
async def test_d9_what_is_no_doh_request_is_told_so_and_asks_nobody(
    method: bytes, target: bytes, kind: bytes | None, body: bytes, status: int, chain_of: Any
) -> None:
    async with Peer(good) as peer, chain_of(peer) as chain:
        reply = await chain.http(method, target, kind, body)
        assert reply.status == status and not peer.asks
        if status == 405:
            assert any(name == b"allow" and b"POST" in value for name, value in reply.fields)


async def test_d10_http_keeps_an_answer_as_long_as_dns_would(chain_of: Any) -> None:
    async def script(a: Ask) -> None:
        if a.name.startswith("none"):
            a.answer(a.reply(rcode="NXDOMAIN", soa="test. 3600 30"))
        elif a.name.startswith("fails"):
            a.answer(a.reply(rcode="SERVFAIL"))
        else:
            a.answer(a.reply(f"{a.written_name} 300 CNAME end.test.", "end.test. 60 A 198.51.100.1"))

    async with Peer(script) as peer, chain_of(peer) as chain:
        for name, control in (("chain.test", b"max-age=60"), ("none.test", b"max-age=30"), ("fails.test", b"no-store")):
            reply = await chain.http(b"GET", encoded(query(name)))
            assert (b"cache-control", control) in reply.fields


async def test_d10_time_in_an_http_cache_is_taken_off_the_ttl(chain_of: Any, authority: Authority) -> None:
    async def script(a: Ask) -> None:
        fields = [("content-type", "application/dns-message"), ("age", "40")]
        a.connection.respond(a, 200, fields, a.reply(GOOD).to_wire())  # type: ignore[union-attr, attr-defined]

    async with Peer(script, "https", authority) as peer, chain_of(peer) as chain:
        assert (await chain.ask(query("aged.test"))).answer[0].ttl == 20


# --- D11, D12: in test_cases_dns.py; here what they leave out ---------------------------------------------------------


async def test_d11_a_peer_that_allows_one_stream_at_a_time_gets_them_one_by_one(
    chain_of: Any, authority: Authority
) -> None:
    async with Peer(good, "https", authority, max_streams=1) as peer, chain_of(peer) as chain:
        replies = await asyncio.gather(*(chain.ask(query(f"q{i}.test")) for i in range(5)))
        assert all(ips(reply) == GOOD_IP for reply in replies)


async def test_d12_another_question_s_answer_and_a_cut_body_are_no_answers(chain_of: Any, authority: Authority) -> None:
    async def script(a: Ask) -> None:
        wire = a.reply(GOOD).to_wire()
        if a.name.startswith("cut"):
            wire = wire[:-5]
        else:
            wire = dns.message.make_response(query("other.test", id=a.message.id)).to_wire()
        a.answer(wire)

    async with Peer(script, "https", authority) as liar, Peer(good) as honest, chain_of(liar, honest) as chain:
        for name in ("cut.test", "swapped.test"):
            assert ips(await chain.ask(query(name))) == GOOD_IP
        assert len(honest.asks) == 2


# --- D13: one connection, many clients with the same id --------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tcp", "tls"])
async def test_d13_ids_in_flight_differ_when_clients_use_the_same(
    kind: str, chain_of: Any, authority: Authority
) -> None:
    both = asyncio.Event()

    async def script(a: Ask) -> None:
        if len(peer.asks) == 2:
            both.set()
        await both.wait()
        a.answer(a.reply(GOOD))

    async with Peer(script, kind, authority) as peer, chain_of(peer) as chain:
        replies = await asyncio.gather(*(chain.ask(query(f"{n}.test", id=77), "tcp") for n in ("one", "two")))
        assert [reply.id for reply in replies] == [77, 77]
        assert len({a.message.id for a in peer.asks}) == 2 and len(peer.connections) == 1


# --- D14 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["tcp", "tls"])
async def test_d14_an_empty_message_keeps_step_and_a_cut_one_ends_quietly(by: str, chain_of: Any) -> None:
    async with Peer(good) as peer, chain_of(peer) as chain:
        stream = await chain.stream(by)
        stream.writer.write(b"\0\0")
        stream.send(query("after.test", id=3).to_wire())
        assert dns.message.from_wire(await stream.receive()).id == 3
        stream.writer.write(b"\0\x0c" + bytes(5))
        await stream.close()
        assert ips(await chain.ask(query("next.test"), by)) == GOOD_IP


async def test_d14_length_and_message_leave_for_the_upstream_in_one_write(chain_of: Any) -> None:
    async with Peer(good, "tcp") as peer, chain_of(peer) as chain:
        await chain.ask(query("one.test"))
        assert peer.connections[0].messages_per_read == [1]


# --- D15 -------------------------------------------------------------------------------------------------------------


async def test_d15_a_client_that_asks_for_it_is_told_the_idle_limit(chain_of: Any) -> None:
    asked = query("alive.test", options=[dns.edns.GenericOption(11, b"")])
    async with Peer(good) as peer, chain_of(peer) as chain:
        for by in ("tcp", "tls"):
            (option,) = (o for o in (await chain.ask(asked, by)).options if int(o.otype) == 11)
            assert struct.unpack("!H", option.to_wire())[0] == 100  # 10 s in units of 100 ms (RFC 7828 3.1)
        assert not [o for o in (await chain.ask(asked, "udp")).options if int(o.otype) == 11]


async def test_d15_hundreds_of_idle_connections_stop_nobody(chain_of: Any) -> None:
    async with Peer(good) as peer, chain_of(peer) as chain:
        idle = [await chain.stream("tcp") for _ in range(400)]
        for by in EVERY_CLIENT:
            assert ips(await chain.ask(query("still.test"), by)) == GOOD_IP
        await asyncio.gather(*(stream.close() for stream in idle))


# --- D16: more in test_doq_server.py -----------------------------------------------------------------------------------


async def test_d16_a_broken_rule_ends_one_connection_with_protocol_error(chain_of: Any) -> None:
    async with Peer(good) as peer, chain_of(peer) as chain:
        for octets in (framed(query("id.test", id=5).to_wire()), b"\0\0"):
            async with doq_client(chain.ports["quic"], chain.ca_file) as client:
                client.open(octets)
                async with no_hang():
                    assert await client.closed == 2
        assert ips(await chain.ask(query("after.test"), "quic")) == GOOD_IP
        assert not peer.seen("id.test")


async def test_d16_an_upstream_over_quic_gets_id_0_and_its_fin(chain_of: Any, authority: Authority) -> None:
    async with Peer(good, "quic", authority) as peer, chain_of(peer) as chain:
        assert ips(await chain.ask(query("zero.test", id=999))) == GOOD_IP
        assert peer.asks[0].message.id == 0


# --- D17 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_d17_queries_are_padded_where_nobody_can_look_in_and_nowhere_else(
    kind: str, chain_of: Any, authority: Authority
) -> None:
    async with Peer(good, kind, authority) as peer, chain_of(peer) as chain:
        padded = query("short.test", options=[dns.edns.GenericOption(12, bytes(33))])
        await chain.ask(padded)
        await chain.ask(query("a-much-longer-name-than-the-other-one.test"))
        sizes = {len(a.wire) for a in peer.asks}
        paddings = [o for a in peer.asks for o in a.message.options if int(o.otype) == 12]
        if kind in ("tls", "https", "quic"):
            assert sizes == {128} and len(paddings) == 2
        else:
            assert not paddings


@pytest.mark.parametrize("by", EVERY_CLIENT)
async def test_d17_answers_to_padded_queries_are_padded_to_468_on_encrypted_ways(by: str, chain_of: Any) -> None:
    async with Peer(good) as peer, chain_of(peer) as chain:
        padded = query("padded.test", options=[dns.edns.GenericOption(12, bytes(33))])
        wires = [await chain.ask_wire(padded.to_wire(), by) for _ in range(2)]
        plain = await chain.ask_wire(query("padded.test").to_wire(), by)
        assert all((len(wire) % 468 == 0) is (by in ("tls", "https", "quic")) for wire in wires)
        assert len(plain) < 128


# --- every transport -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", EVERY_CLIENT)
async def test_d8_the_cause_of_a_failure_reaches_clients_of_every_transport_in_time(by: str, chain_of: Any) -> None:
    async def dark(a: Ask) -> None:
        pass

    async with Peer(dark) as peer, chain_of(peer, timeout_s=0.4) as chain:
        reply = await promptly(0.4 + 0.3, lambda: chain.ask(query(f"dark{time.monotonic_ns()}.test"), by))
        assert reply.rcode() == dns.rcode.SERVFAIL and str(peer.port) in " ".join(ede(reply).values())
