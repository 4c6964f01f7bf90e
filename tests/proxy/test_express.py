"""The short way and the ordinary way are one: whatever happens, both peers see the same bytes and the record says the same.

Each story is played twice on raw sockets: by a gateway that knows the head, which takes the short way as far as it goes, and
by one that never knows any. The ordinary way is the oracle.
"""

from __future__ import annotations

import asyncio
import gc
import random
import re
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from config.model import Config, Edge, Listen, Pool, Probe, Proxy, Secret, Timeouts
from proxy.health import State
from proxy.io.edges import EdgeSet
from proxy.io.gateway import Gateway
from proxy.io.inbound_tcp import listen_tcp
from proxy.io.relay import Relay
from proxy.limiter import Limiter
from proxy.messages import RequestHead
from proxy.waterfall import Finished, RequestRecord
from resolver.io.clock import now

ASK = (
    b"POST /v1/chat HTTP/1.1\r\nHost: %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\nX-One: 1\r\n\r\n%b"
)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
HANG_S = 30.0
ASKED = b'{"n": 12345}'


def ask(body: bytes = ASKED, host: bytes = b"pool.localhost") -> bytes:
    return ASK % (host, len(body), body)


class Stage:
    """A client, a gateway and an origin; the origin is answered by hand."""

    def __init__(self, gateway: Gateway, edges: EdgeSet, records: list[Finished], pool: Pool) -> None:
        self.gateway, self.edges, self.records, self.pool = gateway, edges, records, pool
        self.at_origin: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.accepted = asyncio.Event()
        self.port = 0
        self.asked = bytearray()
        self.heard = bytearray()

    async def connect(self) -> None:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)

    @property
    def origin(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return self.at_origin[-1]

    def say(self, answer: bytes) -> None:
        self.origin[1].write(answer)

    async def arrived(self, body: bytes = ASKED) -> None:
        """A whole request at the origin's newest connection."""
        async with asyncio.timeout(HANG_S):
            while not self.at_origin:
                await self.accepted.wait()
            head = await self.origin[0].readuntil(b"\r\n\r\n")
            self.asked += head + await self.origin[0].readexactly(len(body))

    async def answered(self, size: int) -> None:
        async with asyncio.timeout(HANG_S):
            self.heard += await self.reader.readuntil(b"\r\n\r\n")
            self.heard += await self.reader.readexactly(size)

    async def to_the_end(self) -> None:
        """Whatever comes until the gateway closes; a reset is noted as such."""
        async with asyncio.timeout(HANG_S):
            try:
                self.heard += await self.reader.read()
            except ConnectionResetError:
                self.heard += b"<reset>"

    async def left(self) -> None:
        """The gateway closed or reset its newest connection to the origin."""
        async with asyncio.timeout(HANG_S):
            try:
                self.asked += await self.origin[0].read()
            except ConnectionResetError:
                self.asked += b"<reset>"

    async def recorded(self, count: int) -> None:
        async with asyncio.timeout(HANG_S):
            while len(self.records) < count:
                await asyncio.sleep(0)

    async def exchange(self, body: bytes = ASKED) -> None:
        self.writer.write(ask(body))
        await self.arrived(body)
        self.say(OK)
        await self.answered(2)

    async def warm(self) -> None:
        """Three times the same head: the next one is known."""
        await self.connect()
        for _ in range(3):
            await self.exchange()
        self.asked.clear()
        self.heard.clear()
        self.records.clear()


class NoResolver:
    async def endpoints(self, host: str, port: int) -> None:
        raise AssertionError(f"looked up {host}")


class Unknowing(Gateway):
    """The ordinary way only."""

    def known(self, head: RequestHead, origin: object) -> None:
        return None


@asynccontextmanager
async def stage(
    *, short: bool, timeouts: Timeouts | None = None, clock: Callable[[], float] = now
) -> AsyncIterator[Stage]:
    records: list[Finished] = []
    edges = EdgeSet(resolver=NoResolver(), clock=clock, rng=random.Random(3))
    made_by = Gateway if short else Unknowing
    gateway = made_by(edges=edges, resolver=None, doh=None, clock=clock, record=records.append)  # type: ignore[arg-type]

    def on_origin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.at_origin.append((reader, writer))
        made.accepted.set()

    servers = [await asyncio.start_server(on_origin, "127.0.0.1", 0) for _ in "ef"]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    members = tuple(
        Edge(id=name, scheme="http", host="localhost", port=port, protocol="h1", addresses=("127.0.0.1",))
        for name, port in zip("ef", ports, strict=True)
    )
    pool = Pool(
        "p",
        members,
        hosts=("pool.localhost",),
        keep_warm=0,
        strategy="failover",
        probe=Probe(),
        timeouts=timeouts or Timeouts(),
    )
    made = Stage(gateway, edges, records, pool)
    gateway.apply(Config(state_dir=Path("/nonexistent"), pools=(pool,), proxy=Proxy()))
    edges.apply((pool,))
    listener = await listen_tcp(Listen("http", "127.0.0.1", 0), gateway, tls=None)
    made.port = listener.address[1]
    try:
        yield made
    finally:
        listener.close()
        gateway.abort_all()
        await edges.close()
        for server in servers:
            server.close()
        for _, writer in made.at_origin:
            writer.close()
        made.writer.close()
        for server in servers:
            await server.wait_closed()
        await asyncio.sleep(0)


Story = Callable[[Stage], Awaitable[None]]


def hard_reset(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def a_plain_answer(s: Stage) -> None:
    s.writer.write(ask())
    await s.arrived()
    s.say(
        b"HTTP/1.1 201 Made so\r\nX-Two: a\r\nx-two: b\r\nAlt-Svc: a\r\nContent-Length: 5\r\nKeep-Alive: timeout=9\r\n\r\nhello"
    )
    await s.answered(5)


async def an_answer_without_a_body(s: Stage) -> None:
    s.writer.write(ask())
    await s.arrived()
    s.say(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    await s.answered(0)


async def another_length(s: Stage) -> None:
    await s.exchange(b"x" * 3000)
    await s.exchange(b"")


async def a_cookie(s: Stage) -> None:
    for n in range(3):
        s.writer.write(ask())
        await s.arrived()
        s.say(b"HTTP/1.1 200 OK\r\nSet-Cookie: a=%d\r\nContent-Length: 2\r\n\r\nok" % n)
        await s.answered(2)


async def no_content(s: Stage) -> None:
    s.writer.write(ask())
    await s.arrived()
    s.say(b"HTTP/1.1 204 No Content\r\n\r\n")
    await s.answered(0)


async def an_answer_in_pieces(s: Stage) -> None:
    s.writer.write(ask())
    await s.arrived()
    for piece in (b"HTTP/1.1 200 O", b"K\r\nContent-Le", b"ngth: 5\r\n\r\nhe", b"llo"):
        s.say(piece)
        await s.origin[1].drain()
        await asyncio.sleep(0.005)
    await s.answered(5)


async def a_chunked_answer(s: Stage) -> None:
    s.writer.write(ask())
    await s.arrived()
    s.say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-Trailer: 1\r\n\r\n")
    async with asyncio.timeout(HANG_S):
        s.heard += await s.reader.readuntil(b"0\r\nx-trailer: 1\r\n\r\n")


async def an_event_stream(s: Stage) -> None:
    s.writer.write(ask())
    await s.arrived()
    body = b'data: {"usage":{"prompt_tokens":3,"completion_tokens":4}}\n\ndata: [DONE]\n\n'
    s.say(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    await s.answered(len(body))


async def interim_answers(s: Stage) -> None:
    s.writer.write(ask())
    await s.arrived()
    s.say(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + OK)
    await s.answered(0)
    await s.answered(2)


async def an_answer_that_closes(s: Stage) -> None:
    s.writer.write(ask())
    await s.arrived()
    s.say(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok")
    s.origin[1].close()
    await s.answered(2)


async def an_answer_that_ends_with_its_connection(s: Stage) -> None:
    s.writer.write(ask())
    await s.arrived()
    s.say(b"HTTP/1.0 200 OK\r\n\r\nall of it")
    s.origin[1].close()
    async with asyncio.timeout(HANG_S):
        s.heard += await s.reader.readuntil(b"all of it")


async def more_than_the_answer(s: Stage) -> None:
    s.writer.write(ask())
    await s.arrived()
    s.say(OK + b"HTTP/1.1 200 OK\r\n")
    await s.answered(2)
    await s.left()


async def a_broken_head(s: Stage) -> None:
    s.writer.write(ask())
    await s.arrived()
    s.say(b"HTTP/1.1 200 OK\r\nBad Name: 1\r\nContent-Length: 2\r\n\r\nok")
    await s.answered(0)


async def a_switch_that_nobody_asked_for(s: Stage) -> None:
    s.writer.write(ask())
    await s.arrived()
    s.say(b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n")
    await s.answered(0)


async def a_busy_edge(s: Stage) -> None:
    s.writer.write(ask())
    await s.arrived()
    s.say(b"HTTP/1.1 503 Busy\r\nRetry-After: 7\r\nx-should-retry: true\r\nContent-Length: 2\r\n\r\nno")
    await s.answered(2)


async def a_limit(s: Stage) -> None:
    s.writer.write(ask())
    await s.arrived()
    s.say(b"HTTP/1.1 429 Slow down\r\nretry-after-ms: 70\r\nContent-Length: 2\r\n\r\nno")
    await s.answered(2)
    edge = s.edges.pool("p").edges["e"]
    assert edge.state is not State.DOWN and edge.health.is_cooling


async def a_redirect_elsewhere(s: Stage) -> None:
    s.writer.write(ask())
    await s.arrived()
    s.say(b"HTTP/1.1 307 Go\r\nLocation: https://elsewhere.test/\r\nContent-Length: 0\r\n\r\n")
    await s.answered(0)


async def at_another_origin(s: Stage) -> None:
    before = len(s.at_origin)
    async with asyncio.timeout(HANG_S):
        while len(s.at_origin) == before:
            s.accepted.clear()
            await s.accepted.wait()


async def a_redirect_to_another_edge(s: Stage) -> None:
    """It is followed with method and body, as ever."""
    s.writer.write(ask())
    await s.arrived()
    port = s.pool.edges[1].port
    s.say(b"HTTP/1.1 307 Go\r\nLocation: http://localhost:%d/elsewhere\r\nContent-Length: 0\r\n\r\n" % port)
    await at_another_origin(s)
    await s.arrived()
    s.say(OK)
    await s.answered(2)
    assert b"POST /elsewhere HTTP/1.1\r\n" in s.asked


async def a_reload_of_the_edges_alone(s: Stage) -> None:
    """Between the two halves of a reload a request is sent by what its edge has now."""
    s.edges.apply((replace(s.pool, edges=(replace(s.pool.edges[0], base_path="/base"), s.pool.edges[1])),))
    await s.exchange()
    assert s.asked.startswith(b"POST /base/v1/chat ")


async def a_stale_connection(s: Stage) -> None:
    """The edge's FIN crosses the request: it is sent once more, on a fresh connection, and only once."""
    s.writer.write(ask())
    await s.arrived()
    s.origin[1].close()
    await at_another_origin(s)
    await s.arrived()
    s.say(OK)
    await s.answered(2)


async def an_edge_lost_in_its_answer(s: Stage) -> None:
    s.writer.write(ask())
    await s.arrived()
    s.say(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
    await s.origin[1].drain()
    s.origin[1].close()
    await s.to_the_end()


async def a_client_that_resets(s: Stage) -> None:
    s.writer.write(ask())
    await s.arrived()
    hard_reset(s.writer)
    await s.left()
    await s.recorded(1)


async def a_client_that_closes(s: Stage) -> None:
    s.writer.write(ask())
    await s.arrived()
    s.writer.close()
    await s.left()
    await s.recorded(1)


async def a_client_that_ends_its_direction(s: Stage) -> None:
    s.writer.write(ask())
    s.writer.write_eof()
    await s.arrived()
    await asyncio.sleep(0.05)  # longer than the look for who is left
    s.say(OK)
    await s.to_the_end()


async def requests_in_a_row(s: Stage) -> None:
    s.writer.write(ask())
    await s.arrived()
    s.writer.write(ask() + ask(b"third one"))
    await asyncio.sleep(0.005)
    s.say(OK)
    await s.answered(2)
    await s.arrived()
    s.say(OK)
    await s.answered(2)
    await s.arrived(b"third one")
    s.say(OK)
    await s.answered(2)


async def a_request_in_pieces(s: Stage) -> None:
    message = ask()
    for at in range(0, len(message), 50):
        s.writer.write(message[at : at + 50])
        await s.writer.drain()
        await asyncio.sleep(0.002)
    await s.arrived()
    s.say(OK)
    await s.answered(2)


async def a_silent_edge(s: Stage) -> None:
    s.writer.write(ask())
    await s.arrived()
    await s.answered(0)
    await s.left()


async def a_drain(s: Stage) -> None:
    s.writer.write(ask())
    await s.arrived()
    s.gateway.drain()
    s.say(OK)
    await s.to_the_end()


async def a_hard_stop(s: Stage) -> None:
    s.writer.write(ask())
    await s.arrived()
    s.gateway.abort_all()
    await s.to_the_end()
    await s.left()


async def a_reload_with_another_head(s: Stage) -> None:
    """What is configured for the edge now is what it gets, from the next request on."""
    edge = replace(s.pool.edges[0], headers={"x-added": Secret("new")}, base_path="/base")
    pool = replace(s.pool, edges=(edge, s.pool.edges[1]))
    s.edges.apply((pool,))
    s.gateway.apply(Config(state_dir=Path("/nonexistent"), pools=(pool,), proxy=Proxy()))
    for _ in range(4):
        await s.exchange()
    assert s.asked.count(b"x-added: new\r\n") == 4 and s.asked.count(b"POST /base/v1/chat ") == 4


async def a_reload_without_the_route(s: Stage) -> None:
    pool = replace(s.pool, hosts=("other.localhost",))
    s.edges.apply((pool,))
    s.gateway.apply(Config(state_dir=Path("/nonexistent"), pools=(pool,), proxy=Proxy()))
    s.writer.write(ask())
    await s.answered(0)


async def a_full_edge(s: Stage) -> None:
    for edge in s.edges.pool("p").edges.values():
        edge.limiter = Limiter(1)
    s.edges.pool("p").edges["f"].standing.full = True
    s.writer.write(ask())
    await s.arrived()
    other_reader, other = await asyncio.open_connection("127.0.0.1", s.port)
    other.write(ask())
    async with asyncio.timeout(HANG_S):
        s.heard += await other_reader.readuntil(b"\r\n\r\n")
    other.close()
    s.say(OK)
    await s.answered(2)


STORIES: list[tuple[Story, int]] = [
    # with how many requests take the short way, for its part, to the good end or to where it unfolds
    (a_plain_answer, 1),
    (an_answer_without_a_body, 1),
    (another_length, 2),
    (a_cookie, 3),
    (no_content, 1),
    (an_answer_in_pieces, 1),
    (a_chunked_answer, 1),
    (an_event_stream, 1),
    (interim_answers, 1),
    (an_answer_that_closes, 1),
    (an_answer_that_ends_with_its_connection, 1),
    (more_than_the_answer, 1),
    (a_broken_head, 1),
    (a_switch_that_nobody_asked_for, 1),
    (a_busy_edge, 1),
    (a_limit, 1),
    (a_redirect_elsewhere, 1),
    (a_redirect_to_another_edge, 1),
    (a_reload_of_the_edges_alone, 1),
    (a_stale_connection, 1),
    (an_edge_lost_in_its_answer, 1),
    (a_client_that_resets, 1),
    (a_client_that_closes, 1),
    (a_client_that_ends_its_direction, 1),
    (requests_in_a_row, 1),
    (a_request_in_pieces, 0),
    (a_silent_edge, 1),
    (a_drain, 1),
    (a_hard_stop, 1),
    (a_reload_with_another_head, 3),
    (a_reload_without_the_route, 0),
    (a_full_edge, 1),
]
TIMEOUTS = {a_silent_edge: Timeouts(first_byte_s=0.3)}
VOLATILE = re.compile(rb"(desc=\"[0-9a-f]+-[0-9a-f]+|dur=[0-9.]+|, (queue|upload|connect|resolve);dur=[0-9.]+)")


@dataclass
class Told:
    """What everybody saw of a story, without what differs from run to run."""

    heard: bytes
    asked: bytes
    records: list[dict[str, object]]
    inflight: int
    living: int


def told(s: Stage) -> Told:
    def plain(said: bytearray) -> bytes:
        text = VOLATILE.sub(b"", VOLATILE.sub(b"", bytes(said)))
        for edge in s.pool.edges:
            text = text.replace(b"localhost:%d" % edge.port, b"<%b>" % edge.id.encode())
        return text

    def fields(record: RequestRecord) -> dict[str, object]:
        return {k: v for k, v in vars(record).items() if k not in ("id", "started_at", "fall")}

    inflight = s.edges.pool("p").edges["e"].standing.inflight
    records = sorted((fields(r.whole()) for r in s.records), key=repr)
    return Told(plain(s.heard), plain(s.asked), records, inflight, s.gateway.active)


@pytest.mark.parametrize(("story", "short"), STORIES, ids=[story.__name__ for story, _ in STORIES])
async def test_both_ways_tell_the_same(story: Story, short: int) -> None:
    seen: dict[bool, Told] = {}
    taken: dict[bool, int] = {}
    for way in (False, True):
        async with stage(short=way, timeouts=TIMEOUTS.get(story)) as s:
            await s.warm()
            lane = s.gateway.lane
            await story(s)
            await s.recorded(0 if story is a_reload_without_the_route else 1)
            seen[way] = told(s)
            taken[way] = lane.taken + (s.gateway.lane.taken if s.gateway.lane is not lane else 0)
    assert seen[True] == seen[False]
    assert seen[True].inflight == seen[True].living == 0
    assert taken == {True: short, False: 0}


async def test_a_record_has_its_marks_in_order() -> None:
    async with stage(short=True) as s:
        await s.warm()
        began = now()
        await s.exchange()
        record = s.records[0].whole()
        fall = record.fall
        assert began <= fall.start == fall.opened == fall.sent <= fall.head == fall.first == fall.ended <= now()
        assert sum(record.parts.values()) == pytest.approx(record.wall_s)
        assert s.gateway.lane.taken == 1


async def test_a_head_that_differs_in_more_than_its_length_is_judged_anew() -> None:
    async with stage(short=True) as s:
        await s.warm()
        s.writer.write(ask(host=b"evil.test"))
        await s.answered(0)
        assert s.heard.startswith(b"HTTP/1.1 421 ")
        assert s.gateway.lane.taken == 0


async def test_a_record_holds_no_field_of_its_request() -> None:
    """Records outlive their connections by far; a key must not."""
    async with stage(short=True) as s:
        await s.warm()
        await s.exchange()
        seen, todo = set(), [s.records[0]]
        while todo:
            one = todo.pop()
            if id(one) in seen or isinstance(one, type | ModuleType | FunctionType | MethodType):
                continue
            seen.add(id(one))
            assert not isinstance(one, RequestHead)
            if not isinstance(one, Relay):
                todo += gc.get_referents(one)


async def test_many_requests_leave_nothing_behind() -> None:
    async with stage(short=True) as s:
        await s.warm()
        for n in range(200):
            await s.exchange(b"y" * n)
        edge = s.edges.pool("p").edges["e"]
        assert s.gateway.lane.taken == 200
        assert (s.gateway.active, edge.standing.inflight, edge.standing.waiting) == (0, 0, 0)
        assert edge.connections.counts.idle == 1 and edge.connections.counts.busy == 0
        assert len(s.at_origin) == 1


PIECES = [
    b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 103 X\r\n\r\n", b"HTTP/1.1 404 No\r\n", b"Content-Length: 3\r\n",
    b"Content-Length: 0\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n", b"X: \x00\r\n",
    b"Content-Type: text/event-stream\r\n", b"Set-Cookie: a=1\r\n", b"\r\n", b"abc", b"3\r\nabc\r\n", b"0\r\n\r\n",
    b"\n", b" ",
]  # fmt: skip
ANSWERS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=7)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ANSWERS, st.integers(0, 120))
def test_whatever_an_edge_says_both_ways_tell_the_same(pieces: list[bytes], split: int) -> None:
    answer = b"".join(pieces)

    async def story(s: Stage) -> None:
        s.writer.write(ask())
        await s.arrived()
        first = answer[:split]
        if first:
            s.say(first)
            await s.origin[1].drain()
            await asyncio.sleep(0.001)
        s.say(answer[split:])
        for _, writer in s.at_origin:
            writer.close()
        for edge in s.edges.pool("p").edges.values():
            edge.connections.retire()  # no second try: what it hears would be another story
        await s.recorded(1)
        s.writer.write_eof()
        await s.to_the_end()

    async def play(*, short: bool) -> Told:
        async with stage(short=short) as s:
            await s.warm()
            await story(s)
            return told(s)

    async def both() -> tuple[Told, Told]:
        return await play(short=True), await play(short=False)

    short, ordinary = cast(tuple[Told, Told], asyncio.run(both()))
    assert short == ordinary
