"""Turn decoded header lists into heads and back, refusing what RFC 9113 section 8 calls malformed.

Theory: a list is refused before anyone acts on it, since the next hop may speak h1, where a CR in a value or a second
length is a smuggled request. Each field goes through a memo of verdicts: the lists of one client repeat, and a look-up
costs 0.06 us where the checks cost 0.6. Secrets never enter the memo.

WebSocket (RFC 8441): an extended CONNECT with `:protocol: websocket` becomes method GET with protocol b"websocket", and the
2xx that accepts it becomes status 101, so that the relay sees the one form that h1 has too. Written out, it is the
reverse: 101 leaves as 200 without Upgrade, Connection and the Sec-WebSocket-Key/Accept pair, which h2 does not use.

Rules for editing: 1. a detail names a rule and a field's name, never a value; 2. a rule loosened here needs a smuggling
test beside it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from proxy.h2_errors import Code, H2StreamError
from proxy.messages import NOT_IN_TRAILERS, Fields, RequestHead, ResponseHead, without
from proxy.secret_fields import SECRET

_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_BAD_VALUE = re.compile(rb"[\x00\r\n]|\A[ \t]|[ \t]\Z")
_BAD_PATH = re.compile(rb"[\x00-\x20\x7f#]")
_BAD_AUTHORITY = re.compile(rb"[\x00-\x20\x7f/?#@\\]")
_SCHEME = re.compile(rb"[A-Za-z][A-Za-z0-9+.\-]*")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_STATUS = re.compile(rb"[1-9][0-9][0-9]")

CONNECTION_SPECIFIC = frozenset({b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"})
"""Not sent in h2 or h3, and malformed when received (RFC 9113 8.2.2, RFC 9114 4.2)."""
_PLAIN, _LENGTH_FIELD, _COOKIE, _EXPECT, _HOST = range(5)
_KINDS = {b"content-length": _LENGTH_FIELD, b"cookie": _COOKIE, b"expect": _EXPECT, b"host": _HOST}
_MEMO_LIMIT = 4096
_MEMO_VALUE_BYTES = 128
_MEMO_LINE_BYTES = 512

_verdicts: dict[tuple[bytes, bytes], int] = {}
_out_names: dict[bytes, bytes] = {}


def malformed(detail: str) -> H2StreamError:
    """RFC 9113 8.1.1: a stream error of type PROTOCOL_ERROR."""
    return H2StreamError(Code.PROTOCOL_ERROR, detail)


def _verdict(field: tuple[bytes, bytes]) -> int:
    """The kind of a valid field; raises H2StreamError for any other."""
    name, value = field
    if _NAME.fullmatch(name) is None:
        raise malformed("pseudo-field after a field" if name[:1] == b":" else "field name with a forbidden byte")
    if _BAD_VALUE.search(value) is not None:
        raise malformed(f"value of {name.decode()} with NUL, CR, LF or surrounding space")
    if name in CONNECTION_SPECIFIC or (name == b"te" and value.lower() != b"trailers"):
        raise malformed(f"connection-specific field {name.decode()}")
    kind = _KINDS.get(name, _PLAIN)
    if len(value) <= _MEMO_VALUE_BYTES and name not in SECRET:
        if len(_verdicts) >= _MEMO_LIMIT:
            _verdicts.clear()
        _verdicts[field] = kind
    return kind


def _count_pseudo(fields: Fields) -> int:
    for at, field in enumerate(fields):
        if field[0][:1] != b":":
            return at
    return len(fields)


def _pseudo_fields(fields: Fields, known: frozenset[bytes]) -> dict[bytes, bytes]:
    """Each at most once, all known (RFC 9113 8.3)."""
    found: dict[bytes, bytes] = {}
    for name, value in fields:
        if name not in known or name in found:
            raise malformed("pseudo-field repeated" if name in found else "unknown pseudo-field")
        found[name] = value
    return found


class _Rest:
    """The fields behind the pseudo-fields, with what framing needs of them."""

    __slots__ = ("expect", "fields", "hosts", "length")

    def __init__(self, fields: Fields, at: int) -> None:
        self.fields: Fields = fields[at:]  # a copy: the decoder may know the list again
        self.length: int | None = None
        self.expect = False
        self.hosts: list[bytes] = []
        special = False
        for field in self.fields:
            kind = _verdicts.get(field)
            if kind is None:
                kind = _verdict(field)
            if kind:
                special = self._take(kind, field[1]) or special
        if special:
            self.fields = _joined_cookies([field for field in self.fields if field[0] != b"host"])

    def _take(self, kind: int, value: bytes) -> bool:
        """Note a field; True when the list must be rewritten for it."""
        if kind == _LENGTH_FIELD:
            if _LENGTH.fullmatch(value) is None or self.length not in (None, int(value)):
                raise malformed("content-length is no plain number, or differs from another one")
            self.length = int(value)
        elif kind == _EXPECT:
            self.expect = value.lower() == b"100-continue"
        elif kind == _HOST:
            self.hosts.append(value)
        return kind in (_COOKIE, _HOST)


def _joined_cookies(fields: Fields) -> Fields:
    """Crumbs become one field before anything but h2 or h3 sees them (RFC 9113 8.2.3)."""
    crumbs = [value for name, value in fields if name == b"cookie"]
    if len(crumbs) < 2:
        return fields
    first = next(at for at, field in enumerate(fields) if field[0] == b"cookie")
    rest = [field for field in fields[first:] if field[0] != b"cookie"]
    return [*fields[:first], (b"cookie", b"; ".join(crumbs)), *rest]


_REQUEST_PSEUDO = frozenset({b":method", b":scheme", b":authority", b":path", b":protocol"})


@dataclass(frozen=True, slots=True)
class _Line:
    """What a request's pseudo-fields say; `authority` None when only Host can say it."""

    method: bytes
    target: bytes
    scheme: bytes
    authority: bytes | None
    protocol: bytes = b""

    @property
    def is_tunnel(self) -> bool:
        return self.protocol != b"" or self.method == b"CONNECT"


