"""Decode header lists as RFC 7541 says, fast for lists that were seen before; `proxy.hpack_encoder` is the other direction.

Theory: on a warm connection nearly every field is an index, so a field is one list look-up: 3 us for 20 fields seen before,
where the `hpack` package, the oracle in the tests, takes 41. A block that was seen since the table last moved is known whole.

Rules for editing: 1. the decoder must run to the end of a block even when the list is too long, or the tables of both
ends differ from then on; 2. every memo has a bound.
"""

from __future__ import annotations

from typing import Any

from proxy.hpack_tables import STATIC, Field, HuffmanError, huffman_decode
from proxy.messages import NeverIndexed

DEFAULT_TABLE_BYTES = 4096
ENTRY_OVERHEAD = 32  # RFC 7541 4.1

MEMO_LIMIT = 2048  # strings remembered by the process
_MEMO_BYTES = 24  # longer strings may be secrets and rarely repeat without an index
KNOWN_LIMIT = 64  # whole blocks, and long strings, remembered by one coder
_KNOWN_BYTES = 512
_MOST_RESIZES = 2
"""Of one block: the smallest size since the last block and the one that holds, however often it changed (RFC 7541 4.2)."""


class CompressionError(Exception):
    """A header block that cannot be decoded: the tables of both ends are no longer the same (RFC 7541 section 5)."""


class ListTooLargeError(Exception):
    """The list is over the limit, but the table is intact. `size`: what it would have had (RFC 9113 6.5.2)."""

    def __init__(self, size: int) -> None:
        super().__init__(f"header list of {size} bytes")
        self.size = size


def prefixed(value: int, mask: int, pattern: int) -> bytes:
    """An integer behind the flag bits `pattern`, with a prefix of `mask` (RFC 7541 5.1)."""
    if value < mask:
        return bytes((pattern | value,))
    out = bytearray((pattern | mask,))
    value -= mask
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def integer(block: bytes, at: int, mask: int) -> tuple[int, int]:
    """(value, next position) of an integer with a prefix of `mask` (RFC 7541 5.1); at most 28 bits beyond the prefix."""
    value = block[at] & mask
    at += 1
    if value < mask:
        return value, at
    for shift in (0, 7, 14, 21):
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise CompressionError("integer of more than four continuation bytes")


_memo: dict[bytes, bytes] = {}


def make_room(memo: dict[Any, Any], limit: int) -> None:
    # Emptied whole: what is in use comes back at once, and no order needs to be kept.
    if len(memo) >= limit:
        memo.clear()


