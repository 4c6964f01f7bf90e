"""Know a request again that differs from an earlier one in its target alone.

Theory: a client that asks the same service over and over sends the same header block but for its `:path`, a literal that is
not indexed. With an unchanged HPACK table, equal bytes around it mean equal fields. So a request of a known shape is told
by two comparisons, and whoever owns the shape may have a whole answer ready for that path, found by its coded bytes.
Rules for editing: 1. a block that moves the table is never learned, and a shape counts only while the table stands; 2. a
shape says nothing of its path: who learned it must judge each path by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from proxy.hpack import CompressionError, Decoder, integer

MOST_SHAPES = 4
LONGEST_PATH = 1024
"""Bytes of a coded path: a DNS message of 512 bytes in base64url has 683."""

Find = Callable[[bytes], tuple[bytes, bytes] | None]
"""From a coded `:path` string (RFC 7541 5.2, its length in front) to a header block that names no table entry, and a body;
None: no answer is ready, the request goes the usual way."""

_PATH_INDEXES = (4, 5)  # of the static table


class _Shape(NamedTuple):
    table: int
    before: bytes
    after: bytes
    find: Find


class Shapes:
    """The shapes of one connection, the newest first."""

    __slots__ = ("_decoder", "_shapes")

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._shapes: list[_Shape] = []

    def __bool__(self) -> bool:
        return bool(self._shapes)

    def learn(self, block: bytes, find: Find) -> None:
        """Takes the shape of a block that was just decoded, when it has one."""
        try:
            start, end = _path_of(block)
        except (CompressionError, IndexError):
            return
        if end:
            shape = _Shape(self._decoder.changes, block[:start], block[end:], find)
            self._shapes = [shape, *(s for s in self._shapes if s.table == shape.table)][:MOST_SHAPES]

    def answer(self, block: bytes) -> tuple[bytes, bytes] | None:
        """What is ready for this block; the table has not moved by it."""
        table = self._decoder.changes
        for shape in self._shapes:
            start, stop = len(shape.before), len(block) - len(shape.after)
            if shape.table != table or not start < stop <= start + LONGEST_PATH:
                continue
            if block.startswith(shape.before) and block.endswith(shape.after) and _ends_at(block, start) == stop:
                return shape.find(block[start:stop])
        return None


def _ends_at(block: bytes, at: int) -> int:
    """Where the string at `at` ends; 0 when its length is cut."""
    length = block[at] & 0x7F
    if length < 0x7F:
        return at + 1 + length
    try:
        length, at = integer(block, at, 0x7F)
    except (CompressionError, IndexError):
        return 0
    return at + length


def _path_of(block: bytes) -> tuple[int, int]:
    """Where the one literal `:path` lies; (0, 0) for a block with none or two, or one that moves the table."""
    at, found = 0, (0, 0)
    while at < len(block):
        byte = block[at]
        if byte & 0x80:
            _, at = integer(block, at, 0x7F)
            continue
        if byte & 0x60:
            return 0, 0  # inserts, or resizes the table
        index, at = integer(block, at, 0x0F)
        if not index:
            at = _ends_at(block, at)
        start, at = at, _ends_at(block, at)
        if index in _PATH_INDEXES:
            if found[1]:
                return 0, 0
            found = start, at
    return found if at == len(block) else (0, 0)
