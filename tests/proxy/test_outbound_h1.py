"""HTTP/1.1 to edges, against a server that is told byte for byte what to say."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from websockets.utils import accept_key

from proxy.io.outbound_h1 import MAX_RESPONSE_HEAD, H1EdgeConnection
from proxy.messages import Abort, Cause, Party, RequestHead, Stage
from tests.patience import no_hang
from tests.peers.heard import Heard

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def edge(talk: Talk) -> AsyncIterator[H1EdgeConnection]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    transport, connection = await asyncio.get_running_loop().create_connection(H1EdgeConnection, "127.0.0.1", port)
    try:
        yield connection
    finally:
        transport.abort()
        server.close()
        await asyncio.sleep(0.01)  # the transports' last turns


def says(*pieces: bytes, then: str = "stay") -> Talk:
    """Read a head, say the pieces each in a write of its own, then stay, FIN or RST."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if then == "rst":
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        elif then == "fin":
            writer.close()
        else:
            await reader.read()

    return talk


def ask(connection: H1EdgeConnection, method: bytes = b"GET", protocol: bytes = b"") -> Heard:
    heard, leg = Heard(), connection.open()
    leg.receiver = heard
    leg.head(RequestHead(method, b"/", b"http", b"edge.test", [], length=0, protocol=protocol))
    if not protocol:
        leg.end()
    return heard


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


async def test_a_connection_is_used_again_after_a_whole_answer() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(OK)

    async with edge(talk) as connection:
        for i in range(3):
            assert connection.room == 1
            heard = ask(connection)
            assert connection.room == 0
            await heard.until("end")
            assert heard.body == b"ok"
            assert connection.active == 0, i


@pytest.mark.parametrize("split", [1, 3, 7])
async def test_any_split_of_an_answer_reads_the_same(split: int) -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
    raw = early + b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nx: y\r\n\r\n"
    async with edge(says(*(raw[i : i + split] for i in range(0, len(raw), split)))) as connection:
        heard = ask(connection)
        await heard.until("end")
        assert [word for word in heard.words if word != "data"] == ["interim", "head", "trailers", "end"]
        assert heard.body == b"abc"


BROKEN = {
    "garbage": b"SSH-2.0-OpenSSH\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 7\r\n\r\nhello",
    "bad chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    "unasked 101": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
    "endless head": b"HTTP/1.1 200 OK\r\nX: " + b"v" * (MAX_RESPONSE_HEAD + 1),
    "endless interims": b"HTTP/1.1 103 E\r\n\r\n" * 65,
}


@pytest.mark.parametrize("raw", BROKEN.values(), ids=BROKEN.keys())
async def test_an_edge_that_breaks_the_protocol_is_said_so(raw: bytes) -> None:
    async with edge(says(raw)) as connection:
        heard = ask(connection)
        await heard.until("abort")
        abort = heard.heard[-1][1]
        assert (abort.by, abort.cause) == (Party.EDGE, Cause.BROKEN)
        assert connection.room == 0


@pytest.mark.parametrize("then", ["fin", "rst"])
@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
    ],
)
async def test_a_cut_body_is_lost_never_ended(raw: bytes, then: str) -> None:
    async with edge(says(raw, then=then)) as connection:
        heard = ask(connection)
        await heard.until("abort")
        assert "end" not in heard.words
        assert heard.heard[-1][1].stage in (Stage.BODY, Stage.HEAD)


async def test_a_body_until_close_ends_by_fin() -> None:
    async with edge(says(b"HTTP/1.1 200 OK\r\n\r\nall of it", then="fin")) as connection:
        heard = ask(connection)
        await heard.until("end")
        assert heard.body == b"all of it"


async def test_a_body_until_close_is_lost_by_reset() -> None:
    async with edge(says(b"HTTP/1.1 200 OK\r\n\r\nall of it", then="rst")) as connection:
        heard = ask(connection)
        await heard.until("abort")
        assert "end" not in heard.words


@pytest.mark.parametrize("then", ["fin", "rst"])
async def test_a_connection_lost_before_the_head_says_stage_head(then: str) -> None:
    async with edge(says(then=then)) as connection:
        heard = ask(connection)
        await heard.until("abort")
        assert heard.heard[-1][1].stage is Stage.HEAD
        assert not heard.heard[-1][1].unprocessed


