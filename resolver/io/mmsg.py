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
from collections.abc import Callable
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
    """The slots of one socket."""

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
        self._peers = memoryview(self._names).cast("B")
        self._names_at = ctypes.addressof(self._names)

    def _headers(self, buffer: Any, size: int, name_len: int) -> tuple[Any, Any]:
        messages, iovecs = (_Message * SLOTS)(), (_Iovec * SLOTS)()
        for i in range(SLOTS):
            iovecs[i].base, iovecs[i].len = ctypes.addressof(buffer) + i * size, size
            header = messages[i].header
            header.name, header.name_len = ctypes.addressof(self._names) + i * NAME_BYTES, name_len
            header.iov, header.iov_len = ctypes.addressof(iovecs[i]), 1
        return messages, iovecs

    def serve(self, answer: Callable[[bytes, int], bytes | None]) -> int:
        """Reads what waits, 64 at most, asks `answer(datagram, slot)` for each and writes the replies; how many came.

        A reply goes to the sender of its slot and has at most OUT_BYTES; none or an empty one is not sent. One loop with
        everything in locals: two method calls for each datagram were a fifth of its cost.
        """
        # The kernel leaves `name_len` as it is: a socket has one family.
        count = int(_libc.recvmmsg(self._sock.fileno(), self._in, SLOTS, socket.MSG_DONTWAIT, None))
        received, lengths, sent = self._received, self._lengths, self._sent
        iov_words, words, names_at = self._out_iov_words, self._out_words, self._names_at
        replies = 0
        for slot in range(count):  # none when it is -1: nothing waits, or an ICMP error of an earlier reply
            start = slot * IN_BYTES
            reply = answer(bytes(received[start : start + lengths[slot * _INTS_EACH + _LEN_INT]]), slot)
            if reply:
                at, size = replies * OUT_BYTES, len(reply)
                sent[at : at + size] = reply
                iov_words[replies * 2 + 1] = size
                words[replies * _WORDS_EACH + _NAME_WORD] = names_at + slot * NAME_BYTES
                replies += 1
        self._send(replies)
        return max(0, count)

    def peer(self, slot: int) -> tuple[Any, ...]:
        """The address of a slot as the socket module wants it. Valid until `serve` is called again."""
        name = bytes(self._peers[slot * NAME_BYTES : (slot + 1) * NAME_BYTES])
        port = int.from_bytes(name[2:4], "big")
        if self._sock.family == socket.AF_INET:
            return socket.inet_ntop(socket.AF_INET, name[4:8]), port
        flow, scope = int.from_bytes(name[4:8], "big"), int.from_bytes(name[24:28], sys.byteorder)
        return socket.inet_ntop(socket.AF_INET6, name[8:24]), port, flow, scope

    def _send(self, count: int) -> None:
        """What the kernel has no room for is lost, as datagrams are; one that it refuses is passed over."""
        done = 0
        while done < count:
            sent = int(_libc.sendmmsg(self._sock.fileno(), ctypes.byref(self._out[done]), count - done, 0))
            if sent > 0:
                done += sent
            elif ctypes.get_errno() in (errno.EAGAIN, errno.ENOBUFS):
                return
            elif ctypes.get_errno() != errno.EINTR:
                done += 1
