"""Read and write many datagrams with one system call each: recvmmsg(2) and sendmmsg(2), which Python has no word for.

Theory: with answers from memory, two system calls and two address tuples for each datagram are most of its cost. Here 64
slots are laid out once: message headers, one buffer and one address each. An answer goes back to the address in the slot
of its query, so no address is ever turned into a Python object unless somebody must wait for the answer.
Rules for editing: 1. offsets come from the structures, never from a head; 2. every buffer that the kernel is told about
is held by the object for as long as it lives; 3. whatever is not 64-bit Linux takes the plain listener.
"""

from __future__ import annotations

import ctypes
import errno
import socket
import sys
from typing import Any

SLOTS = 64
IN_BYTES = 4096
NAME_BYTES = 28  # sockaddr_in6, the larger of the two
_WORD = 8


class _Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("len", ctypes.c_size_t)]


class _Header(ctypes.Structure):
    """struct msghdr of 64-bit Linux."""

    _fields_ = [
        ("name", ctypes.c_void_p),
        ("name_len", ctypes.c_uint32),
        ("iov", ctypes.c_void_p),
        ("iov_len", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_len", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    ]


class _Message(ctypes.Structure):
    """struct mmsghdr. The header is padded on its own before the length, so it cannot be written flat."""

    _fields_ = [("header", _Header), ("len", ctypes.c_uint32)]


_MESSAGE_BYTES = ctypes.sizeof(_Message)
_DONT_WAIT = int(getattr(socket, "MSG_DONTWAIT", 0))
RECEIVED_EACH = ctypes.sizeof(_Message) // 4
_LEN_INT = _Message.len.offset // 4


def _load() -> Any:
    """The C library with both calls, None where they or this layout are missing."""
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != _WORD:
        return None
    # PyDLL keeps the interpreter's lock, which is right for calls that never block: to let go of it, and to make pointer
    # objects of the arguments, took 10 us for a datagram that comes alone, as much as all the rest.
    libc = ctypes.PyDLL(None, use_errno=True)
    if not hasattr(libc, "recvmmsg") or not hasattr(libc, "sendmmsg"):
        return None
    libc.recvmmsg.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int, ctypes.c_void_p]
    libc.sendmmsg.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int]
    return libc


_libc = _load()
AVAILABLE = _libc is not None


class Batch:
    """The slots of one socket. A reply is written over its query, in the slot that knows the sender: where most replies
    begin with the id that lies there already, and leave in the order they came, nothing else has to be laid out.

    For the loop that answers, everything it needs for each datagram is at hand without a call: `inbox[start(slot):]` holds
    it, `received[slot * RECEIVED_EACH]` its size, and `sizes[slot * 2 + 1]` is the reply's.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._names = ctypes.create_string_buffer(SLOTS * NAME_BYTES)
        self._buffer = ctypes.create_string_buffer(SLOTS * IN_BYTES)
        name_len = NAME_BYTES if sock.family == socket.AF_INET6 else 16
        self._in, self._in_iov = self._headers(name_len)
        self._out, self._out_iov = self._headers(name_len)
        self._in_at, self._out_at = ctypes.addressof(self._in), ctypes.addressof(self._out)
        self._peers = memoryview(self._names).cast("B")
        self.inbox = memoryview(self._buffer).cast("B")
        self.received = memoryview(self._in).cast("B").cast("I")[_LEN_INT:]
        self.sizes = memoryview(self._out_iov).cast("B").cast("Q")

    def _headers(self, name_len: int) -> tuple[Any, Any]:
        messages, iovecs = (_Message * SLOTS)(), (_Iovec * SLOTS)()
        for i in range(SLOTS):
            iovecs[i].base, iovecs[i].len = ctypes.addressof(self._buffer) + i * IN_BYTES, IN_BYTES
            header = messages[i].header
            header.name, header.name_len = ctypes.addressof(self._names) + i * NAME_BYTES, name_len
            header.iov, header.iov_len = ctypes.addressof(iovecs[i]), 1
        return messages, iovecs

    def receive(self) -> int:
        """Reads what waits, SLOTS at most; how many came. The slots hold until the next call."""
        # The kernel leaves `name_len` as it is: a socket has one family. -1: nothing waits, or an ICMP error.
        return max(0, int(_libc.recvmmsg(self._sock.fileno(), self._in_at, SLOTS, _DONT_WAIT, None)))

    def query(self, slot: int) -> bytes:
        """The datagram of a slot, before a reply was put over it."""
        start = slot * IN_BYTES
        return bytes(self.inbox[start : start + self.received[slot * RECEIVED_EACH]])

    def put(self, slot: int, reply: bytes) -> None:
        """Lays out a reply of at most IN_BYTES for `send`."""
        start, size = slot * IN_BYTES, len(reply)
        self.inbox[start : start + size] = reply
        self.sizes[slot * 2 + 1] = size

    def send(self, first: int, end: int) -> None:
        """Sends the replies of the slots from `first` to before `end`. What the kernel has no room for is lost, as
        datagrams are; one that it refuses is passed over."""
        while first < end:
            at = self._out_at + first * _MESSAGE_BYTES
            sent = int(_libc.sendmmsg(self._sock.fileno(), at, end - first, _DONT_WAIT))
            if sent > 0:
                first += sent
            elif ctypes.get_errno() in (errno.EAGAIN, errno.ENOBUFS):
                return
            elif ctypes.get_errno() != errno.EINTR:
                first += 1

    def peer(self, slot: int) -> tuple[Any, ...]:
        """The address of a slot as the socket module wants it. Valid until the next `receive`."""
        name = bytes(self._peers[slot * NAME_BYTES : (slot + 1) * NAME_BYTES])
        port = int.from_bytes(name[2:4], "big")
        if self._sock.family == socket.AF_INET:
            return socket.inet_ntop(socket.AF_INET, name[4:8]), port
        flow, scope = int.from_bytes(name[4:8], "big"), int.from_bytes(name[24:28], sys.byteorder)
        return socket.inet_ntop(socket.AF_INET6, name[8:24]), port, flow, scope
