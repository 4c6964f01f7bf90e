"""DNS over QUIC with a second implementation at the other end: our listener under its client, our upstream at its server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import dns.message
import dns.rrset
import pytest

from config.model import DnsCache, DnsUpstream, Listen, Resolver, Tickets
from resolver.io.doq_listener import DoqListener, listen_doq
from resolver.io.service import ResolverService
from resolver.io.upstream_set import UpstreamSet
from tests.peers.authority import Authority
from tests.peers.qh3doq import HOST, QhDoqClient, qh3_doq_server
from tests.resolver.scripted import ScriptedUpstreams, answer

PROTOCOL_ERROR, REQUEST_CANCELLED = 2, 3


class Served:
    def __init__(self, listener: DoqListener, upstreams: ScriptedUpstreams, ca: str) -> None:
        self.listener, self.upstreams, self._ca = listener, upstreams, ca

    def client(self, **how: Any) -> QhDoqClient:
        return QhDoqClient(self.listener.address[1], self._ca, **how)


@pytest.fixture
async def served(authority: Authority, tmp_path: Path) -> AsyncIterator[Served]:
    upstreams = ScriptedUpstreams()
    config = Resolver(hosts_files=(), cache=DnsCache(persist=False, prefetch=False))
    service = ResolverService(config, state_dir=tmp_path, upstreams=upstreams)
    await service.start()
    pem = authority.issue()
    listener = listen_doq(Listen("quic", HOST, 0), service, cert_file=pem, key_file=pem, tickets=Tickets())
    try:
        yield Served(listener, upstreams, authority.ca_file)
    finally:
        listener.close()
        await service.close()


def query(name: str, rdtype: str = "A") -> bytes:
    return dns.message.make_query(name, rdtype, use_edns=0, id=0).to_wire()


def framed(wire: bytes) -> bytes:
    return len(wire).to_bytes(2) + wire


def addresses(wire: bytes) -> list[str]:
    return [r.to_text() for rrset in dns.message.from_wire(wire).answer for r in rrset]


# --- our listener ----------------------------------------------------------------------------------------------------


async def test_questions_share_a_connection_and_each_gets_its_own_answer(served: Served) -> None:
    names = [f"n{i}.test" for i in range(100)]
    served.upstreams.script = lambda asked: answer(
        asked, f"60 A 192.0.2.{str(asked.question[0].name)[1:].split('.')[0]}"
    )
    async with served.client() as client:
        replies = await asyncio.gather(*(client.ask(query(name)) for name in names))
    assert [addresses(reply) for reply in replies] == [[f"192.0.2.{i}"] for i in range(100)]
    assert (served.listener.full_handshakes, served.listener.resumed_handshakes) == (1, 0)


async def test_a_large_answer_comes_whole(served: Served) -> None:
    served.upstreams.script = lambda asked: answer(
        asked, *(f"60 A 198.51.{i}.{j}" for i in range(16) for j in range(200))
    )
    async with served.client() as client:
        assert len(addresses(await client.ask(query("big.test")))) == 3200


async def test_a_session_is_resumed_and_its_first_question_answered_in_0_rtt(served: Served) -> None:
    async with served.client() as client:
        await client.ask(query("first.test"))
        await client.until(lambda: client.tickets)
    async with served.client(ticket=client.tickets[0], wait=False) as again:
        stream_id = again.open(framed(query("second.test")))
        assert addresses(await again.answer(stream_id)) == ["192.0.2.1"]
        await again.until(lambda: again.handshake)
        assert again.handshake is not None
        assert again.handshake.session_resumed and again.handshake.early_data_accepted
    assert (served.listener.full_handshakes, served.listener.resumed_handshakes) == (1, 1)


async def test_the_second_use_of_a_ticket_is_a_full_handshake_that_answers_all_the_same(served: Served) -> None:
    async with served.client() as client:
        await client.until(lambda: client.tickets)
    for _ in range(2):
        async with served.client(ticket=client.tickets[0], wait=False) as again:
            assert addresses(await again.ask(query("again.test"))) == ["192.0.2.1"]
    assert (served.listener.full_handshakes, served.listener.resumed_handshakes) == (2, 1)


async def test_a_ticket_says_how_long_it_is_good_for(served: Served) -> None:
    served.listener.retune(Tickets(lifetime_s=600))
    async with served.client() as client:
        await client.until(lambda: client.tickets)
    ticket = client.tickets[0]
    assert (ticket.not_valid_after - ticket.not_valid_before).total_seconds() == 600


async def test_where_early_data_is_off_no_ticket_offers_it_and_sessions_are_resumed_all_the_same(
    served: Served,
) -> None:
    served.listener.retune(Tickets(early_data="off"))
    async with served.client() as client:
        await client.until(lambda: client.tickets)
    assert client.tickets[0].max_early_data_size is None
    async with served.client(ticket=client.tickets[0], wait=False) as again:
        assert addresses(await again.ask(query("resumed.test"))) == ["192.0.2.1"]
        assert again.handshake is not None
        assert again.handshake.session_resumed and not again.handshake.early_data_accepted
    assert (served.listener.full_handshakes, served.listener.resumed_handshakes) == (1, 1)


async def test_early_data_that_an_older_ticket_allowed_is_answered_after_the_handshake(served: Served) -> None:
    async with served.client() as client:
        await client.until(lambda: client.tickets)
    assert client.tickets[0].max_early_data_size
    served.listener.retune(Tickets(early_data="off"))
    async with served.client(ticket=client.tickets[0], wait=False) as again:
        assert addresses(await again.ask(query("late.test"))) == ["192.0.2.1"]
        assert again.handshake is not None
        assert again.handshake.session_resumed and not again.handshake.early_data_accepted


async def test_a_client_whose_port_changed_goes_on(served: Served) -> None:
    async with served.client() as client:
        await client.ask(query("here.test"))
        await client.rebind()
        assert addresses(await client.ask(query("there.test"))) == ["192.0.2.1"]
    assert served.listener.full_handshakes == 1


async def test_an_answer_that_is_no_longer_wanted_holds_up_no_other(served: Served) -> None:
    served.upstreams.held = asyncio.Event()
    async with served.client() as client:
        unwanted = client.open(framed(query("unwanted.test")))
        while not served.upstreams.asked:
            await asyncio.sleep(0.005)
        client.stop(unwanted, REQUEST_CANCELLED)
        served.upstreams.held.set()
        assert addresses(await client.ask(query("wanted.test"))) == ["192.0.2.1"]
        assert unwanted not in client.answers and client.closed is None


async def test_a_query_with_an_id_ends_the_connection(served: Served) -> None:
    async with served.client() as client:
        client.open(framed(b"\1\2" + query("id.test")[2:]))
        await client.until(lambda: client.closed)
        assert client.closed is not None and client.closed.error_code == PROTOCOL_ERROR


# --- our upstream ----------------------------------------------------------------------------------------------------


def upstream_of(port: int, authority: Authority) -> UpstreamSet:
    asked = DnsUpstream("quic", "localhost", port, addresses=(HOST,), ca_file=authority.ca_file)
    return UpstreamSet(Resolver(upstreams=(asked,), bootstrap=()))


async def ask(upstreams: UpstreamSet, name: str) -> list[str]:
    reply = await upstreams.ask(query(name), zone=None, deadline=upstreams.clock() + 5)
    return addresses(reply.wire)


def many(wire: bytes) -> bytes:
    asked = dns.message.from_wire(wire)
    texts = [f"60 A 198.51.{i}.{j}" for i in range(10) for j in range(200)]
    return answer(asked, *(texts if str(asked.question[0].name).startswith("big") else texts[:1]))


@pytest.mark.parametrize("retry", [False, True], ids=["at once", "after a Retry"])
async def test_another_server_answers_small_and_large(authority: Authority, retry: bool) -> None:
    async with qh3_doq_server(authority, many, retry=retry) as server:
        upstreams = upstream_of(server.port, authority)
        found = await asyncio.gather(*(ask(upstreams, f"n{i}.test") for i in range(50)), ask(upstreams, "big.test"))
        assert [len(one) for one in found] == [1] * 50 + [2000]
        await upstreams.close()


async def test_a_connection_that_another_server_closed_is_made_anew_and_resumed(authority: Authority) -> None:
    async with qh3_doq_server(authority, many) as server:
        upstreams = upstream_of(server.port, authority)
        assert await ask(upstreams, "before.test") == ["198.51.0.0"]
        server.hang_up()
        assert await ask(upstreams, "after.test") == ["198.51.0.0"]
        assert server.handshakes[:2] == [False, True]
        await upstreams.close()
