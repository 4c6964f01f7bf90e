"""The outbound HTTP/2 rim over real sockets: nginx, hypercorn, and edges that go silent, leave or die."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import cast

import hypercorn.asyncio
import hypercorn.config
import uvloop

from headrace.lab.ca import ThrowAwayCa
from proxy import h2_frames as wire
from proxy.io.outbound_h2 import H2EdgeConnection
from proxy.messages import Abort, Cause, Leg, Party, RequestHead, Stage
from tests.patience import HANG_S, no_hang, soon
from tests.peers.heard import Heard
from tests.peers.nginx import needs_nginx, nginx
from tests.peers.ports import free_port, until_open
from tests.proxy.h2_wire import OK, Eyes, Seen, body, frame, headers, settings, word

CANCEL = Abort(Party.CLIENT, Stage.HEAD, Cause.CANCELLED)


def ask(
    connection: H2EdgeConnection, method: bytes = b"GET", target: bytes = b"/", **more: object
) -> tuple[Leg, Heard]:
    leg, heard = connection.open(), Heard()
    leg.receiver = heard
    leg.head(RequestHead(method, target, b"https", b"localhost", [], **more))  # type: ignore[arg-type]
    return leg, heard


def serving(folder: Path, ca: ThrowAwayCa, server: str = "") -> AbstractAsyncContextManager[int]:
    return nginx(folder, ca.cert_file, ca.key_file, server, h2=True)


async def get(connection: H2EdgeConnection, target: bytes = b"/") -> Heard:
    leg, heard = ask(connection, target=target)
    leg.end()
    await heard.until("end", "abort")
    return heard


@asynccontextmanager
async def dialled(port: int, ca: ThrowAwayCa) -> AsyncIterator[H2EdgeConnection]:
    loop = asyncio.get_running_loop()
    transport, connection = await loop.create_connection(
        H2EdgeConnection, "127.0.0.1", port, ssl=ca.client_context(["h2"]), server_hostname="localhost"
    )
    try:
        yield connection
    finally:
        transport.abort()
        await asyncio.sleep(0)


@needs_nginx
async def test_nginx_serves_small_and_large_answers_side_by_side(ca: ThrowAwayCa, tmp_path: Path) -> None:
    large = bytes(range(256)) * 40_000
    (tmp_path / "large").write_bytes(large)
    (tmp_path / "small").write_bytes(b"small")
    async with serving(tmp_path, ca) as port, dialled(port, ca) as edge:
        answers = await asyncio.gather(
            get(edge, b"/large"), *[get(edge, b"/small") for _ in range(20)], get(edge, b"/none")
        )
        assert answers[0].body == large
        assert all(answer.body == b"small" for answer in answers[1:-1])
        assert answers[-1].heard[0][1].status == 404
        assert edge.active == 0


@needs_nginx
async def test_a_paused_answer_stops_within_its_window(ca: ThrowAwayCa, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"x" * 10_000_000)
    async with serving(tmp_path, ca) as port, dialled(port, ca) as edge:
        leg, heard = ask(edge, target=b"/large")
        leg.pause()
        leg.end()
        await heard.until("data")
        await get(edge, b"/none")  # others are served meanwhile
        before = -1
        while before != len(heard.body):
            before = len(heard.body)
            await asyncio.sleep(0.1)
        assert before <= 2 * 1024 * 1024
        leg.resume()
        await heard.until("end")
        assert len(heard.body) == 10_000_000


@needs_nginx
async def test_an_upload_is_taken_as_fast_as_nginx_allows(ca: ThrowAwayCa, tmp_path: Path) -> None:
    async with serving(tmp_path, ca, "location /up { dav_methods PUT; create_full_put_path on; }") as port:
        async with dialled(port, ca) as edge:
            leg, heard = ask(edge, b"PUT", b"/up/file", length=None)
            chunk = bytes(range(256)) * 256
            for _ in range(100):
                leg.data(chunk)
                while heard.words.count("full") > heard.words.count("drained"):
                    heard.changed.clear()
                    await soon(heard.changed.wait())
            leg.end()
            await heard.until("end", "abort")
            assert heard.heard[-2][1].status == 201 or heard.words[-1] == "end"
        assert (tmp_path / "up" / "file").read_bytes() == chunk * 100
        assert "full" in heard.words


@needs_nginx
async def test_nginx_that_leaves_after_three_requests_is_left_with_nothing_lost(
    ca: ThrowAwayCa, tmp_path: Path
) -> None:
    (tmp_path / "small").write_bytes(b"small")
    async with serving(tmp_path, ca, "keepalive_requests 3;") as port, dialled(port, ca) as edge:
        changes = []
        edge.on_change = lambda: changes.append((edge.room, edge.closed))
        heard = [ask(edge, target=b"/small") for _ in range(8)]
        for leg, _ in heard:
            leg.end()
        for _, one in heard:
            await one.until("end", "abort")
        done = [one for _, one in heard if one.words[-1] == "end"]
        lost = [one.heard[-1][1] for _, one in heard if one.words[-1] == "abort"]
        assert len(done) >= 3 and all(one.body == b"small" for one in done)
        assert all(abort.unprocessed for abort in lost), lost
        assert edge.room == 0
        async with no_hang():
            while not edge.closed:
                await asyncio.sleep(0.01)
        assert changes[-1] == (0, True)


async def app(scope: dict[str, object], receive: Callable[..., object], send: Callable[..., object]) -> None:
    if scope["type"] != "http":
        return
    text = b""
    while True:
        message = await receive()  # type: ignore[misc]
        text += message.get("body", b"")
        if not message.get("more_body"):
            break
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-size", b"%d" % len(text))]})  # type: ignore[misc]
    for at in range(0, len(text), 50_000):
        await send({"type": "http.response.body", "body": text[at : at + 50_000], "more_body": True})  # type: ignore[misc]
    await send({"type": "http.response.body", "body": b""})  # type: ignore[misc]


async def test_hypercorn_echoes_on_many_streams(ca: ThrowAwayCa) -> None:
    config, port, stop = hypercorn.config.Config(), free_port(), asyncio.Event()
    config.bind = [f"127.0.0.1:{port}"]
    config.certfile, config.keyfile, config.errorlog = str(ca.cert_file), str(ca.key_file), None
    serving = asyncio.create_task(hypercorn.asyncio.serve(app, config, shutdown_trigger=stop.wait))  # type: ignore[arg-type]
    try:
        await until_open(port)
        async with dialled(port, ca) as edge:
            text = bytes(range(256)) * 1000
            heard = []
            for _ in range(10):
                leg, one = ask(edge, b"POST", length=len(text))
                leg.data(text)
                leg.end()
                heard.append(one)
            for one in heard:
                await one.until("end", "abort")
                assert one.body == text
            edge.close()
            assert edge.closed
    finally:
        stop.set()
        await serving


# ------------------------------------------------------------------------------------------------ an edge by hand


class Edge(asyncio.Protocol):
    """Accepts one connection and says what the test wants; it answers nothing by itself."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.writes = 0
        self.lost = asyncio.Event()
        self.changed = asyncio.Event()
        self._eyes = Eyes()
        self._preface = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, chunk: bytes) -> None:
        self.writes += 1
        missing = len(wire.PREFACE) - len(self._preface)
        self._preface += chunk[:missing]
        self.seen += self._eyes.read(chunk[missing:])
        self.changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()

    def say(self, *frames: bytes) -> None:
        self.transport.write(b"".join(frames))

    async def until(self, kind: str, timeout_s: float = HANG_S) -> Seen:
        async with asyncio.timeout(timeout_s):
            while True:
                for seen in self.seen:
                    if seen.kind == kind:
                        self.seen.remove(seen)
                        return seen
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def by_hand(**options: float) -> AsyncIterator[tuple[H2EdgeConnection, Edge]]:
    loop, edge = asyncio.get_running_loop(), Edge()
    server = await loop.create_server(lambda: edge, "127.0.0.1", 0)
    transport, connection = await loop.create_connection(
        lambda: H2EdgeConnection(**options),  # type: ignore[arg-type]
        *server.sockets[0].getsockname()[:2],
    )
    try:
        yield connection, edge
    finally:
        transport.abort()
        edge.transport.abort()
        server.close()
        await asyncio.sleep(0.01)


