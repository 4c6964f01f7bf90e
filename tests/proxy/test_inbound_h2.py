"""The inbound HTTP/2 rim over real sockets: curl, h2load, a client that writes frames, and what time does to it."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from config.model import Listen
from headrace.lab.ca import ThrowAwayCa
from proxy import h2_frames as wire
from proxy.h2_errors import Code
from proxy.io.inbound_tcp import listen_tcp
from proxy.io.rims import Limits
from proxy.messages import Cause, Party, ResponseHead
from tests.patience import HANG_S, no_hang, soon
from tests.peers.services import ByHand, Exchange
from tests.proxy.h2_wire import GET, POST, Eyes, Seen, body, credit, frame, headers, reset, settings

CURL, H2LOAD = shutil.which("curl"), shutil.which("h2load")
needs_curl = pytest.mark.skipif(CURL is None, reason="curl is not installed")


class Client:
    """A client that writes frames by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._eyes = Eyes()
        self.seen: list[Seen] = []
        self.eof = False

    def say(self, *frames: bytes) -> None:
        self._writer.write(b"".join(frames))

    async def until(self, kind: str, stream_id: int | None = None, *, timeout_s: float = HANG_S) -> Seen:
        """The first frame of a kind that came, waited for."""
        async with asyncio.timeout(timeout_s):
            while True:
                for seen in self.seen:
                    if seen.kind == kind and stream_id in (None, seen.stream_id):
                        self.seen.remove(seen)
                        return seen
                if self.eof:
                    raise AssertionError(f"closed before {kind}")
                await self._read()

    async def closed(self, timeout_s: float = HANG_S) -> None:
        async with asyncio.timeout(timeout_s):
            while not self.eof:
                await self._read()

    async def _read(self) -> None:
        try:
            chunk = await self._reader.read(65536)
        except ConnectionResetError:
            chunk = b""
        self.eof = not chunk
        self.seen += self._eyes.read(chunk)

    async def close(self) -> None:
        self._writer.transport.abort()
        await asyncio.sleep(0)


class Rim:
    def __init__(self, service: ByHand, port: int, tls_port: int) -> None:
        self.service, self.port, self.tls_port = service, port, tls_port
        self.clients: list[Client] = []

    async def client(
        self, hello: bytes = wire.PREFACE + wire.settings({}), *, tls: ssl.SSLContext | None = None
    ) -> Client:
        port, name = (self.port, None) if tls is None else (self.tls_port, "localhost")
        client = Client(*await asyncio.open_connection("127.0.0.1", port, ssl=tls, server_hostname=name))
        self.clients.append(client)
        client.say(hello)
        return client


@asynccontextmanager
async def serving(ca: ThrowAwayCa, limits: Limits | None = None, *, accept: bool = True) -> AsyncIterator[Rim]:
    service = ByHand(limits, accept=accept)
    plain = await listen_tcp(Listen("http", "127.0.0.1", 0), service, tls=None)
    secure = await listen_tcp(Listen("https", "127.0.0.1", 0), service, tls=ca.server_context(["h2"]))
    rim = Rim(service, plain.address[1], secure.address[1])
    try:
        yield rim
    finally:
        plain.close()
        secure.close()
        for connection in list(service.connections):
            connection.close_now()
        for client in rim.clients:
            await client.close()
        for _ in range(3):
            await asyncio.sleep(0)


async def run(*command: str) -> bytes:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await soon(process.communicate())
    assert process.returncode == 0, err
    return out


def echo(exchange: Exchange) -> None:
    """Answer as soon as the head is there, with the body that comes."""
    leg = exchange.leg
    on_data, on_end = exchange.on_data, exchange.on_end

    class Echo(Exchange):
        def on_data(self, chunk: bytes) -> None:
            on_data(chunk)
            leg.data(chunk)

        def on_end(self) -> None:
            on_end()
            leg.end()

        def on_full(self) -> None:
            leg.pause()

        def on_drained(self) -> None:
            leg.resume()

    leg.receiver = Echo(leg, exchange.head, exchange.origin)
    leg.head(ResponseHead(200, [(b"x-method", exchange.head.method)]))


