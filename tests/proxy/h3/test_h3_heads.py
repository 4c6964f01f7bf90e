"""Field sections to heads and back: what passes unchanged, what is malformed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.io.quic_codes import MESSAGE_ERROR, StreamFault
from proxy.io.quic_heads import (
    outgoing_trailers,
    request_head,
    request_section,
    response_head,
    response_section,
    section_size,
    trailer_fields,
)
from proxy.messages import Fields, RequestHead, ResponseHead

BASE: Fields = [(b":method", b"POST"), (b":scheme", b"https"), (b":authority", b"api.test"), (b":path", b"/v1?q=%2F")]


def refused(section: Fields) -> str:
    with pytest.raises(StreamFault) as caught:
        request_head(section, ended=False)
    assert caught.value.code == MESSAGE_ERROR
    return caught.value.detail


def test_length_is_announced_none_or_zero_when_the_stream_ended() -> None:
    assert request_head(BASE, ended=True).length == 0
    assert request_head(BASE, ended=False).length is None
    assert request_head([*BASE, (b"content-length", b"7")], ended=False).length == 7


def test_host_stands_in_for_authority_and_may_repeat_it() -> None:
    without = [field for field in BASE if field[0] != b":authority"]
    assert request_head([*without, (b"host", b"api.test")], ended=True).authority == b"api.test"
    head = request_head([*BASE, (b"host", b"API.test"), (b"x", b"y")], ended=True)
    assert (head.authority, head.fields) == (b"api.test", [(b"x", b"y")])


def test_no_authority_at_all_is_for_the_gateway_to_refuse() -> None:
    assert request_head([field for field in BASE if field[0] != b":authority"], ended=True).authority == b""


def test_several_cookie_fields_become_one() -> None:
    head = request_head([*BASE, (b"cookie", b"a=1"), (b"x", b"y"), (b"cookie", b"b=2")], ended=True)
    assert head.fields == [(b"x", b"y"), (b"cookie", b"a=1; b=2")]


def test_expectation_is_seen_and_kept() -> None:
    head = request_head([*BASE, (b"expect", b"100-Continue")], ended=False)
    assert head.expect_continue and head.get(b"expect") == b"100-Continue"


def without(name: bytes, *more: tuple[bytes, bytes]) -> Fields:
    return [field for field in BASE if field[0] != name] + list(more)


@pytest.mark.parametrize(
    "section",
    [
        without(b":method"),
        without(b":scheme"),
        without(b":path"),
        without(b":method", (b":method", b"GET POST")),
        without(b":scheme", (b":scheme", b"ftp")),
        without(b":path", (b":path", b"")),
        without(b":path", (b":path", b"no-slash")),
        without(b":path", (b":path", b"/a b")),
        without(b":path", (b":path", b"/a#b")),
        without(b":path", (b":path", b"/a\x7f")),
        without(b":path", (b":path", b"*")),
        without(b":authority", (b":authority", b"user@api.test")),
        without(b":authority", (b":authority", b"api.test/x")),
        [*BASE, (b":status", b"200")],
        [*BASE, (b":protocol", b"websocket")],
        [*BASE, (b"x", b"y"), (b":scheme", b"https")],
        [*BASE, (b"host", b"a"), (b"host", b"a")],
        [*BASE, (b"", b"y")],
        [*BASE, (b"x y", b"z")],
        [*BASE, (b"x\xe9", b"z")],
        [*BASE, (b"x", b"trailing ")],
        [*BASE, (b"x", b"\tleading")],
        [*BASE, (b"upgrade", b"h2c")],
        [*BASE, (b"proxy-connection", b"close")],
        [*BASE, (b"keep-alive", b"5")],
        [*BASE, (b"te", b"trailers, deflate")],
        [*BASE, (b"content-length", b"-1")],
        [*BASE, (b"content-length", b"")],
        [*BASE, (b"content-length", b"1, 1")],
        [(b":method", b"CONNECT"), (b":authority", b"a:1"), (b":path", b"/")],
        [(b":method", b"CONNECT")],
    ],
)
def test_malformed_sections_are_refused(section: Fields) -> None:
    refused(section)


def test_refusal_names_the_field_and_never_its_value() -> None:
    assert "sk-secret" not in refused([*BASE, (b"authorization", b"Bearer sk-secret\n")])


def test_asterisk_is_for_options() -> None:
    section = [(b":method", b"OPTIONS"), *without(b":method")]
    section = [(name, b"*" if name == b":path" else value) for name, value in section]
    assert request_head(section, ended=True).target == b"*"


def test_te_trailers_may_stay() -> None:
    assert request_head([*BASE, (b"te", b"trailers")], ended=True).fields == [(b"te", b"trailers")]


@pytest.mark.parametrize("status", [b"", b"20", b"2000", b"abc", b"101", b"600", b"099"])
def test_bad_statuses_are_malformed(status: bytes) -> None:
    with pytest.raises(StreamFault):
        response_head([(b":status", status)], method=b"GET")


@pytest.mark.parametrize(
    ("method", "status", "no_body"),
    [(b"GET", b"200", False), (b"HEAD", b"200", True), (b"GET", b"204", True), (b"GET", b"304", True)],
)
def test_which_answers_have_no_body(method: bytes, status: bytes, no_body: bool) -> None:
    head = response_head([(b":status", status), (b"content-length", b"9")], method=method)
    assert (head.no_body, head.length) == (no_body, 9)


def test_outgoing_heads_lose_what_belongs_to_one_hop_and_keep_the_rest_in_order() -> None:
    head = RequestHead(
        b"POST", b"/x", b"https", b"api.test",
        [(b"Host", b"no"), (b"X-B", b"1"), (b"Connection", b"X-B"), (b"TE", b"trailers"), (b"Upgrade", b"h2c"), (b"x-a", b"2")],
    )  # fmt: skip
    assert request_section(head)[4:] == [(b"x-b", b"1"), (b"te", b"trailers"), (b"x-a", b"2")]


def test_accepted_websocket_is_a_200_without_the_keys_answer() -> None:
    head = ResponseHead(101, [(b"Upgrade", b"websocket"), (b"Sec-WebSocket-Accept", b"k"), (b"X", b"1")])
    assert response_section(head, websocket=True) == [(b":status", b"200"), (b"x", b"1")]


def test_trailers_hold_no_pseudo_fields() -> None:
    assert outgoing_trailers([(b":path", b"/"), (b"Content-Length", b"1"), (b"X", b"1")]) == [(b"x", b"1")]
    with pytest.raises(StreamFault):
        trailer_fields([(b":status", b"200")])


def test_section_size_counts_32_for_each_field() -> None:
    assert section_size([(b"abc", b"12345"), (b"d", b"")]) == 8 + 1 + 64


NAMES = st.text("abcdefghijklmnopqrstuvwxyz0123456789-_", min_size=1, max_size=12).map(str.encode)
VALUES = st.binary(max_size=30).map(lambda raw: raw.translate(None, b"\0\r\n").strip(b" \t"))
SPECIAL = {b"host", b"te", b"connection", b"keep-alive", b"upgrade", b"transfer-encoding", b"content-length", b"cookie"}


@given(st.lists(st.tuples(NAMES.filter(lambda n: n not in SPECIAL), VALUES), max_size=10))
def test_any_clean_request_survives_the_way_in_and_out_unchanged(fields: Fields) -> None:
    head = request_head([*BASE, *fields], ended=True)
    assert request_section(head) == [*BASE, *fields]