_lines: dict[tuple[tuple[bytes, bytes], ...], _Line] = {}


def read_request(fields: Fields, *, ended: bool) -> RequestHead:
    """A request's head; `ended`: END_STREAM came with it. Raises H2StreamError.

    Of a tunnel (CONNECT, websocket) the length is 0: its bytes are no body.
    """
    count = _count_pseudo(fields)
    key = tuple(fields[:count])
    line = _lines.get(key)
    if line is None:
        line = _read_line(_pseudo_fields(fields[:count], _REQUEST_PSEUDO))
        # A query may hold a key, and seldom repeats.
        if b"?" not in line.target and sum(len(value) for _, value in key) <= _MEMO_LINE_BYTES:
            if len(_lines) >= _MEMO_LIMIT:
                _lines.clear()
            _lines[key] = line
    rest = _Rest(fields, count)
    authority = line.authority
    if rest.hosts or authority is None:
        authority = _authority(authority, rest.hosts)
    if line.is_tunnel:
        return RequestHead(line.method, line.target, line.scheme, authority, rest.fields, 0, line.protocol)
    length = _body_length(rest.length, ended)
    return RequestHead(line.method, line.target, line.scheme, authority, rest.fields, length, b"", rest.expect)


def _read_line(pseudo: dict[bytes, bytes]) -> _Line:
    method, authority = pseudo.get(b":method", b""), pseudo.get(b":authority")
    if _TOKEN.fullmatch(method) is None:
        raise malformed(":method is missing or no token")
    if authority is not None and _BAD_AUTHORITY.search(authority) is not None:
        raise malformed("authority with userinfo or a forbidden byte")
    if method == b"CONNECT":
        return _read_connect(pseudo, authority)
    if b":protocol" in pseudo:
        raise malformed(":protocol without CONNECT (RFC 8441 4)")
    scheme, target = _scheme_and_path(pseudo, method)
    return _Line(method, target, scheme, authority)


def _read_connect(pseudo: dict[bytes, bytes], authority: bytes | None) -> _Line:
    protocol = pseudo.get(b":protocol")
    if not authority:
        raise malformed("CONNECT without :authority (RFC 9113 8.5)")
    if protocol is None:
        if b":scheme" in pseudo or b":path" in pseudo:
            raise malformed("CONNECT with :scheme or :path (RFC 9113 8.5)")
        return _Line(b"CONNECT", authority, b"", authority)
    scheme, target = _scheme_and_path(pseudo, b"GET")
    if protocol != b"websocket":
        raise UnknownProtocolError
    return _Line(b"GET", target, scheme, authority, protocol)


class UnknownProtocolError(Exception):
    """An extended CONNECT for a protocol that nobody here speaks: it is answered with 501 (RFC 9220 section 3)."""


def _authority(authority: bytes | None, hosts: list[bytes]) -> bytes:
    # RFC 9113 8.3.1: a Host that says something else than :authority makes the request malformed.
    named = {host.lower() for host in hosts}
    if len(hosts) > 1 or (hosts and authority is not None and named != {authority.lower()}):
        raise malformed("host is repeated or differs from :authority")
    value = authority if authority is not None else (hosts[0] if hosts else b"")
    if _BAD_AUTHORITY.search(value) is not None:
        raise malformed("authority with userinfo or a forbidden byte")
    return value


