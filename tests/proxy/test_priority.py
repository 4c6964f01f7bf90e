"""What RFC 9218 priorities mean, and whose word counts."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.model import PathPriority
from proxy.messages import Fields
from proxy.priority import DEFAULT, PathPriorities, Priority, adjusted, of_fields, read

VALUES: list[tuple[bytes, Priority | None]] = [
    (b"u=1", Priority(1)),
    (b"u=1, i", Priority(1, True)),
    (b"i", Priority(3, True)),
    (b"i=?0,u=7", Priority(7, False)),
    (b"i=?1", Priority(3, True)),
    (b"", DEFAULT),
    (b"u=1,u=5", Priority(5)),  # the last one counts (RFC 8941 3.2)
    (b'u=2;x="a,b";y, i;z=1.5, foo=bar/baz, h=("a" b;q 3);r, b=:AQ==:, k, n=-7', Priority(2, True)),
    # A parameter out of range or of another type is ignored, the others stand (RFC 9218 4).
    (b"u=8, i", Priority(3, True)),
    (b"u=-1", DEFAULT),
    (b"u=1.0", DEFAULT),
    (b"u=07", DEFAULT),
    (b'u="1"', DEFAULT),
    (b"u", DEFAULT),
    (b"u=(1)", DEFAULT),
    (b"i=1", DEFAULT),
    (b"i=u", DEFAULT),
    # What is no dictionary is ignored whole (RFC 8941 4.2).
    (b"u=1,", None),
    (b"u=1 i", None),
    (b"u=", None),
    (b"U=1", None),
    (b"u =1", None),
    (b"u=1, i=?2", None),
    (b"u=(1", None),
    (b'u="1', None),
    (b"\xff", None),
    (b"u=1" + b" " * 300 + b", i", None),
]


@pytest.mark.parametrize(("value", "meaning"), VALUES, ids=[repr(value)[:40] for value, _ in VALUES])
def test_value_means(value: bytes, meaning: Priority | None) -> None:
    assert read(value) == meaning


@given(st.integers(0, 7), st.booleans())
def test_what_we_write_is_what_we_read(urgency: int, incremental: bool) -> None:
    assert read(bytes(Priority(urgency, incremental))) == Priority(urgency, incremental)


@given(st.one_of(st.binary(max_size=64), st.text(alphabet='ui=?01234567,; ()"\\:a*.', max_size=64).map(str.encode)))
def test_no_value_of_a_stranger_raises(value: bytes) -> None:
    read(value)
    adjusted(DEFAULT, value)


@pytest.mark.parametrize(
    "value", [b"u=(" + b"a " * 126, b"a=(" * 85, b"u;" * 127, b'u="' + b"\\" * 250, b"u=" + b"1" * 253]
)
def test_hard_values_are_judged_in_no_time(value: bytes) -> None:
    began = time.thread_time()
    read(value)
    assert time.thread_time() - began < 0.2


def test_several_lines_are_one_value() -> None:
    assert of_fields([(b"priority", b"u=5"), (b"x", b"1"), (b"priority", b"i")]) == Priority(5, True)
    assert of_fields([(b"x", b"1")]) is None


def test_a_response_changes_only_what_it_names() -> None:
    assert adjusted(Priority(5, True), b"u=1") == Priority(1, True)
    assert adjusted(Priority(5, True), b"i=?0") == Priority(5, False)
    assert adjusted(Priority(5, True), b"u=9, x") == Priority(5, True)
    assert adjusted(Priority(5, True), b"u=1,") == Priority(5, True)


RULES = PathPriorities(
    "u=4", [PathPriority("/v1", 5), PathPriority("/v1/chat/completions", 1, True), PathPriority("/files/", 7)]
)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (b"/v1/chat/completions", Priority(1, True)),
        (b"/v1/chat/completions?x=/files/", Priority(1, True)),
        (b"/v1/chat/completions/7", Priority(1, True)),
        (b"/v1/chat/completionsX", Priority(5)),
        (b"/v1", Priority(5)),
        (b"/v2", Priority(4)),
        (b"/files/a", Priority(7)),
        (b"/files", Priority(4)),
    ],
)
def test_longest_path_rule_speaks_then_the_default(target: bytes, said: Priority) -> None:
    assert RULES.of(target) == said


def test_a_pool_with_the_default_of_the_rfc_says_nothing() -> None:
    silent = PathPriorities("u=3", [])
    assert not silent
    assert silent.of(b"/") is None
    assert PathPriorities("u=3, i", []).of(b"/") == Priority(3, True)


@pytest.mark.parametrize(
    ("fields", "target", "after"),
    [
        ([], b"/v1/chat/completions", [(b"priority", b"u=1, i")]),
        ([(b"priority", b"u=6")], b"/v1/chat/completions", [(b"priority", b"u=6")]),
        ([(b"priority", b"junk,")], b"/files/x", [(b"priority", b"junk,")]),  # passes unchanged
        ([], b"/files/x", [(b"priority", b"u=7")]),
    ],
)
def test_a_request_that_says_nothing_is_spoken_for_upstream(fields: Fields, target: bytes, after: Fields) -> None:
    RULES.add_to(fields, target)
    assert fields == after


def test_what_the_rfc_assumes_anyway_takes_no_bytes() -> None:
    fields: Fields = []
    PathPriorities("u=3", [PathPriority("/", 3)]).add_to(fields, b"/")
    assert fields == []
