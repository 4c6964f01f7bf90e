"""What an edge of HTTP/1.1 may say, byte by byte, and what clients of each version make of it through us.

After each answer an innocent request on what connections are left must get its own answer: no byte of the one before.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from config.model import Config, Edge, Pool, Probe, Timeouts
from headrace.lab.ca import ThrowAwayCa
from proxy.messages import RequestHead
from tests.patience import HANG_S
from tests.peers.heard import Heard
from tests.proxy.matrix import VERSIONS, Matrix, matrix

OK = b"HTTP/1.1 200 OK\r\n"
INNOCENT = OK + b"content-length: 3\r\n\r\ntwo"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
RESET_ON_CLOSE = struct.pack("ii", 1, 0)

# What has one right reading: status, body.
READ = {
    "both framings": (b"GET", OK + b"content-length: 50\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n", 200, b"hi"),
    "equal lengths": (b"GET", OK + b"content-length: 2, 2\r\ncontent-length: 2\r\n\r\nhi", 200, b"hi"),
    "204 with a length": (b"GET", b"HTTP/1.1 204 None\r\ncontent-length: 5\r\n\r\nhello", 204, b""),
    "204 in chunks": (b"GET", b"HTTP/1.1 204 None\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 204, b""),
    "304 with a length": (b"GET", b"HTTP/1.1 304 Same\r\ncontent-length: 5\r\n\r\n", 304, b""),
    "HEAD with a length": (b"HEAD", OK + b"content-length: 100\r\n\r\n", 200, b""),
    "HEAD in chunks": (b"HEAD", OK + b"transfer-encoding: chunked\r\n\r\n", 200, b""),
    "chunk extensions": (b"GET", CHUNKED + b'2;a="b\\"c"\r\nhi\r\n0;x\r\n\r\n', 200, b"hi"),
    "no reason": (b"GET", b"HTTP/1.1 200\r\ncontent-length: 2\r\n\r\nhi", 200, b"hi"),
    "a second answer": (b"GET", OK + b"content-length: 2\r\n\r\nhi" + OK + b"content-length: 4\r\n\r\nEVIL", 200, b"hi"),
    "100 that nobody waits for": (b"GET", b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"content-length: 2\r\n\r\nhi", 200, b"hi"),
    "mixed case": (b"GET", OK + b"X-A: 1\r\nContent-LENGTH: 2\r\n\r\nhi", 200, b"hi"),
}  # fmt: skip
# What has none: 502, and nothing of it reaches the client.
REFUSED = {
    "two lengths": OK + b"content-length: 2\r\ncontent-length: 3\r\n\r\nhi!",
    "negative length": OK + b"content-length: -2\r\n\r\nhi",
    "signed length": OK + b"content-length: +2\r\n\r\nhi",
    "length of 20 digits": OK + b"content-length: 99999999999999999999\r\n\r\nhi",
    "another coding": OK + b"transfer-encoding: gzip, chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
    "identity": OK + b"transfer-encoding: identity\r\ncontent-length: 2\r\n\r\nhi",
    "folded line": OK + b"x-a: 1\r\n 2\r\ncontent-length: 0\r\n\r\n",
    "NUL": OK + b"x-a: a\0b\r\ncontent-length: 0\r\n\r\n",
    "bare CR": OK + b"x-a: a\rb\r\ncontent-length: 0\r\n\r\n",
    "bare LF": b"HTTP/1.1 200 OK\nx-a: a\ncontent-length: 0\n\n",
    "space before the colon": OK + b"x-a : 1\r\ncontent-length: 0\r\n\r\n",
    "no name": OK + b": 1\r\ncontent-length: 0\r\n\r\n",
    "length nominated": OK + b"connection: content-length\r\ncontent-length: 2\r\n\r\nhi",
    "101 unasked": b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\nhi",
    "status 99": b"HTTP/1.1 099 X\r\ncontent-length: 0\r\n\r\n",
    "status 600": b"HTTP/1.1 600 X\r\ncontent-length: 0\r\n\r\n",
    "HTTP/2.0": b"HTTP/2.0 200 OK\r\ncontent-length: 0\r\n\r\n",
    "a flood of 103": b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" * 2000,
    "an endless head": OK + b"x-a: " + b"a" * 300_000,
}  # fmt: skip
# What is found wrong when the head has left: never a clean end.
CUT = {
    "a length too large": CHUNKED + b"fffffffffffffffff\r\nhi",
    "a negative chunk": CHUNKED + b"-2\r\nhi\r\n",
    "chunks by bare LF": CHUNKED + b"2\nhi\n0\n\n",
    "a pseudo-field in trailers": CHUNKED + b"2\r\nhi\r\n0\r\n:status: 200\r\n\r\n",
    "fewer bytes than said": OK + b"content-length: 50\r\n\r\nhi",
    "no last chunk": CHUNKED + b"2\r\nhi\r\n",
}
WHOLE_BUT_LEAVING = frozenset({"fewer bytes than said", "no last chunk"})


@dataclass
class RawEdge:
    """Answers each request with the bytes in `script`; then it is silent, or gone: by FIN or by RST."""

    script: bytes = INNOCENT
    then: str = "stays"
    asked: int = 0
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                self.asked += 1
                writer.write(self.script)
                if self.then == "RST":
                    sock = writer.get_extra_info("socket")
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                if self.then != "stays":
                    writer.close()
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


@asynccontextmanager
async def before_raw_edge(ca: ThrowAwayCa) -> AsyncIterator[tuple[Matrix, RawEdge]]:
    raw = RawEdge()
    server = await asyncio.start_server(raw.serve, "127.0.0.1", 0)
    async with matrix(ca) as made:
        edge = Edge("raw", "http", "localhost", server.sockets[0].getsockname()[1], addresses=("127.0.0.1",))
        pool = Pool("raw", (edge,), hosts=("raw.localhost",), keep_warm=0, probe=Probe(), timeouts=Timeouts())
        made.edges.apply((pool,))
        made.gateway.apply(Config(state_dir=Path("/nonexistent"), pools=(pool,)))
        try:
            yield made, raw
        finally:
            server.close()
            for writer in raw.writers:
                writer.transport.abort()


async def asked(made: Matrix, down: str, method: bytes = b"GET") -> Heard:
    """What a client hears until its exchange is over."""
    leg, heard = made.ask(await made.client(down), "raw", RequestHead(method, b"/x", b"", b"", [], 0))
    leg.end()
    async with asyncio.timeout(HANG_S):
        while not {"end", "abort"} & set(heard.words):
            heard.changed.clear()
            await heard.changed.wait()
    return heard


def status_of(heard: Heard) -> int:
    return next((value.status for word, value in heard.heard if word == "head"), 0)


async def the_next_is_in_step(made: Matrix, raw: RawEdge, down: str) -> None:
    raw.script, raw.then = INNOCENT, "stays"
    heard = await asked(made, down)
    assert (status_of(heard), heard.body, heard.words[-1]) == (200, b"two", "end")


@pytest.mark.parametrize("down", VERSIONS)
@pytest.mark.parametrize("what", READ)
async def test_an_answer_with_one_right_reading_is_read_so(what: str, down: str, ca: ThrowAwayCa) -> None:
    async with before_raw_edge(ca) as (made, raw):
        method, raw.script, status, body = READ[what]
        heard = await asked(made, down, method)
        assert (status_of(heard), heard.body, heard.words[-1]) == (status, body, "end")
        head = next(value for word, value in heard.heard if word == "head")
        if status == 204:
            assert head.get(b"content-length") is None
        await the_next_is_in_step(made, raw, down)


@pytest.mark.parametrize("down", VERSIONS)
@pytest.mark.parametrize("what", REFUSED)
async def test_an_answer_with_no_right_reading_is_502_and_nothing_of_it(what: str, down: str, ca: ThrowAwayCa) -> None:
    async with before_raw_edge(ca) as (made, raw):
        raw.script = REFUSED[what]
        heard = await asked(made, down)
        assert (status_of(heard), heard.words[-1]) == (502, "end")
        assert b"edge_broke_protocol" in heard.body
        assert heard.words.count("interim") <= 64
        assert raw.asked == 1
        await the_next_is_in_step(made, raw, down)


@pytest.mark.parametrize("down", VERSIONS)
@pytest.mark.parametrize("what", CUT)
async def test_an_answer_that_breaks_off_or_breaks_a_rule_never_ends_cleanly(
    what: str, down: str, ca: ThrowAwayCa
) -> None:
    async with before_raw_edge(ca) as (made, raw):
        raw.script, raw.then = CUT[what], "FIN" if what in WHOLE_BUT_LEAVING else "stays"
        heard = await asked(made, down)
        assert heard.words[-1] == "abort"
        assert heard.body in (b"", b"hi")
        await the_next_is_in_step(made, raw, down)


@pytest.mark.parametrize("down", VERSIONS)
async def test_trailers_that_would_change_the_message_stay_here(down: str, ca: ThrowAwayCa) -> None:
    async with before_raw_edge(ca) as (made, raw):
        trailers = b"content-length: 5\r\ntransfer-encoding: chunked\r\nhost: x\r\nconnection: close\r\nx-t: 1\r\n"
        raw.script = CHUNKED + b"2\r\nhi\r\n0\r\n" + trailers + b"\r\n"
        heard = await asked(made, down)
        assert heard.words[-1] == "end"
        assert [value for word, value in heard.heard if word == "trailers"] == [[(b"x-t", b"1")]]
        await the_next_is_in_step(made, raw, down)


@pytest.mark.parametrize("then", ["FIN", "RST"])
@pytest.mark.parametrize("down", VERSIONS)
async def test_a_post_is_not_asked_again_after_interim_answers(down: str, then: str, ca: ThrowAwayCa) -> None:
    async with before_raw_edge(ca) as (made, raw):
        await the_next_is_in_step(made, raw, down)  # the connection is a reused one from here on
        raw.script, raw.then, raw.asked = b"HTTP/1.1 103 Early Hints\r\n\r\n", then, 0
        heard = await asked(made, down, b"POST")
        assert (status_of(heard), heard.words[-1]) == (502, "end")
        assert raw.asked == 1
        await the_next_is_in_step(made, raw, down)
