"""When an HTTP/2 connection writes: at the end of a turn, and of a burst over several; by a loop whose clock stands still."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from proxy import h2_frames as wire
from proxy.io.h2_rim import BURST_S, HOLD_BYTES
from proxy.io.inbound_h2 import H2ServerConnection
from proxy.io.rims import Origin
from proxy.messages import Leg, ResponseHead
from tests.peers.services import ByHand, Exchange
from tests.proxy.h2_wire import GET, credit, headers, settings
from tests.proxy.test_wire import Transport

STREAMS = 20


class StillLoop(asyncio.SelectorEventLoop):
    """A loop whose time is what the test says."""

    now = 100.0

    def time(self) -> float:
        return self.now


async def rounds(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def play(story: Callable[[StillLoop, list[Leg], Transport], Awaitable[None]]) -> None:
    """Tell it with STREAMS answers whose heads have left."""

    async def told() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, StillLoop)
        legs: list[Leg] = []

        def answer(exchange: Exchange) -> None:
            exchange.leg.head(ResponseHead(200, []))
            legs.append(exchange.leg)

        service, transport = ByHand(), Transport()
        service.on_exchange = answer
        rim = H2ServerConnection(service, Origin("127.0.0.1", 1, "https://x", b"https", "h2"))
        rim.connection_made(transport)
        asked = b"".join(headers(2 * number + 1, GET, end=True) for number in range(STREAMS))
        rim.data_received(wire.PREFACE + settings(initial_window_size=1 << 20) + credit(0, 1 << 20) + asked)
        await rounds(4)
        transport.writes.clear()
        await story(loop, legs, transport)
        rim.connection_lost(None)

    with asyncio.Runner(loop_factory=StillLoop) as runner:
        runner.run(told())


def test_a_burst_over_several_rounds_leaves_in_one_write() -> None:
    async def story(loop: StillLoop, legs: list[Leg], transport: Transport) -> None:
        for number in range(0, STREAMS, 4):
            for leg in legs[number : number + 4]:
                leg.data(b"token")
            await rounds(1)
            assert transport.writes == []
        await rounds(2)
        assert [write.count(b"token") for write in transport.writes] == [STREAMS]

    play(story)


def test_what_comes_alone_leaves_in_the_next_round() -> None:
    async def story(loop: StillLoop, legs: list[Leg], transport: Transport) -> None:
        for leg in legs[:2]:
            leg.data(b"token")
        await rounds(1)
        assert [write.count(b"token") for write in transport.writes] == [2]

    play(story)


def test_a_burst_does_not_wait_longer_than_it_may() -> None:
    async def story(loop: StillLoop, legs: list[Leg], transport: Transport) -> None:
        for number in range(0, 16, 4):
            for leg in legs[number : number + 4]:
                leg.data(b"token")
            if number == 8:
                loop.now += BURST_S
            await rounds(1)
        assert [write.count(b"token") for write in transport.writes] == [12]
        await rounds(2)
        assert [write.count(b"token") for write in transport.writes] == [12, 4]

    play(story)


def test_a_burst_does_not_grow_beyond_what_is_worth_a_write() -> None:
    async def story(loop: StillLoop, legs: list[Leg], transport: Transport) -> None:
        for _ in range(8):
            legs[0].data(b"x" * (HOLD_BYTES // 8))
        await rounds(1)
        assert len(transport.writes) == 1 and len(transport.writes[0]) > HOLD_BYTES

    play(story)
