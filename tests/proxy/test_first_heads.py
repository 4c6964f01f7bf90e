"""A client that makes a connection for each request is known by the heads of its last ones, and no secret stays for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from proxy.io.first_heads import CLIENTS, FirstHeads
from proxy.io.rims import Origin
from proxy.messages import RequestHead
from tests.patience import no_hang
from tests.peers.services import ByHand
from tests.proxy.test_express import OK, Stage, ask, stage


async def once(s: Stage, message: bytes, body: bytes) -> bytes:
    """One request on a connection of its own, and what was heard."""
    await s.connect()
    s.writer.write(message)
    async with no_hang():
        while not s.at_origin:
            await s.accepted.wait()
        head = await s.origin[0].readuntil(b"\r\n\r\n")
        s.asked += head + await s.origin[0].readexactly(len(body))
        s.say(OK)
        heard = await s.reader.readuntil(b"\r\n\r\n") + await s.reader.readexactly(2)
    s.writer.close()
    return heard


BODY = b'{"n": 1}'


async def test_the_third_connection_takes_the_short_way_and_is_told_the_same() -> None:
    async with stage(short=True) as s:
        heads = []
        for _ in range(4):
            heard = await once(s, ask(BODY), BODY)
            heads.append(heard.split(b"\r\nserver-timing:")[0])
        assert s.gateway.lane.taken == 2
        assert len(set(heads)) == 1
        first, *others = s.asked.split(BODY)[:-1]
        assert all(other == first for other in others)
        assert [record.whole().status for record in s.records] == [200] * 4


async def test_another_length_is_the_same_head_and_another_field_is_not() -> None:
    async with stage(short=True) as s:
        for body in (BODY, BODY, BODY * 9):
            await once(s, ask(body), body)
        assert s.gateway.lane.taken == 1
        assert await once(s, ask(BODY).replace(b"X-One: 1", b"X-One: 2"), BODY)
        assert s.gateway.lane.taken == 1
        assert b"x-one: 2" in s.asked.lower()


async def test_a_head_that_asks_to_close_is_not_remembered() -> None:
    async with stage(short=True) as s:
        closing = ask(BODY).replace(b"X-One: 1", b"Connection: close")
        for _ in range(4):
            assert b"connection: close" in (await once(s, closing, BODY)).lower()
        assert s.gateway.lane.taken == 0


async def test_a_new_configuration_makes_known_heads_anew() -> None:
    async with stage(short=True) as s:
        for _ in range(3):
            await once(s, ask(BODY), BODY)
        s.gateway.lane.close()
        s.gateway.lane = type(s.gateway.lane)(s.gateway.relay)
        for _ in range(3):
            await once(s, ask(BODY), BODY)
        assert s.gateway.lane.taken == 2  # the first of them made it known again


ORIGIN = Origin("192.0.2.1", 1, "http://x", b"http", "h1")
HEAD = RequestHead(b"GET", b"/", b"http", b"pool.localhost", [])
RAW = b"GET / HTTP/1.1\r\nHost: pool.localhost\r\nAuthorization: Bearer s\r\n\r\n"


async def test_what_is_remembered_is_for_its_address_and_ends_with_its_listener() -> None:
    async with stage(short=True) as s:
        await s.connect()
        firsts = FirstHeads()
        for _ in range(2):
            assert firsts.recall(ORIGIN) is None
            firsts.note(RAW, HEAD, ORIGIN, s.gateway)
        assert firsts.recall(ORIGIN) is not None
        assert firsts.recall(replace(ORIGIN, peer="192.0.2.2")) is None
        firsts.forget()
        assert firsts.recall(ORIGIN) is None


async def test_few_addresses_are_remembered() -> None:
    async with stage(short=True) as s:
        await s.connect()
        firsts = FirstHeads()
        for number in range(3 * CLIENTS):
            firsts.note(RAW, HEAD, replace(ORIGIN, peer=f"192.0.2.{number}"), s.gateway)
            assert len(firsts._heads) <= CLIENTS
        firsts.forget()


async def test_all_of_it_is_forgotten_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    due: list[tuple[float, Callable[[], None]]] = []
    monkeypatch.setattr(loop, "call_later", lambda delay, what: due.append((delay, what)) or loop.call_at(1e12, what))
    firsts = FirstHeads()
    firsts.note(RAW, HEAD, ORIGIN, ByHand())
    (delay, forget), *_ = due
    assert 0 < delay <= 60
    forget()
    assert not firsts._heads
