"""Ports for servers that want the same number on TCP and UDP, or that come back to a number they had.

Theory: a port that the kernel lent and took back may be lent again at once, to any connection that somebody opens. The
ports here lie below the range that the kernel lends from; whoever binds there asks for a number, and each process
begins to count at a place of its own. So a port stays free between the moment it is chosen and the moment a server
binds it, and while a server that was stopped is to come back.
"""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path

HOST = "127.0.0.1"
FIRST, LAST = 12_000, 32_000
TRIES = 256
_numbers = itertools.count(os.getpid() * 997)


def bind_pair(port: int = 0) -> tuple[socket.socket, socket.socket]:
    """A listening TCP socket and a UDP socket with one port number on loopback; `port` 0 takes a free one.

    Raises OSError when a given port is taken, or when 256 chosen ones were all taken.
    """
    for attempt in range(TRIES):
        try:
            return _bound_pair(port or _next())
        except OSError:
            if port or attempt == TRIES - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def bind_tcp(port: int = 0) -> socket.socket:
    """A listening TCP socket on loopback."""
    tcp = _bound(socket.SOCK_STREAM, port)
    tcp.listen(256)
    return tcp


def free_ports(count: int) -> list[int]:
    """`count` different ports that are free now on TCP and UDP, and that the kernel lends to nobody."""
    pairs = [bind_pair() for _ in range(count)]
    ports = [tcp.getsockname()[1] for tcp, _ in pairs]
    for pair in pairs:
        for opened in pair:
            opened.close()
    return ports


def _next() -> int:
    """The next number of this process; 0, the kernel's choice, where the kernel lends nearly all there is."""
    width = min(LAST, _lent_from()) - FIRST
    return FIRST + next(_numbers) % width if width > 1000 else 0


def _lent_from() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:  # not Linux: the range that IANA names begins above ours
        return LAST


def _bound_pair(port: int) -> tuple[socket.socket, socket.socket]:
    tcp = _bound(socket.SOCK_STREAM, port)
    try:
        udp = _bound(socket.SOCK_DGRAM, tcp.getsockname()[1])
        tcp.listen(256)
    except OSError:
        tcp.close()
        raise
    return tcp, udp


def _bound(kind: socket.SocketKind, port: int) -> socket.socket:
    # asyncio sets TCP_NODELAY only where the protocol number says TCP, and accepted sockets inherit it: without it each
    # answer's head waits 40 ms for a delayed acknowledgement.
    opened = socket.socket(socket.AF_INET, kind, socket.IPPROTO_TCP if kind == socket.SOCK_STREAM else 0)
    try:
        if kind == socket.SOCK_STREAM:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.setblocking(False)
        opened.bind((HOST, port))
    except OSError:
        opened.close()
        raise
    return opened
