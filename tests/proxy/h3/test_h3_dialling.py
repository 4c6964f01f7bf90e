"""Dialling an HTTP/3 edge: time-outs, trust, tickets and retries."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from pathlib import Path

import pytest

from proxy.io.outbound_quic import QuicSessions, dial_quic
from tests.patience import eventually
from tests.peers.authority import Authority
from tests.peers.h3peers import Server
from tests.peers.ports import free_port
from tests.proxy.h3.exchanges import OK, dialled, start

# -- dialling


async def test_closed_port_is_refused_at_once(ca: str) -> None:
    with pytest.raises(ConnectionRefusedError):  # and not TimeoutError
        await dial_quic(
            "127.0.0.1", free_port(), server_name="localhost", ca_file=ca, timeout_s=30, sessions=QuicSessions()
        )


async def test_silent_port_times_out(ca: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            await dial_quic(
                "127.0.0.1",
                silent.getsockname()[1],
                server_name="localhost",
                ca_file=ca,
                timeout_s=0.3,
                sessions=QuicSessions(),
            )
        assert time.monotonic() - began > 0.25


async def test_cancelled_dial_leaves_nothing_behind(ca: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        dial = asyncio.create_task(
            dial_quic(
                "127.0.0.1",
                silent.getsockname()[1],
                server_name="localhost",
                ca_file=ca,
                timeout_s=9,
                sessions=QuicSessions(),
            )
        )
        await asyncio.sleep(0.05)
        dial.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dial  # an unclosed socket would fail the test as a ResourceWarning


@pytest.mark.parametrize("wrong", ["authority", "name"])
async def test_certificate_is_always_verified(ca: str, pem: str, wrong: str, tmp_path: Path) -> None:
    other = Authority(tmp_path).ca_file
    async with Server(pem) as server:
        with pytest.raises(ssl.SSLCertVerificationError, match="verify failed"):
            await dial_quic(
                "127.0.0.1",
                server.port,
                server_name="localhost" if wrong == "authority" else "api.openai.com",
                ca_file=other if wrong == "authority" else ca,
                timeout_s=30,
                sessions=QuicSessions(),
            )


async def test_own_authority_is_trusted_besides_the_systems_roots(ca: str, pem: str) -> None:
    async with Server(pem) as server:
        with pytest.raises(ssl.SSLCertVerificationError):
            await dial_quic(
                "127.0.0.1", server.port, server_name="localhost", ca_file="", timeout_s=30, sessions=QuicSessions()
            )
        async with dialled(server.port, ca) as connection:
            assert connection.room > 0


async def test_tickets_resume_once_each_and_only_under_the_same_trust(ca: str, pem: str, tmp_path: Path) -> None:
    sessions = QuicSessions()
    async with Server(pem, lambda a: a.respond(OK, b"x")) as server:
        async with dialled(server.port, ca, sessions) as first:
            await start(first).heard_word("end")
            assert not first.resumed
            await eventually(lambda: len(sessions._tickets))
        async with dialled(server.port, ca, sessions) as second:
            await start(second).heard_word("end")
            assert second.resumed
        other = tmp_path / "more-trust.pem"
        other.write_bytes(Path(ca).read_bytes())
        async with dialled(server.port, str(other), sessions) as third:
            assert not third.resumed


def test_kept_tickets_are_bounded_per_edge_and_in_all() -> None:
    class Ticket:
        is_valid = True

    sessions = QuicSessions(edges=2, per_edge=2)
    tickets = [Ticket() for _ in range(5)]
    for ticket in tickets[:3]:
        sessions.keep("a", ticket)  # type: ignore[arg-type]
    assert [sessions.take("a") for _ in range(3)] == [tickets[2], tickets[1], None]
    for edge in ("b", "c", "d"):
        sessions.keep(edge, tickets[3])  # type: ignore[arg-type]
    assert [sessions.take(edge) for edge in ("b", "c", "d")] == [None, tickets[3], tickets[3]]


async def test_retry_of_a_busy_edge_is_followed(ca: str, pem: str) -> None:
    server = Server(pem, lambda a: a.respond(OK, b"x"))
    server.retry = True
    async with server, dialled(server.port, ca) as connection:
        await start(connection).heard_word("end")
