"""A slice of bench/fuzz_rims.py, the same every time: no conversation makes a rim raise, hang on to an exchange or dawdle.

HEADRACE_FUZZ_SECONDS=600 makes the run of each rim that long, from another seed each time.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable

import pytest

from bench.fuzz_rims import Case, fuzz, rims
from bench.fuzz_way import BothWays
from bench.rim_mutations import LARGE, Mutator, reads
from bench.rim_seeds import H1_REQUESTS
from bench.rim_stage import Transport, Watched, held_bytes
from proxy.io.inbound_h1 import H1ServerConnection
from proxy.io.outbound_h1 import H1EdgeConnection
from proxy.io.rims import Limits, Origin
from proxy.messages import Abort, Cause, Party, RequestHead, ResponseHead, Stage
from tests.peers.fakeleg import FakeLeg
from tests.peers.services import ByHand

LONG_S = float(os.environ.get("HEADRACE_FUZZ_SECONDS", "0"))
SLICES = {"h3 server": 800, "h3 client": 1000, "both ways": 500}
PER_RIM = 2000


@pytest.mark.timeout(LONG_S + 120)
@pytest.mark.parametrize("rim", list(rims()))
async def test_mutated_conversations_end_as_they_must(rim: str) -> None:
    if LONG_S:
        row = await fuzz(rim, 1 << 40, random.SystemRandom().randrange(1 << 32), until=time.monotonic() + LONG_S)
        assert row["cases"]
        return
    wanted = SLICES.get(rim, PER_RIM)
    row = await fuzz(rim, wanted, 7)
    assert row["cases"] == wanted


async def test_the_slice_of_both_ways_does_take_the_short_way() -> None:
    both = BothWays()
    for number in range(20):
        await both(random.Random(number))
    assert both.took_short_way >= 20


async def test_a_rim_that_raises_or_dawdles_is_reported_with_its_case() -> None:
    def made(case: Case) -> dict[str, Callable[[], Case]]:
        return {"it": lambda: case}

    async def raises(dice: random.Random) -> None:
        raise RuntimeError("seen")

    async def raises_later(dice: random.Random) -> None:
        asyncio.get_running_loop().call_soon(lambda: [][0])
        await asyncio.sleep(0)

    async def dawdles(dice: random.Random) -> None:
        begin = time.thread_time()
        while time.thread_time() - begin < 0.06:
            pass

    for case, said in ((raises, "seed 5, case 0: RuntimeError: seen"), (raises_later, "IndexError"), (dawdles, " ms")):
        with pytest.raises(AssertionError, match=said):
            await fuzz("it", 1, 5, known=made(case))


def test_a_case_is_the_same_each_time() -> None:
    mutator = Mutator(H1_REQUESTS)

    def drawn(number: int) -> list[bytes]:
        dice = random.Random(f"7/{number}")
        return reads(dice, mutator.pieces(dice))

    first = [drawn(number) for number in range(300)]
    assert first == [drawn(number) for number in range(300)]
    assert any(len(b"".join(each)) > LARGE for each in first)


def test_reads_are_the_bytes_that_were_said() -> None:
    for number in range(300):
        dice = random.Random(number)
        pieces = dice.choice(H1_REQUESTS)
        assert b"".join(reads(dice, pieces)) == b"".join(pieces)


GET = RequestHead(b"GET", b"/", b"http", b"h", [])
LOST = Abort(Party.EDGE, Stage.BODY, Cause.LOST)


@pytest.mark.parametrize(
    "words", [["data"], ["head", "head"], ["head", "end", "end"], ["head", "end", "data"], ["abort", "end"], ["end"]]
)
def test_a_leg_that_breaks_its_contract_is_seen(words: list[str]) -> None:
    watched = Watched(FakeLeg(), GET, is_client=False)
    say = {
        "head": lambda: watched.on_head(ResponseHead(200, [])),
        "data": lambda: watched.on_data(b"x"),
        "end": watched.on_end,
        "abort": lambda: watched.on_abort(LOST),
    }
    for word in words[:-1]:
        say[word]()
    with pytest.raises(AssertionError):
        say[words[-1]]()


def test_an_exchange_is_over_when_neither_side_owes_anything() -> None:
    watched = Watched(FakeLeg(), GET, is_client=False)
    watched.on_head(ResponseHead(101, []))
    watched.on_end()
    assert not watched.over  # our half of the tunnel is open
    watched.on_abort(LOST)
    assert watched.over


async def test_what_a_connection_keeps_is_counted() -> None:
    connection = H1EdgeConnection()
    before = held_bytes(connection)
    leg = connection.open() if connection.room else None
    assert leg is None
    connection.idle_hint_s = 1.0
    connection._leg = [b"x" * 5000, {"a": bytearray(700)}]  # type: ignore[assignment]
    assert 5700 <= held_bytes(connection) - before < 5800


async def test_pipelined_bytes_beyond_a_head_stay_unread_until_the_answer_whoever_resumes() -> None:
    service = ByHand(Limits(max_header_bytes=100))
    rim = H1ServerConnection(service, Origin("192.0.2.1", 5, "http://127.0.0.1:1", b"http", "h1"))
    wire = Transport(rim)
    rim.connection_made(wire)
    rim.data_received(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n" + b"G" * 200)
    exchange = service.exchanges.get_nowait()
    exchange.leg.resume()
    assert not wire.reading
    exchange.answer()
    assert wire.reading
    wire.lose(None)
