"""A second implementation's HTTP/3 client through the gateway to each version of edge."""

from __future__ import annotations

import hashlib

import pytest

from headrace.lab.ca import ThrowAwayCa
from proxy.io.quic_codes import INTERNAL_ERROR, NO_ERROR
from proxy.messages import Abort, Cause, Party, ResponseHead, Stage
from tests.peers.h3peers import Answer
from tests.peers.qh3client import QhClient
from tests.proxy.matrix import VERSIONS, Matrix, matrix

each_edge = pytest.mark.parametrize("up", VERSIONS)
SSE = [(b"content-type", b"text/event-stream")]
LOST = Abort(Party.EDGE, Stage.BODY, Cause.LOST, "test")


def client_of(made: Matrix, **how: object) -> QhClient:
    return QhClient(made.port("h3"), made.ca_file, **how)  # type: ignore[arg-type]


async def until_body(answer: Answer, body: bytes) -> None:
    await answer.until(lambda a: a.body == body)


@each_edge
async def test_a_chat_stream_arrives_event_by_event(up: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made, client_of(made) as client:
        answer = client.ask(f"{up}.localhost", "POST", "/v1/chat/completions?a=%2F", (b"authorization", b"Bearer x"))
        client.send(answer, b'{"stream":true}', end=True)
        exchange = await made.origin.arrived(5)
        await exchange.until("end")
        assert exchange.origin.version == up
        assert exchange.head.target == b"/v1/chat/completions?a=%2F"
        assert exchange.head.get(b"authorization") == b"Bearer x"
        assert exchange.body == b'{"stream":true}'
        exchange.leg.head(ResponseHead(200, SSE))
        await answer.until(lambda a: a.sections)
        assert answer.body == b""
        sent = b""
        for i in range(20):
            event = b'data: {"n":%d}\n\n' % i
            sent += event
            exchange.leg.data(event)
            await until_body(answer, sent)
        exchange.leg.end()
        await answer.whole()
        assert (answer.status, answer.body) == (200, sent)


@each_edge
async def test_large_bodies_pass_both_ways(up: str, ca: ThrowAwayCa) -> None:
    body = bytes(range(256)) * 12_000  # several windows of either side
    async with matrix(ca) as made, client_of(made) as client:
        answer = client.ask(f"{up}.localhost", "POST", "/", (b"content-length", b"%d" % len(body)))
        client.send(answer, body, end=True)
        exchange = await made.origin.arrived(5)
        await exchange.until("end", 20)
        assert exchange.head.length == len(body)
        assert hashlib.sha256(exchange.body).digest() == hashlib.sha256(body).digest()
        exchange.answer(body)
        await answer.until(lambda a: a.ended, 20)
        assert hashlib.sha256(answer.body).digest() == hashlib.sha256(body).digest()


@each_edge
async def test_trailers_pass_both_ways(up: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made, client_of(made) as client:
        answer = client.ask(f"{up}.localhost", "POST")
        client.send(answer, b"body")
        client.send_trailers(answer, [(b"x-sum", b"1")])
        exchange = await made.origin.arrived(5)
        await exchange.until("end")
        assert ("trailers", [(b"x-sum", b"1")]) in exchange.heard
        exchange.leg.head(ResponseHead(200, []))
        exchange.leg.data(b"body")
        exchange.leg.trailers([(b"x-sum", b"2")])
        exchange.leg.end()
        await answer.whole()
        assert answer.sections[-1] == [(b"x-sum", b"2")]


@each_edge
async def test_interim_answers_come_before_the_final_one(up: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made, client_of(made) as client:
        answer = client.ask(f"{up}.localhost")
        exchange = await made.origin.arrived(5)
        for status in (103, 102, 103):
            exchange.leg.interim(ResponseHead(status, [(b"link", b"</a>")]))
        exchange.answer(b"x")
        await answer.whole()
        assert answer.statuses == [b"103", b"102", b"103", b"200"]


@each_edge
async def test_an_edge_that_is_lost_in_mid_answer_resets_the_stream(up: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made, client_of(made) as client:
        answer = client.ask(f"{up}.localhost")
        exchange = await made.origin.arrived(5)
        exchange.leg.head(ResponseHead(200, SSE))
        exchange.leg.data(b"data: 1\n\n")
        await answer.until(lambda a: a.body)
        exchange.leg.abort(LOST)
        await answer.until(lambda a: a.reset is not None)
        assert (answer.reset, answer.body, answer.ended) == (INTERNAL_ERROR, b"data: 1\n\n", False)


@pytest.mark.parametrize("how", ["reset", "stop"])
@each_edge
async def test_a_client_that_gives_up_cancels_the_edge(up: str, how: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made, client_of(made) as client:
        answer = client.ask(f"{up}.localhost", "POST")
        client.send(answer, b"part")
        exchange = await made.origin.arrived(5)
        await exchange.until("data")
        (client.reset if how == "reset" else client.stop)(answer)
        await exchange.until("abort")
        assert "end" not in exchange.words
        # The connection lives on, and is in step.
        following = client.ask(f"{up}.localhost")
        (await made.origin.arrived(5)).answer(b"next")
        assert (await following.whole()).body == b"next"


@each_edge
async def test_an_early_answer_stops_the_upload_without_an_error(up: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made, client_of(made) as client:
        answer = client.ask(f"{up}.localhost", "POST")
        client.send(answer, b"part")
        exchange = await made.origin.arrived(5)
        exchange.answer(b"no", status=401)
        await answer.whole()
        assert (answer.status, answer.body) == (401, b"no")
        await answer.until(lambda a: a.stopped is not None)
        assert answer.stopped == NO_ERROR


async def test_a_drain_says_goaway_and_lets_the_stream_end(ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made, client_of(made) as client:
        answer = client.ask("h1.localhost")
        exchange = await made.origin.arrived(5)
        exchange.leg.head(ResponseHead(200, SSE))
        await answer.until(lambda a: a.sections)
        made.gateway.drain()
        await client.until(lambda c: c.goaways)
        assert client.goaways == [answer.stream_id + 4]
        late = client.ask("h1.localhost")
        await late.until(lambda a: a.reset is not None)
        exchange.leg.data(b"data: last\n\n")
        exchange.leg.end()
        await answer.whole()
        assert answer.body == b"data: last\n\n"
        await client.until(lambda c: c.closed)
        assert client.closed is not None and client.closed.error_code == NO_ERROR


async def ticket_of(made: Matrix) -> object:
    async with client_of(made) as client:
        answer = client.ask("h1.localhost")
        (await made.origin.arrived(5)).answer()
        await answer.whole()
        await client.until(lambda c: c.tickets)
        assert client.handshake is not None and not client.handshake.session_resumed
        return client.tickets[-1]


async def test_a_ticket_resumes_once(ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        ticket = await ticket_of(made)
        for resumed in (True, False):
            async with client_of(made, ticket=ticket) as client:
                assert client.handshake is not None and client.handshake.session_resumed is resumed
                answer = client.ask("h1.localhost")
                (await made.origin.arrived(5)).answer(b"again")
                assert (await answer.whole()).body == b"again"


async def test_a_get_in_early_data_is_served_and_marked_and_a_post_is_refused(ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        async with client_of(made, ticket=await ticket_of(made), wait=False) as client:
            answer = client.ask("h1.localhost")
            exchange = await made.origin.arrived(5)
            assert exchange.head.get(b"early-data") == b"1"
            exchange.answer(b"early")
            assert (await answer.whole()).body == b"early"
            assert client.handshake is not None and client.handshake.early_data_accepted
        async with client_of(made, ticket=await ticket_of(made), wait=False) as client:
            answer = client.ask("h1.localhost", "POST")
            client.send(answer, b"{}", end=True)
            assert (await answer.whole()).status == 425
            assert made.origin.exchanges.empty()


@pytest.mark.parametrize("how", ["rebind", "migrate"])
async def test_a_stream_goes_on_from_another_port(how: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made, client_of(made) as client:
        answer = client.ask("h1.localhost")
        exchange = await made.origin.arrived(5)
        exchange.leg.head(ResponseHead(200, SSE))
        exchange.leg.data(b"data: 1\n\n")
        await answer.until(lambda a: a.body)
        await (client.rebind() if how == "rebind" else client.migrate())
        # A client whose NAT forgot finds out by saying something; here it asks for more.
        other = client.ask("h1.localhost", path="/other")
        (await made.origin.arrived(5)).answer(b"other")
        exchange.leg.data(b"data: 2\n\n")
        exchange.leg.end()
        assert (await other.whole()).body == b"other"
        assert (await answer.whole()).body == b"data: 1\n\ndata: 2\n\n"
        assert client.closed is None
