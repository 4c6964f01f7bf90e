"""Requests of h2 and h3 streams on the short way to an HTTP/1.1 edge: the same as on the ordinary way, whatever happens."""

from __future__ import annotations

import asyncio

import pytest

from headrace.lab.ca import ThrowAwayCa
from proxy.io.rims import EdgeConnection
from proxy.known_heads import are_alike
from proxy.messages import Abort, Cause, Leg, Party, RequestHead, ResponseHead, Stage
from tests.peers.heard import Heard
from tests.peers.services import Exchange
from tests.proxy.matrix import Matrix, matrix

CANCEL = Abort(Party.US, Stage.BODY, Cause.CANCELLED, "test")
LOST = Abort(Party.EDGE, Stage.BODY, Cause.LOST, "test")
HANG_S = 30.0

streams = pytest.mark.parametrize("down", ["h2", "h3"])


def get(target: bytes = b"/v1/models") -> RequestHead:
    return RequestHead(b"GET", target, b"", b"", [(b"x-one", b"1"), (b"authorization", b"Bearer sk-1")], length=0)


def post(size: int) -> RequestHead:
    return RequestHead(
        b"POST", b"/v1/chat", b"", b"", [(b"content-length", b"%d" % size), (b"x-one", b"1")], length=size
    )


async def sent(
    made: Matrix, client: EdgeConnection, head: RequestHead, body: bytes = b""
) -> tuple[Leg, Heard, Exchange]:
    leg, heard = made.ask(client, "h1", head)
    if body:
        leg.data(body)
    leg.end()
    return leg, heard, await made.origin.arrived(HANG_S)


async def whole(made: Matrix, client: EdgeConnection, head: RequestHead, body: bytes = b"") -> tuple[Heard, Exchange]:
    _, heard, exchange = await sent(made, client, head, body)
    await exchange.until("end")
    exchange.answer(b"hello")
    await heard.until("end")
    return heard, exchange


async def warm(made: Matrix, down: str) -> EdgeConnection:
    """Two of a kind each: the next ones are known."""
    client = await made.client(down)
    for _ in range(2):
        await whole(made, client, get())
    return client


def taken(made: Matrix) -> int:
    return made.gateway.lane.taken


def head_of(heard: Heard) -> ResponseHead:
    head: ResponseHead = next(value for word, value in heard.heard if word == "head")
    return head