class Decoder:
    """The receiving table of one connection. `table_bytes` is what our SETTINGS allow the peer, never changed later."""

    __slots__ = ("_bytes", "_entries", "_known", "_limit", "_max_list", "_strings", "_table_bytes", "changes")

    def __init__(self, max_list_bytes: int, table_bytes: int = DEFAULT_TABLE_BYTES) -> None:
        self._entries: list[Field] = []  # newest last: index 62 is _entries[-1]
        self._bytes = 0
        self._limit = table_bytes  # what the peer chose
        self._table_bytes = table_bytes  # what we allow
        self._max_list = max_list_bytes
        self.changes = 0  # of the table
        self._known: dict[bytes, list[Field]] = {}  # blocks that mean this as long as the table stands
        self._strings: dict[bytes, bytes] = {}  # long ones, secrets among them: they go with the connection

    def decode(self, block: bytes) -> list[Field]:
        """The fields in order, not to be changed by the caller.

        Raises CompressionError, or ListTooLargeError after the whole block went into the table.
        """
        known = self._known.get(block)
        if known is not None:
            return known
        changes = self.changes
        try:
            fields = self._decode(block)
        except IndexError:
            raise CompressionError("block ends inside a field, or names an index outside the table") from None
        except HuffmanError as exc:
            raise CompressionError(str(exc)) from None
        if changes != self.changes:
            self._known.clear()
        elif len(block) <= _KNOWN_BYTES:
            make_room(self._known, KNOWN_LIMIT)
            self._known[block] = fields
        return fields

    def knows(self, block: bytes) -> bool:
        """Whether this block was decoded since the table last moved, and did not move it."""
        return block in self._known

    def _decode(self, block: bytes) -> list[Field]:
        fields: list[Field] = []
        entries, size, at, end, resizes = self._entries, 0, 0, len(block), 0
        while at < end:
            byte = block[at]
            if byte > 0x80 and byte < 0xFF:
                at += 1
                field = STATIC[byte - 0x81] if byte < 0xBE else entries[0xBD - byte]
            elif byte >= 0x80:
                index, at = integer(block, at, 0x7F)
                field = self._entry(index)
            elif byte & 0xE0 == 0x20:
                resizes += 1
                if fields or size or resizes > _MOST_RESIZES:
                    raise CompressionError("table size update after a field, or a third one (RFC 7541 4.2)")
                at = self._resize(block, at)
                continue
            else:
                field, at = self._literal(block, at, byte)
            size += len(field[0]) + len(field[1]) + ENTRY_OVERHEAD
            if size <= self._max_list:
                fields.append(field)
        if size > self._max_list:
            raise ListTooLargeError(size)
        return fields

    def _entry(self, index: int) -> Field:
        if index == 0 or index > 61 + len(self._entries):
            raise CompressionError(f"index {index} in a table of {61 + len(self._entries)}")
        return STATIC[index - 1] if index < 62 else self._entries[61 - index]

    def _literal(self, block: bytes, at: int, byte: int) -> tuple[Field, int]:
        inserted, never = byte & 0x40, byte & 0xF0 == 0x10
        index, at = integer(block, at, 0x3F if inserted else 0x0F)
        if index:
            name = self._entry(index)[0]
        else:
            name, at = self._string(block, at)
        value, at = self._string(block, at)
        field = (name, NeverIndexed(value) if never else value)
        if inserted:
            self.changes += 1
            self._entries.append(field)
            self._bytes += len(name) + len(value) + ENTRY_OVERHEAD
            if self._bytes > self._limit:
                self._evict()
        return field, at

    def _string(self, block: bytes, at: int) -> tuple[bytes, int]:
        huffman = block[at] & 0x80
        length, at = integer(block, at, 0x7F)
        end = at + length
        if end > len(block):
            raise CompressionError(f"string of {length} bytes where {len(block) - at} are left")
        raw = block[at:end]
        if not huffman:
            return raw, end
        # Short strings are shared by all connections, since they are names and numbers.
        memo, limit = (_memo, MEMO_LIMIT) if length <= _MEMO_BYTES else (self._strings, KNOWN_LIMIT)
        text = memo.get(raw)
        if text is None:
            text = huffman_decode(raw)
            if length <= _KNOWN_BYTES:
                make_room(memo, limit)
                memo[raw] = text
        return text, end

    def _resize(self, block: bytes, at: int) -> int:
        limit, at = integer(block, at, 0x1F)
        if limit > self._table_bytes:
            raise CompressionError(f"table of {limit} bytes where {self._table_bytes} are allowed")
        self._limit = limit
        self.changes += 1
        self._evict()
        return at

    def _evict(self) -> None:
        gone = 0
        for name, value in self._entries:
            if self._bytes <= self._limit:
                break
            self._bytes -= len(name) + len(value) + ENTRY_OVERHEAD
            gone += 1
        del self._entries[:gone]


def read_string(block: bytes) -> bytes:
    """The text of a whole string literal (RFC 7541 5.2). Raises CompressionError."""
    try:
        length, at = integer(block, 0, 0x7F)
        if at + length != len(block):
            raise CompressionError(f"string of {length} bytes in {len(block) - at}")
        return huffman_decode(block[at:]) if block[0] & 0x80 else block[at:]
    except IndexError:
        raise CompressionError("string without a length") from None
    except HuffmanError as exc:
        raise CompressionError(str(exc)) from None
