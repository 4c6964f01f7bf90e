"""The HTTP/1.1 codec: what it reads, what it refuses, and that httptools reads the same in what both accept."""

from __future__ import annotations

import contextlib

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.h1 import MAX_LINES, HeadError, head_end, parse_request, parse_response, write_request, write_response
from proxy.h1_bodies import ChunkedReader, CloseReader, LengthReader, request_reader, write_chunk, write_last_chunk
from proxy.messages import RequestHead, ResponseHead


def request(*lines: str) -> bytes:
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def read(reader: ChunkedReader | LengthReader | CloseReader, *pieces: bytes) -> tuple[bytes, bytes]:
    """(payload, what was left over in the piece that ended the body)."""
    got: list[bytes] = []
    for i, piece in enumerate(pieces):
        at = reader.feed(piece, 0, got.append)
        if reader.done:
            assert i == len(pieces) - 1
            return b"".join(got), piece[at:]
    return b"".join(got), b""


def test_a_request_keeps_target_order_and_repeats() -> None:
    raw = request("POST //a%2Fb?x=%20 HTTP/1.1", "Host: h:1", "X-A: 1", "x-b:2  ", "X-A: 3", "Content-Length: 4")
    head, framing = parse_request(raw, b"http")
    assert (head.method, head.target, head.authority, head.length) == (b"POST", b"//a%2Fb?x=%20", b"h:1", 4)
    assert head.fields == [(b"x-a", b"1"), (b"x-b", b"2"), (b"x-a", b"3"), (b"content-length", b"4")]
    assert framing.keep_alive
    assert not framing.chunked


def test_an_absolute_target_gives_the_authority() -> None:
    head, _ = parse_request(request("GET http://real.test?q HTTP/1.1", "Host: other.test"), b"http")
    assert (head.authority, head.target) == (b"real.test", b"/?q")


def test_options_for_a_url_without_path_asks_about_the_server() -> None:
    head, _ = parse_request(request("OPTIONS http://real.test:80 HTTP/1.1", "Host: other.test"), b"http")
    assert (head.authority, head.target) == (b"real.test:80", b"*")
    head, _ = parse_request(request("OPTIONS http://real.test/ HTTP/1.1", "Host: other.test"), b"http")
    assert head.target == b"/"


@pytest.mark.parametrize(
    ("line", "keep_alive"),
    [("HTTP/1.1", True), ("HTTP/1.0", False)],
)
def test_only_http_1_1_is_kept_alive_by_default(line: str, keep_alive: bool) -> None:
    _, framing = parse_request(request(f"GET / {line}", "Host: h"), b"http")
    assert framing.keep_alive is keep_alive


def test_hop_by_hop_and_nominated_fields_stay_here() -> None:
    raw = request("GET / HTTP/1.1", "Host: h", "Connection: X-Hop, keep-alive", "X-Hop: 1", "Keep-Alive: timeout=5",
                  "Proxy-Connection: keep-alive", "TE: trailers, deflate", "X-Keep: 1")  # fmt: skip
    head, _ = parse_request(raw, b"http")
    assert head.fields == [(b"x-keep", b"1"), (b"te", b"trailers")]


@pytest.mark.parametrize(
    ("said", "protocol"),
    [
        ("foo", b"foo"),
        ("Foo/2.1", b"foo/2.1"),
        ("foo/2, websocket", b"foo/2"),
        ("h2c", b""),
        ("h2c/1", b""),
        ("TLS/1.0", b""),
        ("HTTP/2.0", b""),
        ("foo/", b""),
        ("/foo", b""),
        ("foo/b/r", b""),
        ("f o", b""),
        ("", b""),
        (",", b""),
    ],
)
def test_an_upgrade_names_a_protocol_with_or_without_version(said: str, protocol: bytes) -> None:
    raw = request("GET / HTTP/1.1", "Host: h", "Connection: upgrade", f"Upgrade: {said}")
    assert parse_request(raw, b"http")[0].protocol == protocol


