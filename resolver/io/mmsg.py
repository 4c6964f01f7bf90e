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
IN_BYTES, OUT_BYTES = 4096, 1232
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


_WORDS_EACH = ctypes.sizeof(_Message) // _WORD
_NAME_WORD = (_Message.header.offset + _Header.name.offset) // _WORD
_INTS_EACH = ctypes.sizeof(_Message) // 4
_LEN_INT = _Message.len.offset // 4


def _load() -> Any:
    """The C library with both calls, None where they or this layout are missing."""
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != _WORD:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    return libc if hasattr(libc, "recvmmsg") and hasattr(libc, "sendmmsg") else None


_libc = _load()
AVAILABLE = _libc is not None


class Batch:
    """The slots of one socket. `receive`, then `datagram(i)` and `answer(i, reply)` for each, then `send`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._names = ctypes.create_string_buffer(SLOTS * NAME_BYTES)
        self._inbox = ctypes.create_string_buffer(SLOTS * IN_BYTES)
        self._outbox = ctypes.create_string_buffer(SLOTS * OUT_BYTES)
        name_len = NAME_BYTES if sock.family == socket.AF_INET6 else 16
        self._in, self._in_iov = self._headers(self._inbox, IN_BYTES, name_len)
        self._out, self._out_iov = self._headers(self._outbox, OUT_BYTES, name_len)
        self._received = memoryview(self._inbox).cast("B")
        self._sent = memoryview(self._outbox).cast("B")
        self._lengths = memoryview(self._in).cast("B").cast("I")
        self._out_words = memoryview(self._out).cast("B").cast("Q")
        self._out_iov_words = memoryview(self._out_iov).cast("B").cast("Q")
        self._names_at = ctypes.addressof(self._names)
        self._count = 0

    def _headers(self, buffer: Any, size: int, name_len: int) -> tuple[Any, Any]:
        messages, iovecs = (_Message * SLOTS)(), (_Iovec * SLOTS)()
        for i in range(SLOTS):
            iovecs[i].base, iovecs[i].len = ctypes.addressof(buffer) + i * size, size
            header = messages[i].header
            header.name, header.name_len = ctypes.addressof(self._names) + i * NAME_BYTES, name_len
            header.iov, header.iov_len = ctypes.addressof(iovecs[i]), 1
        return messages, iovecs

    def receive(self) -> int:
        """How many datagrams came; 0 when none waits. The kernel leaves `name_len` as it is: a socket has one family."""
        self._count = 0
        return max(0, int(_libc.recvmmsg(self._sock.fileno(), self._in, SLOTS, socket.MSG_DONTWAIT, None)))

    def datagram(self, slot: int) -> bytes:
        start = slot * IN_BYTES
        return bytes(self._received[start : start + self._lengths[slot * _INTS_EACH + _LEN_INT]])

    def peer(self, slot: int) -> tuple[Any, ...]:
        """The address of a slot as the socket module wants it. Valid until the next `receive`."""
        name = self._names.raw[slot * NAME_BYTES : (slot + 1) * NAME_BYTES]
        port = int.from_bytes(name[2:4], "big")
        if self._sock.family == socket.AF_INET:
            return socket.inet_ntop(socket.AF_INET, name[4:8]), port
        flow, scope = int.from_bytes(name[4:8], "big"), int.from_bytes(name[24:28], sys.byteorder)
        return socket.inet_ntop(socket.AF_INET6, name[8:24]), port, flow, scope

    def answer(self, slot: int, reply: bytes) -> None:
        """Puts a reply of at most OUT_BYTES to the sender of a slot into the next write. At most one for each slot."""
        at, size = self._count, len(reply)
        self._sent[at * OUT_BYTES : at * OUT_BYTES + size] = reply
        self._out_iov_words[at * 2 + 1] = size
        self._out_words[at * _WORDS_EACH + _NAME_WORD] = self._names_at + slot * NAME_BYTES
        self._count += 1

    def send(self) -> int:
        """Writes the replies; how many went. What the kernel has no room for is lost, one it refuses is passed over."""
        done = went = 0
        while done < self._count:
            sent = int(_libc.sendmmsg(self._sock.fileno(), ctypes.byref(self._out[done]), self._count - done, 0))
            if sent > 0:
                done += sent
                went += sent
            elif ctypes.get_errno() in (errno.EAGAIN, errno.ENOBUFS):
                break
            elif ctypes.get_errno() != errno.EINTR:
                done += 1
        return went
