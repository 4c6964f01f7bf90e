"""What strangers and broken clients may send to an h3 listener: nothing of it stops the listener or fills it."""

from __future__ import annotations

import asyncio
import os
import random
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aioquic.buffer import encode_uint_var
from aioquic.h3.connection import FrameType, encode_frame
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection

from proxy.io import inbound_quic
from proxy.io.inbound_quic import QuicListener
from proxy.io.outbound_quic import QuicSessions, dial_quic
from proxy.io.rims import Limits
from resolver.io import quic_door
from tests.patience import no_hang, soon
from tests.peers.h3peers import Client, Gateway, listening, say
from tests.peers.ports import needs_ipv6


class Stranger(asyncio.DatagramProtocol):
    """A bare socket that notes what comes back."""

    def __init__(self) -> None:
        self.got: asyncio.Queue[bytes] = asyncio.Queue()

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.got.put_nowait(data)

    async def next(self) -> bytes:
        return await soon(self.got.get())


@asynccontextmanager
async def stranger(listener: QuicListener) -> AsyncIterator[tuple[Stranger, asyncio.DatagramTransport]]:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.create_datagram_endpoint(Stranger, remote_addr=listener.address)
    try:
        yield protocol, transport
    finally:
        transport.close()


def first_flight(token: bytes = b"") -> tuple[bytes, QuicConnection]:
    config = QuicConfiguration(is_client=True, alpn_protocols=["h3"], server_name="localhost", token=token)
    quic = QuicConnection(configuration=config)
    quic.connect(("127.0.0.1", 1), 0.0)
    return quic.datagrams_to_send(0.0)[0][0], quic


async def fence(listener: QuicListener, ca: str) -> None:
    """The listener still serves."""
    async with Client(listener.address[1], ca) as client:
        assert (await client.ask().whole()).status == 200


async def test_garbage_datagrams_raise_nothing_and_keep_nothing(
    ca: str, pem: str, caplog: pytest.LogCaptureFixture
) -> None:
    draw = random.Random(20)
    gateway = Gateway(lambda x: say(x.leg))
    async with listening(gateway, pem) as listener, stranger(listener) as (_, wire):
        initial, _ = first_flight()
        for round_ in range(40):
            for _ in range(100):
                wire.sendto(_garbage(draw, initial))
            await asyncio.sleep(0)
            if round_ == 5:
                await fence(listener, ca)
                tracemalloc.start()
                before, _ = tracemalloc.get_traced_memory()
        await fence(listener, ca)
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert listener.connections <= quic_door.HALF_OPEN
        assert after - before < 8 * 1024 * 1024
    assert [r for r in caplog.records if r.levelname in ("ERROR", "CRITICAL")] == []


def _garbage(draw: random.Random, initial: bytes) -> bytes:
    kind = draw.randrange(4)
    if kind == 0:
        return draw.randbytes(draw.randrange(0, 1500))
    if kind == 1:
        return bytes((draw.randrange(0x80, 0x100),)) + draw.randbytes(draw.randrange(0, 1400))
    flipped = bytearray(initial)
    for _ in range(draw.randrange(1, 8)):
        flipped[draw.randrange(len(flipped) if kind == 2 else 40)] = draw.randrange(256)
    return bytes(flipped[: draw.randrange(1, len(flipped) + 1)]) if draw.random() < 0.3 else bytes(flipped)


async def test_undecryptable_initial_leaves_no_connection_behind(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: say(x.leg))
    async with listening(gateway, pem) as listener, stranger(listener) as (_, wire):
        for _ in range(20):
            initial, _ = first_flight()
            wire.sendto(initial[:100] + bytes((initial[100] ^ 1,)) + initial[101:])
        await fence(listener, ca)
        assert listener.connections == 1  # the fence's own, in its closing period


async def test_unknown_version_is_answered_by_negotiation_and_negotiation_by_silence(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: say(x.leg))
    async with listening(gateway, pem) as listener, stranger(listener) as (peer, wire):
        initial, _ = first_flight()
        wire.sendto(initial[:1] + b"\xfa\xfa\xfa\xfa" + initial[5:])
        answer = await peer.next()
        assert answer[0] & 0x80 and answer[1:5] == bytes(4)
        assert b"\x00\x00\x00\x01" in answer
        wire.sendto(answer + bytes(1200))
        wire.sendto(initial[:1] + b"\xfa\xfa\xfa\xfa" + initial[5:1000])  # too short to deserve one
        await fence(listener, ca)
        assert peer.got.empty()