def test_connection_may_not_name_credentials() -> None:
    with pytest.raises(HeadError, match="authorization"):
        parse_request(request("GET / HTTP/1.1", "Host: h", "Connection: Authorization", "Authorization: x"), b"http")


REFUSED = {
    "both lengths": ["Content-Length: 3", "Transfer-Encoding: chunked"],
    "two lengths": ["Content-Length: 3", "Content-Length: 3"],
    "length list": ["Content-Length: 3, 3"],
    "signed length": ["Content-Length: +3"],
    "hex length": ["Content-Length: 0x3"],
    "coding after chunked": ["Transfer-Encoding: chunked, identity"],
    "two codings": ["Transfer-Encoding: identity", "Transfer-Encoding: chunked"],
    "unknown coding": ["Transfer-Encoding: xchunked"],
    "vertical tab": ["Transfer-Encoding: \x0bchunked"],
    "space before colon": ["Transfer-Encoding : chunked"],
    "obs-fold": ["X-A: one", " two"],
    "no colon": ["Garbage"],
    "space in a name": ["X Bad: 1"],
    "NUL": ["X-A: a\x00b"],
    "bare CR": ["X-A: a\rb"],
    "bare LF": ["X-A: a\nb"],
    "two hosts": ["Host: evil.test"],
    "bad host": ["X: y", "\tHost: x"],
}


@pytest.mark.parametrize("lines", REFUSED.values(), ids=REFUSED.keys())
def test_ambiguous_heads_are_refused(lines: list[str]) -> None:
    with pytest.raises(HeadError):
        parse_request(request("POST / HTTP/1.1", "Host: h", *lines), b"http")


def test_transfer_encoding_in_http_1_0_is_refused() -> None:
    with pytest.raises(HeadError):
        parse_request(request("POST / HTTP/1.0", "Host: h", "Transfer-Encoding: chunked"), b"http")


@pytest.mark.parametrize(
    "line",
    [
        "GET  / HTTP/1.1",
        "GET / HTTP/2.0",
        "GET /",
        "GET / HTTP/1.1 ",
        "G@T / HTTP/1.1",
        "GET /a b HTTP/1.1",
        "GET /a#b HTTP/1.1",
        "GET * HTTP/1.1",
        "GET http://h/a#b HTTP/1.1",
    ],
)
def test_malformed_request_lines_are_refused(line: str) -> None:
    with pytest.raises(HeadError):
        parse_request(request(line, "Host: h"), b"http")


def test_http_1_1_needs_exactly_one_host() -> None:
    with pytest.raises(HeadError, match="Host"):
        parse_request(request("GET / HTTP/1.1", "X: y"), b"http")


@pytest.mark.parametrize("line", [b"x-%d: 1\r\n", b"te: %d\r\n"])
def test_a_head_of_too_many_lines_is_431(line: bytes) -> None:
    head = b"GET / HTTP/1.1\r\nHost: h\r\n"
    parse_request(head + b"".join(line % n for n in range(MAX_LINES - 1)) + b"\r\n", b"http")
    with pytest.raises(HeadError) as refused:
        parse_request(head + b"".join(line % n for n in range(MAX_LINES)) + b"\r\n", b"http")
    assert refused.value.status == 431
    with pytest.raises(HeadError) as refused:
        head_end(b"GET /" + b"v" * 100, 0, 64)
    assert refused.value.status == 414


def test_known_odd_and_deciding_lines_keep_their_order_however_they_are_mixed() -> None:
    mixed = [
        b"x-a: 1",
        b"te: trailers",
        b"x-b: 2",
        b"connection: x-gone",
        b"x-gone: 1",
        b"content-length: 0",
        b"x-a: 1",
    ]
    raw = b"\r\n".join([b"GET / HTTP/1.1", b"host: h", *mixed, b"", b""])
    kept = [(b"x-a", b"1"), (b"x-b", b"2"), (b"content-length", b"0"), (b"x-a", b"1"), (b"te", b"trailers")]
    for _ in range(2):  # the second time every line is known
        assert parse_request(raw, b"http")[0].fields == kept