@streams
async def test_edge_and_client_hear_the_same_on_both_ways(down: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        client = await made.client(down)
        ways = [await whole(made, client, get()) for _ in range(3)]
        assert taken(made) == 1
        (ordinary, at_edge), _, (short, at_edge_short) = ways
        assert (short.body, short.words) == (ordinary.body, ordinary.words)
        assert at_edge_short.head == at_edge.head and at_edge_short.words == at_edge.words
        timing = {b"server-timing"}
        assert [f for f in head_of(short).fields if f[0] not in timing] == [
            f for f in head_of(ordinary).fields if f[0] not in timing
        ]
        assert [f[0] for f in head_of(short).fields].count(b"server-timing") == 1
        first, last = made.records[0], made.records[-1]
        for name in (
            "outcome",
            "status",
            "bytes_in",
            "bytes_out",
            "client_version",
            "edge_version",
            "pool",
            "path",
            "host",
        ):
            assert getattr(first, name) == getattr(last, name), name


@streams
async def test_a_body_that_comes_with_its_head_goes_the_short_way(down: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        client = await made.client(down)
        for size in (5, 7, 300):
            _, exchange = await whole(made, client, post(size), b"x" * size)
            assert exchange.body == b"x" * size and exchange.head.length == size
        assert taken(made) == 1
        assert [record.bytes_in for record in made.records] == [5, 7, 300]


@streams
async def test_a_body_that_comes_later_goes_the_ordinary_way(down: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        client = await made.client(down)
        for _ in range(2):
            await whole(made, client, post(4), b"abcd")
        leg, heard = made.ask(client, "h1", post(4))
        leg.data(b"ab")
        exchange = await made.origin.arrived(HANG_S)
        await exchange.until("data")
        assert exchange.body == b"ab"
        leg.data(b"cd")
        leg.end()
        await exchange.until("end")
        exchange.answer(b"hello")
        await heard.until("end")
        assert exchange.body == b"abcd" and taken(made) == 0


@streams
async def test_a_cancelled_stream_cancels_its_edge(down: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        client = await warm(made, down)
        leg, _, exchange = await sent(made, client, get())
        assert taken(made) == 1
        leg.abort(CANCEL)
        await exchange.until("abort")
        assert exchange.leg is not None
        async with asyncio.timeout(HANG_S):
            while made.gateway.active:
                await asyncio.sleep(0)
        assert made.records[-1].outcome == "client cancelled"
        await whole(made, client, get())  # the connection goes on


@streams
async def test_an_event_stream_is_relayed_as_it_comes(down: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        client = await warm(made, down)
        _, heard, exchange = await sent(made, client, get())
        exchange.leg.head(ResponseHead(200, [(b"content-type", b"text/event-stream")]))
        exchange.leg.data(b"data: 1\n\n")
        await heard.until_bytes(9)
        exchange.leg.data(b"data: 2\n\n")
        exchange.leg.end()
        await heard.until("end")
        assert heard.body == b"data: 1\n\ndata: 2\n\n" and made.records[-1].events == 2
        assert taken(made) == 1


@streams
async def test_an_answer_that_is_cut_never_ends_cleanly(down: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        client = await warm(made, down)
        _, heard, exchange = await sent(made, client, get())
        exchange.leg.head(ResponseHead(200, [(b"content-length", b"10")], length=10))
        exchange.leg.data(b"half")
        await heard.until_bytes(4)
        exchange.leg.abort(LOST)
        await heard.until("abort")
        assert "end" not in heard.words


@streams
async def test_an_edge_that_closes_its_idle_connection_costs_no_answer(down: str, ca: ThrowAwayCa) -> None:
    """The request crosses the FIN on a reused connection: once more, on a fresh one."""
    async with matrix(ca) as made:
        client = await warm(made, down)
        _, heard, exchange = await sent(made, client, get())
        exchange.leg.abort(LOST)
        again = await made.origin.arrived(HANG_S)
        again.answer(b"hello")
        await heard.until("end")
        assert heard.body == b"hello" and taken(made) == 1


@streams
async def test_another_target_or_field_is_decided_anew(down: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        client = await warm(made, down)
        await whole(made, client, get(b"/v1/other"))
        other = get()
        other.fields[1] = (b"authorization", b"Bearer sk-2")
        _, exchange = await whole(made, client, other)
        assert exchange.head.get(b"authorization") == b"Bearer sk-2"
        assert taken(made) == 0


@streams
async def test_many_streams_at_once_leave_nothing_behind(down: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        client = await warm(made, down)
        made.origin.on_exchange = lambda exchange: asyncio.get_running_loop().call_soon(exchange.answer, b"hello")  # type: ignore[assignment]
        for _ in range(5):
            asked = [made.ask(client, "h1", get()) for _ in range(20)]
            for leg, _ in asked:
                leg.end()
            for _, heard in asked:
                await heard.until("end")
        edge = made.edges.pool("h1").edges["h1-edge"]
        assert (made.gateway.active, edge.standing.inflight, edge.connections.counts.busy) == (0, 0, 0)
        assert taken(made) > 50


def test_heads_are_alike_when_only_the_length_differs() -> None:
    assert are_alike(post(5), post(6))
    assert are_alike(get(), get())
    for change in (
        {"method": b"PUT"},
        {"target": b"/"},
        {"authority": b"a"},
        {"scheme": b"http"},
        {"length": None},
        {"protocol": b"websocket"},
        {"expect_continue": True},
        {"fields": [(b"content-length", b"5")]},
        {"fields": [(b"x-one", b"1"), (b"content-length", b"5")]},
        {"fields": [(b"content-length", b"5"), (b"x-one", b"2")]},
    ):
        other = post(5)
        for name, value in change.items():
            setattr(other, name, value)
        assert not are_alike(post(5), other), change
