"""A WebSocket from a client of any version to an HTTP/1.1 edge, and back (RFC 6455, 8441, 9220)."""

from __future__ import annotations

import asyncio

import pytest
from websockets.utils import accept_key

from headrace.lab.ca import ThrowAwayCa
from proxy.io.inbound_h1 import H1ClientLeg
from proxy.messages import RequestHead, ResponseHead
from tests.proxy.matrix import matrix


@pytest.mark.parametrize("down", ["h1", "h2"])  # our HTTP/3 client opens none; test_h3_inbound has another one's
async def test_a_websocket_of_any_client_version_reaches_an_http_1_1_edge(down: str, ca: ThrowAwayCa) -> None:
    async with matrix(ca) as made:
        client = await made.client(down)
        if down == "h2":
            async with asyncio.timeout(3):
                while not client.allows_websocket:  # type: ignore[attr-defined]
                    await asyncio.sleep(0.01)  # the server's SETTINGS are on their way
        for _ in range(2):  # the second one on the same connection, where there can be two
            fields = [(b"sec-websocket-version", b"13"), (b"sec-websocket-protocol", b"realtime")]
            head = RequestHead(b"GET", b"/v1/realtime", b"", b"", fields, length=0, protocol=b"websocket")
            leg, heard = made.ask(client, "h1", head)
            exchange = await made.origin.arrived()
            assert isinstance(exchange.leg, H1ClientLeg)
            assert exchange.head.protocol == b"websocket"
            key = exchange.head.get(b"sec-websocket-key")
            assert key is not None
            accept = accept_key(key.decode()).encode()
            answer = [
                (b"upgrade", b"websocket"),
                (b"sec-websocket-accept", accept),
                (b"sec-websocket-protocol", b"realtime"),
            ]
            exchange.leg.head(ResponseHead(101, answer))
            await heard.until("head")
            told = next(value for word, value in heard.heard if word == "head")
            assert told.status == 101
            assert told.get(b"sec-websocket-protocol") == b"realtime"
            text = b"\x81\x85\x01\x02\x03\x04" + bytes(
                a ^ b for a, b in zip(b"hello", b"\x01\x02\x03\x04\x01", strict=True)
            )
            leg.data(text)
            await exchange.until("data")
            assert exchange.body.endswith(text)
            exchange.leg.data(b"\x81\x02hi")
            await heard.until("data")
            assert heard.body == b"\x81\x02hi"
            if down == "h1":
                break
