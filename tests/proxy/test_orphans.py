"""A FIN from a client that listens and one from a client that left are told apart."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from proxy.io.orphans import peer_is_gone


@pytest.fixture(params=["127.0.0.1", "::1", "dual"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    host = request.param
    family = socket.AF_INET if host == "127.0.0.1" else socket.AF_INET6
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        if host == "dual":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            listener.bind(("::" if host == "dual" else host, 0))
        except OSError:
            pytest.skip("no IPv6 here")
        listener.listen()
        client = socket.create_connection(("127.0.0.1" if host == "dual" else host, listener.getsockname()[1]))
        accepted, _ = listener.accept()
        with accepted, client:
            if peer_is_gone(accepted.getsockname()[:2], accepted.getpeername()[:2]) is None:
                pytest.skip("no sock_diag here")
            yield accepted, client


def ends(accepted: socket.socket) -> tuple[tuple[str, int], tuple[str, int]]:
    own, peer = accepted.getsockname(), accepted.getpeername()
    return (own[0], own[1]), (peer[0], peer[1])


def test_an_open_client_is_there(pair: tuple[socket.socket, socket.socket]) -> None:
    accepted, _ = pair
    assert peer_is_gone(*ends(accepted)) is False


def test_a_client_that_sends_no_more_still_listens(pair: tuple[socket.socket, socket.socket]) -> None:
    accepted, client = pair
    own, peer = ends(accepted)
    client.shutdown(socket.SHUT_WR)
    assert accepted.recv(1) == b""
    assert peer_is_gone(own, peer) is False


def test_a_client_that_closed_is_gone(pair: tuple[socket.socket, socket.socket]) -> None:
    accepted, client = pair
    own, peer = ends(accepted)
    client.close()
    assert accepted.recv(1) == b""
    assert peer_is_gone(own, peer) is True


def test_nothing_is_claimed_about_another_machine() -> None:
    assert peer_is_gone(("192.0.2.1", 443), ("192.0.2.2", 50000)) is None
