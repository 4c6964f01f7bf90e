"""What is said about a port that cannot be had."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from config.model import Listen
from headrace import ports

COMM = Path("/proc/self/comm").read_text().strip() if Path("/proc/self/comm").exists() else ""


@pytest.mark.skipif(not COMM, reason="no /proc")
@pytest.mark.parametrize(("scheme", "kind"), [("http", socket.SOCK_STREAM), ("h3", socket.SOCK_DGRAM)])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_process_that_holds_the_port_is_named(scheme: str, kind: socket.SocketKind, host: str) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, kind) as taken:
        taken.bind((host, 0))
        if kind == socket.SOCK_STREAM:
            taken.listen()
        listen = Listen(scheme, host, taken.getsockname()[1])
        text = ports.explain(listen, OSError(errno.EADDRINUSE, ""))
    assert text.startswith(f"{listen}: the port is taken by {COMM} (process {os.getpid()}); stop it, or use another")
    assert text.endswith("is free")


@pytest.mark.skipif(not COMM, reason="no /proc")
def test_who_only_connects_from_a_port_does_not_hold_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as calling:
        listen = Listen("http", "127.0.0.1", calling.getsockname()[1])
        text = ports.explain(listen, OSError(errno.EADDRINUSE, ""))
    assert text.startswith(f"{listen}: the port is taken; stop it")


def test_a_low_port_says_what_it_needs() -> None:
    exc = PermissionError(errno.EACCES, "")
    assert "CAP_NET_BIND_SERVICE" in ports.explain(Listen("udp", "127.0.0.1", 53), exc)
    assert ports.needs_privilege(exc)


def test_an_address_of_another_machine_is_told_apart() -> None:
    exc = OSError(errno.EADDRNOTAVAIL, "")
    assert "no such address" in ports.explain(Listen("udp", "192.0.2.1", 5353), exc)
    assert not ports.needs_privilege(exc)
