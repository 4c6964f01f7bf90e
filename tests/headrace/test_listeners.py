"""Listeners as the daemon opens them: which addresses can be had beside each other."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from config.model import Listen
from proxy.io.inbound_tcp import bind
from resolver.io.quic_bind import bind_quic
from tests.peers.ports import free_port, needs_ipv6


@pytest.mark.parametrize("take", [bind, bind_quic], ids=["tcp", "quic"])
@needs_ipv6
def test_a_port_is_had_on_the_wildcards_of_both_families(take: Callable[[Listen], socket.socket]) -> None:
    port = free_port()
    four, six = take(Listen("h3", "0.0.0.0", port)), take(Listen("h3", "::", port))
    for sock in (four, six):
        sock.close()


def test_a_udp_port_that_is_taken_is_not_shared() -> None:
    mine = bind_quic(Listen("h3", "127.0.0.1", 0))
    with pytest.raises(OSError, match="in use"):
        bind_quic(Listen("h3", "127.0.0.1", mine.getsockname()[1]))
    mine.close()