async def test_an_idle_connection_that_the_edge_closes_is_not_handed_out() -> None:
    gone = asyncio.Event()

    async with edge(says(OK, then="fin")) as connection:
        connection.on_change = lambda: gone.set() if connection.closed else None
        await ask(connection).until("end")
        async with no_hang():
            await gone.wait()
        assert connection.room == 0


async def test_bytes_that_nobody_asked_for_end_the_connection() -> None:
    async with edge(says(OK + b"HTTP/1.1 408 Request Timeout\r\n\r\n")) as connection:
        await ask(connection).until("end")
        assert connection.room == 0


async def test_abort_resets_so_that_the_edge_stops_at_once() -> None:
    seen: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            await reader.read()
            seen.set_result("fin")
        except ConnectionResetError:
            seen.set_result("rst")

    async with edge(talk) as connection:
        leg = connection.open()
        leg.head(RequestHead(b"GET", b"/", b"http", b"h", [], length=0))
        leg.end()
        await asyncio.sleep(0.02)  # the request leaves first
        leg.abort(Abort(Party.CLIENT, Stage.HEAD, Cause.CANCELLED))
        async with no_hang():
            assert await seen == "rst"
        assert connection.closed


async def test_close_waits_for_the_exchange_in_progress() -> None:
    go = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await go.wait()
        writer.write(OK)
        await reader.read()

    async with edge(talk) as connection:
        heard = ask(connection)
        connection.close()
        assert not connection.closed
        go.set()
        await heard.until("end")
        assert connection.closed


async def test_a_tunnel_has_two_ends() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\nhello")
        writer.write_eof()
        assert await reader.read() == b"still heard"

    async with edge(talk) as connection:
        heard, leg = Heard(), connection.open()
        leg.receiver = heard
        leg.head(
            RequestHead(b"GET", b"/", b"http", b"h", [(b"sec-websocket-key", b"k")], length=0, protocol=b"websocket")
        )
        await heard.until("end")
        assert heard.body == b"hello"
        assert next(value for word, value in heard.heard if word == "head").status == 101
        leg.data(b"still heard")
        leg.end()


async def test_a_refused_upgrade_leaves_the_connection_usable() -> None:
    async with edge(says(b"HTTP/1.1 426 Upgrade Required\r\nUpgrade: x\r\nContent-Length: 0\r\n\r\n")) as connection:
        heard = ask(connection, protocol=b"websocket")
        await heard.until("end")
        assert next(value for word, value in heard.heard if word == "head").get(b"upgrade") == b"x"
        assert connection.room == 1


@pytest.mark.parametrize("right", [True, False])
async def test_a_websocket_of_a_client_without_key_gets_one_and_its_answer_is_checked(right: bool) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        key = head.split(b"sec-websocket-key: ", 1)[1].split(b"\r\n", 1)[0].decode()
        accept = accept_key(key) if right else accept_key("another")
        lines = f"HTTP/1.1 101 X\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: {accept}\r\n\r\n"
        writer.write(lines.encode())
        await reader.read()

    async with edge(talk) as connection:
        heard = ask(connection, protocol=b"websocket")
        await heard.until("head" if right else "abort")
        assert ("head" in heard.words) is right


async def test_a_clients_own_key_passes_unchanged() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.count(b"sec-websocket-key: theirs\r\n") == 1
        writer.write(b"HTTP/1.1 101 X\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
        await reader.read()

    async with edge(talk) as connection:
        heard, leg = Heard(), connection.open()
        leg.receiver = heard
        fields = [(b"sec-websocket-key", b"theirs")]
        leg.head(RequestHead(b"GET", b"/", b"http", b"h", fields, length=0, protocol=b"websocket"))
        await heard.until("head")


async def test_bytes_after_an_early_answer_are_no_second_end() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 401 No\r\nContent-Length: 2\r\n\r\nno")
        await reader.readuntil(b"more")
        writer.write(b"stray")
        await reader.read()

    async with edge(talk) as connection:
        heard, leg = Heard(), connection.open()
        leg.receiver = heard
        leg.head(RequestHead(b"POST", b"/", b"http", b"h", [], length=None))
        await heard.until("end")
        leg.data(b"more")
        async with no_hang():
            while leg._keep_alive:
                await asyncio.sleep(0)
        leg.end()
        assert heard.words == ["head", "data", "end"]
        assert connection.closed  # out of step: it carries no other request
