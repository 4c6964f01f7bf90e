"""How a connection to an HTTP/3 edge ends: by us, by the edge, by silence, by a path that moved or died."""

from __future__ import annotations

import asyncio
import time

import pytest
from aioquic.tls import Epoch

from proxy.io import outbound_quic
from proxy.messages import Abort, Cause, Party, Stage
from tests.patience import eventually, no_hang, timed
from tests.peers.h3peers import Exchanged, Gateway, Server, listening, say
from tests.peers.nat import Nat
from tests.proxy.h3.exchanges import OK, dialled, head, start

# -- the connection's end


async def test_close_lets_exchanges_end_first(ca: str, pem: str) -> None:
    async with Server(pem) as server, dialled(server.port, ca) as connection:
        exchange = start(connection)
        connection.close()
        assert connection.room == 0 and not connection.closed
        await server.until(lambda s: s.asked)
        server.asked[0].respond(OK, b"late")
        await exchange.heard_word("end")
        await eventually(lambda: connection.closed)
        assert exchange.body == b"late"
        await server.until(lambda s: s.closed)
        assert server.closed[0].error_code == 0x100


@timed
async def test_closed_by_the_edge_fails_exchanges_at_once_with_their_stage(ca: str, pem: str) -> None:
    async with Server(pem) as server, dialled(server.port, ca) as connection:
        changes: list[bool] = []
        connection.on_change = lambda: changes.append(connection.closed)
        exchange = start(connection, body=None)
        await server.until(lambda s: s.asked)
        began = time.monotonic()
        server.protocols[0].close(0x102, reason_phrase="going down")
        abort: Abort = await exchange.heard_word("abort")
        assert time.monotonic() - began < 0.1
        assert (abort.by, abort.stage, abort.cause, abort.code) == (Party.EDGE, Stage.HEAD, Cause.LOST, 0x102)
        assert "going down" in abort.detail
        assert changes[-1] is True


async def test_dead_path_is_found_while_there_is_work(ca: str, pem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbound_quic, "PING_AFTER_S", 0.2)
    monkeypatch.setattr(outbound_quic, "LOST_AFTER_S", 0.5)
    async with Server(pem) as server, dialled(server.port, ca) as connection:
        exchange = start(connection)
        await server.until(lambda s: s.asked)
        # Given an edge that hears nothing any more (a black hole, not a closed port)
        server.server.datagram_received = lambda *_: None
        abort: Abort = await exchange.heard_word("abort")
        assert abort.cause is Cause.LOST and "nothing heard" in abort.detail
        assert connection.closed


async def test_an_edge_that_lost_our_port_in_mid_answer_is_told_the_new_one(
    ca: str, pem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbound_quic, "PING_AFTER_S", 1000.0)
    monkeypatch.setattr(outbound_quic, "LOST_AFTER_S", 2000.0)
    async with Server(pem) as server, Nat(server.port) as nat, dialled(nat.port, ca) as connection:
        exchange = start(connection)
        await server.until(lambda s: s.asked)
        server.asked[0].respond(OK, b"one", end=False)
        await exchange.until(lambda x: x.body == b"one")
        sent = server.asked[0].quic._spaces[Epoch.ONE_RTT]
        async with no_hang():
            while sent.ack_eliciting_in_flight:  # we owe no ACK that would say it
                await asyncio.sleep(0.01)
        await nat.rebind()
        server.asked[0].send(b"two", end=True)
        await exchange.heard_word("end")
        assert exchange.body == b"onetwo"


@timed
async def test_slow_model_that_answers_pings_is_waited_for(ca: str, pem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbound_quic, "PING_AFTER_S", 0.1)
    monkeypatch.setattr(outbound_quic, "LOST_AFTER_S", 0.3)
    async with Server(pem) as server, dialled(server.port, ca) as connection:
        exchange = start(connection)
        await asyncio.sleep(1.0)  # three times what would be death
        server.asked[0].respond(OK, b"at last")
        await exchange.heard_word("end")


async def test_edge_that_went_away_is_noticed_by_its_closed_port(ca: str, pem: str) -> None:
    async with Server(pem) as server, dialled(server.port, ca) as connection:
        exchange = start(connection, body=None)
        await server.until(lambda s: s.asked)
        server.vanish()
        assert exchange.leg is not None
        exchange.leg.data(b"anyone?")
        exchange.leg.data(b"anyone?")
        abort: Abort = await exchange.heard_word("abort")
        assert "closed" in abort.detail


async def test_restarted_edge_says_by_a_stateless_reset_that_it_knows_nothing(ca: str, pem: str) -> None:
    gateway = Gateway()
    async with listening(gateway, pem) as listener, dialled(listener.address[1], ca) as connection:
        exchange = start(connection, body=None)
        await gateway.request()
        # When the listener forgets, as after a restart with the same certificate
        for known in list(listener._ids):
            known.link.dispose()
            listener.forget(known)
        assert exchange.leg is not None
        exchange.leg.data(b"x" * 100)
        abort: Abort = await exchange.heard_word("abort")
        assert "stateless reset" in abort.detail


async def test_both_rims_together_move_bodies_both_ways(ca: str, pem: str) -> None:
    def echo(x: Exchanged) -> None:
        assert x.leg is not None and x.head is not None
        say(x.leg, 200, bytes(300_000), [(b"content-length", b"300000")])

    async with listening(Gateway(echo), pem) as listener, dialled(listener.address[1], ca) as connection:
        exchanges = [start(connection, head(b"POST"), bytes(10_000)) for _ in range(5)]
        for exchange in exchanges:
            await exchange.heard_word("end")
            assert len(exchange.body) == 300_000
