"""The side copy of event streams: right counts for any line ending and any split, blind rather than wrong."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.sse import MAX_EVENT, Observer

CHAT = [
    {"choices": [{"delta": {"role": "assistant"}}]},
    {"choices": [{"delta": {"content": "He"}}]},
    {"choices": [{"delta": {"content": "llo 北京 \u2028"}}]},
    {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
]


def stream(events: list[dict[str, object]], end: str, *, last: bool = True) -> bytes:
    text = "".join(f"data: {json.dumps(e, ensure_ascii=False)}{end}{end}" for e in events)
    return (text + (f"data: [DONE]{end}{end}" if last else "")).encode()


def watched(*chunks: bytes) -> Observer:
    observer = Observer()
    for chunk in chunks:
        observer.feed(chunk)
    return observer


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@given(draw=st.data())
def test_any_split_gives_the_same_counts(end: str, draw: st.DataObject) -> None:
    raw = stream(CHAT, end)
    cuts = sorted(draw.draw(st.sets(st.integers(1, len(raw) - 1), max_size=12)))
    chunks = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    observer = watched(*chunks, b"\n" if end == "\r" else b"")
    assert (observer.events, observer.done, observer.has_content) == (5, True, True)
    assert observer.usage == {"prompt_tokens": 3, "completion_tokens": 2}
    assert not observer.incomplete


def test_a_stream_without_its_own_end_is_incomplete() -> None:
    assert watched(stream(CHAT, "\n", last=False)).incomplete
    assert watched(stream(CHAT, "\n")[:-1]).incomplete


def test_comments_and_empty_frames_are_no_events() -> None:
    observer = watched(b": ping\n\n", b"event: ping\n\n", b"retry: 1\n\n", b"data:\n\n")
    assert observer.events == 0
    assert not observer.blind


def test_anthropic_usage_and_end_are_seen() -> None:
    observer = watched(
        b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":9}}}\n\n',
        b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"text_delta","text":"x"}}\n\n',
        b'event: message_delta\ndata: {"type":"message_delta","usage":{"output_tokens":4}}\n\n',
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    )
    assert observer.usage == {"input_tokens": 9, "output_tokens": 4}
    assert observer.done
    assert observer.events == 4


def test_an_error_in_band_is_noted() -> None:
    assert watched(b'data: {"error":{"message":"overloaded"}}\n\n').error
    assert watched(b'event: error\ndata: {"type":"error"}\n\n').error


def test_responses_events_end_with_completed() -> None:
    raw = b'event: response.completed\ndata: {"type":"response.completed","response":{"usage":{"input_tokens":1}}}\n\n'
    assert watched(raw).done
    assert watched(raw).usage == {"input_tokens": 1}


def test_an_endless_line_blinds_the_watcher_and_keeps_little() -> None:
    observer = Observer()
    for _ in range(2 * MAX_EVENT // 65536):
        observer.feed(b"x" * 65536)
    assert observer.blind
    assert len(observer._rest) <= MAX_EVENT + 65536


@given(st.lists(st.binary(max_size=60), max_size=10))
def test_no_bytes_raise(chunks: list[bytes]) -> None:
    watched(*chunks)


def test_an_error_event_split_after_its_name_is_still_an_error() -> None:
    observer = watched(stream(CHAT, "\n", last=False), b"event: error\n", b'data: {"message":"no"}\n\n')
    assert observer.error


def test_the_short_way_and_the_long_way_count_the_same() -> None:
    token = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
    delta = b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"x"}}\n\n'
    short = watched(token, *[token, delta] * 20)
    long = watched(b"".join([token, *[token, delta] * 20]))
    assert short.events == long.events == 41
