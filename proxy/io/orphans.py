"""Ask the kernel whether the process at the other end of a loopback connection still holds its socket.

A FIN says "I send no more", not "I listen no more" (RFC 9293 3.6): a client that shut down its half is owed its answer, and
one that called close() is gone, yet both look alike on the wire until we write. While a model thinks we write nothing, and
the user who pressed Esc pays for an answer that nobody reads. On loopback the peer's socket is in our own kernel: sock_diag(7)
shows its inode, which is 0 once no process holds it.
"""

from __future__ import annotations

import errno
import socket
import struct

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
NLMSG_ERROR = 2
NLM_F_REQUEST = 1
NO_COOKIE = 0xFFFFFFFF
ALL_STATES = 0xFFFFFFFF
HEADER = struct.Struct("=IHHII")
REQUEST = struct.Struct("=BBBBI")  # family, protocol, extensions, pad, states
INODE = struct.Struct("=I")
INODE_AT = HEADER.size + 4 + 48 + 16  # after family..retrans, the socket's identity, and four numbers
REPLY_BYTES = 4096

Address = tuple[str, int]


def peer_is_gone(own: Address, peer: Address) -> bool | None:
    """True when no process holds the peer's socket any more; None when it cannot be known: another machine, another
    network namespace, or a sandbox without netlink. `own` and `peer` as our socket names them. Some 20 µs."""
    family, source, target = _identity(peer[0], own[0])
    identity = struct.pack("!HH16s16s", peer[1], own[1], source, target) + struct.pack("=III", 0, NO_COOKIE, NO_COOKIE)
    body = REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, ALL_STATES) + identity
    try:
        reply = _ask(HEADER.pack(HEADER.size + len(body), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 1, 0) + body)
    except OSError:
        return None
    kind = HEADER.unpack_from(reply)[1]
    if kind == NLMSG_ERROR:
        code = -struct.unpack_from("=i", reply, HEADER.size)[0]
        # Loopback and no such socket: it went away whole, TIME_WAIT and all.
        return True if code == errno.ENOENT and _is_loopback(peer[0]) else None
    if kind != SOCK_DIAG_BY_FAMILY or len(reply) < INODE_AT + INODE.size:
        return None
    return bool(INODE.unpack_from(reply, INODE_AT)[0] == 0)


def _ask(request: bytes) -> bytes:
    # The kernel answers within send(): what recv() does not find at once never comes.
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, NETLINK_SOCK_DIAG) as diag:
        diag.send(request)
        return diag.recv(REPLY_BYTES)


def _identity(source: str, target: str) -> tuple[int, bytes, bytes]:
    """The family and both addresses in 16 bytes. A v4 client of a dual-stack listener has a v4 socket of its own."""
    source, target = source.removeprefix("::ffff:"), target.removeprefix("::ffff:")
    family = socket.AF_INET6 if ":" in source else socket.AF_INET
    packed = (socket.inet_pton(family, each.partition("%")[0]).ljust(16, b"\0") for each in (source, target))
    return family, *packed  # type: ignore[return-value]


def _is_loopback(address: str) -> bool:
    return address.removeprefix("::ffff:").startswith("127.") or address == "::1"
