"""Undo the content coding of a stream that is only looked at, piece by piece and within bounds.

Theory: gzip and deflate (RFC 9110 8.4.1) are undone as far as the pieces go; a stream that flushes after each event, which it
must to be of use, gives each event at once. A few bytes may unfold into a thousand times as many, so a piece gives at
most MAX_PIECE, and a stream no more than MAX_RATIO times what came. Brotli and Zstandard would take a library each for a
mere onlooker: those streams pass unwatched.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

MAX_PIECE = 1024 * 1024
MAX_RATIO = 100
"""JSON of one token an event, alike but for the token, packs 10 to 30 times; zlib's utmost is 1032."""
FREE_BYTES = 256 * 1024
"""What may come out whatever came in."""
_GZIP, _ZLIB, _RAW = 31, 15, -15

Undo = Callable[[bytes], bytes]


class NotUndoneError(ValueError):
    """The bytes are no such coding, or unfold into more than they may."""


class Inflater:
    """Undoes gzip (members one after the other included) or deflate, zlib's form or the bare one that some send."""

    __slots__ = ("_came", "_deflate", "_gave", "_wbits", "_zlib")

    def __init__(self, *, deflate: bool = False) -> None:
        self._deflate = deflate
        self._wbits = _ZLIB if deflate else _GZIP
        self._zlib = zlib.decompressobj(self._wbits)
        self._came = self._gave = 0

    def __call__(self, chunk: bytes) -> bytes:
        """What the next bytes unfold into, so far. Raises NotUndoneError; it is of no more use then."""
        self._came += len(chunk)
        try:
            text = self._inflate(chunk)
        except zlib.error as exc:
            raise NotUndoneError("not the coding that was announced") from exc
        self._gave += len(text)
        if self._gave > FREE_BYTES + MAX_RATIO * self._came:
            raise NotUndoneError(f"{self._came} bytes unfold into {self._gave}")
        return text

    def _inflate(self, chunk: bytes) -> bytes:
        if self._deflate and not self._gave and self._came == len(chunk) and not _is_zlib(chunk):
            self._zlib = zlib.decompressobj(_RAW)
        pieces, left = [], MAX_PIECE
        while chunk:
            if self._zlib.eof:
                if self._deflate:
                    break  # nothing may follow; who does send more is not understood, and need not be
                self._zlib = zlib.decompressobj(self._wbits)
            pieces.append(self._zlib.decompress(chunk, left))
            left -= len(pieces[-1])
            if self._zlib.unconsumed_tail or left <= 0:
                raise NotUndoneError(f"a piece of {len(chunk)} bytes unfolds into more than {MAX_PIECE}")
            chunk = self._zlib.unused_data
        return b"".join(pieces)


def _is_zlib(start: bytes) -> bool:
    """Whether a stream starts as RFC 1950 says; less than two bytes may be it."""
    return not start or (start[0] & 0x0F == 8 and (len(start) < 2 or int.from_bytes(start[:2], "big") % 31 == 0))


def undoing(coding: bytes | None) -> Undo | None:
    """How to undo a Content-Encoding, None for nothing to undo. Raises NotUndoneError for one that is not known."""
    name = (coding or b"").strip().lower()
    if name in (b"", b"identity"):
        return None
    if name in (b"gzip", b"x-gzip"):
        return Inflater()
    if name == b"deflate":
        return Inflater(deflate=True)
    raise NotUndoneError(f"coding {name[:20].decode('latin-1')}")