async def test_preface_settings_and_request_are_one_write() -> None:
    async with by_hand() as (connection, edge):
        leg, _ = ask(connection)
        leg.end()
        await edge.until("Headers")
        assert edge.writes == 1


async def test_a_silent_edge_with_work_is_pinged_and_then_given_up() -> None:
    async with by_hand(ping_after_s=0.1, dead_after_s=0.2) as (connection, edge):
        leg, heard = ask(connection)
        leg.end()
        await edge.until("Ping")
        await heard.until("abort")
        abort = heard.heard[-1][1]
        assert (abort.by, abort.cause, abort.unprocessed) == (Party.EDGE, Cause.LOST, False)
        await edge.lost.wait()
        assert connection.closed


async def test_an_edge_that_does_not_answer_a_ping_gets_nothing_new_until_it_is_heard_again() -> None:
    async with by_hand(ping_after_s=0.05, dead_after_s=5) as (connection, edge):
        edge.say(settings())
        leg, heard = ask(connection)
        leg.end()
        changed = asyncio.Event()
        connection.on_change = changed.set
        ping = await edge.until("Ping")
        assert connection.room > 0
        while connection.room:
            changed.clear()
            await soon(changed.wait())
        edge.say(frame(wire.PING, wire.ACK, 0, ping.value))
        while not connection.room:
            changed.clear()
            await soon(changed.wait())
        edge.say(headers(1, OK, end=True))
        await heard.until("end")