def _scheme_and_path(pseudo: dict[bytes, bytes], method: bytes) -> tuple[bytes, bytes]:
    scheme, path = pseudo.get(b":scheme", b""), pseudo.get(b":path", b"")
    if _SCHEME.fullmatch(scheme) is None:
        raise malformed(":scheme is missing or malformed")
    if not (path[:1] == b"/" or (path == b"*" and method == b"OPTIONS")) or _BAD_PATH.search(path) is not None:
        raise malformed(":path is missing or malformed")
    return scheme, path


def _body_length(announced: int | None, ended: bool) -> int | None:
    if not ended:
        return announced
    if announced:
        raise malformed(f"content-length {announced} and no body (RFC 9113 8.1.1)")
    return 0


_RESPONSE_PSEUDO = frozenset({b":status"})


def read_response(fields: Fields, *, method: bytes, ended: bool, tunnel: bool) -> ResponseHead:
    """An interim or final response's head. `tunnel`: it answers an extended CONNECT. Raises H2StreamError."""
    count = _count_pseudo(fields)
    pseudo = _pseudo_fields(fields[:count], _RESPONSE_PSEUDO)
    status_text = pseudo.get(b":status", b"")
    if _STATUS.fullmatch(status_text) is None:
        raise malformed(":status is missing or malformed")
    rest = _Rest(fields, count)
    status = int(status_text)
    if status == 101 or (status < 200 and ended):
        raise malformed(f"status {status} in h2, or as the end of a stream")
    if tunnel and 200 <= status < 300:
        return ResponseHead(101, rest.fields, None)
    no_body = method == b"HEAD" or status in (204, 304)
    if no_body:
        return ResponseHead(status, rest.fields, rest.length or 0, no_body=True)
    connected = method == b"CONNECT" and 200 <= status < 300
    length = None if status < 200 or connected else _body_length(rest.length, ended)
    return ResponseHead(status, rest.fields, length)


def read_trailers(fields: Fields) -> Fields:
    """Trailers that may go on; a pseudo-field among them is malformed (RFC 9113 8.1)."""
    return without(_Rest(fields, 0).fields, NOT_IN_TRAILERS)


def _lower_name(name: bytes) -> bytes:
    """The name as h2 wants it, b"" for a field that must not be sent (RFC 9113 8.2.2)."""
    lower = name.lower()
    if lower in CONNECTION_SPECIFIC or lower == b"host" or _NAME.fullmatch(lower) is None:
        lower = b""
    if len(_out_names) >= _MEMO_LIMIT:
        _out_names.clear()
    _out_names[name] = lower
    return lower


def write_fields(fields: Fields, sent: Fields) -> Fields:
    """Append fields in the form of h2 to `sent`."""
    names = _out_names
    for field in fields:
        name = field[0]
        lower = names.get(name)
        if lower is None:
            lower = _lower_name(name)
        if lower == name:
            sent.append(field)
        elif lower:
            sent.append((lower, field[1]))
    return sent


_KEY = frozenset({b"sec-websocket-key"})
_ACCEPT = frozenset({b"sec-websocket-accept"})
_TE = frozenset({b"te"})
_STATUS_FIELDS = {status: (b":status", b"%d" % status) for status in range(100, 600)}


def write_request(head: RequestHead) -> Fields:
    """The list for a request; `protocol` b"websocket" becomes an extended CONNECT (RFC 8441)."""
    if head.method == b"CONNECT":
        return write_fields(head.fields, [(b":method", b"CONNECT"), (b":authority", head.target)])
    sent = [(b":method", head.method), (b":scheme", head.scheme)]
    if head.authority:
        sent.append((b":authority", head.authority))
    sent.append((b":path", head.target))
    if head.protocol:
        sent[0] = (b":method", b"CONNECT")
        sent.insert(1, (b":protocol", head.protocol))
    write_fields(head.fields, sent)
    if head.protocol:
        sent = without(sent, _KEY)
    te = [value for name, value in sent if name == b"te"]
    if te and te != [b"trailers"]:
        sent = without(sent, _TE)
    return sent


def write_response(head: ResponseHead, *, tunnel: bool = False) -> Fields:
    """The list for a response, interim ones too; `tunnel`: it answers an extended CONNECT, where 101 is said as 200."""
    accepted = tunnel and head.status == 101
    status = 200 if accepted else head.status
    sent = write_fields(head.fields, [_STATUS_FIELDS.get(status) or (b":status", b"%d" % status)])
    return without(sent, _ACCEPT) if accepted else sent
