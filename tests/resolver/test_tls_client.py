"""Outgoing TLS: verified always, resumed when a ticket is there, on both loops."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from resolver.io.tls_client import MAX_SESSIONS, ResumingContext, client_context, remember, was_resumed
from tests.peers.authority import Authority

LOOPS = [
    pytest.param(asyncio.new_event_loop, id="asyncio"),
    pytest.param(uvloop.new_event_loop, id="uvloop"),
]


class Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class Ask(asyncio.Protocol):
    def __init__(self) -> None:
        self.answer = asyncio.get_running_loop().create_future()
        self.lost = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(b"hello")

    def data_received(self, data: bytes) -> None:
        self.answer.set_result(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(exc)


async def served(context: ssl.SSLContext, play: Callable[[int], Awaitable[None]]) -> None:
    server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", 0, ssl=context)
    try:
        await play(server.sockets[0].getsockname()[1])
    finally:
        server.close()


async def greet(context: ResumingContext, port: int, name: str = "localhost") -> bool:
    """One connection that says hello; whether it was resumed."""
    loop = asyncio.get_running_loop()
    transport, ask = await loop.create_connection(Ask, "127.0.0.1", port, ssl=context, server_hostname=name)
    await ask.answer
    remember(transport)
    resumed = was_resumed(transport)
    transport.close()
    await ask.lost
    return resumed


@pytest.mark.parametrize("new_loop", LOOPS)
def test_second_connection_to_a_name_is_resumed(new_loop, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    client = client_context(authority.ca_file)

    async def play(port: int) -> None:
        assert [await greet(client, port) for _ in range(3)] == [False, True, True]

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(served(authority.server_context(), play))


@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_session_is_offered_once(new_loop, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    client = client_context(authority.ca_file)

    async def play(port: int) -> None:
        await greet(client, port)
        loop = asyncio.get_running_loop()
        both = [
            await loop.create_connection(Ask, "127.0.0.1", port, ssl=client, server_hostname="localhost")
            for _ in range(2)
        ]
        assert [was_resumed(transport) for transport, _ in both] == [True, False]
        for transport, ask in both:
            transport.close()
            await ask.lost

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(served(authority.server_context(), play))


@pytest.mark.parametrize("new_loop", LOOPS)
@pytest.mark.parametrize(("trusted", "name"), [(False, "localhost"), (True, "other.test")])
def test_unknown_issuer_and_wrong_name_are_refused(new_loop, trusted: bool, name: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    client = client_context(authority.ca_file if trusted else "")

    async def play(port: int) -> None:
        with pytest.raises(ssl.SSLCertVerificationError):
            await greet(client, port, name)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(served(authority.server_context(), play))


def test_sessions_are_bounded_and_the_newest_are_kept() -> None:
    class Session:
        has_ticket, id = True, b""

    context = client_context()
    for i in range(MAX_SESSIONS + 3):
        context.keep(f"host{i}.test", Session())
    assert len(context.kept) == MAX_SESSIONS
    assert "host2.test" not in context.kept and f"host{MAX_SESSIONS + 2}.test" in context.kept


def test_a_session_without_a_ticket_replaces_none_that_has_one() -> None:
    class Session:
        def __init__(self, has_ticket: bool) -> None:
            self.has_ticket, self.id = has_ticket, b""

    context, good = client_context(), Session(True)
    context.keep("Host.test", good)
    context.keep("host.test", Session(False))
    assert context.kept["host.test"] is good


def test_plain_and_foreign_transports_are_ignored() -> None:
    class Plain:
        def get_extra_info(self, name: str) -> None:
            return None

    remember(Plain())
    assert not was_resumed(Plain())


def test_tls_below_1_2_is_not_spoken() -> None:
    context = client_context()
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert context.check_hostname and context.verify_mode is ssl.CERT_REQUIRED


def test_a_missing_ca_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        client_context(str(tmp_path / "none.pem"))
