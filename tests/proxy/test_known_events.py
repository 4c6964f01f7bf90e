"""Shapes of events: what matches says the same but for its open values, and nothing that matters is open."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.known_events import KEPT, MAX_EVENT, NOTHING, learned, shape_of


def matches(shape_from: bytes, event: bytes) -> bool:
    return re.compile(shape_of(shape_from)[0]).fullmatch(event) is not None


CHAT = b'data: {"id":"c-1","created":17,"choices":[{"index":0,"delta":{"content":" a"},"finish_reason":null}]}\n\n'
CLAUDE = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"text":"a"}}\n\n'


@pytest.mark.parametrize(
    ("event", "other"),
    [
        (CHAT, CHAT.replace(b" a", b'\\n\\"{}: \xe5\x8c\x97')),
        (CHAT, CHAT.replace(b" a", b"")),
        (CHAT, CHAT.replace(b"17", b"-1.5e+3").replace(b"c-1", b"c-2")),
        (CLAUDE, CLAUDE.replace(b":0", b":12")),
        (b"id: 1\ndata: {}\n\n", b"id: 22\ndata: {}\n\n"),
    ],
)
def test_other_strings_and_numbers_are_the_same_shape(event: bytes, other: bytes) -> None:
    assert matches(event, other)


@pytest.mark.parametrize(
    ("event", "other"),
    [
        (CHAT, CHAT.replace(b"null", b'"stop"')),
        (CHAT, CHAT.replace(b"content", b"error")),
        (CHAT, CHAT.replace(b"}]}", b'}],"usage":{"a":1}}')),
        (CHAT, CHAT.replace(b" a", b"a\n\ndata: b")),
        (CHAT, CHAT.replace(b" a", b"a\rb")),
        (CHAT, CHAT.replace(b" a", b'a","error":"b')),
        (CHAT, CHAT.replace(b" a", b"a\\")),
        (CHAT, CHAT + CHAT),
        (CHAT, CHAT[:-1]),
        (CHAT, b"data: [DONE]\n\n"),
        (CLAUDE, CLAUDE.replace(b"content_block_delta", b"message_stop")),
        (CLAUDE, CLAUDE.replace(b'"type":"content_block_delta"', b'"type":"error"')),
        (b'data: {"error":"","a":1}\n\n', b'data: {"error":"boom","a":1}\n\n'),
    ],
)
def test_other_keys_literals_kinds_or_ends_are_another_shape(event: bytes, other: bytes) -> None:
    assert other != event and not matches(event, other)


def outline(value: Any) -> Any:
    """The value without its strings and numbers; of KEPT keys the string itself."""
    if isinstance(value, dict):
        return [
            (name, each if isinstance(each, str) and f'"{name}"'.encode() in KEPT else outline(each))
            for name, each in value.items()
        ]
    if isinstance(value, list):
        return [outline(each) for each in value]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float if is_number else str if isinstance(value, str) else value


KEYS = st.sampled_from(["a", "type", "error", "usage", "content", "delta"])
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.text(alphabet='a"\\\n:{}[],1', max_size=4))
VALUES = st.recursive(LEAVES, lambda it: st.lists(it, max_size=3) | st.dictionaries(KEYS, it, max_size=3), max_leaves=6)
EVENTS = st.dictionaries(KEYS, VALUES, max_size=3)


@given(EVENTS, EVENTS)
def test_events_of_one_shape_differ_in_open_values_alone(one: dict[str, Any], two: dict[str, Any]) -> None:
    events = [f"data: {json.dumps(said)}\n\n".encode() for said in (one, two)]
    assert matches(events[0], events[0])
    assert not matches(*events) or outline(one) == outline(two)


@given(st.binary(max_size=80))
def test_any_bytes_have_a_shape_which_they_match(event: bytes) -> None:
    shape, _ = shape_of(event)
    assert re.compile(shape).fullmatch(event) is not None


def test_a_shape_is_learned_at_its_second_sight() -> None:
    event = b'data: {"seen twice":"a"}\n\n'
    assert learned(event) is NOTHING
    match = learned(event.replace(b":", b": "))
    assert match is NOTHING  # another spacing is another shape
    match = learned(event)
    assert match is learned(event)
    assert match(b"xx" + event + b"yy", 2, 2 + len(event)) is not None


@pytest.mark.parametrize("inside", [b"1," * 40 + b"1", b'"' + b"x" * MAX_EVENT + b'"'])
def test_what_would_take_long_to_compile_is_not_learned(inside: bytes) -> None:
    event = b"data: [" + inside + b"]\n\n"
    assert [learned(event) for _ in range(3)] == [NOTHING] * 3
