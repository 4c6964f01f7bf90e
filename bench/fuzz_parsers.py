"""The parsers of `bench.fuzz_rims` that are plain functions: frames that are watched, codings, blocks, fields of a line."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from bench.rim_mutations import Mutator, Pieces, reads
from bench.rim_seeds import ALT_SVC, EVENTS, LOCATIONS, PRIORITIES, RETRIES, WS, coded_events, header_blocks
from bench.rim_stage import held_bytes
from config.model import Edge, Pool
from proxy import hpack, priority
from proxy.codings import Inflater, NotUndoneError
from proxy.health import retry_after_s
from proxy.hpack import CompressionError, ListTooLargeError
from proxy.messages import ResponseHead
from proxy.reach import h3_alternative
from proxy.redirects import follow
from proxy.sse import MAX_EVENT, observer_for
from proxy.websocket import MAX_KEPT, FrameScanner, Opening

POOL = Pool(
    "p",
    (
        Edge(id="a", scheme="http", host="a.test", port=80, base_path="/base"),
        Edge(id="b", scheme="https", host="b.test", port=443),
    ),
)
Parse = Callable[[random.Random, list[bytes]], None]
MAX_LIST = 4096


class Parsed:
    """A case of one parser: reads of a mutated conversation."""

    def __init__(self, corpus: Sequence[Pieces], parse: Parse) -> None:
        self._mutator = Mutator(corpus)
        self._parse = parse

    async def __call__(self, dice: random.Random) -> None:
        self._parse(dice, reads(dice, self._mutator.pieces(dice)))


def websocket(dice: random.Random, chunks: list[bytes]) -> None:
    """Frames pass; what is taken out or put in place of another are our pongs and close codes that must not be sent."""
    scanner, opening = FrameScanner(b"ours" if dice.randrange(2) else b""), Opening(dice.choice((0, 0, 1, 2)))
    came = passed = 0
    for chunk in chunks:
        came += len(chunk)
        out = scanner.feed(chunk)
        passed += len(out)
        assert -1 <= scanner.boundary <= len(out)
        opening.add(out, scanner)
        assert held_bytes(scanner) <= 1024 + len(chunk), f"{held_bytes(scanner)} bytes of frames are held"
    opening.take()
    assert held_bytes(opening) <= MAX_KEPT
    passed += len(scanner.rest())
    assert passed <= came + 125 * len(chunks) + 125
    if not scanner.pongs and scanner.close_code is None:
        assert passed == came, f"{passed} of {came} bytes passed"


def events(dice: random.Random, chunks: list[bytes], coding: bytes | None = None) -> None:
    observer = observer_for(b"text/event-stream", coding, float)
    assert observer is not None
    for chunk in chunks:
        observer.feed(chunk)
        assert held_bytes(observer) <= 4 * MAX_EVENT + 2 * len(chunk), f"{held_bytes(observer)} bytes are held"


def coded(dice: random.Random, chunks: list[bytes]) -> None:
    events(dice, chunks, dice.choice((b"gzip", b"deflate", b"x-gzip")))
    undo = Inflater(deflate=bool(dice.randrange(2)))
    with suppress(NotUndoneError):
        for chunk in chunks:
            undo(chunk)


def blocks(dice: random.Random, chunks: list[bytes]) -> None:
    decoder = hpack.Decoder(MAX_LIST)
    for chunk in chunks:
        try:
            fields = decoder.decode(chunk)
        except CompressionError:
            return
        except ListTooLargeError:
            continue
        assert sum(len(name) + len(value) + 32 for name, value in fields) <= MAX_LIST
        assert decoder._bytes <= hpack.DEFAULT_TABLE_BYTES
        assert decoder.decode(chunk) is not None or decoder.changes


def location(dice: random.Random, chunks: list[bytes]) -> None:
    found = follow(ResponseHead(307, [(b"location", b"".join(chunks))]), POOL, dice.choice(POOL.edges))
    assert found is None or found.target.startswith(b"/")


def alternative(dice: random.Random, chunks: list[bytes]) -> None:
    found = h3_alternative(b"".join(chunks), "a.test")
    assert found is None or 0 < found[0] < 65536


def urgency(dice: random.Random, chunks: list[bytes]) -> None:
    value = b"".join(chunks)
    said = priority.read(value)
    assert said is None or 0 <= said.urgency <= 7
    priority.of_fields([(b"priority", chunk) for chunk in chunks])
    priority.adjusted(priority.DEFAULT, value)


def retry(dice: random.Random, chunks: list[bytes]) -> None:
    for name in (b"retry-after", b"retry-after-ms"):
        said = retry_after_s([(name, b"".join(chunks)), (b"date", chunks[0] if chunks else b"")], 1.0)
        assert said is None or said >= 0


def _parser(corpus: Sequence[Pieces], parse: Parse) -> Callable[[], Callable[[random.Random], Awaitable[None]]]:
    return lambda: Parsed(corpus, parse)


PARSERS = {
    "websocket frames": _parser([WS, WS[:4], WS[::-1]], websocket),
    "event stream": _parser(EVENTS, events),
    "codings": _parser(coded_events(), coded),
    "hpack": _parser(header_blocks(), blocks),
    "location": _parser(LOCATIONS, location),
    "alt-svc": _parser(ALT_SVC, alternative),
    "priority": _parser(PRIORITIES, urgency),
    "retry-after": _parser(RETRIES, retry),
}
