"""Each way to serve a UDP socket gives the same answers to the same askers, whatever comes between."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import dns.message
import dns.rcode
import pytest

from config.model import Listen
from resolver.io import mmsg
from resolver.io.datagrams import ALONE, SINGLY, BatchedUdpListener, EveryAddressUdpListener, UdpListener, listener_for
from resolver.io.service import ResolverService
from tests.patience import no_hang
from tests.resolver.scripted import ScriptedUpstreams
from tests.resolver.service_lab import QUIET

KINDS = [UdpListener, EveryAddressUdpListener]
if mmsg.AVAILABLE:
    KINDS.append(BatchedUdpListener)


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[ResolverService]:
    made = ResolverService(QUIET, state_dir=tmp_path, upstreams=ScriptedUpstreams())
    yield made
    await made.close()


def bound(family: socket.AddressFamily, host: str) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    sock.bind((host, 0))
    return sock


async def replies_of(client: socket.socket, count: int) -> list[bytes]:
    loop = asyncio.get_running_loop()
    async with no_hang():
        return [await loop.sock_recv(client, 4096) for _ in range(count)]


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
@pytest.mark.parametrize("kind", KINDS)
async def test_hits_misses_and_garbage_of_many_clients_in_one_burst(
    service: ResolverService, kind: type[UdpListener], family: socket.AddressFamily, host: str
) -> None:
    sock = bound(family, host)
    listener = kind(Listen("udp", host, 0), sock, service)
    clients = [bound(family, host) for _ in range(3)]
    for burst in range(3):
        for number, client in enumerate(clients):
            client.connect(sock.getsockname())
            for ident in range(12):
                name = f"n{ident % 4}.c{number if ident % 2 else 'all'}.b{burst}.example"
                client.send(dns.message.make_query(name, "A", id=ident).to_wire())
                client.send(b"garbage")
                client.send(bytes([0, ident, 1]) + bytes(9))
        for client in clients:
            got = [dns.message.from_wire(wire) for wire in await replies_of(client, 24)]
            good = [reply for reply in got if reply.rcode() == dns.rcode.NOERROR]
            assert sorted(reply.id for reply in good) == list(range(12))
            assert all(reply.question[0].name.to_text().startswith(f"n{reply.id % 4}.") for reply in good)
            assert sum(reply.rcode() == dns.rcode.FORMERR for reply in got) == 12
    for client in clients:
        client.close()
    listener.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_that_is_gone_takes_no_answer_from_the_others(
    service: ResolverService, kind: type[UdpListener]
) -> None:
    await service.resolve("a.example", "A")
    sock = bound(socket.AF_INET, "127.0.0.1")
    listener = kind(Listen("udp", "127.0.0.1", 0), sock, service)
    gone, here = bound(socket.AF_INET, "127.0.0.1"), bound(socket.AF_INET, "127.0.0.1")
    for client in (gone, here):
        client.connect(sock.getsockname())
    for ident in range(10):
        for client in (gone, here):
            client.send(dns.message.make_query("a.example", "A", id=ident).to_wire())
    gone.close()
    assert {wire[1] for wire in await replies_of(here, 10)} == set(range(10))
    here.send(dns.message.make_query("a.example", "A", id=11).to_wire())
    assert [wire[1] for wire in await replies_of(here, 1)] == [11], "an ICMP error is not the end of the socket"
    here.close()
    listener.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_above_its_rate_is_refused(tmp_path: Path, kind: type[UdpListener]) -> None:
    service = ResolverService(
        replace(QUIET, rate_limit_per_s=5), state_dir=tmp_path, upstreams=ScriptedUpstreams(), clock=lambda: 1000.0
    )
    sock, client = bound(socket.AF_INET, "127.0.0.1"), bound(socket.AF_INET, "127.0.0.1")
    listener = kind(Listen("udp", "127.0.0.1", 0), sock, service)
    client.connect(sock.getsockname())
    for ident in range(8):
        client.send(dns.message.make_query("a.example", "A", id=ident).to_wire())
    codes = [dns.message.from_wire(wire).rcode() for wire in await replies_of(client, 8)]
    assert (codes.count(dns.rcode.NOERROR), codes.count(dns.rcode.REFUSED)) == (5, 3)
    client.close()
    listener.close()
    await service.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_that_comes_after_the_close_goes_nowhere(tmp_path: Path, kind: type[UdpListener]) -> None:
    upstreams = ScriptedUpstreams(held=asyncio.Event())
    service = ResolverService(QUIET, state_dir=tmp_path, upstreams=upstreams)
    sock, client = bound(socket.AF_INET, "127.0.0.1"), bound(socket.AF_INET, "127.0.0.1")
    listener = kind(Listen("udp", "127.0.0.1", 0), sock, service)
    client.connect(sock.getsockname())
    client.send(dns.message.make_query("a.example", "A").to_wire())
    async with no_hang():
        while not upstreams.asked:
            await asyncio.sleep(0.002)
    listener.close()
    assert upstreams.held is not None
    upstreams.held.set()
    await service.close()
    client.close()


def test_the_way_is_chosen_by_what_is_bound() -> None:
    assert listener_for(Listen("udp", "::", 53)) is EveryAddressUdpListener
    assert listener_for(Listen("udp", "127.0.0.1", 53)) is (BatchedUdpListener if mmsg.AVAILABLE else UdpListener)


@pytest.mark.skipif(not mmsg.AVAILABLE, reason="no recvmmsg here")
async def test_datagrams_that_come_alone_are_served_as_well_as_bursts_in_every_order(service: ResolverService) -> None:
    """Far more than the listener takes to change its way, and back."""
    sock, client = bound(socket.AF_INET, "127.0.0.1"), bound(socket.AF_INET, "127.0.0.1")
    listener = BatchedUdpListener(Listen("udp", "127.0.0.1", 0), sock, service)
    client.connect(sock.getsockname())
    ident = 0
    for burst in (*[1] * (ALONE + 3), 30, *[1] * (ALONE + SINGLY + 3), 30, 1, 1):
        begin = ident
        for _ in range(burst):
            ident += 1
            client.send(dns.message.make_query(f"n{ident % 40}.example", "A", id=ident).to_wire())
        got = {dns.message.from_wire(wire).id for wire in await replies_of(client, burst)}
        assert got == set(range(begin + 1, ident + 1))
    assert service.stats()["queries"] == ident == sum(service.replies["udp"])
    client.close()
    listener.close()