async def test_many_half_open_connections_bring_retry_and_it_lets_honest_clients_in(
    ca: str, pem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quic_door, "RETRY_ABOVE", 3)
    gateway = Gateway(lambda x: say(x.leg))
    async with listening(gateway, pem) as listener, stranger(listener) as (peer, wire):
        for _ in range(3):
            wire.sendto(first_flight()[0])
        for _ in range(3):
            await peer.next()
        assert listener.connections == 3
        wire.sendto(first_flight()[0])
        retry = await _next_retry(peer)
        assert retry[0] & 0xF0 == 0xF0
        assert listener.connections == 3
        await fence(listener, ca)


async def _next_retry(peer: Stranger) -> bytes:
    while True:
        datagram = await peer.next()
        if datagram[0] & 0xF0 == 0xF0:
            return datagram


async def test_false_token_is_refused_under_load(ca: str, pem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quic_door, "RETRY_ABOVE", 0)
    gateway = Gateway(lambda x: say(x.leg))
    async with listening(gateway, pem) as listener, stranger(listener) as (peer, wire):
        initial, quic = first_flight(token=os.urandom(60))
        wire.sendto(initial)
        quic.receive_datagram(await peer.next(), ("127.0.0.1", 1), 0.1)
        assert quic._close_event is not None and quic._close_event.error_code == 0xB
        assert listener.connections == 0


async def test_half_open_connections_are_bounded_and_time_out(
    ca: str, pem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quic_door, "HALF_OPEN", 5)
    gateway = Gateway(lambda x: say(x.leg), Limits(header_timeout_s=0.3))
    async with listening(gateway, pem) as listener, stranger(listener) as (_, wire):
        for _ in range(20):
            wire.sendto(first_flight()[0])
        refused = Client(listener.address[1], ca)
        await refused.connect()
        await refused.until(lambda c: c.closed)
        assert refused.closed is not None and refused.closed.error_code == 0x2
        refused.vanish()
        assert listener.connections == 5
        async with no_hang():
            while listener.connections:
                await asyncio.sleep(0.05)
        await fence(listener, ca)


async def test_half_open_connections_take_the_places_of_connections(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: say(x.leg))
    gateway.room = 3
    async with listening(gateway, pem) as listener, stranger(listener) as (_, wire):
        for _ in range(3):
            wire.sendto(first_flight()[0])
        await gateway.until(lambda g: len(g.connections) == 3)
        refused = Client(listener.address[1], ca)
        await refused.connect()
        await refused.until(lambda c: c.closed)
        assert refused.closed is not None and refused.closed.error_code == 0x2
        refused.vanish()
        for half_open in gateway.connections[:]:
            half_open.close_now()
        await gateway.until(lambda g: len(g.lost) == 3)
        async with Client(listener.address[1], ca) as client:
            assert (await client.ask().whole()).status == 200


async def test_draining_listener_refuses_newcomers_at_once(ca: str, pem: str) -> None:
    gateway = Gateway()
    async with listening(gateway, pem) as listener:
        listener.drain()
        client = Client(listener.address[1], ca)
        await client.connect()
        await client.until(lambda c: c.closed)
        assert client.closed is not None and client.closed.error_code == 0x2
        client.vanish()


async def test_stateless_resets_are_shorter_than_their_cause_and_rare(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: say(x.leg))
    async with listening(gateway, pem) as listener, stranger(listener) as (peer, wire):
        wire.sendto(b"\x40" + os.urandom(20))  # too short to be answered without a loop between two servers
        for _ in range(200):
            wire.sendto(b"\x40" + os.urandom(99))
        await fence(listener, ca)
        assert 0 < peer.got.qsize() <= 2 * quic_door.RESETS_PER_S
        assert all(21 <= len(peer.got.get_nowait()) < 100 for _ in range(peer.got.qsize()))