# ------------------------------------------------------------------------------------------------ other people's clients


@needs_curl
@pytest.mark.parametrize("mode", ["prior knowledge", "alpn"])
async def test_curl_gets_its_upload_back(ca: ThrowAwayCa, tmp_path: Path, mode: str) -> None:
    upload = tmp_path / "upload"
    upload.write_bytes(bytes(range(256)) * 12_000)
    async with serving(ca) as rim:
        rim.service.on_exchange = echo
        where = [f"http://127.0.0.1:{rim.port}/echo", "--http2-prior-knowledge"]
        if mode == "alpn":
            where = [f"https://localhost:{rim.tls_port}/echo", "--http2", "--cacert", str(ca.ca_file)]
        got = tmp_path / "got"
        out = await run(
            CURL or "",
            "-s",
            "-S",
            "--data-binary",
            f"@{upload}",
            "-o",
            str(got),
            "-w",
            "%{http_version} %{http_code}",
            *where,
        )
        assert out == b"2 200"
        assert got.read_bytes() == upload.read_bytes()
        exchange = await rim.service.arrived()
        assert exchange.origin.version == "h2"
        assert exchange.head.length == upload.stat().st_size


@needs_curl
async def test_curl_with_head_and_an_early_refusal(ca: ThrowAwayCa, tmp_path: Path) -> None:
    upload = tmp_path / "upload"
    upload.write_bytes(b"x" * 5_000_000)
    async with serving(ca) as rim:

        def refuse(exchange: Exchange) -> None:
            if exchange.head.method == b"HEAD":
                exchange.leg.head(ResponseHead(200, [(b"content-length", b"99")], 99, no_body=True))
                exchange.leg.end()
            else:
                exchange.answer(b"no", 401)

        rim.service.on_exchange = refuse
        url, form = f"http://127.0.0.1:{rim.port}/", "%{http_code}"
        prior = "--http2-prior-knowledge"
        assert (await run(CURL or "", "-s", "-S", "-I", prior, url)).startswith(b"HTTP/2 200")
        out = await run(CURL or "", "-s", "-S", "-w", form, "--data-binary", f"@{upload}", "-H", "Expect:", prior, url)
        assert out == b"no401"


def test_h2load_over_uvloop_and_tls(ca: ThrowAwayCa) -> None:
    if H2LOAD is None:
        pytest.skip("h2load is not installed")

    async def main() -> bytes:
        async with serving(ca) as rim:
            rim.service.on_exchange = lambda exchange: exchange.answer(b"hello")
            return await run(H2LOAD or "", "-n", "2000", "-c", "4", "-m", "32", f"https://127.0.0.1:{rim.tls_port}/")

    assert b"2000 succeeded, 0 failed, 0 errored" in uvloop.run(main())


# ------------------------------------------------------------------------------------------------ ends


async def test_a_vanished_client_is_heard_by_every_exchange(ca: ThrowAwayCa) -> None:
    async with serving(ca) as rim:
        client = await rim.client()
        client.say(headers(1, GET, end=True), headers(3, POST))
        exchanges = [await rim.service.arrived(), await rim.service.arrived()]
        await client.close()
        for exchange in exchanges:
            await exchange.until("abort")
            assert exchange.heard[-1][1].cause is Cause.LOST
        assert not rim.service.connections


async def test_a_reset_is_heard_at_once_and_the_connection_goes_on(ca: ThrowAwayCa) -> None:
    async with serving(ca) as rim:
        client = await rim.client()
        client.say(headers(1, GET, end=True))
        first = await rim.service.arrived()
        client.say(reset(1, Code.CANCEL), headers(3, GET, end=True))
        await first.until("abort")
        assert first.heard[-1][1].by is Party.CLIENT
        (await rim.service.arrived()).answer()
        assert (await client.until("Data", 3)).value == b"ok"