def test_a_head_over_the_limit_is_431_before_it_ends() -> None:
    with pytest.raises(HeadError) as refused:
        head_end(b"GET / HTTP/1.1\r\nX: " + b"v" * 100, 0, 64)
    assert refused.value.status == 431


def test_a_head_of_bare_line_feeds_is_refused_at_once() -> None:
    with pytest.raises(HeadError, match="bare LF"):
        head_end(b"GET / HTTP/1.1\nHost: h\n\n", 0, 1000)


# ------------------------------------------------------------------------------------------------ responses


def test_transfer_encoding_wins_over_content_length_and_ends_the_connection() -> None:
    head, framing = parse_response(
        request("HTTP/1.1 200 OK", "Content-Length: 3", "Transfer-Encoding: chunked"), b"GET"
    )
    assert head.length is None
    assert head.get(b"content-length") is None
    assert framing.chunked
    assert not framing.keep_alive


def test_two_different_lengths_are_refused_and_equal_ones_joined() -> None:
    with pytest.raises(HeadError):
        parse_response(request("HTTP/1.1 200 OK", "Content-Length: 5", "Content-Length: 7"), b"GET")
    head, _ = parse_response(request("HTTP/1.1 200 OK", "Content-Length: 5", "Content-Length: 5"), b"GET")
    assert head.length == 5
    assert [f for f in head.fields if f[0] == b"content-length"] == [(b"content-length", b"5")]


@pytest.mark.parametrize(("method", "status"), [(b"HEAD", 200), (b"GET", 204), (b"GET", 304)])
def test_answers_that_have_no_body_keep_their_length_field(method: bytes, status: int) -> None:
    head, _ = parse_response(request(f"HTTP/1.1 {status} X", "Content-Length: 5"), method)
    assert head.no_body
    assert head.length == 0
    assert head.get(b"content-length") == b"5"


def test_an_answer_without_framing_lasts_until_the_connection_closes() -> None:
    head, framing = parse_response(request("HTTP/1.1 200 OK"), b"GET")
    assert head.length is None
    assert not framing.chunked
    assert not framing.keep_alive


# ------------------------------------------------------------------------------------------------ bodies

BAD_CHUNKS = {
    "bare LF": b"2\nab\n0\n\n",
    "overflow": b"10000000000000000\r\n",
    "plus": b"+2\r\nab\r\n0\r\n\r\n",
    "0x": b"0x2\r\nab\r\n0\r\n\r\n",
    "LF in an extension": b"2;a\nxx\r\nab\r\n0\r\n\r\n",
    "no CRLF after data": b"2\r\nabXX0\r\n\r\n",
    "empty size": b"\r\nab",
    "space before size": b" 2\r\nab\r\n",
}


@pytest.mark.parametrize("raw", BAD_CHUNKS.values(), ids=BAD_CHUNKS.keys())
def test_broken_chunks_are_refused(raw: bytes) -> None:
    with pytest.raises(HeadError):
        read(ChunkedReader(), raw)


def test_an_endless_chunk_line_is_refused() -> None:
    with pytest.raises(HeadError, match="chunk line"):
        read(ChunkedReader(), b"2;" + b"x" * 5000)


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.data())
def test_chunked_bodies_survive_any_split(parts: list[bytes], draw: st.DataObject) -> None:
    wire = b"".join(map(write_chunk, parts)) + write_last_chunk([(b"x-t", b"1")]) + b"GET"
    reader, got, at = ChunkedReader(), bytearray(), 0
    while at < len(wire) and not reader.done:
        size = draw.draw(st.integers(1, len(wire) - at))
        at += reader.feed(wire[at : at + size], 0, got.extend)
    assert reader.done
    assert bytes(got) == b"".join(parts)
    assert wire[at:] == b"GET"
    assert reader.trailers == [(b"x-t", b"1")]


def test_a_length_reader_stops_at_the_next_message() -> None:
    assert read(LengthReader(3), b"ab", b"cNEXT") == (b"abc", b"NEXT")


# ------------------------------------------------------------------------------------------------ writing


