"""The connection of an HTTP/3 client: new ports, drains, limits, silence, resumption and new certificates."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from config.model import Tickets
from proxy.io.rims import Limits
from proxy.messages import Abort, ResponseHead
from tests.patience import eventually, timed
from tests.peers.h3peers import Client, Gateway, listening, make_authority, say

# -- the connection


async def test_stream_goes_on_when_the_clients_port_changes(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: x.leg.head(ResponseHead(200, [])) if x.leg else None)
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client.ask("POST", end=False)
        exchange = await gateway.request()
        assert exchange.leg is not None
        exchange.leg.data(b"before ")
        await answer.until(lambda a: a.body)
        await client.rebind()
        client.send(answer, b"from another port")
        assert await exchange.heard_word("data") == b"from another port"
        exchange.leg.data(b"after")
        exchange.leg.end()
        assert (await answer.whole()).body == b"before after"
        assert listener.connections == 1


async def test_stream_goes_on_under_another_connection_id_and_port(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: x.leg.head(ResponseHead(200, [])) if x.leg else None)
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client.ask("POST", end=False)
        exchange = await gateway.request()
        assert exchange.leg is not None
        for number in range(12):  # more ids than are granted at once: used ones are retired, new ones issued
            await client.until(lambda c: c.quic._peer_cid_available)
            await client.rebind()
            client.protocol.change_connection_id()
            client.send(answer, b"%x" % number)
            await exchange.until(lambda x, n=number: len(x.body) == n + 1)
        exchange.leg.end()
        await answer.whole()
        assert exchange.body == b"0123456789ab"
        assert len(listener._by_id) < 20


async def test_drain_says_goaway_lets_streams_end_and_closes(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: x.leg.head(ResponseHead(200, [])) if x.leg else None)
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client.ask()
        exchange = await gateway.request()
        listener.drain()
        await client.until(lambda c: c.raw_control.endswith(b"\x07\x01\x04"))
        late = client.ask()
        await late.until(lambda a: a.reset is not None)
        assert late.reset == 0x10B
        assert exchange.leg is not None
        exchange.leg.data(b"the tail")
        exchange.leg.end()
        assert (await answer.whole()).body == b"the tail"
        await client.until(lambda c: c.closed)
        assert client.closed is not None and client.closed.error_code == 0x100
        assert len(gateway.exchanges) == 1


async def test_close_aborts_every_exchange_and_none_ends_cleanly(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: x.leg.head(ResponseHead(200, [])) if x.leg else None)
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client.ask()
        exchange = await gateway.request()
        await answer.until(lambda a: a.sections)
        listener.close()
        assert exchange.words[-1] == "abort"
        await client.until(lambda c: c.closed)
        assert not answer.ended
        assert client.closed is not None and client.closed.error_code != 0x100


async def test_connection_beyond_the_limit_is_refused(ca: str, pem: str) -> None:
    gateway = Gateway()
    gateway.room = 1
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca):
        second = Client(listener.address[1], ca)
        await second.connect()
        await second.until(lambda c: c.closed)
        assert second.closed is not None and second.closed.error_code == 0x2
        second.vanish()
    assert len(gateway.connections) == 1


async def test_idle_connection_ends_after_its_timeout(ca: str, pem: str) -> None:
    gateway = Gateway(limits=Limits(idle_timeout_s=0.4))
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        client.vanish()
        await gateway.until(lambda g: g.lost)
        await eventually(lambda: listener.connections == 0)


async def test_vanished_client_with_work_in_progress_is_noticed(
    ca: str, pem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.io.quic_server.PING_AFTER_S", 0.2)
    monkeypatch.setattr("proxy.io.quic_server.LOST_AFTER_S", 0.5)
    gateway = Gateway()
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        client.ask()
        exchange = await gateway.request()
        client.vanish()
        abort: Abort = await exchange.heard_word("abort")
        assert "nothing heard" in abort.detail


@timed
async def test_quiet_client_that_answers_pings_is_not_lost(ca: str, pem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.io.quic_server.PING_AFTER_S", 0.1)
    monkeypatch.setattr("proxy.io.quic_server.LOST_AFTER_S", 0.3)
    gateway = Gateway()
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as client:
        answer = client.ask()
        exchange = await gateway.request()
        await asyncio.sleep(1.0)  # the time in which silence would have been taken for death, three times over
        say(exchange.leg, 200, b"slow model")
        assert (await answer.whole()).body == b"slow model"


# -- resumption


async def resumed(port: int, ca: str, first: Client, *, early: bool = False) -> Client:
    """A client that offers the newest ticket of another; `early`: nothing is sent yet."""
    client = Client(port, ca)
    client.config.session_ticket = first.tickets[-1]
    await client.connect(transmit=not early)
    return client


async def test_second_connection_resumes_and_says_so(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: say(x.leg))
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as first:
        await first.until(lambda c: c.tickets)
        second = await resumed(listener.address[1], ca, first)
        await second.until(lambda c: c.handshake)
        await second.ask().whole()
        assert second.handshake is not None and second.handshake.session_resumed
        assert gateway.exchanges[0].origin is not None and gateway.exchanges[0].origin.resumed
        assert (listener.full_handshakes, listener.resumed_handshakes) == (1, 1)
        second.vanish()


async def test_early_request_is_marked_and_the_same_flight_is_not_executed_twice(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: say(x.leg))
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as first:
        await first.until(lambda c: c.tickets)
        second = await resumed(listener.address[1], ca, first, early=True)
        flight: list[bytes] = []
        transport = second._transports[-1]
        second.protocol._transport = _Tap(transport, flight)  # type: ignore[assignment]
        answer = second.ask("GET", "/early")
        await answer.whole()
        assert second.handshake is not None and second.handshake.early_data_accepted
        assert gateway.exchanges[0].origin is not None and gateway.exchanges[0].origin.early_data
        late = await second.ask("GET", "/late").whole()
        assert late.status == 200
        assert gateway.exchanges[1].origin is not None and not gateway.exchanges[1].origin.early_data
        # When the captured flight comes once more, from elsewhere
        loop = asyncio.get_running_loop()
        thief, _ = await loop.create_datagram_endpoint(
            asyncio.DatagramProtocol, remote_addr=("127.0.0.1", listener.address[1])
        )
        for datagram in flight[:4]:
            thief.sendto(datagram)
        await first.ask("GET", "/fence").whole()
        assert [x.head.target for x in gateway.exchanges if x.head] == [b"/early", b"/late", b"/fence"]
        thief.close()
        second.vanish()


async def test_where_early_data_is_off_a_ticket_resumes_and_no_request_comes_before_the_handshake(
    ca: str, pem: str
) -> None:
    gateway = Gateway(lambda x: say(x.leg))
    off = Tickets(early_data="off")
    async with listening(gateway, pem, off) as listener, Client(listener.address[1], ca) as first:
        await first.until(lambda c: c.tickets)
        assert first.tickets[-1].max_early_data_size is None
        second = await resumed(listener.address[1], ca, first)
        await second.until(lambda c: c.handshake)
        assert (await second.ask().whole()).status == 200
        assert second.handshake is not None and second.handshake.session_resumed
        assert not second.handshake.early_data_accepted
        second.vanish()


async def test_a_request_in_early_data_that_an_older_ticket_allowed_is_served_after_the_handshake(
    ca: str, pem: str
) -> None:
    gateway = Gateway(lambda x: say(x.leg))
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as first:
        await first.until(lambda c: c.tickets)
        listener.retune(Tickets(early_data="off"))
        second = await resumed(listener.address[1], ca, first, early=True)
        assert (await second.ask("GET", "/early").whole()).status == 200
        assert second.handshake is not None and second.handshake.session_resumed
        assert not second.handshake.early_data_accepted
        assert gateway.exchanges[0].origin is not None and not gateway.exchanges[0].origin.early_data
        second.vanish()


class _Tap:
    """A transport that notes what is sent."""

    def __init__(self, transport: asyncio.DatagramTransport, seen: list[bytes]) -> None:
        self._transport, self._seen = transport, seen

    def sendto(self, data: bytes, addr: object = None) -> None:
        self._seen.append(data)
        self._transport.sendto(data, addr)  # type: ignore[arg-type]

    def close(self) -> None:
        self._transport.close()


async def test_expired_ticket_means_a_full_handshake(ca: str, pem: str) -> None:
    gateway = Gateway(lambda x: say(x.leg))
    tickets = Tickets(lifetime_s=1)
    async with listening(gateway, pem, tickets) as listener, Client(listener.address[1], ca) as first:
        await first.until(lambda c: c.tickets)
        ticket = first.tickets[-1]
        assert (ticket.not_valid_after - ticket.not_valid_before).total_seconds() == 1
        ticket.not_valid_after = ticket.not_valid_after.replace(year=ticket.not_valid_after.year + 1)
        await asyncio.sleep(1.1)  # the lifetime: there is no event for a time that passes
        second = await resumed(listener.address[1], ca, first)
        await second.ask().whole()
        assert second.handshake is not None and not second.handshake.session_resumed
        second.vanish()


async def test_new_certificate_is_used_for_new_connections_and_old_ones_live(ca: str, pem: str, tmp_path: Path) -> None:
    other_ca, other_pem = make_authority(tmp_path)
    gateway = Gateway(lambda x: say(x.leg))
    async with listening(gateway, pem) as listener, Client(listener.address[1], ca) as first:
        listener.reload_certificate(other_pem, other_pem)
        assert (await first.ask().whole()).status == 200
        async with Client(listener.address[1], other_ca) as second:
            assert (await second.ask().whole()).status == 200
        with pytest.raises(OSError, match="absent"):
            listener.reload_certificate(str(tmp_path / "absent.pem"))
        async with Client(listener.address[1], other_ca) as third:
            assert (await third.ask().whole()).status == 200
