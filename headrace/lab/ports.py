"""Ports from the kernel for servers that want the same number on TCP and UDP."""

from __future__ import annotations

import socket

HOST = "127.0.0.1"
TRIES = 32


def bind_pair(port: int = 0) -> tuple[socket.socket, socket.socket]:
    """A listening TCP socket and a UDP socket with one port number on loopback; `port` 0 lets the kernel choose.

    Raises OSError when a given port is taken, or when 32 chosen ones were all taken for UDP.
    """
    for attempt in range(TRIES):
        tcp = _bound(socket.SOCK_STREAM, port)
        try:
            udp = _bound(socket.SOCK_DGRAM, tcp.getsockname()[1])
        except OSError:
            tcp.close()
            if port or attempt == TRIES - 1:
                raise
            continue
        tcp.listen(256)
        return tcp, udp
    raise AssertionError("the last attempt returns or raises")


def bind_tcp(port: int = 0) -> socket.socket:
    """A listening TCP socket on loopback."""
    tcp = _bound(socket.SOCK_STREAM, port)
    tcp.listen(256)
    return tcp


def free_ports(count: int) -> list[int]:
    """`count` different ports that are free now on TCP and UDP. Free *now*: somebody else may take one before you do."""
    pairs = [bind_pair() for _ in range(count)]
    ports = [tcp.getsockname()[1] for tcp, _ in pairs]
    for pair in pairs:
        for opened in pair:
            opened.close()
    return ports


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
