"""An Upgrade to a protocol that nobody here knows: tunnelled over h1, ignored where the edge has none."""

from __future__ import annotations

import pytest

from headrace.lab.ca import ThrowAwayCa
from proxy.messages import RequestHead, ResponseHead
from tests.proxy.matrix import VERSIONS, matrix


@pytest.mark.parametrize("up", VERSIONS)
async def test_an_unknown_protocol_is_switched_to_or_ignored(up: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        client = await made.client("h1")
        head = RequestHead(b"GET", b"/x", b"", b"", [], length=0, protocol=b"foo/2.1")
        leg, heard = made.ask(client, up, head)
        exchange = await made.origin.arrived()
        if up != "h1":
            assert exchange.head.protocol == b""
            exchange.answer(b"plain")
            await heard.until("end")
            assert heard.body == b"plain"
            return
        assert exchange.head.protocol == b"foo/2.1"
        exchange.leg.head(ResponseHead(101, [(b"upgrade", b"foo/2.1")]))
        await heard.until("head")
        leg.data(b"to the edge")
        leg.end()
        await exchange.until("end")
        assert exchange.body == b"to the edge"
        exchange.leg.data(b"and back")
        exchange.leg.end()
        await heard.until("end")
        assert heard.body == b"and back"
