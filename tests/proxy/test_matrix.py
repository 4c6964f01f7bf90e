"""The rules of the data path in all nine version pairs. No pair is special."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from headrace.lab.ca import ThrowAwayCa
from proxy.io.rims import EdgeConnection
from proxy.messages import Abort, Cause, Leg, Party, RequestHead, ResponseHead, Stage
from tests.peers.heard import Heard
from tests.peers.services import Exchange
from tests.proxy.matrix import PAIRS, Matrix, matrix

pytestmark = pytest.mark.parametrize(("down", "up"), PAIRS, ids=[f"{down}-{up}" for down, up in PAIRS])

LOST = Abort(Party.EDGE, Stage.BODY, Cause.LOST, "test")
CANCEL = Abort(Party.US, Stage.BODY, Cause.CANCELLED, "test")
SSE = [(b"content-type", b"text/event-stream")]


async def begin(
    made: Matrix, down: str, up: str, head: RequestHead | None = None
) -> tuple[EdgeConnection, Leg, Heard, Exchange]:
    """A request from a client of one version, arrived at the origin of another."""
    client = await made.client(down)
    leg, heard = made.ask(client, up, head)
    if head is not None and head.length == 0:
        leg.end()
    exchange = await made.origin.arrived(5)
    assert exchange.origin.version == up
    return client, leg, heard, exchange


def get() -> RequestHead:
    return RequestHead(
        b"GET", b"//a%2Fb/?x=%20&y", b"", b"", [(b"x-one", b"1"), (b"x-two", b"\xe9"), (b"x-one", b"3")], length=0
    )


async def test_heads_bodies_and_trailers_pass_unchanged(down: str, up: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        head = get()
        head.method, head.length = b"POST", None
        _, leg, heard, exchange = await begin(made, down, up, head)
        body = bytes(range(256)) * 400
        for at in range(0, len(body), 7000):
            leg.data(body[at : at + 7000])
        leg.end()
        await exchange.until("end")
        assert exchange.head.target == b"//a%2Fb/?x=%20&y"
        assert exchange.head.fields[:3] == [(b"x-one", b"1"), (b"x-two", b"\xe9"), (b"x-one", b"3")]
        assert exchange.body == body

        exchange.leg.head(ResponseHead(201, [(b"set-cookie", b"a=1"), (b"set-cookie", b"b=2, c"), (b"x-r", b"\xff")]))
        exchange.leg.data(body)
        exchange.leg.trailers([(b"x-t", b"1")])
        exchange.leg.end()
        await heard.until("end")
        answer = next(value for word, value in heard.heard if word == "head")
        assert answer.status == 201
        # Order counts between fields of one name (RFC 9110 5.3); QPACK's never-indexed lines come last.
        ours = [f for f in answer.fields if f[0].lower() in (b"set-cookie", b"x-r")]
        assert sorted(ours, key=lambda f: f[0]) == [
            (b"set-cookie", b"a=1"),
            (b"set-cookie", b"b=2, c"),
            (b"x-r", b"\xff"),
        ]
        assert heard.body == body
        assert ("trailers", [(b"x-t", b"1")]) in heard.heard


async def test_the_head_and_each_event_leave_when_they_come(down: str, up: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        _, _, heard, exchange = await begin(made, down, up, get())
        exchange.leg.head(ResponseHead(200, SSE))
        await heard.until("head")
        assert "data" not in heard.words
        total = 0
        for i in range(5):
            event = b"data: %d\n\n" % i
            total += len(event)
            exchange.leg.data(event)
            await heard.until_bytes(total)
        exchange.leg.end()
        await heard.until("end")
        assert heard.body == b"".join(b"data: %d\n\n" % i for i in range(5))


async def test_interim_answers_pass_in_order(down: str, up: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        _, _, heard, exchange = await begin(made, down, up, get())
        exchange.leg.interim(ResponseHead(103, [(b"link", b"</a>")]))
        exchange.leg.interim(ResponseHead(102, []))
        await heard.until("interim")
        exchange.answer(b"x")
        await heard.until("end")
        assert [value.status for word, value in heard.heard if word == "interim"] == [103, 102]


@pytest.mark.parametrize("when", ["before the head", "after the head"])
async def test_a_client_that_leaves_cancels_the_edge_at_once(down: str, up: str, when: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        _, leg, heard, exchange = await begin(made, down, up, get())
        if when == "after the head":
            exchange.leg.head(ResponseHead(200, SSE))
            exchange.leg.data(b"data: 1\n\n")
            await heard.until("data")
        leg.abort(CANCEL)
        await exchange.until("abort")
        assert exchange.heard[-1][1].by is Party.CLIENT
        await asyncio.sleep(0)
        assert made.records[-1].outcome.startswith("client")


async def test_a_cut_upload_never_looks_whole(down: str, up: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        _, leg, _, exchange = await begin(made, down, up)
        leg.data(b'{"model":"m","mess')
        await exchange.until("data")
        leg.abort(CANCEL)
        await exchange.until("abort")
        assert "end" not in exchange.words


async def test_a_stream_cut_by_the_edge_keeps_its_events_and_ends_unclean(down: str, up: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        _, _, heard, exchange = await begin(made, down, up, get())
        exchange.leg.head(ResponseHead(200, SSE))
        events = [b'data: {"n":%d}\n\n' % i for i in range(20)]
        for event in events:
            exchange.leg.data(event)
        await heard.until_bytes(sum(map(len, events)))
        exchange.leg.abort(LOST)
        await heard.until("abort")
        assert heard.body == b"".join(events)
        assert "end" not in heard.words
        assert made.records[-1].outcome.startswith("edge")


async def test_an_edge_that_fails_before_the_head_is_an_error_of_ours(down: str, up: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        _, leg, heard, exchange = await begin(made, down, up)
        leg.data(b"{}")
        leg.end()
        await exchange.until("end")
        exchange.leg.abort(LOST)
        await heard.until("end")
        answer = next(value for word, value in heard.heard if word == "head")
        assert answer.status == 502
        assert answer.get(b"x-should-retry") == b"false"
        assert b'"error"' in heard.body


async def test_an_answer_while_the_upload_runs_arrives(down: str, up: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        _, leg, heard, exchange = await begin(made, down, up)
        leg.data(b"part")
        await exchange.until("data")
        exchange.answer(b"no", status=401)
        await heard.until("head")
        await heard.until_bytes(2)
        assert next(value for word, value in heard.heard if word == "head").status == 401


async def test_a_slow_reader_stops_the_edge_and_loses_nothing(down: str, up: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        _, leg, heard, exchange = await begin(made, down, up, get())
        exchange.leg.head(ResponseHead(200, []))
        await heard.until("head")
        leg.pause()
        block, sent, digest = bytes(range(256)) * 256, 0, hashlib.sha256()
        while "full" not in exchange.words:
            exchange.leg.data(block)
            digest.update(block)
            sent += len(block)
            await asyncio.sleep(0.001)
            assert sent < 24 << 20, "the edge was never told to stop"
        leg.resume()
        exchange.leg.end()
        await heard.until("end")
        assert len(heard.body) == sent
        assert hashlib.sha256(heard.body).digest() == digest.digest()


async def test_a_head_request_has_no_body_and_the_next_one_is_in_step(down: str, up: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        head = get()
        head.method = b"HEAD"
        client, _, heard, exchange = await begin(made, down, up, head)
        exchange.leg.head(ResponseHead(200, [(b"content-length", b"10")], length=0, no_body=True))
        exchange.leg.end()
        await heard.until("end")
        assert heard.body == b""
        leg, again = made.ask(client, up, get())
        leg.end()
        (await made.origin.arrived()).answer(b"in step")
        await again.until("end")
        assert again.body == b"in step"


async def test_options_goes_as_many_hops_as_it_may_and_trace_none(down: str, up: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        client = await made.client(down)

        def ask(method: bytes, hops: bytes) -> Heard:
            head = RequestHead(method, b"/x", b"", b"", [(b"max-forwards", hops)], length=0)
            leg, heard = made.ask(client, up, head)
            leg.end()
            return heard

        heard = ask(b"OPTIONS", b"3")
        exchange = await made.origin.arrived()
        assert exchange.head.get(b"max-forwards") == b"2"
        exchange.answer(b"edge")
        await heard.until("end")
        for method, hops, status in ((b"OPTIONS", b"0", 204), (b"TRACE", b"3", 405), (b"TRACE", b"0", 405)):
            for _ in range(3):  # the same head again may go the short way
                heard = ask(method, hops)
                await heard.until("end")
                (answer,) = (value for word, value in heard.heard if word == "head")
                assert answer.status == status
                assert b"POST" in (answer.get(b"allow") or b"")
        assert made.origin.exchanges.empty()


@pytest.mark.parametrize("status", [201, 302])
async def test_a_location_never_names_an_edge(down: str, up: str, status: int, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        (edge,) = made.edges.pool(up).config.edges
        address = f"{'https' if edge.is_tls else 'http'}://{edge.host}:{edge.port}"
        elsewhere = f"https://{edge.host}:{edge.port + 1}/x"
        client = await made.client(down)
        for location, told in [(f"{address}/a?b", "/a?b"), (elsewhere, elsewhere)] * 3:
            leg, heard = made.ask(client, up, get())
            leg.end()
            exchange = await made.origin.arrived()
            exchange.leg.head(ResponseHead(status, [(b"location", location.encode())], length=0))
            exchange.leg.end()
            await heard.until("end")
            answer = next(value for word, value in heard.heard if word == "head")
            assert (answer.status, answer.get(b"location")) == (status, told.encode())


async def test_fifty_requests_share_few_connections(down: str, up: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        made.origin.on_exchange = lambda exchange: exchange.answer(exchange.head.target)
        client = await made.client(down)
        for i in range(50):
            head = get()
            head.target = b"/%d" % i
            leg, heard = made.ask(client, up, head)
            leg.end()
            await heard.until("end")
            assert heard.body == b"/%d" % i
        assert len(made.origin.connections) == 1
        assert sum(record.reused for record in made.records) == 49
