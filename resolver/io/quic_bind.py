"""Take the UDP address of a QUIC listener, before the QUIC stack is loaded: datagrams wait in the kernel meanwhile."""

from __future__ import annotations

import socket

from config.model import Listen

BUFFER_BYTES = 4 * 1024 * 1024
"""Asked of the kernel, each way; a burst that does not fit is lost and sent again."""


def bind_quic(listen: Listen) -> socket.socket:
    """A bound socket that does not block; port 0 takes any. `::` is IPv6 alone, as for TCP. Raises OSError."""
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        sock.setblocking(False)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((listen.host, listen.port))
    except OSError:
        sock.close()
        raise
    return sock
