"""Valid conversations, as pieces that mean something, and what is done to them before a parser gets them.

A piece is a line, a frame, a chunk: mutations drop, repeat, swap and splice pieces, and then flip, cut and overwrite bytes
and play with line ends and numbers. Everything is drawn from the dice that are given.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

Pieces = Sequence[bytes]

TOKENS = (
    b"\r\n", b"\n", b"\r", b"\r\n\r\n", b"\0", b" ", b"\t", b":", b";", b",", b"=", b'"', b"\xff", b"\xb2", b"0", b"-1",
    b"9" * 20, b"f" * 17, b"9" * 5000, b"18446744073709551616", b"HTTP/1.1", b"\x80" * 6, b"\xff\xff\xff\xff", b"%00",
    b"Content-Length: 1\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n", b"Expect: 100-continue\r\n",
)  # fmt: skip
MOST_READS = 24
LARGE = 50_000
"""Bytes of one thing repeated: more than any head may have, and than any bound of the rims under fuzz but one."""


class Mutator:
    """Draws inputs from a corpus."""

    def __init__(self, corpus: Sequence[Pieces]) -> None:
        self._corpus = corpus

    def pieces(self, dice: random.Random) -> list[bytes]:
        """A conversation of the corpus, or one like it."""
        found = list(dice.choice(self._corpus))
        for _ in range(dice.choice((0, 0, 1, 1, 2, 4))):
            self._shuffle(dice, found)
        for _ in range(dice.choice((0, 1, 1, 2, 3, 8))):
            if found:
                at = dice.randrange(len(found))
                found[at] = mutated(dice, found[at])
        if not dice.randrange(150):
            thing = dice.choice(TOKENS + tuple(found)) or b"x"
            found.insert(dice.randrange(len(found) + 1), (thing * (LARGE // len(thing) + 1))[:LARGE])
        return found

    def _shuffle(self, dice: random.Random, found: list[bytes]) -> None:
        way, at = dice.randrange(5), dice.randrange(len(found) + 1)
        if way == 0:
            del found[at : at + dice.randrange(1, 3)]
        elif way == 1:
            found[at:at] = found[at : at + dice.randrange(1, 4)] * dice.choice((1, 1, 2, 40))
        elif way == 2:
            other = dice.choice(self._corpus)
            start = dice.randrange(len(other))
            found[at:at] = other[start : start + dice.randrange(1, 5)]
        elif way == 3 and len(found) > 1:
            one, two = dice.randrange(len(found)), dice.randrange(len(found))
            found[one], found[two] = found[two], found[one]
        else:
            del found[at:]


def _flip(dice: random.Random, piece: bytearray) -> None:
    if piece:
        piece[dice.randrange(len(piece))] ^= 1 << dice.randrange(8)


def _overwrite(dice: random.Random, piece: bytearray) -> None:
    at, token = dice.randrange(len(piece) + 1), dice.choice(TOKENS)
    piece[at : at + len(token)] = token


def _insert(dice: random.Random, piece: bytearray) -> None:
    at = dice.randrange(len(piece) + 1)
    piece[at:at] = dice.choice(TOKENS)


def _cut(dice: random.Random, piece: bytearray) -> None:
    at = dice.randrange(len(piece) + 1)
    del piece[at : at + dice.choice((1, 1, 3, 1 << 30))]


def _repeat(dice: random.Random, piece: bytearray) -> None:
    at = dice.randrange(len(piece) + 1)
    piece[at:at] = piece[at : at + dice.randrange(1, 20)] * dice.choice((1, 2, 50))


def _noise(dice: random.Random, piece: bytearray) -> None:
    at = dice.randrange(len(piece) + 1)
    piece[at:at] = dice.randbytes(dice.randrange(1, 9))


def _other_line_end(dice: random.Random, piece: bytearray) -> None:
    at = piece.find(b"\r\n", dice.randrange(len(piece) + 1))
    if at >= 0:
        piece[at : at + 2] = dice.choice((b"\n", b"\r", b"\r\r\n", b"\r\n ", b"\n\r\n", b"\0\r\n"))


def _other_number(dice: random.Random, piece: bytearray) -> None:
    digits = [at for at, byte in enumerate(piece) if 0x30 <= byte <= 0x39]
    if digits:
        at = dice.choice(digits)
        piece[at : at + 1] = dice.choice((b"", b"0", b"1", b"9", b"999999999", b"-", b"0x1", b"1e9", b"\xb9"))


WAYS: tuple[Callable[[random.Random, bytearray], None], ...] = (
    _flip, _flip, _overwrite, _insert, _cut, _repeat, _noise, _other_line_end, _other_number,
)  # fmt: skip


def mutated(dice: random.Random, piece: bytes) -> bytes:
    changed = bytearray(piece)
    dice.choice(WAYS)(dice, changed)
    return bytes(changed)


def reads(dice: random.Random, pieces: Pieces) -> list[bytes]:
    """The bytes of `pieces`, in order, in the reads in which they arrive: all at once, by pieces, or cut anywhere."""
    way = dice.randrange(3)
    if way == 0 and len(pieces) <= MOST_READS:
        return [piece for piece in pieces if piece]
    whole = b"".join(pieces)
    if way == 1 or len(whole) < 2:
        return [whole] if whole else []
    # Close to one another as often as far apart: what is cut inside a number or a CR LF is what breaks.
    cuts = sorted({dice.randrange(1, len(whole)) for _ in range(dice.randrange(1, MOST_READS))})
    if dice.randrange(2):
        start = dice.randrange(len(whole))
        cuts = list(range(start, min(start + MOST_READS, len(whole)))) or cuts
    return [whole[at:to] for at, to in zip([0, *cuts], [*cuts, len(whole)], strict=True) if at < to]