async def test_a_broken_rule_is_told_before_the_connection_closes(ca: ThrowAwayCa) -> None:
    async with serving(ca) as rim:
        client = await rim.client()
        client.say(headers(1, POST))
        exchange = await rim.service.arrived()
        client.say(frame(wire.PING, 0, 7, b"8 bytes!"))
        assert (await client.until("GoAway")).value == Code.PROTOCOL_ERROR
        await client.closed()
        await exchange.until("abort")


async def test_a_hard_stop_resets_what_is_open(ca: ThrowAwayCa) -> None:
    async with serving(ca) as rim:
        client = await rim.client()
        client.say(headers(1, GET, end=True))
        exchange = await rim.service.arrived()
        exchange.leg.head(ResponseHead(200, []))
        exchange.leg.data(b"half")
        await client.until("Data", 1)
        (connection,) = rim.service.connections
        connection.close_now()
        assert (await client.until("RstStream", 1)).value == Code.INTERNAL_ERROR
        await client.until("GoAway")
        await client.closed()
        assert exchange.words[-1] == "abort"


async def test_a_drain_serves_what_is_open_and_what_crosses_its_goaway(ca: ThrowAwayCa) -> None:
    async with serving(ca) as rim:
        client = await rim.client()
        client.say(headers(1, GET, end=True))
        exchange = await rim.service.arrived()
        (connection,) = rim.service.connections
        connection.drain()
        exchange.answer(b"still here")
        assert (await client.until("Data", 1)).value == b"still here"
        ping = await client.until("Ping")
        await client.until("GoAway")
        client.say(headers(3, GET, end=True), frame(wire.PING, wire.ACK, 0, ping.value))
        crossed = await rim.service.arrived()
        await client.until("GoAway")
        crossed.answer(b"served too")
        assert (await client.until("Data", 3)).value == b"served too"
        await client.closed()
        assert not rim.service.connections


async def test_an_unwanted_upload_is_cut_after_its_answer(ca: ThrowAwayCa) -> None:
    async with serving(ca) as rim:
        client = await rim.client()
        client.say(headers(1, POST))
        (await rim.service.arrived()).answer(b"no", 401)
        assert (await client.until("Data", 1)).end
        assert (await client.until("RstStream", 1)).value == Code.NO_ERROR


async def test_a_drain_of_an_idle_connection_closes_it_within_a_round_trip(ca: ThrowAwayCa) -> None:
    async with serving(ca) as rim:
        client = await rim.client()
        await client.until("Settings")
        (connection,) = rim.service.connections
        connection.drain()
        client.say(frame(wire.PING, wire.ACK, 0, (await client.until("Ping")).value))
        await client.closed(timeout_s=0.8)


async def test_a_client_that_ignores_the_drains_ping_is_closed_too(ca: ThrowAwayCa) -> None:
    async with serving(ca) as rim:
        client = await rim.client()
        await client.until("Settings")
        (connection,) = rim.service.connections
        connection.drain()
        await client.closed()


async def test_a_connection_too_many_is_sent_away_before_its_handshake(ca: ThrowAwayCa) -> None:
    async with serving(ca, accept=False) as rim:
        with pytest.raises((ConnectionError, ssl.SSLError)):
            await rim.client(tls=ca.client_context(["h2"]))


# ------------------------------------------------------------------------------------------------ time

HASTY = Limits(header_timeout_s=0.2, idle_timeout_s=0.4)


@pytest.mark.parametrize(
    "hello",
    [
        wire.PREFACE,
        wire.PREFACE + wire.settings({}) + headers(1, GET, whole=False),
        wire.PREFACE + wire.settings({}) + headers(1, GET)[:-1],
    ],
    ids=["no settings", "a block without its end", "half a frame"],
)
async def test_a_head_that_is_never_whole_ends_the_connection(ca: ThrowAwayCa, hello: bytes) -> None:
    async with serving(ca, HASTY) as rim:
        client = await rim.client(hello)
        await client.until("GoAway")
        await client.closed()


