"""Chunks that pass as they are: the client gets the same body, the record says the same, and every end is told as ever.

An odd spelling of a chunk's size tells the two ways apart: it passes where chunks pass, and is written anew elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from config.model import Timeouts
from proxy.sse import Observer
from proxy.waterfall import RequestRecord
from resolver.io.clock import now
from tests.patience import eventually, no_hang
from tests.proxy.test_express import Stage, ask, hard_reset, stage

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"


def event(word: str) -> bytes:
    return b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % word.encode()


def chunk(payload: bytes, zeros: int = 0, extension: bytes = b"") -> bytes:
    return b"0" * zeros + b"%X%b\r\n%b\r\n" % (len(payload), extension, payload)


class Stream:
    """One answer in progress. `sent` and `heard` grow together: each read of the gateway is one write of the origin."""

    def __init__(self, on: Stage) -> None:
        self.on = on
        self.heard = b""

    async def say(self, piece: bytes, *, until: bytes) -> bytes:
        """Write a piece; what the client heard of it, up to and with `until`."""
        self.on.say(piece)
        async with no_hang():
            heard = await self.on.reader.readuntil(until)
        self.heard += heard
        return heard

    async def begin(self) -> None:
        self.on.writer.write(ask())
        await self.on.arrived()
        await self.say(HEAD, until=b"\r\n\r\n")
        self.heard = b""
        for word in ("Hel", "lo"):  # from the third on a chunk of this length is known
            await self.say(chunk(event(word)), until=b"\n\n\r\n")
            await self.say(chunk(event(word), zeros=1), until=b"\n\n\r\n")

    async def record(self) -> RequestRecord:
        await self.on.recorded(1)
        return self.on.records[0].whole()


@asynccontextmanager
async def streaming(timeouts: Timeouts | None = None, clock: object = now) -> AsyncIterator[Stream]:
    async with stage(short=True, timeouts=timeouts, clock=clock) as on:  # type: ignore[arg-type]
        await on.connect()
        made = Stream(on)
        await made.begin()
        yield made


def payload_of(chunks: bytes) -> bytes:
    """The body of a well-formed chunked message."""
    body, rest = b"", chunks
    while rest:
        line, _, rest = rest.partition(b"\r\n")
        size = int(line.split(b";")[0], 16)
        assert rest[size : size + 2] == b"\r\n"
        body, rest = body + rest[:size], rest[size + 2 :]
    return body


async def test_a_lone_chunk_passes_as_it_is_spelt() -> None:
    async with streaming() as stream:
        said = chunk(event("abc"), zeros=1)
        assert await stream.say(said, until=b"\n\n\r\n") == said


PIECES = st.sampled_from([
    chunk(event("a")),
    chunk(event("abc"), zeros=1),
    chunk(event("a")) + chunk(event("bc")),
    chunk(event("a"), extension=b";why=not"),
    chunk(b": " + b"x" * 5000 + b"\n\n"),
    chunk(b'data: {"choices":[],"usage":{"prompt_tokens":3}}\n\n'),
    chunk(b"data: no JSON\n\n"),
    chunk(event("a")[:20]),
])  # fmt: skip


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(PIECES, max_size=12), st.lists(st.integers(1, 40), max_size=12))
def test_any_mixture_of_reads_is_relayed_and_counted_alike(pieces: list[bytes], cuts: list[int]) -> None:
    async def story() -> None:
        async with streaming() as stream:
            for piece, cut in zip(pieces, [*cuts, *[0] * len(pieces)], strict=False):
                for part in filter(None, (piece[:cut], piece[cut:])):
                    stream.on.say(part)
                    await asyncio.sleep(0.001)  # mostly a read of its own; the outcome is the same when it is not
            stream.on.say(LAST)
            async with no_hang():
                stream.heard += await stream.on.reader.readuntil(LAST)
            said = payload_of(b"".join(map(chunk, map(event, ("Hel", "Hel", "lo", "lo")))) + b"".join(pieces))
            assert payload_of(stream.heard.removesuffix(LAST)) == said
            record = await stream.record()
            oracle = Observer(lambda: 0.0)
            oracle.feed(said)
            assert (record.outcome, record.bytes_out, record.events) == ("ok", len(said), oracle.events)
            assert (record.usage, record.incomplete) == (oracle.usage, oracle.incomplete)

    asyncio.run(story())


async def test_what_looks_like_a_chunk_inside_of_one_is_payload() -> None:
    async with streaming() as stream:
        inner = chunk(event("abc"))
        await stream.say(inner, until=b"\n\n\r\n")
        whole = chunk(b"a: 1\n" + inner + b"b: 2\n")
        at = whole.index(inner)
        stream.heard = b""
        await stream.say(whole[:at], until=b"a: 1\n")
        await stream.say(inner, until=b"\n\n\r\n")
        await stream.say(whole[at + len(inner) :] + LAST, until=LAST)
        payload = payload_of(stream.heard.removesuffix(LAST))
        assert payload == b"a: 1\n" + inner + b"b: 2\n"


async def test_chunks_and_what_else_comes_leave_in_order() -> None:
    async with streaming() as stream:
        both = chunk(event("a")) + chunk(event("b"))
        stream.on.say(both)
        stream.on.say(chunk(event("c")))
        async with no_hang():
            for word in ("a", "b", "c"):
                assert event(word) in await stream.on.reader.readuntil(b"\n\n\r\n")


async def test_trailers_follow_the_chunks_that_passed_and_the_connection_serves_on() -> None:
    async with streaming() as stream:
        await stream.say(chunk(event("abc")), until=b"\n\n\r\n")
        assert await stream.say(b"0\r\nX-Sum: 1\r\n\r\n", until=b"x-sum: 1\r\n\r\n") == b"0\r\nx-sum: 1\r\n\r\n"
        await stream.on.exchange()
        assert len(stream.on.at_origin) == 1


@pytest.mark.parametrize("broken", [chunk(event("abc"))[:-2] + b"xx", b"zz\r\n", b"0\r\nBad Name: 1\r\n\r\n"])
async def test_a_broken_chunk_after_good_ones_cuts_the_answer(broken: bytes) -> None:
    async with streaming() as stream:
        await stream.say(chunk(event("abc")), until=b"\n\n\r\n")
        stream.on.say(broken)
        await stream.on.to_the_end()
        assert LAST not in stream.on.heard
        assert (await stream.record()).outcome == "edge broken rule"


async def test_an_edge_that_is_lost_between_chunks_cuts_the_answer() -> None:
    async with streaming() as stream:
        await stream.say(chunk(event("abc")), until=b"\n\n\r\n")
        hard_reset(stream.on.origin[1])
        await stream.on.to_the_end()
        assert LAST not in stream.on.heard
        record = await stream.record()
        assert (record.outcome, record.events) == ("edge lost", 5)


async def test_a_client_that_leaves_between_chunks_ends_the_edge_s_work() -> None:
    async with streaming() as stream:
        await stream.say(chunk(event("abc")), until=b"\n\n\r\n")
        hard_reset(stream.on.writer)
        await stream.on.left()
        assert stream.on.asked.endswith(b"<reset>")
        record = await stream.record()
        assert (record.outcome, record.bytes_out) == ("client cancelled", 4 * len(event("Hel")) - 2 + len(event("abc")))


async def test_a_client_that_does_not_read_stops_the_edge_and_loses_nothing() -> None:
    payload = event("x" * 4000)
    async with streaming() as stream:
        transport = stream.on.origin[1].transport
        stream.on.reader._transport.pause_reading()  # type: ignore[attr-defined]
        sent = 0
        while transport.get_write_buffer_size() < 1 << 20 and sent < 20_000:
            stream.on.say(chunk(payload))
            sent += 1
            if sent % 100 == 0:
                await asyncio.sleep(0.001)
        assert sent < 20_000  # 80 MB are more than all buffers between hold: somebody stopped
        stream.on.reader._transport.resume_reading()  # type: ignore[attr-defined]
        stream.on.say(LAST)
        async with no_hang():
            heard = b""
            while not heard.endswith(b"\r\n" + LAST):  # reads that cut a chunk are chunks of their own
                heard += await stream.on.reader.read(1 << 16)
        assert payload_of(heard.removesuffix(LAST)) == payload * sent
        assert (await stream.record()).outcome == "ok"


async def test_chunks_that_pass_keep_a_stream_from_being_overdue_and_silence_does_not() -> None:
    at = [now()]
    async with streaming(Timeouts(idle_s=100.0), lambda: at[0]) as stream:
        relay = stream.on.gateway.relay
        at[0] += 90
        await eventually(lambda: relay.now == at[0])
        await stream.say(chunk(event("abc")), until=b"\n\n\r\n")
        at[0] += 90
        await eventually(lambda: relay.now == at[0])
        await stream.say(chunk(event("abc")), until=b"\n\n\r\n")
        at[0] += 101
        await stream.on.to_the_end()
        record = await stream.record()
        assert (record.outcome, record.detail) == ("edge timed out", "edge sent nothing for timeouts.idle = 100 s")


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(PIECES, max_size=12))
def test_a_client_without_chunks_gets_the_payloads_alone(pieces: list[bytes]) -> None:
    async def story() -> None:
        async with stage(short=True) as on:
            await on.connect()
            on.writer.write(ask().replace(b"HTTP/1.1", b"HTTP/1.0"))
            await on.arrived()
            on.say(HEAD)
            said = b""
            async with no_hang():
                await on.reader.readuntil(b"\r\n\r\n")
                for piece in [chunk(event("Hel"))] * 3 + pieces:
                    on.say(piece)
                    said += payload_of(piece)
                    assert await on.reader.readexactly(len(payload_of(piece))) == payload_of(piece)
                on.say(LAST)
                assert await on.reader.read() == b""
            await on.recorded(1)
            record, oracle = on.records[0].whole(), Observer(lambda: 0.0)
            oracle.feed(said)
            assert (record.outcome, record.bytes_out, record.events) == ("ok", len(said), oracle.events)

    asyncio.run(story())
