"""DNS over QUIC as a server: RFC 9250's rules, held against a client that breaks them."""

from __future__ import annotations

import asyncio
import shutil
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import dns.asyncquery
import dns.edns
import dns.message
import dns.opcode
import dns.rcode
import pytest
from aioquic.tls import SessionTicket

from config.model import DnsCache, Listen, Resolver, Tickets
from resolver.io import doq_server
from resolver.io.doq_listener import DoqListener, listen_doq
from resolver.io.service import ResolverService
from tests.patience import no_hang
from tests.peers.authority import Authority
from tests.peers.doq_client import DoqClient, doq_client, framed
from tests.resolver.scripted import ScriptedUpstreams, answer

HOST = "127.0.0.1"
NO_ERROR, PROTOCOL_ERROR, EXCESSIVE_LOAD = 0, 2, 4


class Served:
    def __init__(self, listener: DoqListener, upstreams: ScriptedUpstreams, service: ResolverService, ca: str) -> None:
        self.listener, self.upstreams, self.service, self.ca = listener, upstreams, service, ca
        self.port = listener.address[1]


@pytest.fixture
async def served(authority: Authority, tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(authority, tmp_path) as found:
        yield found


@asynccontextmanager
async def serving(authority: Authority, tmp_path: Path, host: str = HOST) -> AsyncIterator[Served]:
    upstreams = ScriptedUpstreams()
    config = Resolver(hosts_files=(), cache=DnsCache(persist=False, prefetch=False))
    service = ResolverService(config, state_dir=tmp_path, upstreams=upstreams)
    await service.start()
    pem = authority.issue()
    listener = listen_doq(Listen("quic", host, 0), service, cert_file=pem, key_file=pem, tickets=Tickets())
    try:
        yield Served(listener, upstreams, service, authority.ca_file)
    finally:
        listener.close()
        await service.close()


def query(name: str, rdtype: str = "A", **kw: object) -> bytes:
    return dns.message.make_query(name, rdtype, **{"use_edns": 0, "id": 0, **kw}).to_wire()  # type: ignore[arg-type]


async def test_a_question_and_its_answer_end_one_stream_each(served: Served) -> None:
    async with doq_client(served.port, served.ca) as client:
        for _ in range(2):
            reply = dns.message.from_wire(await client.ask(query("one.test")))
            assert reply.id == 0 and reply.answer[0][0].to_text() == "192.0.2.1"
    assert served.upstreams.asked == [("one.test.", "A")]


async def test_a_hundred_questions_share_a_connection_and_a_slow_one_holds_nobody(served: Served) -> None:
    release = asyncio.Event()

    async def script(asked: dns.message.Message) -> bytes:
        if asked.question[0].name.to_text().startswith("slow"):
            await release.wait()
        return answer(asked, "60 A 192.0.2.1")

    served.upstreams.script = script
    async with doq_client(served.port, served.ca) as client:
        slow = client.open(framed(query("slow.test")))
        await asyncio.gather(*(client.ask(query(f"q{i}.test")) for i in range(99)))
        assert not client.answer(slow).done()
        release.set()
        async with no_hang():
            await client.answer(slow)


async def test_a_large_answer_comes_whole_over_several_packets(served: Served) -> None:
    served.upstreams.script = lambda asked: answer(
        asked, *(f"60 A 198.51.{i}.{j}" for i in range(16) for j in range(200))
    )
    async with doq_client(served.port, served.ca) as client:
        reply = dns.message.from_wire(await client.ask(query("big.test")))
        assert len(reply.answer[0]) == 3200


async def test_a_question_in_pieces_is_read_whole(served: Served) -> None:
    async with doq_client(served.port, served.ca) as client:
        octets = framed(query("pieces.test"))
        stream_id = client.open(octets[:1], end=False)
        for i in range(1, len(octets)):
            client.more(stream_id, octets[i : i + 1], end=i == len(octets) - 1)
        async with no_hang():
            assert dns.message.from_wire(await client.answer(stream_id)).answer


async def test_a_query_is_answered_before_its_fin_which_may_come_late(served: Served) -> None:
    async with doq_client(served.port, served.ca) as client:
        stream_id = client.open(framed(query("late.test")), end=False)
        async with no_hang():
            await client.answer(stream_id)
        client.more(stream_id, b"", end=True)
        assert await client.ask(query("after.test"))


async def test_a_fin_that_never_comes_ends_the_connection(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doq_server, "PATIENCE_S", 0.2)
    async with doq_client(served.port, served.ca) as client:
        client.open(framed(query("nofin.test")), end=False)
        assert await closed(client) == PROTOCOL_ERROR


KEEPALIVE = query("keepalive.test", options=[dns.edns.GenericOption(11, b"")])
RESPONSE = bytearray(query("qr.test"))
RESPONSE[2] |= 0x80


@pytest.mark.parametrize(
    "octets",
    [
        framed(query("id.test", id=7)),
        framed(query("one.test")) + framed(query("two.test")),
        b"\0\0",
        b"\0",
        b"",
        framed(query("cut.test"))[:-1],
        framed(b"\0\0short"),
        framed(KEEPALIVE),
        framed(bytes(RESPONSE)),
    ],
    ids=["id", "two", "empty", "half a length", "nothing", "cut", "no header", "keepalive", "a response"],
)
async def test_who_breaks_a_rule_loses_the_connection_and_nobody_else_does(served: Served, octets: bytes) -> None:
    async with doq_client(served.port, served.ca) as other, doq_client(served.port, served.ca) as client:
        client.open(octets)
        assert await closed(client) == PROTOCOL_ERROR
        assert await other.ask(query("other.test"))
    assert ("keepalive.test.", "A") not in served.upstreams.asked


async def test_a_unidirectional_stream_is_a_broken_rule(served: Served) -> None:
    async with doq_client(served.port, served.ca) as client:
        client.more(client._quic.get_next_available_stream_id(is_unidirectional=True), b"\0")
        assert await closed(client) == PROTOCOL_ERROR


async def test_unfinished_messages_are_bounded(served: Served) -> None:
    async with doq_client(served.port, served.ca) as client:
        for _ in range(6):
            client.open(b"\xff\xff" + bytes(60_000), end=False)
        assert await closed(client) == EXCESSIVE_LOAD


async def closed(client: DoqClient) -> int:
    async with no_hang():
        return await client.closed


async def test_a_cancelled_question_is_not_answered_and_the_next_one_is(served: Served) -> None:
    served.upstreams.held = asyncio.Event()
    async with doq_client(served.port, served.ca) as client:
        stream_id = client.open(framed(query("gone.test")))
        while not served.upstreams.asked:
            await asyncio.sleep(0.005)
        client.cancel(stream_id)
        while stream_id not in client.reset:
            await asyncio.sleep(0.005)
        served.upstreams.held.set()
        assert await client.ask(query("next.test"))
        assert not client.answer(stream_id).done()
        assert all(not guest._streams for guest in served.listener.guests())


# --- 0-RTT -----------------------------------------------------------------------------------------------------------


async def a_ticket(served: Served) -> SessionTicket:
    tickets: list[SessionTicket] = []
    async with doq_client(served.port, served.ca, on_ticket=tickets.append) as client:
        await client.ask(query("first.test"))
        while not tickets:
            await asyncio.sleep(0.005)
    return tickets[0]


async def test_a_query_in_early_data_is_answered_once_and_its_replay_is_a_full_handshake(served: Served) -> None:
    ticket = await a_ticket(served)
    ids: list[int] = []

    def early(client: DoqClient) -> None:
        ids.append(client.open(framed(query("early.test"))))

    async with doq_client(served.port, served.ca, ticket=ticket, early=early) as client:
        async with no_hang():
            assert dns.message.from_wire(await client.answer(ids[0])).answer
        assert client.resumed and client.early_accepted
    async with doq_client(served.port, served.ca, ticket=ticket) as client:
        assert not client.resumed
    assert (served.listener.full_handshakes, served.listener.resumed_handshakes) == (2, 1)


async def test_other_than_a_query_waits_for_the_end_of_the_handshake(served: Served) -> None:
    """A server must not act on other opcodes in 0-RTT (RFC 9250 4.5)."""
    ticket = await a_ticket(served)
    notify = dns.message.make_query("zone.test", "SOA", id=0)
    notify.set_opcode(dns.opcode.NOTIFY)
    ids: list[int] = []
    seen: list[bool] = []
    stock = served.service.answer_cached

    def watched(wire: bytes, limit: int, **kw: object) -> bytes | None:
        if wire[2] & 0x78:
            seen.append(served.listener.guests()[-1].quic.handshake_done)
        return stock(wire, limit, **kw)  # type: ignore[arg-type]

    served.service.answer_cached = watched  # type: ignore[assignment, method-assign]
    async with doq_client(
        served.port, served.ca, ticket=ticket, early=lambda c: ids.append(c.open(framed(notify.to_wire())))
    ) as client:
        async with no_hang():
            reply = dns.message.from_wire(await client.answer(ids[0]))
        assert client.early_accepted and reply.rcode() == dns.rcode.NOTIMP
    assert seen == [True]


# --- the door --------------------------------------------------------------------------------------------------------


async def test_drain_lets_answers_arrive_and_takes_nobody_new(served: Served) -> None:
    served.upstreams.held = asyncio.Event()
    async with doq_client(served.port, served.ca) as client:
        stream_id = client.open(framed(query("held.test")))
        while not served.upstreams.asked:
            await asyncio.sleep(0.005)
        served.listener.drain()
        with pytest.raises(ConnectionError):
            async with doq_client(served.port, served.ca):
                pass
        served.upstreams.held.set()
        async with no_hang():
            assert dns.message.from_wire(await client.answer(stream_id)).answer
        assert await closed(client) == NO_ERROR


async def test_a_listener_on_every_address_answers_from_the_one_that_was_asked(
    authority: Authority, tmp_path: Path
) -> None:
    async with serving(authority, tmp_path, "0.0.0.0") as found, doq_client(found.port, found.ca) as client:
        assert await client.ask(query("every.test"))


async def test_a_padded_query_gets_an_answer_padded_to_468(served: Served) -> None:
    async with doq_client(served.port, served.ca) as client:
        reply = await client.ask(query("padded.test", options=[dns.edns.GenericOption(12, bytes(40))]))
        assert len(reply) % 468 == 0


async def test_dnspythons_client_gets_answers_over_quic(served: Served) -> None:
    asked = dns.message.make_query("python.test", "A")
    reply = await dns.asyncquery.quic(
        asked, HOST, timeout=5, port=served.port, verify=served.ca, server_hostname="localhost"
    )
    assert reply.answer[0][0].to_text() == "192.0.2.1"


async def kdig(*words: str) -> str:
    process = await asyncio.create_subprocess_exec(
        "kdig", *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    async with no_hang():
        return (await process.communicate())[0].decode()


@pytest.mark.skipif(shutil.which("kdig") is None, reason="needs kdig (knot-dnsutils)")
async def test_kdig_gets_answers_over_quic(served: Served) -> None:
    words = ["@127.0.0.1", "-p", str(served.port), "+quic", f"+tls-ca={served.ca}", "+tls-host=localhost", "kdig.test"]
    if "protocol(TCP)" in await kdig("-d", "+time=1", "+retry=0", *words):
        pytest.skip("this kdig is built without QUIC: it takes +quic and asks over TCP")
    assert (await kdig("+short", *words)).strip() == "192.0.2.1"


async def test_garbage_at_the_door_leaves_nothing_behind(served: Served) -> None:
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(asyncio.DatagramProtocol, remote_addr=(HOST, served.port))
    for size in (0, 1, 20, 60, 1200, 1400):
        transport.sendto(struct.pack("!B", 0xC0) + bytes(size))
        transport.sendto(bytes(size))
    async with doq_client(served.port, served.ca) as client:
        assert await client.ask(query("after.test"))
        assert served.listener.connections == 1
    transport.close()
