"""A head is recognised when it differs from one that was read in nothing but the digits of its Content-Length."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.h1 import HeadError, parse_request
from proxy.known_heads import MAX_BYTES, Shape

HEAD = b"POST /v1/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: %b\r\nAccept: */*\r\n\r\n"


def shape(digits: bytes = b"5") -> Shape:
    return Shape(HEAD % digits)


def test_a_whole_message_of_another_length_is_recognised() -> None:
    message = HEAD % b"11" + b"hello world"
    assert message[shape().body_at(message) :] == b"hello world"


def test_an_empty_body_is_recognised() -> None:
    assert shape().body_at(HEAD % b"0") == len(HEAD % b"0")


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(HEAD % b"5" + b"hell", id="body not whole"),
        pytest.param(HEAD % b"5" + b"hello!", id="more than the body"),
        pytest.param((HEAD % b"5")[:-1], id="head not whole"),
        pytest.param((HEAD % b"5")[:60], id="ends before the digits"),
        pytest.param(HEAD % b"05" + b"hello", id="leading zero"),
        pytest.param(HEAD % b"+5" + b"hello", id="sign"),
        pytest.param(HEAD % b" 5" + b"hello", id="space"),
        pytest.param(HEAD % b"5, 5" + b"hello", id="list"),
        pytest.param(HEAD % b"" + b"", id="no digits"),
        pytest.param(HEAD % (b"9" * 30), id="number without end"),
        pytest.param((HEAD % b"5").replace(b"*/*", b"*/+") + b"hello", id="another value after it"),
        pytest.param((HEAD % b"5").replace(b"POST", b"PUT") + b"hello", id="another method"),
        pytest.param((HEAD % b"5").replace(b"\r\nAccept", b"\nAccept") + b"hello", id="bare LF"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_anything_else_is_nobodys(message: bytes) -> None:
    assert shape().body_at(message) == 0


def test_a_head_without_a_length_is_recognised_alone() -> None:
    raw = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert Shape(raw).body_at(raw) == len(raw)
    assert Shape(raw).body_at(raw + b"x") == 0


@pytest.mark.parametrize(
    "raw",
    [
        b"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length : 5\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 005\r\n\r\n",
        b"POST / HTTP/1.1\r\nX: " + b"x" * MAX_BYTES + b"\r\n\r\n",
    ],
)
def test_no_shape_is_made_of_what_could_be_read_in_two_ways(raw: bytes) -> None:
    with pytest.raises(ValueError, match="content-length"):
        Shape(raw)


def test_shapes_are_equal_when_only_the_length_differs() -> None:
    assert shape(b"5") == shape(b"17") != Shape((HEAD % b"5").replace(b"*/*", b"text/*"))


def test_a_shape_does_not_show_its_bytes() -> None:
    assert "sk-secret" not in repr(Shape(b"GET / HTTP/1.1\r\nAuthorization: Bearer sk-secret\r\n\r\n"))


@given(
    st.from_regex(rb"[0-9 ,+]{0,2}", fullmatch=True), st.binary(max_size=12), st.integers(0, 90), st.binary(max_size=1)
)
def test_what_is_recognised_means_the_same_but_for_its_length(digits: bytes, body: bytes, at: int, odd: bytes) -> None:
    """The reader is the oracle: whatever a shape takes, the reader takes too, with equal fields but for that one."""
    known, _ = parse_request(HEAD % b"5", b"http")
    message = bytearray(HEAD % digits + body)
    message[at : at + len(odd)] = odd
    message = bytes(message)
    at = shape().body_at(message)
    if not at:
        return
    read, framing = parse_request(message[:at], b"http")
    assert read.length == len(message) - at and framing.keep_alive
    without = [field for field in read.fields if field[0] != b"content-length"]
    assert without == [field for field in known.fields if field[0] != b"content-length"]


@given(st.integers(0, 10**15 - 1))
def test_every_plain_length_is_recognised(length: int) -> None:
    message = HEAD % b"%d" % length
    try:
        read, _ = parse_request(message, b"http")
    except HeadError:  # pragma: no cover
        pytest.fail("the reader takes plain numbers")
    assert read.length == length
    assert bool(shape().body_at(message)) == (length == 0)
