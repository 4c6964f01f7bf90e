"""Find the end of an HTTP/1.1 body and take its framing off, or put it on (RFC 9112 6 and 7).

Theory: a reader is fed what was read: payload slices go out, and it says where the body ended. Nothing is copied but
slices, and the chunks of a token stream, which lie whole in their reads, take one step each.

Rules for editing: as in `proxy.h1`; a reader never looks beyond the body's end.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from proxy.h1 import MEMO_LINES, Framing, HeadError, read_field_line, write_field_lines
from proxy.messages import NOT_IN_TRAILERS, Fields, RequestHead, ResponseHead

CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?")
SHORT_SIZE = re.compile(rb"[0-9A-Fa-f]{1,6}")
MAX_CHUNK_LINE = 4096  # bytes: size and extensions; RFC 9112 7.1.1 asks for a bound
MAX_TRAILERS = 16 * 1024


class LengthReader:
    """A body of a known number of bytes."""

    __slots__ = ("left", "trailers")

    def __init__(self, length: int) -> None:
        self.left = length
        self.trailers: Fields = []

    @property
    def done(self) -> bool:
        return self.left == 0

    def feed(self, chunk: bytes, start: int, give: Callable[[bytes], None]) -> int:
        """Payload of `chunk[start:]` goes to `give`; returns the offset of the first byte that is not ours."""
        end = min(len(chunk), start + self.left)
        if end > start:
            self.left -= end - start
            give(chunk if start == 0 and end == len(chunk) else chunk[start:end])
        return end


class CloseReader:
    """A body that ends with the connection."""

    __slots__ = ("trailers",)
    done = False

    def __init__(self) -> None:
        self.trailers: Fields = []

    def feed(self, chunk: bytes, start: int, give: Callable[[bytes], None]) -> int:
        if start < len(chunk):
            give(chunk[start:] if start else chunk)
        return len(chunk)


_sizes: dict[bytes, int] = {}

LONE: dict[bytes, tuple[int, int]] = {}
"""By its first five bytes, of a chunk of up to FFF bytes: where its payload begins, and how long all of it is. What begins so
and is as long, with CRLF at its end, is one whole chunk. Five bytes hold any such size with its CRLF."""
UNKNOWN = (0, 0)


class ChunkedReader:
    """The chunked coding (RFC 9112 7.1), strictly. `done` after the last chunk's trailers and empty line.

    A line that is split between reads waits in `_line`, at most MAX_CHUNK_LINE (MAX_TRAILERS in all for trailers).
    """

    __slots__ = ("_at_end", "_left", "_line", "_trailer_bytes", "done", "is_between", "trailers")

    def __init__(self) -> None:
        self.is_between = True
        """Nothing of a chunk or of the end was read yet: the next byte begins a chunk's line."""
        self._left = 0  # payload bytes of the current chunk still to come; -2, -1: its CR LF are due
        self._line = b""
        self._at_end = False
        self._trailer_bytes = 0
        self.done = False
        self.trailers: Fields = []

    def alone(self, chunk: bytes) -> bytes:
        """The payload of a read that is one whole chunk and nothing else, as most of a token stream's are; b"" when it is
        not, which `feed` then takes."""
        if not self.is_between:
            return b""
        start, size = LONE.get(chunk[:5], UNKNOWN)
        if not size:
            start, size = _learn_lone(chunk)
        return chunk[start:-2] if size == len(chunk) and chunk[-2:] == b"\r\n" else b""

    def feed(self, chunk: bytes, start: int, give: Callable[[bytes], None]) -> int:
        """As LengthReader.feed; raises HeadError on anything that is not this coding."""
        at, size = start, len(chunk)
        if self.is_between:
            at = self._whole_chunks(chunk, at, give)
        while at < size and not self.done:
            if self._left > 0:
                end = min(size, at + self._left)
                self._left -= end - at
                give(chunk[at:end])
                at = end
                if self._left == 0:
                    self._left = -2
            elif self._left < 0:
                if chunk[at] != (0x0D if self._left == -2 else 0x0A):
                    raise HeadError("chunk data is not followed by CRLF")
                self._left += 1
                at += 1
            else:
                at = self._take_line(chunk, at)
        self.is_between = self._left == 0 and not self._line and not self._at_end
        return at

    def _whole_chunks(self, chunk: bytes, at: int, give: Callable[[bytes], None]) -> int:
        """The chunks that lie whole in this read, which on a token stream is all of them: one step for each instead of the
        five of the general way. Returns where that way has to go on."""
        while True:
            end = chunk.find(b"\r\n", at, at + 18)
            if end < 0:
                return at
            size = _sizes.get(chunk[at:end])
            if size is None:
                size = self._size_of(chunk[at:end])
            stop = end + 2 + size
            if size == 0 or chunk[stop : stop + 2] != b"\r\n":
                return at
            give(chunk[end + 2 : stop])
            at = stop + 2
            if at == len(chunk):
                return at

    def _size_of(self, line: bytes) -> int:
        """A chunk size for the short way; 0 sends anything unusual the general way, which knows what to refuse."""
        if SHORT_SIZE.fullmatch(line) is None:
            return 0
        size = int(line, 16)
        if len(_sizes) >= MEMO_LINES:
            _sizes.clear()
        _sizes[line] = size
        return size

    def _take_line(self, chunk: bytes, at: int) -> int:
        end = chunk.find(b"\n", at)
        piece = chunk[at:] if end < 0 else chunk[at : end + 1]
        line = self._line + piece if self._line else piece
        if len(line) > MAX_CHUNK_LINE + (MAX_TRAILERS if self._at_end else 0):
            raise HeadError(f"chunk line of more than {MAX_CHUNK_LINE} bytes")
        if end < 0:
            self._line = line
            return len(chunk)
        self._line = b""
        if line[-2:-1] != b"\r":
            raise HeadError("bare LF in a chunk line (RFC 9112 7.1)")
        self._on_line(line[:-2])
        return end + 1

    def _on_line(self, line: bytes) -> None:
        if not self._at_end:
            match = CHUNK_LINE.fullmatch(line)
            if match is None:
                raise HeadError("malformed chunk size line")
            self._left = int(match[1], 16)
            if self._left > 1 << 60:
                raise HeadError("chunk size overflows")
            self._at_end = self._left == 0
        elif line:
            self._trailer_bytes += len(line)
            if self._trailer_bytes > MAX_TRAILERS:
                raise HeadError(f"trailers of more than {MAX_TRAILERS} bytes")
            field = read_field_line(line)
            if field[0] not in NOT_IN_TRAILERS:
                self.trailers.append(field)
        else:
            self.done = True


def _learn_lone(chunk: bytes) -> tuple[int, int]:
    """The entry of LONE for what begins as this does; UNKNOWN for larger chunks, extensions, the last one."""
    end = chunk.find(b"\r\n", 0, 5)
    if end < 1 or SHORT_SIZE.fullmatch(chunk, 0, end) is None or not (size := int(chunk[:end], 16)):
        return UNKNOWN
    if len(LONE) >= MEMO_LINES:
        LONE.clear()
    found = LONE[chunk[:5]] = (end + 2, end + 2 + size + 2)
    return found


BodyReader = LengthReader | ChunkedReader | CloseReader


def request_reader(head: RequestHead, framing: Framing) -> BodyReader:
    return ChunkedReader() if framing.chunked else LengthReader(head.length or 0)


def response_reader(head: ResponseHead, framing: Framing) -> BodyReader:
    if framing.chunked:
        return ChunkedReader()
    return CloseReader() if head.length is None else LengthReader(head.length)


def write_chunk(chunk: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(chunk), chunk)


def write_last_chunk(trailers: Fields) -> bytes:
    return b"0\r\n%b\r\n" % write_field_lines(trailers) if trailers else b"0\r\n\r\n"