async def test_an_edge_that_is_silent_to_a_ping_is_given_up_when_nobody_waits_any_more() -> None:
    async with by_hand(ping_after_s=0.05, dead_after_s=0.3) as (connection, edge):
        leg, _ = ask(connection)
        leg.end()
        changed = asyncio.Event()
        connection.on_change = changed.set
        while connection.room:
            changed.clear()
            await soon(changed.wait())
        leg.abort(Abort(Party.CLIENT, Stage.HEAD, Cause.CANCELLED))
        await soon(edge.lost.wait())
        assert connection.closed


async def test_a_slow_edge_that_answers_pings_is_waited_for() -> None:
    async with by_hand(ping_after_s=0.05, dead_after_s=0.15) as (connection, edge):
        leg, heard = ask(connection)
        leg.end()
        edge.say(settings())
        for _ in range(5):
            ping = await edge.until("Ping")
            edge.say(frame(wire.PING, wire.ACK, 0, ping.value))
        edge.say(headers(1, OK, end=True))
        await heard.until("end")
        assert not connection.closed


async def test_an_idle_edge_is_not_pinged_however_long_it_says_nothing() -> None:
    async with by_hand(ping_after_s=0.05, dead_after_s=0.1) as (connection, edge):
        await asyncio.sleep(0.3)
        leg, _ = ask(connection)
        leg.end()
        await edge.until("Headers")
        assert not connection.closed
        assert not [seen for seen in edge.seen if seen.kind == "Ping"]


async def test_an_edge_that_dies_is_an_abort_for_each_and_one_last_change() -> None:
    async with by_hand() as (connection, edge):
        (first, answered), (second, waiting) = ask(connection), ask(connection)
        first.end()
        second.end()
        await edge.until("Headers")
        edge.say(settings(), headers(1, OK), body(1, b"half"))
        await answered.until("data")
        changes = []
        connection.on_change = lambda: changes.append(connection.closed)
        edge.transport.abort()
        await answered.until("abort")
        await waiting.until("abort")
        assert [one.heard[-1][1].stage for one in (answered, waiting)] == [Stage.BODY, Stage.HEAD]
        assert changes[-1] is True
        assert changes.count(True) == 1
        assert (connection.room, connection.active) == (0, 0)


async def test_a_cancel_reaches_the_edge_within_the_turn() -> None:
    async with by_hand() as (connection, edge):
        leg, _ = ask(connection)
        leg.end()
        await edge.until("Headers")
        leg.abort(CANCEL)
        assert (await edge.until("RstStream")).value == 8
        assert connection.active == 0


async def test_an_edge_that_does_not_read_fills_the_leg_and_drains_it() -> None:
    async with by_hand() as (connection, edge):
        leg, heard = ask(connection, b"POST", length=None)
        await edge.until("Headers")
        edge.say(settings(initial_window_size=1 << 30), frame(wire.WINDOW_UPDATE, 0, 0, word(1 << 30)))
        await edge.until("Settings")  # ours came with the head; the ACK comes when theirs was read
        await edge.until("Settings")
        edge.transport.pause_reading()
        while "full" not in heard.words:
            leg.data(b"x" * 65536)
            await asyncio.sleep(0)
            assert len(heard.words) < 2
        edge.transport.resume_reading()
        await heard.until("drained")


async def test_close_waits_for_what_is_in_progress() -> None:
    async with by_hand() as (connection, edge):
        leg, heard = ask(connection)
        leg.end()
        await edge.until("Headers")
        connection.close()
        assert (connection.room, connection.closed) == (0, False)
        edge.say(settings(), headers(1, OK), body(1, b"done", end=True))
        await heard.until("end")
        assert (await edge.until("GoAway")).value == 0
        await edge.lost.wait()
        assert connection.closed


async def test_goaway_gives_back_what_was_not_processed_and_finishes_the_rest() -> None:
    async with by_hand() as (connection, edge):
        (first, kept), (second, given_back) = ask(connection, b"POST"), ask(connection, b"POST")
        first.end()
        second.end()
        await edge.until("Headers")
        edge.say(settings(), frame(wire.GOAWAY, 0, 0, word(1) + word(0)))
        await given_back.until("abort")
        assert given_back.heard[-1][1].unprocessed
        edge.say(headers(1, OK), body(1, b"kept", end=True))
        await kept.until("end")
        await edge.lost.wait()


def test_requests_over_uvloop() -> None:
    async def main() -> bytes:
        async with by_hand() as (connection, edge):
            leg, heard = ask(connection)
            leg.end()
            await edge.until("Headers")
            edge.say(settings(), headers(1, OK), body(1, b"quick", end=True))
            await heard.until("end")
            return heard.body

    assert uvloop.run(main()) == b"quick"
