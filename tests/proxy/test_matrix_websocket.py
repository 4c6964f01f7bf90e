"""A WebSocket from a client of any version to an edge of any version, and back (RFC 6455, 8441, 9220)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from websockets.utils import accept_key

from headrace.lab.ca import ThrowAwayCa
from proxy.io.inbound_h1_leg import H1ClientLeg
from proxy.messages import Abort, Cause, Party, RequestHead, ResponseHead, Stage
from tests.patience import HANG_S, no_hang
from tests.peers.h3peers import Answer, Client
from tests.peers.heard import Heard
from tests.peers.services import Exchange
from tests.proxy.matrix import Matrix, matrix

KEY = b"dGhlIHNhbXBsZSBub25jZQ=="
ASKED = [(b"sec-websocket-version", b"13"), (b"sec-websocket-protocol", b"realtime")]
GRANTED = (b"sec-websocket-protocol", b"realtime")
HELLO = b"\x81\x85\x01\x02\x03\x04" + bytes(a ^ b for a, b in zip(b"hello", b"\x01\x02\x03\x04\x01", strict=True))
CLOSE, CLOSED = b"\x88\x82\x00\x00\x00\x00\x03\xe8", b"\x88\x02\x03\xe8"
PAIRS = [(down, up) for down in ("h1", "h2", "h3") for up in ("h1", "h2", "h3")]
pytestmark = pytest.mark.parametrize(("down", "up"), PAIRS, ids=[f"{down}-{up}" for down, up in PAIRS])


class Socket:
    """A client's WebSocket of any version, in bytes: h1 and h2 by our rims, h3 by aioquic's own client."""

    def __init__(self, say: Callable[[bytes, bool], None], heard: Heard | Answer) -> None:
        self.say = say  # bytes, and whether the direction ends with them
        self._heard = heard

    async def until(self, ready: Callable[[Socket], object], timeout_s: float = HANG_S) -> None:
        changed = self._heard.changed if isinstance(self._heard, Heard) else self._heard.happened
        async with asyncio.timeout(timeout_s):
            while not ready(self):
                changed.clear()
                await changed.wait()

    @property
    def body(self) -> bytes:
        return self._heard.body

    @property
    def accepted(self) -> list[tuple[bytes, bytes]] | None:
        """The fields that came with the acceptance."""
        if isinstance(self._heard, Answer):
            return self._heard.sections[0] if self._heard.sections and self._heard.status == 200 else None
        heads = [value for word, value in self._heard.heard if word == "head"]
        return heads[0].fields if heads and heads[0].status == 101 else None

    @property
    def status(self) -> int:
        if isinstance(self._heard, Answer):
            return self._heard.status if self._heard.sections else 0
        return next((value.status for word, value in self._heard.heard if word == "head"), 0)

    @property
    def cut(self) -> bool:
        """Whether it ended without a clean end."""
        if isinstance(self._heard, Answer):
            return self._heard.reset is not None
        return "abort" in self._heard.words

    @property
    def ended(self) -> bool:
        return self._heard.ended if isinstance(self._heard, Answer) else "end" in self._heard.words


@asynccontextmanager
async def opener(made: Matrix, down: str, up: str) -> AsyncIterator[Callable[[], Socket]]:
    """Opens WebSockets, all on one connection where the version has several."""
    if down == "h3":
        async with Client(made.port("h3"), made.ca_file) as client:

            def ask() -> Socket:
                section = [(b":method", b"CONNECT"), (b":protocol", b"websocket"), (b":scheme", b"https")]
                section += [(b":authority", f"{up}.localhost".encode()), (b":path", b"/v1/realtime"), *ASKED]
                answer = client.ask_raw(section, end=False)
                return Socket(lambda chunk, end: client.send(answer, chunk, end=end), answer)

            yield ask
        return
    connection = await made.client(down)
    if down == "h2":
        async with no_hang():
            while not connection.allows_websocket:  # type: ignore[attr-defined]
                await asyncio.sleep(0.01)  # the server's SETTINGS are on their way

    def ask_rim() -> Socket:
        fields = [*ASKED, (b"sec-websocket-key", KEY)] if down == "h1" else list(ASKED)
        head = RequestHead(b"GET", b"/v1/realtime", b"", b"", fields, length=0, protocol=b"websocket")
        leg, heard = made.ask(connection, up, head)

        def say(chunk: bytes, end: bool) -> None:
            leg.data(chunk)
            if end:
                leg.end()

        return Socket(say, heard)

    yield ask_rim


async def accept(made: Matrix, up: str) -> Exchange:
    """The edge accepts the next one, by the rules of its version."""
    exchange = await made.origin.arrived(5)
    assert exchange.origin.version == up
    assert exchange.head.protocol == b"websocket"
    assert exchange.head.target == b"/v1/realtime"
    assert exchange.head.get(b"sec-websocket-version") == b"13"
    key = exchange.head.get(b"sec-websocket-key")
    fields = [GRANTED]
    if up == "h1":
        assert isinstance(exchange.leg, H1ClientLeg) and key is not None
        fields += [(b"upgrade", b"websocket"), (b"sec-websocket-accept", accept_key(key.decode()).encode())]
    else:
        assert key is None
    exchange.leg.head(ResponseHead(101, fields))
    return exchange


async def test_a_websocket_is_opened_used_and_closed(down: str, up: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made, opener(made, down, up) as ask:
        for _ in range(1 if down == "h1" else 2):  # the second one on the same connection
            opened = ask()
            exchange = await accept(made, up)
            await opened.until(lambda s: s.accepted is not None)
            assert opened.accepted is not None
            assert GRANTED in opened.accepted
            # The answer to the key where there was one, and no trace of it where h2 and h3 have none
            answers = [value for name, value in opened.accepted if name == b"sec-websocket-accept"]
            assert answers == ([accept_key(KEY.decode()).encode()] if down == "h1" else [])
            assert len([name for name, _ in opened.accepted if name == b"upgrade"]) == (1 if down == "h1" else 0)

            opened.say(HELLO, False)
            await exchange.until("data")
            assert exchange.body == HELLO
            exchange.leg.data(b"\x81\x02hi")
            await opened.until(lambda s: s.body == b"\x81\x02hi")

            opened.say(CLOSE, False)
            while not exchange.body.endswith(CLOSE):
                exchange.changed.clear()
                await exchange.changed.wait()
            exchange.leg.data(CLOSED)
            exchange.leg.end()
            await opened.until(lambda s: s.body.endswith(CLOSED))
            opened.say(b"", True)
            await opened.until(lambda s: s.ended)
            assert not opened.cut


async def test_a_lost_edge_closes_with_a_code_that_may_be_on_the_wire(down: str, up: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made, opener(made, down, up) as ask:
        opened = ask()
        exchange = await accept(made, up)
        await opened.until(lambda s: s.accepted is not None)
        exchange.leg.data(b"\x81\x02hi")
        await opened.until(lambda s: s.body == b"\x81\x02hi")
        exchange.leg.abort(Abort(Party.EDGE, Stage.BODY, Cause.LOST, "test"))
        await opened.until(lambda s: len(s.body) > 4)
        assert opened.body[4] == 0x88
        assert int.from_bytes(opened.body[6:8], "big") in (1011, 1014)


async def test_a_refusal_of_the_edge_is_an_ordinary_answer(down: str, up: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made, opener(made, down, up) as ask:
        opened = ask()
        (await made.origin.arrived(5)).answer(b"no", 403)
        await opened.until(lambda s: s.ended)
        assert (opened.status, opened.body) == (403, b"no")
        assert opened.accepted is None
