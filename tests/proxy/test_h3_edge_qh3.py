"""Our edge connection against a second implementation's HTTP/3 server."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from headrace.lab.ca import ThrowAwayCa
from proxy.io.outbound_quic import H3EdgeConnection, QuicSessions
from proxy.messages import Abort, Cause, Party, Stage
from tests.peers.qh3server import QhServer
from tests.proxy.h3.exchanges import dialled, head, start

OK = [(b":status", b"200")]


@asynccontextmanager
async def both(ca: ThrowAwayCa) -> AsyncIterator[tuple[QhServer, H3EdgeConnection]]:
    async with (
        QhServer(str(ca.cert_file), str(ca.key_file)) as server,
        dialled(server.port, str(ca.ca_file)) as connection,
    ):
        yield server, connection


async def test_a_request_and_its_streamed_answer_pass_whole(ca: ThrowAwayCa) -> None:
    async with both(ca) as (server, connection):
        fields = [(b"x-a", b"1"), (b"authorization", b"Bearer s")]
        exchange = start(connection, head(b"POST", b"/v1//x%2F?q", *fields), b"prompt" * 100)
        await server.until(lambda s: s.asked and s.asked[0].ended)
        asked = server.asked[0]
        assert asked.body == b"prompt" * 100
        assert dict(asked.fields)[b":path"] == b"/v1//x%2F?q"
        assert dict(asked.fields)[b"authorization"] == b"Bearer s"
        asked.head([(b":status", b"103"), (b"link", b"</a>")])
        asked.head([*OK, (b"content-type", b"text/event-stream")])
        for number in range(5):
            asked.send(b"data: %d\n\n" % number)
            await exchange.until(lambda x: x.body.endswith(b"data: %d\n\n" % (x.body.count(b"data") - 1)))
        asked.head([(b"x-sum", b"5")], end=True)
        await exchange.heard_word("end")
        assert exchange.words[0:2] == ["interim", "head"]
        assert exchange.words[-2:] == ["trailers", "end"]
        assert exchange.body == b"".join(b"data: %d\n\n" % number for number in range(5))


async def test_large_bodies_pass_both_ways(ca: ThrowAwayCa) -> None:
    body = bytes(range(256)) * 12_000
    async with both(ca) as (server, connection):
        exchange = start(connection, head(b"POST"), body)
        await server.until(lambda s: s.asked and s.asked[0].ended, 20)
        assert hashlib.sha256(server.asked[0].body).digest() == hashlib.sha256(body).digest()
        server.asked[0].head(OK)
        server.asked[0].send(body, end=True)
        await exchange.until(lambda x: "end" in x.words, 20)
        assert hashlib.sha256(exchange.body).digest() == hashlib.sha256(body).digest()


@pytest.mark.parametrize("when", ["before the head", "after the head"])
async def test_a_cancel_reaches_it_as_reset_and_stop(ca: ThrowAwayCa, when: str) -> None:
    async with both(ca) as (server, connection):
        exchange = start(connection, head(b"POST"), None)
        exchange.leg.data(b"part")
        await server.until(lambda s: s.asked and s.asked[0].body == b"part")
        if when == "after the head":
            server.asked[0].head(OK)
            await exchange.heard_word("head")
        exchange.leg.abort(Abort(Party.CLIENT, Stage.BODY, Cause.CANCELLED))
        await server.until(lambda s: s.asked[0].reset == 0x10C and s.asked[0].stopped == 0x10C)
        again = start(connection)
        await server.until(lambda s: len(s.asked) == 2)
        server.asked[1].head(OK, end=True)
        await again.heard_word("end")


async def test_its_reset_is_a_lost_answer_and_the_connection_goes_on(ca: ThrowAwayCa) -> None:
    async with both(ca) as (server, connection):
        exchange = start(connection)
        await server.until(lambda s: s.asked)
        server.asked[0].head(OK)
        server.asked[0].send(b"part")
        await exchange.until(lambda x: x.body == b"part")
        server.asked[0].abort(0x102)
        abort: Abort = await exchange.heard_word("abort")
        assert (abort.by, abort.stage, abort.cause, abort.code) == (Party.EDGE, Stage.BODY, Cause.LOST, 0x102)
        assert connection.room > 0


async def test_its_ticket_resumes(ca: ThrowAwayCa) -> None:
    sessions = QuicSessions()
    async with QhServer(str(ca.cert_file), str(ca.key_file)) as server:
        assert await resumed(server, ca, sessions, 1) is False
        assert await resumed(server, ca, sessions, 2) is True


async def resumed(server: QhServer, ca: ThrowAwayCa, sessions: QuicSessions, number: int) -> bool:
    async with dialled(server.port, str(ca.ca_file), sessions) as connection:
        exchange = start(connection)
        await server.until(lambda s: len(s.asked) == number)
        server.asked[-1].head(OK, end=True)
        await exchange.heard_word("end")
        return connection.resumed
