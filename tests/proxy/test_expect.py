"""A client that waits for 100 hears it once: from the edge, or from us when the edge says nothing."""

from __future__ import annotations

import pytest

from headrace.lab.ca import ThrowAwayCa
from proxy.messages import RequestHead, ResponseHead
from tests.proxy.matrix import PAIRS, matrix

pytestmark = pytest.mark.parametrize(("down", "up"), PAIRS, ids=[f"{down}-{up}" for down, up in PAIRS])


def post() -> RequestHead:
    fields = [(b"expect", b"100-continue"), (b"content-length", b"4")]
    return RequestHead(b"POST", b"/x", b"", b"", fields, length=4, expect_continue=True)


async def test_an_edge_that_knows_no_expect_costs_no_wait(down: str, up: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        leg, heard = made.ask(await made.client(down), up, post())
        exchange = await made.origin.arrived()
        await heard.until("interim")  # nobody but us can have said it
        leg.data(b"body")
        leg.end()
        await exchange.until("end")
        exchange.leg.interim(ResponseHead(100, []))  # too late, and once is enough
        exchange.answer(b"ok")
        await heard.until("end")
        assert [value.status for word, value in heard.heard if word == "interim"] == [100]


async def test_a_client_that_did_not_wait_is_told_nothing(down: str, up: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        client = await made.client(down)
        leg, heard = made.ask(client, up, post())
        leg.data(b"body")
        leg.end()
        exchange = await made.origin.arrived()
        await exchange.until("end")
        # Another one waits meanwhile: when that was told, this one's time is over as well.
        _, waiting = made.ask(await made.client(down), up, post())
        await made.origin.arrived()
        await waiting.until("interim")
        exchange.answer(b"ok")
        await heard.until("end")
        assert "interim" not in heard.words
