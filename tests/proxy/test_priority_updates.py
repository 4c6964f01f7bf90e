"""A client changes its mind in mid-stream (RFC 9218 7): whom that reaches, over the pairs and frame by frame."""

from __future__ import annotations

from itertools import product

import pytest
from aioquic.buffer import encode_uint_var
from aioquic.h3.connection import encode_frame
from aioquic.quic.events import StreamDataReceived

from headrace.lab.ca import ThrowAwayCa
from proxy.h2_frames import SETTINGS_ACK
from proxy.io.sides import PRIORITIES
from proxy.messages import RequestHead, ResponseHead
from proxy.priority import Priority
from tests.peers.h3peers import Client, Protocol, Server, make_authority
from tests.proxy.h2_wire import Edge, settings
from tests.proxy.h3.exchanges import dialled, start
from tests.proxy.matrix import matrix

BOTH = ("h2", "h3")
URGENT = Priority(0, incremental=True)
UPDATE = b"\x00\x00\x0a\x10\x00\x00\x00\x00\x00" + b"\x00\x00\x00\x01u=0, i"


def get(*fields: tuple[bytes, bytes]) -> RequestHead:
    return RequestHead(b"GET", b"/", b"", b"", list(fields), length=0)


def served_by(leg: object) -> Priority:
    """How a client's leg of ours is served."""
    if leg.version == "h2":  # type: ignore[attr-defined]
        return leg.priority  # type: ignore[attr-defined,no-any-return]
    return leg._connection.quic.priority_of(leg.stream_id)  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize(("down", "up"), list(product(BOTH, BOTH)), ids=map("-".join, product(BOTH, BOTH)))
async def test_an_update_in_mid_stream_counts_here_and_at_the_edge(down: str, up: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        leg, heard = made.ask(await made.client(down), up, get((b"priority", b"u=6")))
        leg.end()
        exchange = await made.origin.arrived(5)
        exchange.leg.head(ResponseHead(200, []))
        exchange.leg.data(b"part")
        await heard.until("data")
        leg.prioritize(URGENT)
        await exchange.until("priority")
        assert ("priority", URGENT) in exchange.heard
        assert served_by(exchange.leg) == URGENT
        (exchanging,) = made.gateway.relay.exchanges
        assert served_by(exchanging.client) == URGENT
        exchange.leg.end()
        await heard.until("end")


@pytest.mark.parametrize("down", BOTH)
async def test_an_h1_edge_cannot_be_told_and_its_answer_goes_on(down: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        leg, heard = made.ask(await made.client(down), "h1", get())
        leg.end()
        exchange = await made.origin.arrived(5)
        leg.prioritize(URGENT)
        (exchanging,) = made.gateway.relay.exchanges
        exchange.leg.head(ResponseHead(200, []))
        await heard.until("head")
        assert served_by(exchanging.client) == URGENT
        exchange.leg.end()
        await heard.until("end")


@pytest.mark.parametrize(
    ("down", "up"), list(product(BOTH, ("h1", *BOTH))), ids=map("-".join, product(BOTH, ("h1", *BOTH)))
)
async def test_an_update_before_an_edge_is_open_is_what_the_request_says(down: str, up: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        leg, heard = made.ask(await made.client(down), up, get((b"priority", b"u=6"), (b"x-a", b"1")))
        leg.prioritize(URGENT)
        leg.end()
        exchange = await made.origin.arrived(5)
        assert [value for name, value in exchange.head.fields if name == b"priority"] == [b"u=0, i"]
        assert exchange.head.get(b"x-a") == b"1"
        exchange.answer()
        await heard.until("end")


async def test_an_update_before_its_request_is_passed_on_too(ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made, Client(made.port("h3"), made.ca_file, host="localhost") as client:
        control = client.http._local_control_stream_id
        assert control is not None
        client.quic.send_stream_data(control, encode_frame(0xF0700, encode_uint_var(0) + b"u=0, i"))
        client.authority = b"h2.localhost"
        client.ask("GET", "/", (b"priority", b"u=6"))
        exchange = await made.origin.arrived(5)
        assert exchange.head.get(b"priority") == b"u=0, i"


async def test_what_one_client_says_on_a_shared_connection_is_bounded(ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        client = await made.client("h2")
        leg, _ = made.ask(client, "h2", get())
        leg.end()
        exchange = await made.origin.arrived(5)
        for number in range(3 * PRIORITIES):
            leg.prioritize(Priority(number % 8))
        made.ask(client, "h2", get())[0].end()
        await made.origin.arrived(5)  # by the same way, so what was said before it is there
        assert exchange.words.count("priority") == PRIORITIES


# -- what stands on the wire


def test_an_h2_edge_that_does_not_know_rfc_9218_is_told_nothing() -> None:
    edge = Edge(hello=settings())
    leg, _ = edge.ask()
    edge.heard()
    leg.prioritize(URGENT)
    assert edge.heard() == []
    assert leg.priority == URGENT  # what we upload to it is served by it all the same


def test_an_h2_edge_that_knows_rfc_9218_is_told_in_a_frame_of_stream_0() -> None:
    edge = Edge(hello=settings(no_rfc7540_priorities=1))
    leg, _ = edge.ask()
    edge.heard()
    leg.prioritize(URGENT)
    assert edge.h2.sender.take() == UPDATE


def test_an_h2_edge_is_told_once_its_settings_came() -> None:
    edge = Edge(hello=b"")
    leg, _ = edge.ask()
    leg.prioritize(Priority(5))
    leg.prioritize(URGENT)
    assert [seen.kind for seen in edge.heard()] == ["Headers"]
    edge.say(settings(no_rfc7540_priorities=1))
    assert edge.h2.sender.take() == SETTINGS_ACK + UPDATE


class Listening(Server):
    """Keeps the bytes of the client's control stream."""

    control = b""

    def on_event(self, protocol: Protocol, event: object) -> None:  # type: ignore[override]
        if isinstance(event, StreamDataReceived) and event.stream_id == 2:
            self.control += event.data
        super().on_event(protocol, event)  # type: ignore[arg-type]


async def test_an_h3_edge_is_told_on_the_control_stream(tmp_path_factory: pytest.TempPathFactory) -> None:
    ca_file, pem = make_authority(tmp_path_factory.mktemp("tls"))
    frame = encode_frame(0xF0700, encode_uint_var(0) + b"u=0, i")
    async with Listening(pem) as server, dialled(server.port, ca_file) as connection:
        exchange = start(connection)
        await server.until(lambda s: s.asked)
        assert exchange.leg is not None
        exchange.leg.prioritize(URGENT)
        await server.until(lambda s: frame in s.control)  # type: ignore[attr-defined]
        server.asked[0].respond([(b":status", b"200")])
        await exchange.heard_word("end")
        exchange.leg.prioritize(Priority(7))  # it is over: nothing is said of it
        again = start(connection)
        await server.until(lambda s: len(s.asked) == 2)
        server.asked[1].respond([(b":status", b"200")])
        await again.heard_word("end")
        assert server.control.endswith(frame)
