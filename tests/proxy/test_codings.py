"""What is undone of a coded stream for the onlooker, and where it stops."""

from __future__ import annotations

import gzip
import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.codings import FREE_BYTES, MAX_PIECE, MAX_RATIO, Inflater, NotUndoneError, undoing
from proxy.sse import Observer, observer_for

EVENTS = [b'data: {"choices":[{"delta":{"content":"%d"}}]}\n\n' % number for number in range(50)]
STREAM = b"".join(EVENTS) + b'data: {"choices":[],"usage":{"completion_tokens":50}}\n\ndata: [DONE]\n\n'


def bare(text: bytes) -> bytes:
    made = zlib.compressobj(wbits=-15)
    return made.compress(text) + made.flush()


CODED = {
    b"gzip": gzip.compress(STREAM),
    b"x-gzip": gzip.compress(STREAM[:700]) + gzip.compress(STREAM[700:]),
    b"deflate": zlib.compress(STREAM),
    b"Deflate ": bare(STREAM),
    b"identity": STREAM,
}


def clock() -> float:
    return 1.0


@pytest.mark.parametrize("coding", CODED, ids=[name.decode() for name in CODED])
@given(draw=st.data())
def test_any_split_of_a_coded_stream_gives_the_same_counts(coding: bytes, draw: st.DataObject) -> None:
    raw = CODED[coding]
    cuts = sorted(draw.draw(st.sets(st.integers(1, len(raw) - 1), max_size=12)))
    observer = observer_for(b"text/event-stream; charset=utf-8", coding, clock)
    assert observer is not None
    for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        observer.feed(raw[a:b])
    assert (observer.events, observer.done, observer.incomplete) == (52, True, False)
    assert observer.usage == {"completion_tokens": 50}


def test_each_flushed_event_is_seen_when_it_comes() -> None:
    made, observer = zlib.compressobj(wbits=31), observer_for(b"Text/Event-Stream", b"gzip", clock)
    assert observer is not None
    for number, event in enumerate(EVENTS):
        observer.feed(made.compress(event) + made.flush(zlib.Z_SYNC_FLUSH))
        assert observer.events == number + 1


@pytest.mark.parametrize("coding", [b"br", b"zstd", b"gzip, gzip", b"compress"])
def test_what_is_not_undone_is_not_watched(coding: bytes) -> None:
    assert observer_for(b"text/event-stream", coding, clock) is None


def test_other_texts_are_not_watched() -> None:
    assert observer_for(b"text/plain", None, clock) is None
    assert observer_for(None, None, clock) is None


@pytest.mark.parametrize(
    "coded",
    [
        gzip.compress(b"\n" * (MAX_PIECE + 1)),
        gzip.compress(b"\n" * (MAX_PIECE // 2)) + gzip.compress(b"\n" * (MAX_PIECE // 2 + 9)),
        b"\x1f\x8b\x08" + b"\xff" * 40,
        b"data: plain\n\n",
    ],
    ids=["a bomb", "a bomb in two members", "broken", "not coded at all"],
)
def test_a_bomb_and_a_lie_blind_the_watcher(coded: bytes) -> None:
    with pytest.raises(NotUndoneError):
        Inflater()(coded)
    observer = Observer(clock, undoing(b"gzip"))
    observer.feed(coded)
    assert observer.blind
    observer.feed(coded)


def test_a_stream_that_unfolds_too_far_in_small_pieces_is_left() -> None:
    made, observer, came = zlib.compressobj(9, wbits=31), Observer(clock, undoing(b"gzip")), 0
    while not observer.blind and came < 100_000:
        piece = made.compress(b"\n" * 65536) + made.flush(zlib.Z_SYNC_FLUSH)
        came += len(piece)
        observer.feed(piece)
    assert observer.blind
    assert came * 700 <= FREE_BYTES + MAX_RATIO * came + 2 * 65536


@given(st.lists(st.binary(max_size=80), max_size=8), st.sampled_from([b"gzip", b"deflate"]))
def test_no_bytes_raise_into_the_stream(chunks: list[bytes], coding: bytes) -> None:
    observer = Observer(clock, undoing(coding))
    for chunk in chunks:
        observer.feed(chunk)


def test_a_member_that_fills_the_piece_to_the_byte_leaves_no_room_for_the_next() -> None:
    full = random.Random(5).randbytes(MAX_PIECE)  # which no coding makes smaller: the ratio has nothing to say
    with pytest.raises(NotUndoneError, match="unfolds into more"):
        Inflater()(gzip.compress(full) + gzip.compress(b"more"))