async def test_a_head_that_drips_does_not_renew_its_time(ca: ThrowAwayCa) -> None:
    async with serving(ca, HASTY) as rim:
        client = await rim.client()
        client.say(headers(1, GET, whole=False))

        async def drip() -> None:
            while True:
                client.say(frame(wire.CONTINUATION, 0, 1, b"\x00\x01a\x01b"))
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        await client.until("GoAway")
        dripping.cancel()


async def test_an_idle_connection_is_drained_and_a_busy_one_is_not(ca: ThrowAwayCa) -> None:
    async with serving(ca, HASTY) as rim:
        idle, busy = await rim.client(), await rim.client()
        busy.say(headers(1, GET, end=True))
        exchange = await rim.service.arrived()
        await idle.until("GoAway")
        # Silence on a busy connection is asked about instead: the client may be asleep, or only patient.
        await busy.until("Ping")
        exchange.answer()
        assert (await busy.until("Data", 1)).value == b"ok"


async def test_a_client_that_is_silent_to_a_ping_too_is_given_up(ca: ThrowAwayCa) -> None:
    async with serving(ca, HASTY) as rim:
        client = await rim.client()
        client.say(headers(1, GET, end=True))
        exchange = await rim.service.arrived()
        await client.until("Ping")
        await exchange.until("abort")
        await client.closed()


# ------------------------------------------------------------------------------------------------ back-pressure


async def deaf(rim: Rim) -> socket.socket:
    """A client that asked and does not read."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", rim.port))
    hello = wire.PREFACE + settings(initial_window_size=1 << 30) + credit(0, 1 << 30) + headers(1, GET, end=True)
    await loop.sock_sendall(sock, hello)
    return sock


async def fill(exchange: Exchange) -> int:
    """Answer until the leg is full; the bytes that took."""
    exchange.leg.head(ResponseHead(200, []))
    sent = 0
    while "full" not in exchange.words:
        exchange.leg.data(b"x" * 65536)
        sent += 65536
        await asyncio.sleep(0)
        assert sent < 1 << 26
    return sent


async def test_a_client_that_does_not_even_read_its_goaway_is_cut(ca: ThrowAwayCa) -> None:
    async with serving(ca) as rim:
        sock = await deaf(rim)
        await fill(await rim.service.arrived())
        (connection,) = rim.service.connections
        connection.close_now()
        async with no_hang():
            while rim.service.connections:
                await asyncio.sleep(0.05)
        sock.close()


async def test_a_client_that_does_not_read_fills_its_leg_and_drains_it(ca: ThrowAwayCa) -> None:
    async with serving(ca) as rim:
        sock, loop = await deaf(rim), asyncio.get_running_loop()
        exchange = await rim.service.arrived()
        sent = await fill(exchange)
        exchange.leg.end()
        eyes, got = Eyes(), 0
        async with no_hang():
            while True:
                for seen in eyes.read(await loop.sock_recv(sock, 1 << 20)):
                    got += len(seen.value) if seen.kind == "Data" else 0
                if got == sent:
                    break
        await exchange.until("drained")
        sock.close()


async def test_an_upload_that_nobody_takes_stops_at_its_window(ca: ThrowAwayCa) -> None:
    async with serving(ca) as rim:
        client = await rim.client()
        client.say(headers(1, POST), headers(3, POST))
        stalled, other = await rim.service.arrived(), await rim.service.arrived()
        stalled.leg.pause()
        for _ in range(64):
            client.say(body(1, b"x" * 16384))
        client.say(body(3, b"y" * 16384, end=True))
        await other.until("end")
        assert not [s for s in client.seen if s.kind == "WindowUpdate" and s.stream_id == 1]
        stalled.leg.resume()
        assert (await client.until("WindowUpdate", 1)).value == 1 << 20