def test_a_post_without_body_says_so() -> None:
    raw, chunked = write_request(RequestHead(b"POST", b"/", b"http", b"h", [], length=0))
    assert b"content-length: 0\r\n" in raw
    assert not chunked


def test_a_length_is_written_once() -> None:
    raw, _ = write_request(RequestHead(b"POST", b"/", b"http", b"h", [(b"content-length", b"4")], length=4))
    assert raw.lower().count(b"content-length") == 1


def test_a_body_without_length_is_chunked_only_for_http_1_1() -> None:
    head = ResponseHead(200, [])
    assert write_response(head, http10=False, close=False)[1] is True
    assert write_response(head, http10=True, close=True)[1] is False


def test_what_is_written_reads_back() -> None:
    head = RequestHead(b"POST", b"/x?y", b"http", b"h:8", [(b"a", b"1"), (b"b", b"2")], length=None)
    raw, chunked = write_request(head)
    again, framing = parse_request(raw, b"http")
    assert (again, framing.chunked, chunked) == (head, True, True)


# ------------------------------------------------------------------------------------------------ the oracle

token = st.text("abcxyz-_!", min_size=1, max_size=8).map(str.encode)
value = st.binary(max_size=12).map(lambda b: bytes(c for c in b if c > 0x20 and c != 0x7F))
reserved = {
    b"host",
    b"content-length",
    b"transfer-encoding",
    b"connection",
    b"te",
    b"upgrade",
    b"keep-alive",
    b"expect",
}


class Oracle:
    def __init__(self) -> None:
        self.fields: list[tuple[bytes, bytes]] = []
        self.url = self.body = b""
        self.complete = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name, value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = True


@given(
    st.lists(st.tuples(token, value).filter(lambda f: f[0].lower() not in reserved), max_size=6),
    st.lists(st.binary(min_size=1, max_size=30), max_size=4),
)
def test_httptools_reads_the_same_request(fields: list[tuple[bytes, bytes]], parts: list[bytes]) -> None:
    head = RequestHead(b"POST", b"/p?q=1", b"http", b"h", fields, length=None)
    raw, _ = write_request(head)
    wire = raw + b"".join(map(write_chunk, parts)) + write_last_chunk([])
    oracle = Oracle()
    httptools.HttpRequestParser(oracle).feed_data(wire)
    ours, framing = parse_request(raw, b"http")
    body, rest = read(request_reader(ours, framing), wire[len(raw) :])
    assert oracle.complete
    assert oracle.url == ours.target
    assert [f for f in oracle.fields if f[0].lower() not in reserved] == ours.fields == fields
    assert oracle.body == body == b"".join(parts)
    assert rest == b""


@given(st.binary(max_size=200))
def test_no_bytes_escape_as_another_exception(noise: bytes) -> None:
    for raw in (noise + b"\r\n\r\n", b"GET / HTTP/1.1\r\nHost: h\r\n" + noise + b"\r\n\r\n"):
        try:
            end = head_end(raw, 0, 10_000)
            parse_request(raw[:end], b"http")
        except HeadError:
            pass
    reader = ChunkedReader()
    with contextlib.suppress(HeadError):
        reader.feed(noise, 0, lambda piece: None)


@given(st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=4), st.integers(0, 40), st.integers(0, 3))
def test_a_lone_chunk_is_what_the_general_way_would_have_given(payloads: list[bytes], cut: int, pad: int) -> None:
    """`alone` takes a read only when `feed` would take all of it for one chunk, and then says the same."""
    reads = [b"%0*x\r\n%b\r\n" % (pad + 1, len(payload), payload) for payload in payloads]
    reads[0] = reads[0][: len(reads[0]) - cut] if cut < len(reads[0]) else reads[0]
    short, general = ChunkedReader(), ChunkedReader()
    for read in reads * 2:
        said: list[bytes] = []
        oracle: list[bytes] = []
        try:
            general.feed(read, 0, oracle.append)
        except HeadError:
            assert not short.alone(read)
            return
        if payload := short.alone(read):
            said.append(payload)
        else:
            short.feed(read, 0, said.append)
        assert b"".join(said) == b"".join(oracle)
