"""A heartbeat is heard in silence, stands between whole lines only, and hides nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from config.model import Config, Llm
from headrace.lab.ca import ThrowAwayCa
from proxy.heartbeat import COMMENT, PING, Gaps, takes_heartbeats
from proxy.messages import Abort, Cause, Fields, Party, RequestHead, ResponseHead, Stage
from tests.peers.services import Exchange
from tests.proxy.matrix import PAIRS, VERSIONS, Heard, Matrix, matrix

SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]
LOST = Abort(Party.EDGE, Stage.BODY, Cause.LOST, "test")


@pytest.mark.parametrize(
    ("passed", "openai", "anthropic"),
    [
        ([], COMMENT, PING),
        ([b"data: x\n\n"], COMMENT, PING),
        ([b"data: x\r\n\r\n"], COMMENT, PING),
        ([b"data: x\r", b"\n\r", b"\n"], COMMENT, PING),
        ([b"data: x\n"], COMMENT, COMMENT),
        ([b"data: x\r\n"], COMMENT, COMMENT),
        ([b"data: x\n", b"\n"], COMMENT, PING),
        ([b"data: x\r"], b"", b""),
        ([b"data: x\r\n\r"], b"", b""),
        ([b'data: {"a'], b"", b""),
        ([b"data: x\n\n", b"d"], b"", b""),
    ],
)
def test_only_between_whole_lines_and_an_event_only_between_events(
    passed: list[bytes], openai: bytes, anthropic: bytes
) -> None:
    gaps = Gaps()
    for chunk in passed:
        gaps.passed(chunk)
    assert (gaps.heartbeat("openai"), gaps.heartbeat("anthropic")) == (openai, anthropic)


@pytest.mark.parametrize(
    ("status", "fields", "length", "no_body", "takes"),
    [
        (200, SSE, None, False, True),
        (200, [*SSE, (b"content-encoding", b"identity")], None, False, True),
        (200, [*SSE, (b"content-encoding", b"gzip")], None, False, False),
        (200, SSE, 100, False, False),
        (200, SSE, None, True, False),
        (200, [(b"content-type", b"application/json")], None, False, False),
        (200, [], None, False, False),
    ],
)
def test_only_event_streams_without_length_and_coding_take_them(
    status: int, fields: Fields, length: int | None, no_body: bool, takes: bool
) -> None:
    assert takes_heartbeats(ResponseHead(status, fields, length, no_body)) is takes


async def asked(made: Matrix, down: str, up: str, target: bytes = b"/v1/chat/completions") -> tuple[Heard, Exchange]:
    """A request through pools that have a heartbeat, arrived at the edge."""
    llm = Llm(heartbeat_s=0.1)
    pools = tuple(dataclasses.replace(made.edges.pool(version).config, llm=llm) for version in VERSIONS)
    made.edges.apply(pools)
    made.gateway.apply(Config(state_dir=Path("/nonexistent"), pools=pools))
    client = await made.client(down)
    leg, heard = made.ask(client, up, RequestHead(b"POST", target, b"", b"", [], length=0))
    leg.end()
    return heard, await made.origin.arrived()


@pytest.mark.parametrize(("down", "up"), PAIRS, ids=[f"{down}-{up}" for down, up in PAIRS])
async def test_silence_is_filled_and_the_events_are_whole(down: str, up: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        heard, exchange = await asked(made, down, up)
        exchange.leg.head(ResponseHead(200, list(SSE)))
        await heard.until_bytes(2 * len(COMMENT))
        assert bytes(heard.body).replace(COMMENT, b"") == b""
        exchange.leg.data(b"id: 1\ndata: {}\n\n")
        await heard.until_bytes(len(heard.body) + 16 + 2 * len(COMMENT))
        exchange.leg.end()
        await heard.until("end")
        assert bytes(heard.body).replace(COMMENT, b"") == b"id: 1\ndata: {}\n\n"


async def test_nothing_is_put_into_a_line_that_waits_for_its_end(ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        heard, exchange = await asked(made, "h1", "h1")
        other, beside = await asked(made, "h2", "h2")
        exchange.leg.head(ResponseHead(200, list(SSE)))
        exchange.leg.data(b'data: {"a')
        await heard.until_bytes(9)
        beside.leg.head(ResponseHead(200, list(SSE)))
        await other.until_bytes(3 * len(COMMENT))  # meanwhile the first one had time for as many
        exchange.leg.data(b'": 1}\n\n')
        exchange.leg.end()
        await heard.until("end")
        assert b'data: {"a": 1}\n\n' in bytes(heard.body)


@pytest.mark.parametrize("down", VERSIONS)
async def test_a_stream_that_fails_ends_as_ever(down: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        heard, exchange = await asked(made, down, "h1", b"/v1/messages")
        exchange.leg.head(ResponseHead(200, list(SSE)))
        await heard.until_bytes(len(PING))
        assert bytes(heard.body).replace(PING, b"") == b""
        exchange.leg.abort(LOST)
        await heard.until("abort")
        assert "end" not in heard.words


async def test_no_heartbeat_before_the_edges_head_nor_in_other_answers(ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        heard, exchange = await asked(made, "h1", "h1")
        other, busy = await asked(made, "h2", "h2")
        exchange.leg.head(ResponseHead(200, [(b"content-type", b"application/json")]))
        await heard.until("head")
        busy.leg.head(ResponseHead(200, list(SSE)))
        await other.until_bytes(3 * len(COMMENT))  # meanwhile the first one had time for as many
        assert heard.body == b""
