"""Ports for servers that cannot take one from the kernel, and ports where nobody is."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headrace.lab.ports import free_ports
from tests.patience import no_hang


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


HAS_IPV6 = _has_ipv6()
needs_ipv6 = pytest.mark.skipif(not HAS_IPV6, reason="this machine has no ::1")


def free_port() -> int:
    """A port of TCP and UDP that stays free until a server of ours takes it, because the kernel lends it to nobody."""
    return free_ports(1)[0]


async def until_open(port: int, host: str = "127.0.0.1") -> None:
    """Until somebody listens there."""
    async with no_hang():
        while True:
            try:
                _, writer = await asyncio.open_connection(host, port)
            except OSError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                await writer.wait_closed()
                return


@contextmanager
def refusing_port(host: str = "127.0.0.1") -> Iterator[int]:
    """A port that refuses TCP connections for as long as the test lasts: bound, and nobody listens."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as held:
        held.bind((host, 0))
        yield held.getsockname()[1]
