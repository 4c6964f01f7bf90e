"""The side copy of event streams: right counts for any line ending and any split, blind rather than wrong."""

from __future__ import annotations

import itertools
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
    observer = Observer(lambda: 0.0)
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
    observer = Observer(lambda: 0.0)
    for _ in range(2 * MAX_EVENT // 65536):
        observer.feed(b"x" * 65536)
    assert observer.blind
    assert len(observer._rest) <= MAX_EVENT + 65536


def test_endless_empty_lines_of_one_event_blind_the_watcher_as_well() -> None:
    observer = Observer(lambda: 0.0)
    for _ in range(60):
        observer.feed(b"data:\n" * 1000)
    assert observer.blind
    assert sum(len(line) + 5 for line in observer._data) <= MAX_EVENT + 5


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


def test_first_and_last_token_are_timed() -> None:
    now = iter(range(1, 100))
    observer = Observer(lambda: float(next(now)))
    for event in (CHAT[0], CHAT[1], CHAT[2], CHAT[1]):
        observer.feed(f"data: {json.dumps(event)}\n\n".encode())
    first, last = observer.first_token, observer.last_token
    observer.feed(b'data: {"choices":[],"usage":{"completion_tokens":2}}\n\ndata: [DONE]\n\n')
    assert (first, last) == (2.0, 4.0)
    assert (observer.first_token, observer.last_token) == (2.0, 4.0)


def test_usage_that_is_null_in_every_event_costs_no_look_inside() -> None:
    # Given a stream that would be cut off by an event that cannot be parsed
    token = b'data: {"choices":[{"delta":{"content":"x"}}],"usage":null}\n\n'
    observer = watched(token, token.replace(b"null}", b"null"), token, b'data: {"choices":[],"usage":{"a":1}}\n\n')
    assert observer.events == 4
    assert observer.usage == {"a": 1}


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("response.output_text.delta", {"delta": "x"}),
        ("response.refusal.delta", {"delta": "x"}),
        ("response.function_call_arguments.delta", {"delta": "{"}),
        ("response.reasoning_summary_text.delta", {"delta": "x"}),
    ],
)
@pytest.mark.parametrize("named", [True, False], ids=["with event lines", "data alone"])
@pytest.mark.parametrize(
    ("end", "failed"), [("response.completed", False), ("response.incomplete", False), ("response.failed", True)]
)
def test_responses_streams_in_every_form(kind: str, extra: dict[str, str], named: bool, end: str, failed: bool) -> None:
    def event(kind: str, **more: object) -> bytes:
        line = f"event: {kind}\n" if named else ""
        return f"{line}data: {json.dumps({'type': kind, **more})}\n\n".encode()

    observer = watched(
        event("response.created", response={"usage": None, "error": None}),
        *[event(kind, **extra) for _ in range(5)],
        event("response.output_item.done", item={}),
        event(end, response={"usage": {"input_tokens": 3, "output_tokens": 5}}),
    )
    assert (observer.events, observer.done, observer.has_content, observer.error) == (8, True, True, failed)
    assert observer.usage == {"input_tokens": 3, "output_tokens": 5}
    assert not observer.incomplete


TEXTS = st.text(alphabet='a"\\\n:{}é,', max_size=6)


@given(
    st.lists(st.one_of(TEXTS, st.just("[DONE]"), st.just('"usage":{"a":1}')), min_size=1, max_size=12), st.booleans()
)
def test_tokens_known_by_their_shape_count_as_those_that_are_read(texts: list[str], spaced: bool) -> None:
    separators = (", ", ": ") if spaced else (",", ":")
    said = [{"id": "x", "choices": [{"delta": {"content": text or "-"}}], "usage": None} for text in texts]
    tail = [{"choices": [], "usage": {"a": 2}}, {"error": {"message": "late"}}]
    events = [f"data: {json.dumps(each, separators=separators)}\n\n".encode() for each in [*said, *tail]]
    one_by_one, at_once = watched(*events), watched(b"".join(events))
    for observer in (one_by_one, at_once):
        assert (observer.events, observer.usage, observer.error) == (len(events), {"a": 2}, True)
        assert not observer.done and not observer.blind


EVENTS = [
    b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
    b'data: {"created":7,"choices":[{"delta":{"content":"b"}}]}\n\n',
    b'data: {"created":8,"choices":[{"delta":{"content":"c"}}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":3}}\n\n',
    b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"d"}}\n\n',
    b'event: error\ndata: {"type":"error"}\n\n',
    b"data: [DONE]\n\n",
]


@given(st.lists(st.sampled_from([*EVENTS, b"data: {", b"\n", b"x" * 5000]), max_size=60))
def test_what_is_known_by_its_shape_is_seen_as_if_it_had_been_read(chunks: list[bytes]) -> None:
    clock = itertools.count(1.0)
    at = 0.0
    knowing, reading = Observer(lambda: at), Observer(lambda: at)
    for chunk in chunks:
        at = next(clock)
        knowing.feed(chunk)
        for cut in (slice(None, 1), slice(1, None)):  # an event in two pieces has no shape
            reading.feed(chunk[cut])
    for name in ("events", "has_content", "done", "error", "usage", "blind", "incomplete", "first_token", "last_token"):
        assert getattr(knowing, name) == getattr(reading, name), name


def test_a_stream_expects_more_of_what_it_saw_but_not_inside_of_an_event() -> None:
    event = b'data: {"n":%d,"choices":[{"delta":{"content":"a"}}]}\n\n'
    observer = watched(*[event % n for n in range(4)])
    one_more = event % 99
    assert observer.expects(one_more, 0, len(one_more)) is not None
    observer.feed(one_more[:20])
    assert observer.expects(one_more, 0, len(one_more)) is None
    observer.feed(one_more[20:])
    assert observer.expects(one_more, 0, len(one_more)) is not None
    assert observer.events == 5


def test_a_coded_stream_expects_nothing_of_its_coded_bytes() -> None:
    event = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
    observer = Observer(lambda: 0.0, undo=lambda coded: coded)
    for _ in range(5):
        observer.feed(event)
    assert observer.events == 5
    assert observer.expects(event, 0, len(event)) is None
