"""What is written while a peer is heard leaves in one write, on whichever connection, and in order."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable

import pytest
import uvloop

from proxy.io.inbound_h1 import H1ServerConnection
from proxy.io.inbound_h2 import H2ServerConnection
from proxy.io.outbound_h1 import H1EdgeConnection
from proxy.io.outbound_h2 import H2EdgeConnection
from proxy.io.rims import Origin
from proxy.io.wire import Wire
from proxy.messages import ResponseHead
from tests.peers.services import ByHand, Exchange


class Transport(asyncio.Transport):
    """Keeps each write apart."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...


def wire() -> tuple[Wire, Transport]:
    made, transport = Wire(asyncio.get_running_loop()), Transport()
    made.attach(transport)
    return made, transport


async def turn_of_the_loop() -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_pieces_written_in_a_turn_leave_joined_at_its_end() -> None:
    (one, first), (other, second) = wire(), wire()
    one.turn.is_open = True
    for piece in (b"a", b"b", b"c"):
        one.write(piece)
        other.write(piece * 2)
    assert not first.writes and not second.writes
    other.turn.end()
    assert (first.writes, second.writes) == ([b"abc"], [b"aabbcc"])


async def test_pieces_written_between_turns_leave_joined_a_callback_later() -> None:
    one, transport = wire()
    one.write(b"a")
    one.write(b"b")
    assert not transport.writes
    await turn_of_the_loop()
    assert transport.writes == [b"ab"]


async def test_a_whole_message_leaves_at_once_unless_something_is_before_it() -> None:
    one, transport = wire()
    one.write_whole(b"a")
    assert transport.writes == [b"a"]
    one.write(b"b")
    one.write_whole(b"c")
    await turn_of_the_loop()
    assert transport.writes == [b"a", b"bc"]


async def test_a_close_sends_what_was_written_before_it() -> None:
    one, transport = wire()
    one.turn.is_open = True
    one.write(b"last words")
    one.close()
    assert transport.writes == [b"last words"]
    one.turn.end()
    assert transport.writes == [b"last words"]


async def test_a_reset_drops_what_was_written() -> None:
    one, transport = wire()
    transport.abort = lambda: None  # type: ignore[method-assign]
    one.write(b"never")
    one.reset()
    one.write(b"nor this")
    await turn_of_the_loop()
    assert transport.writes == []


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_head_and_body_of_an_answer_leave_in_one_write(factory: object) -> None:
    async def story() -> None:
        service, transport = ByHand(), Transport()

        def answer(exchange: Exchange) -> None:
            exchange.leg.head(ResponseHead(200, [], length=None))
            exchange.leg.data(b"one")
            exchange.leg.data(b"two")
            exchange.leg.end()

        service.on_exchange = answer
        rim = H1ServerConnection(service, Origin("127.0.0.1", 1, "http://x", b"http", "h1"))
        rim.connection_made(transport)
        rim.data_received(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert len(transport.writes) == 1 and transport.writes[0].endswith(b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")
        rim.connection_lost(None)

    with asyncio.Runner(loop_factory=factory) as runner:  # type: ignore[arg-type]
        runner.run(story())


async def test_a_turn_ends_even_when_hearing_fails() -> None:
    """A rim never raises; if one did, the other connections' writes would not be held for ever."""
    service, transport = ByHand(), Transport()

    def fail(exchange: Exchange) -> None:
        exchange.leg.head(ResponseHead(200, [], length=0))
        raise RuntimeError("a bug")

    service.on_exchange = fail
    rim = H1ServerConnection(service, Origin("127.0.0.1", 1, "http://x", b"http", "h1"))
    rim.connection_made(transport)
    with pytest.raises(RuntimeError, match="a bug"):
        rim.data_received(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert transport.writes and not rim.wire.turn.is_open
    rim.connection_lost(None)


ORIGIN = Origin("127.0.0.1", 1, "http://x", b"http", "h1")
Rim = H1ServerConnection | H2ServerConnection | H1EdgeConnection | H2EdgeConnection
RIMS: list[Callable[[], Rim]] = [
    lambda: H1ServerConnection(ByHand(), ORIGIN),
    lambda: H2ServerConnection(ByHand(), ORIGIN),
    H1EdgeConnection,
    H2EdgeConnection,
]


@pytest.mark.parametrize("rim", RIMS, ids=["client h1", "client h2", "edge h1", "edge h2"])
async def test_transport_goes_with_its_connection_and_does_not_wait_for_the_collector(rim: Callable[[], Rim]) -> None:
    made, transport = rim(), Transport()
    made.connection_made(transport)
    gone = weakref.ref(transport)
    await turn_of_the_loop()
    del transport
    gc.disable()
    try:
        made.connection_lost(None)
        assert gone() is None
    finally:
        gc.enable()


async def test_a_reset_inside_a_turn_drops_what_it_held() -> None:
    (one, first), (other, second) = wire(), wire()
    first.abort = lambda: None  # type: ignore[method-assign]
    one.turn.is_open = True
    one.write(b"never")
    one.reset()
    other.write(b"but this")
    one.turn.end()
    assert (first.writes, second.writes) == ([], [b"but this"])


async def test_a_whole_message_waits_for_the_piece_that_its_turn_holds() -> None:
    one, transport = wire()
    one.turn.is_open = True
    one.write(b"a")
    one.write_whole(b"b")
    one.turn.end()
    assert transport.writes == [b"ab"]