async def test_random_frames_on_any_stream_close_one_connection_at_most(
    ca: str, pem: str, caplog: pytest.LogCaptureFixture
) -> None:
    draw = random.Random(7)
    gateway = Gateway(lambda x: say(x.leg))
    async with listening(gateway, pem) as listener:
        for _ in range(60):
            async with Client(listener.address[1], ca) as client:
                for _ in range(6):
                    payload = b"".join(
                        encode_frame(draw.choice([0, 1, 4, 7, 13, 0x21, 0xF0700]), draw.randbytes(draw.randrange(40)))
                        for _ in range(3)
                    )
                    uni = draw.random() < 0.5
                    stream_id = client.quic.get_next_available_stream_id(is_unidirectional=uni)
                    prefix = encode_uint_var(draw.choice([0, 1, 2, 3, 0x54, 77])) if uni else b""
                    client.quic.send_stream_data(stream_id, prefix + payload, draw.random() < 0.5)
                    client.protocol.transmit()
                    await asyncio.sleep(0)
        await fence(listener, ca)
    assert [r for r in caplog.records if r.levelname in ("ERROR", "CRITICAL")] == []


async def test_section_of_many_one_byte_lines_is_refused_before_it_is_decoded(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: say(x.leg))
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        # Given 40000 references to a static entry: each is one byte here and a field of its own there
        bomb = b"\x00\x00" + b"\xd1" * 40_000
        refused = await client.send_bytes(encode_frame(FrameType.HEADERS, bomb), end=True).whole()
        assert refused.status == 431 and b"40000 lines" in refused.body
        assert gateway.exchanges == []
        # Its connection may carry others' requests: it goes on
        assert (await client.ask().whole()).status == 200


async def test_head_that_waits_for_the_encoder_stream_is_delivered_when_it_comes(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: say(x.leg))
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        await client.until(lambda c: c.http.received_settings)
        # Given an encoder whose instructions are held back
        held: list[bytes] = []
        stock = client.quic.send_stream_data
        encoder = client.http._local_encoder_stream_id

        def hold(stream_id: int, data: bytes, end_stream: bool = False) -> None:
            if stream_id == encoder:
                held.append(data)
            else:
                stock(stream_id, data, end_stream)

        client.quic.send_stream_data = hold  # type: ignore[method-assign]
        answers = [client.ask("GET", f"/{n}", (b"x-same", b"a" * 50), (b"x-other", b"b" * 50)) for n in range(6)]
        await answers[0].whole()
        await asyncio.sleep(0.05)
        waiting = [a for a in answers if not a.ended]
        assert waiting, "the encoder never referred to an entry that had not arrived"
        assert encoder is not None
        stock(encoder, b"".join(held))
        client.quic.send_stream_data = stock  # type: ignore[method-assign]
        client.protocol.transmit()
        for answer in answers:
            await answer.whole()
        assert sorted(x.head.target for x in gateway.exchanges if x.head) == [f"/{n}".encode() for n in range(6)]


@pytest.mark.parametrize(
    ("host", "asks"),
    [("0.0.0.0", ("127.0.0.1", "127.0.0.7")), pytest.param("::", ("::1",), marks=needs_ipv6)],
    ids=["IPv4", "IPv6"],
)
async def test_wildcard_answers_from_the_address_that_was_asked(
    ca: str, pem: str, host: str, asks: tuple[str, ...]
) -> None:
    from config.model import Listen, Tickets

    gateway = Gateway(lambda x: say(x.leg))
    listener = await inbound_quic.listen_quic(
        Listen("h3", host, 0), gateway, cert_file=pem, key_file=pem, tickets=Tickets()
    )
    try:
        for asked in asks:
            connection = await dial_quic(  # its socket is connected: it hears that address alone
                asked, listener.address[1], server_name="localhost", ca_file=ca, timeout_s=30, sessions=QuicSessions()
            )
            connection.abandon()
        assert len(gateway.connections) == len(asks)
    finally:
        listener.close()


@needs_ipv6
async def test_peers_without_ipv4_are_served(ca: str, pem: str) -> None:
    from config.model import Listen, Tickets

    gateway = Gateway(lambda x: say(x.leg))
    listener = await inbound_quic.listen_quic(
        Listen("h3", "::1", 0), gateway, cert_file=pem, key_file=pem, tickets=Tickets()
    )
    try:
        client = Client(listener.address[1], ca)
        client._address = ("::1", listener.address[1], 0, 0)  # type: ignore[assignment]
        client.local = "::1"
        await client.connect()
        assert (await client.ask().whole()).status == 200
        client.vanish()
    finally:
        listener.close()
