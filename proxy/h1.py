"""Read and write HTTP/1.1 message heads, to the letter of RFC 9112 and no further; `proxy.h1_bodies` has what follows them.

Theory: a head is one byte string that ends in an empty line; it is split by hand and each line goes through a memo, since
the lines of an SDK's requests repeat from call to call. Measured: 17 fields cost 4.5 us split by hand and 4.4 us in
httptools, which gives no offsets (where a message ends inside a read) and lets obs-fold through; a memoised line costs
0.1 us. httptools stays the oracle in the tests.

Everything ambiguous is refused (RFC 9112 sections 2.2, 5.1, 5.2, 6.1, 6.3, 7.1): bare LF, obs-fold, space before the colon,
a control byte in a value, Content-Length with Transfer-Encoding or twice, any coding but one `chunked`, chunk sizes with
anything but hex digits, a chunk extension with a control byte.

Hop-by-hop fields (RFC 9110 7.6.1) exist in this version only, so they are taken out here, nominated ones included.

Rules for editing: 1. pure; 2. `HeadError.status` is what a client is told, an edge's becomes 502; 3. a rule loosened here
needs a smuggling test beside it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import cast

from proxy.messages import Fields, RequestHead, ResponseHead, get_field
from proxy.secret_fields import SECRET
from proxy.websocket_handshake import is_key

TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
REQUEST_LINE = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+) ([\x21\x22\x24-\x7e\x80-\xff]+) HTTP/([0-9]\.[0-9])")
STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: ([\t\x20-\x7e\x80-\xff]*))?")
FIELD_LINE = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([\t\x20-\x7e\x80-\xff]*)")
PROTOCOL = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+(?:/[!#$%&'*+\-.^_`|~0-9A-Za-z]+)?")
CARRIES_HTTP = frozenset({b"http", b"h2c", b"tls"})
HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::[0-9]{0,5})?")

HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"te", b"transfer-encoding", b"upgrade"})
SPECIAL_BUT_KEPT = frozenset({b"content-length", b"expect"})
SPECIAL = HOP_BY_HOP | SPECIAL_BUT_KEPT | {b"host"}
ORDINARY_CONNECTION = frozenset({b"keep-alive", b"close", b"upgrade", b"te"})
# Nominating one of these in Connection would make the next hop lose what the client meant for the far end, credentials
# above all: such a request is refused, never stripped in silence.
UNNOMINABLE = frozenset({
    b"authorization", b"proxy-authorization", b"cookie", b"set-cookie", b"x-api-key", b"api-key", b"host", b"content-length",
    b"content-type", b"content-encoding", b"content-range", b"cache-control", b"expect", b"forwarded", b"x-forwarded-for",
    b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip",
})  # fmt: skip

MEMO_LINES = 4096
MEMO_LINE_BYTES = 512
MAX_AUTHORITY = 261  # bytes: a name of 255 and a port
MAX_LINES = 1024
"""Field lines of a head, as over h3: node takes 2000, Envoy and Apache 100."""


class HeadError(Exception):
    """A message that must not be passed on. `status`: 400, 414, 431, 501 or 505 for a client."""

    def __init__(self, detail: str, status: int = 400) -> None:
        super().__init__(detail)
        self.detail = detail
        self.status = status


@dataclass(slots=True)
class Framing:
    """How the message goes on after its head.

    `chunked`: chunked coding; otherwise `length` of the head counts, None there meaning "until the connection closes".
    `keep_alive`: another message may follow. `http10`: the peer speaks HTTP/1.0. `idle_hint_s`: from `Keep-Alive:
    timeout=`, 0.0 when it said none.
    """

    chunked: bool = False
    keep_alive: bool = True
    http10: bool = False
    idle_hint_s: float = 0.0


_ordinary: dict[bytes, tuple[bytes, bytes]] = {}
_deciding: dict[bytes, tuple[bytes, bytes]] = {}
"""Lines seen before, by what is done with them: kept as they are, or looked at first (those of SPECIAL)."""


def read_field_line(line: bytes) -> tuple[bytes, bytes]:
    """(lower-case name, value) of one field line; raises HeadError.

    A bare CR or LF, or a NUL, is in no value that FIELD_LINE takes (RFC 9112 2.2, RFC 9110 5.5).
    """
    match = FIELD_LINE.fullmatch(line)
    if match is None:
        raise HeadError(_bad_line(line))
    name = match[1].lower()
    field = (name, match[2].rstrip(b" \t"))
    # A secret stays no longer in memory than its request; a memo is dropped whole when a flood of odd lines fills it.
    if name not in SECRET and len(line) <= MEMO_LINE_BYTES:
        memo = _deciding if name in SPECIAL else _ordinary
        if len(memo) >= MEMO_LINES:
            memo.clear()
        memo[line] = field
    return field


def _bad_line(line: bytes) -> str:
    name, colon, _ = line.partition(b":")
    if line[:1] in (b" ", b"\t"):
        return "folded field line (obs-fold, RFC 9112 5.2)"
    if not colon:
        return f"field line of {len(line)} bytes without a colon"
    if TOKEN.fullmatch(name) is None:
        return "field name with a space or a forbidden byte (RFC 9112 5.1)"
    return f"control byte in the value of {name.decode('latin-1')[:64]}"


def head_end(buffer: bytes | bytearray, start: int, limit: int) -> int:
    """Offset just after the empty line that ends a head, or -1 when more bytes are needed. Raises HeadError early.

    `start`: where an earlier search may go on. A head longer than `limit` bytes is 431 as soon as that is known, 414 when
    its first line alone is (RFC 9112 3).
    """
    end = buffer.find(b"\r\n\r\n", max(0, start - 3))
    size = len(buffer) if end < 0 else end + 4
    if size > limit:
        whole_line = buffer.find(b"\r\n", 0, limit) >= 0
        raise HeadError(
            f"{'head' if whole_line else 'request line'} of more than {limit} bytes", 431 if whole_line else 414
        )
    if end < 0:
        bare = buffer.find(b"\n", start)
        # Waiting for CRLF CRLF would hang on a head made of bare LFs until the header timeout.
        while bare >= 0:
            if bare == 0 or buffer[bare - 1] != 0x0D:
                raise HeadError("bare LF in a head (RFC 9112 2.2)")
            bare = buffer.find(b"\n", bare + 1)
        return -1
    return end + 4


def _gather(raw: bytes) -> tuple[bytes, Fields, dict[bytes, bytes]]:
    """(start line, fields, those that decide framing and routing). Repeats of the latter are joined by a comma, as RFC 9110
    5.3 says, which makes every repeat that must not be an impossible value."""
    lines = raw[:-4].split(b"\r\n")
    start = lines.pop(0)
    if len(lines) > MAX_LINES:
        raise HeadError(f"{len(lines)} field lines, at most {MAX_LINES} are read", 431)
    # One call for all lines that need no look; most of a head does not.
    found = list(map(_ordinary.get, lines))
    special: dict[bytes, bytes] = {}
    if None in found:
        _look(lines, found, special)
    fields = cast(Fields, found)
    # TE is hop-by-hop, yet the far end must know that trailers are welcome: we relay them (RFC 9110 10.1.4).
    if b"te" in special and b"trailers" in _tokens(special[b"te"]):
        fields.append((b"te", b"trailers"))
    return start, fields, special


def _look(lines: list[bytes], found: list[tuple[bytes, bytes] | None], special: dict[bytes, bytes]) -> None:
    """Fill the gaps of `found` in place; a field that goes no further leaves it."""
    at, left = 0, found.count(None)
    # Each search goes on where the last one found something: from the start, a head of 9000 odd lines took 470 ms.
    for _ in range(left):
        at = found.index(None, at)
        line = lines[at]
        name, value = field = _deciding.get(line) or read_field_line(line)
        if name in SPECIAL:
            special[name] = special[name] + b", " + value if name in special else value
            if name not in SPECIAL_BUT_KEPT:
                del lines[at], found[at]
                continue
        found[at] = field


def _tokens(value: bytes) -> list[bytes]:
    return [token for part in value.lower().split(b",") if (token := part.strip(b" \t"))]


def _connection(fields: Fields, special: dict[bytes, bytes], framing: Framing) -> Fields:
    """Decide whether the connection goes on, and take out the fields that Connection names (RFC 9110 7.6.1)."""
    value = special.get(b"connection")
    if value is None:
        framing.keep_alive = not framing.http10
        return fields
    tokens = _tokens(value)
    framing.keep_alive = b"keep-alive" in tokens if framing.http10 else b"close" not in tokens
    if ORDINARY_CONNECTION.issuperset(tokens):
        return fields
    nominated = {token for token in tokens if token not in HOP_BY_HOP and token != b"close"}
    if forbidden := nominated & UNNOMINABLE:
        raise HeadError(f"connection names the end-to-end field {sorted(forbidden)[0].decode()}")
    return [field for field in fields if field[0] not in nominated]


def _length(value: bytes) -> int:
    if not value.isdigit() or len(value) > 18:
        raise HeadError("content-length is repeated or not a plain number (RFC 9112 6.3)")
    return int(value)


def parse_request(raw: bytes, scheme: bytes) -> tuple[RequestHead, Framing]:
    """A request head, empty line included, to its meaning; raises HeadError.

    An absolute-form target gives its authority the last word (RFC 9112 3.2.2) and becomes origin form.
    """
    start, fields, special = _gather(raw)
    match = REQUEST_LINE.fullmatch(start)
    if match is None:
        raise HeadError("malformed request line")
    method, target, version = match.groups()
    if version != b"1.1" and version != b"1.0":
        raise HeadError(f"HTTP version {version.decode()}", 505)
    framing = Framing(http10=version == b"1.0")
    fields = _connection(fields, special, framing)
    length = _request_framing(special, framing)
    authority = _authority(special, framing)
    if target[0] != 0x2F and method != b"CONNECT":
        if target == b"*" and method != b"OPTIONS":
            raise HeadError("* is a target of OPTIONS alone (RFC 9112 3.2.4)")
        authority, target = _origin_form(authority, target, method)
    head = RequestHead(method, target, scheme, authority, fields, length)
    if b"expect" in special or b"upgrade" in special:
        _ask_more(head, special, framing)
    return head, framing


def _ask_more(head: RequestHead, special: dict[bytes, bytes], framing: Framing) -> None:
    """Expect and Upgrade, which HTTP/1.0 does not have."""
    if framing.http10:
        return
    head.expect_continue = special.get(b"expect", b"").lower() == b"100-continue"
    if b"upgrade" in special and b"upgrade" in _tokens(special.get(b"connection", b"")):
        head.protocol = _switchable(next(iter(_tokens(special[b"upgrade"])), b""), head.length)
        if head.protocol == b"websocket" and not (head.method == b"GET" and is_key(head.get(b"sec-websocket-key"))):
            raise HeadError("websocket upgrade without GET or a key of 16 bytes (RFC 6455 4.2.1)")


def _switchable(token: bytes, length: int | None) -> bytes:
    """The protocol to switch to, `name` or `name/version`, or b"": an Upgrade may always be ignored (RFC 9110 7.8). With a
    body there are two readings of where it ends, and what carries HTTP would carry requests past our eyes."""
    name = token.partition(b"/")[0]
    if length != 0 or name in CARRIES_HTTP or PROTOCOL.fullmatch(token) is None:
        return b""
    return token


def _request_framing(special: dict[bytes, bytes], framing: Framing) -> int | None:
    length = special.get(b"content-length")
    transfer = special.get(b"transfer-encoding")
    if transfer is None:
        return 0 if length is None else _length(length)
    if length is not None:
        raise HeadError("both transfer-encoding and content-length (RFC 9112 6.1)")
    if framing.http10:
        raise HeadError("transfer-encoding in HTTP/1.0 (RFC 9112 6.1)")
    if transfer.lower() != b"chunked":
        raise HeadError("transfer-encoding other than one chunked", 501 if transfer.isalpha() else 400)
    framing.chunked = True
    return None


def _authority(special: dict[bytes, bytes], framing: Framing) -> bytes:
    authority = special.get(b"host")
    if authority is None:
        if framing.http10:
            return b""
        raise HeadError("no Host field (RFC 9112 3.2)")
    if len(authority) > MAX_AUTHORITY or HOST.fullmatch(authority) is None:
        raise HeadError("malformed or repeated Host field (RFC 9112 3.2)")
    return authority


def _origin_form(authority: bytes, target: bytes, method: bytes) -> tuple[bytes, bytes]:
    if target == b"*":
        return authority, target
    scheme, separator, rest = target.partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        raise HeadError("request target is neither a path nor an absolute URL")
    cut = min((i for i in (rest.find(b"/"), rest.find(b"?")) if i >= 0), default=len(rest))
    authority, path = rest[:cut], rest[cut:]
    if not authority or len(authority) > MAX_AUTHORITY or HOST.fullmatch(authority) is None:
        raise HeadError("malformed authority in the request target")
    if not path and method == b"OPTIONS":
        return authority, b"*"  # of the server as a whole (RFC 9112 3.2.4)
    return authority, path if path[:1] == b"/" else b"/" + path


def parse_response(raw: bytes, method: bytes) -> tuple[ResponseHead, Framing]:
    """A response head to its meaning, for the request method it answers; raises HeadError (status has no use here)."""
    start, fields, special = _gather(raw)
    match = STATUS_LINE.fullmatch(start)
    if match is None:
        raise HeadError("malformed status line")
    minor, code, reason = match.groups(b"")
    status = int(code)
    framing = Framing(http10=minor == b"0")
    fields = _connection(fields, special, framing)
    if b"keep-alive" in special:
        framing.idle_hint_s = _keep_alive_timeout(special[b"keep-alive"])
    head = ResponseHead(status, fields, reason=reason)
    if status in (101, 426) and b"upgrade" in special:
        fields.append((b"upgrade", special[b"upgrade"]))  # for 426 RFC 9110 15.5.22 demands it
    if status == 101:
        return head, framing
    head.no_body = method == b"HEAD" or status < 200 or status in (204, 304)
    _response_framing(head, special, framing)
    return head, framing


def _response_framing(head: ResponseHead, special: dict[bytes, bytes], framing: Framing) -> None:
    """RFC 9112 6.3. Transfer-Encoding overrides Content-Length, which is dropped, and the connection ends after it."""
    transfer, length = special.get(b"transfer-encoding"), special.get(b"content-length")
    if transfer is not None:
        if transfer.lower() != b"chunked":
            raise HeadError("transfer-encoding other than one chunked")
        if length is not None or framing.http10:
            head.fields = [field for field in head.fields if field[0] != b"content-length"]
            framing.keep_alive = False
        framing.chunked = not head.no_body
        head.length = 0 if head.no_body else None
    elif length is not None:
        if b"," in length:
            length = _same_length(head, length)
        head.length = 0 if head.no_body else _length(length)
    elif head.no_body:
        head.length = 0
    else:
        framing.keep_alive = False


def _same_length(head: ResponseHead, value: bytes) -> bytes:
    """One of several equal lengths, which replaces them (RFC 9110 8.6)."""
    values = set(_tokens(value))
    if len(values) != 1:
        raise HeadError("different content-lengths (RFC 9112 6.3)")
    (length,) = values
    head.fields = [field for field in head.fields if field[0] != b"content-length"]
    head.fields.append((b"content-length", length))
    return length


def _keep_alive_timeout(value: bytes) -> float:
    for part in value.split(b","):
        name, _, number = part.strip(b" \t").partition(b"=")
        if name.lower() == b"timeout" and number.isdigit() and len(number) < 7:
            return float(number)
    return 0.0


# ------------------------------------------------------------------------------------------------ writing

REASONS = {
    100: b"Continue", 101: b"Switching Protocols", 102: b"Processing", 103: b"Early Hints", 200: b"OK", 201: b"Created",
    202: b"Accepted", 204: b"No Content", 206: b"Partial Content", 301: b"Moved Permanently", 302: b"Found",
    303: b"See Other", 304: b"Not Modified", 307: b"Temporary Redirect", 308: b"Permanent Redirect", 400: b"Bad Request",
    401: b"Unauthorized", 403: b"Forbidden", 404: b"Not Found", 405: b"Method Not Allowed", 408: b"Request Timeout",
    409: b"Conflict", 413: b"Content Too Large", 414: b"URI Too Long", 415: b"Unsupported Media Type",
    417: b"Expectation Failed", 421: b"Misdirected Request", 422: b"Unprocessable Content", 425: b"Too Early",
    426: b"Upgrade Required", 429: b"Too Many Requests", 431: b"Request Header Fields Too Large",
    500: b"Internal Server Error", 501: b"Not Implemented", 502: b"Bad Gateway", 503: b"Service Unavailable",
    504: b"Gateway Timeout", 505: b"HTTP Version Not Supported", 508: b"Loop Detected",
}  # fmt: skip

EXPECTS_BODY = frozenset({b"POST", b"PUT", b"PATCH"})


def write_field_lines(fields: Fields) -> bytes:
    return b"\r\n".join(map(b": ".join, fields)) + b"\r\n" if fields else b""


def _announces(fields: Fields, length: int) -> bool:
    return (b"content-length", b"%d" % length) in fields or get_field(fields, b"content-length") is not None


def write_request(head: RequestHead) -> tuple[bytes, bool]:
    """(bytes of the head, whether the body is sent chunked). A websocket or other upgrade gets its Connection field."""
    chunked = head.length is None
    tail = b""
    if chunked:
        tail = b"transfer-encoding: chunked\r\n"
    elif (head.length or head.method in EXPECTS_BODY) and not _announces(head.fields, head.length or 0):
        tail = b"content-length: %d\r\n" % (head.length or 0)
    trailers = (b"te", b"trailers") in head.fields  # RFC 9110 10.1.4: TE must be nominated
    if head.protocol:
        nominated = b"upgrade, te" if trailers else b"upgrade"
        tail += b"upgrade: %b\r\nconnection: %b\r\n" % (head.protocol, nominated)
    elif trailers:
        tail += b"connection: te\r\n"
    start = b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (head.method, head.target, head.authority)
    return b"%b%b%b\r\n" % (start, write_field_lines(head.fields), tail), chunked


def write_response(head: ResponseHead, *, http10: bool, close: bool, keep_alive: bytes = b"") -> tuple[bytes, bool]:
    """(bytes of the head, whether the body is sent chunked). HTTP/1.0 peers get a body that ends with the connection.

    `keep_alive`: the whole line that announces the idle timeout, for connections that go on.
    """
    status = head.status
    start = b"HTTP/1.1 %d %b\r\n" % (status, head.reason or REASONS.get(status, b""))
    chunked, tail = False, b""
    if status == 101:
        tail = b"connection: upgrade\r\n"
    elif status >= 200:
        chunked = head.length is None and not head.no_body and not http10
        if chunked:
            tail = b"transfer-encoding: chunked\r\n"
        elif head.length is not None and not head.no_body and not _announces(head.fields, head.length):
            tail = b"content-length: %d\r\n" % head.length
        tail += b"connection: close\r\n" if close else b"connection: keep-alive\r\n" if http10 else keep_alive
    return b"%b%b%b\r\n" % (start, write_field_lines(head.fields), tail), chunked
