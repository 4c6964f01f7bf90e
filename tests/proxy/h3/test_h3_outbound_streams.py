"""Streams to an HTTP/3 edge that are no plain exchange: WebSockets, cancels, and sides that do not read."""

from __future__ import annotations

import asyncio
import time

import pytest

from proxy.io.outbound_quic import H3EdgeConnection
from proxy.io.quic_flow import STREAM_WINDOW
from proxy.io.rims import HIGH_WATER
from proxy.messages import Abort, Cause, Party, RequestHead, Stage
from tests.patience import timed
from tests.peers import h3peers
from tests.peers.h3peers import Asked, Exchanged, Server
from tests.proxy.h3.exchanges import OK, Older, dialled, head, start


def websocket() -> RequestHead:
    request = head(b"GET", b"/ws", (b"sec-websocket-version", b"13"), (b"sec-websocket-key", b"a2V5"))
    request.protocol, request.length = b"websocket", 0
    return request


async def settled(connection: H3EdgeConnection) -> None:
    async with asyncio.timeout(5):
        while not connection.is_settled:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("kind", ["connect", "another protocol"])
async def test_any_other_tunnel_is_refused_before_a_byte_leaves(ca: str, pem: str, kind: str) -> None:
    async with Server(pem) as server, dialled(server.port, ca) as connection:
        await settled(connection)
        request = head(b"CONNECT" if kind == "connect" else b"GET")
        request.protocol = b"" if kind == "connect" else b"made-up"
        exchange = start(connection, request, None)
        abort: Abort = await exchange.heard_word("abort")
        assert (abort.unprocessed, abort.cause) == (True, Cause.REFUSED)
        assert connection.active == 0 and server.asked == []


async def test_a_websocket_is_an_extended_connect_with_two_directions(ca: str, pem: str) -> None:
    async with Server(pem) as server, dialled(server.port, ca) as connection:
        await settled(connection)
        exchange = start(connection, websocket(), None)
        await server.until(lambda s: s.asked)
        asked = server.asked[0]
        assert asked.fields == [
            (b":method", b"CONNECT"), (b":protocol", b"websocket"), (b":scheme", b"https"),
            (b":authority", b"localhost"), (b":path", b"/ws"), (b"sec-websocket-version", b"13"),
        ]  # fmt: skip
        assert not asked.ended
        asked.respond([(b":status", b"200"), (b"sec-websocket-protocol", b"realtime")], end=False)
        accepted = await exchange.heard_word("head")
        assert (accepted.status, accepted.fields) == (101, [(b"sec-websocket-protocol", b"realtime")])
        exchange.leg.data(b"up")
        await server.until(lambda s: s.asked[0].body == b"up")
        asked.send(b"down", end=True)
        await exchange.heard_word("end")
        assert exchange.body == b"down"
        exchange.leg.data(b" and more")  # the other direction goes on after their half-close
        exchange.leg.end()
        await server.until(lambda s: s.asked[0].ended)
        assert asked.body == b"up and more"
        assert connection.active == 0


async def test_a_refused_websocket_is_an_ordinary_answer_and_leaves_nothing(ca: str, pem: str) -> None:
    async with Server(pem) as server, dialled(server.port, ca) as connection:
        await settled(connection)
        exchange = start(connection, websocket(), None)
        await server.until(lambda s: s.asked)
        server.asked[0].respond([(b":status", b"403")], b"no")
        await exchange.heard_word("end")
        refused = next(value for word, value in exchange.heard if word == "head")
        assert (refused.status, exchange.body, connection.active) == (403, b"no", 0)
        await server.until(lambda s: s.asked[0].ended)


async def test_an_edge_that_does_not_offer_it_is_asked_for_no_websocket(
    ca: str, pem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(h3peers, "H3Connection", Older)
    async with Server(pem) as server, dialled(server.port, ca) as connection:
        await settled(connection)
        assert not connection.allows_websocket
        exchange = start(connection, websocket(), None)
        assert (await exchange.heard_word("abort")).unprocessed
        assert connection.active == 0 and server.asked == []


# -- cancels and back-pressure


@pytest.mark.parametrize("begun", [False, True])
@timed
async def test_abort_cancels_at_the_edge_within_100_ms(ca: str, pem: str, begun: bool) -> None:
    def answer(asked: Asked) -> None:
        if begun:
            asked.respond(OK, b"token", end=False)

    async with Server(pem, answer) as server, dialled(server.port, ca) as connection:
        exchange = start(connection, head(b"POST"), None)
        assert exchange.leg is not None
        await server.until(lambda s: s.asked)
        if begun:
            await exchange.heard_word("data")
        began = time.monotonic()
        exchange.leg.abort(Abort(Party.CLIENT, Stage.HEAD, Cause.CANCELLED))
        exchange.leg.abort(Abort(Party.CLIENT, Stage.HEAD, Cause.CANCELLED))
        asked = server.asked[0]
        await server.until(lambda s: asked.reset is not None and asked.stopped is not None)
        assert time.monotonic() - began < 0.1
        assert (asked.reset, asked.stopped) == (0x10C, 0x10C)
        assert connection.active == 0 and "abort" not in exchange.words


async def test_paused_answer_stays_within_one_window(ca: str, pem: str) -> None:
    total = 4 * STREAM_WINDOW
    async with Server(pem, lambda a: a.respond(OK, bytes(total))) as server, dialled(server.port, ca) as connection:
        leg = connection.open()
        exchange = Exchanged(leg=leg)
        leg.receiver = exchange
        leg.pause()
        leg.head(head())
        leg.end()
        await exchange.until(lambda x: len(x.body) > STREAM_WINDOW // 2)
        await asyncio.sleep(0.2)
        assert len(exchange.body) <= STREAM_WINDOW + 64
        leg.resume()
        await exchange.until(lambda x: len(x.body) == total)


async def test_upload_that_the_edge_does_not_read_says_full_then_drained(ca: str, pem: str) -> None:
    async with Server(pem, max_stream_data=32 * 1024) as server, dialled(server.port, ca) as connection:
        exchange = start(connection, head(b"POST"), None)
        leg = exchange.leg
        assert leg is not None
        quic = server.protocols[0]._quic
        quic._write_stream_limits = lambda **_: None  # type: ignore[method-assign]
        while "full" not in exchange.words:
            leg.data(bytes(8 * 1024))
        await server.until(lambda s: s.asked and len(s.asked[0].body) > 16 * 1024)
        assert connection.quic.unsent(0) <= HIGH_WATER + 16 * 1024
        del quic._write_stream_limits  # type: ignore[misc]
        quic._streams[0].max_stream_data_local = 1 << 24
        server.protocols[0].transmit()
        await exchange.heard_word("drained")
        assert exchange.words == ["full", "drained"]
