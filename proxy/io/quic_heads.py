"""Turn HTTP/3 field sections into heads and back, to the letter of RFC 9114 sections 4.2 to 4.4 and RFC 9220.

Theory: what HTTP/3 may say and HTTP/1.1 may not (upper case, CR or LF in a value, two lengths, `transfer-encoding`) is
where a downgrade turns into request smuggling, so nothing of it gets past here: a message that breaks a rule is
malformed, which is a stream error (RFC 9114 4.1.2), never a guess.
Rules for editing: 1. pure; 2. every refusal carries what was seen, but never a field's value: it may be a secret.
"""

from __future__ import annotations

import re

from proxy.h2_heads import CONNECTION_SPECIFIC
from proxy.io.quic_codes import MESSAGE_ERROR, StreamFault
from proxy.messages import NOT_IN_TRAILERS, Fields, NeverIndexed, RequestHead, ResponseHead, without
from proxy.secret_fields import SECRET

NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
METHOD = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
BAD_VALUE = re.compile(rb"[\0\r\n]|\A[ \t]|[ \t]\Z")
PATH = re.compile(rb"/[\x21\x22\x24-\x7e\x80-\xff]*")  # no "#": who cuts there and who does not would see two paths
AUTHORITY = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]+)(?::[0-9]{0,5})?")
DIGITS = re.compile(rb"[0-9]{1,18}")

REQUEST_PSEUDO = frozenset({b":method", b":scheme", b":authority", b":path", b":protocol"})

FIELD_OVERHEAD = 32
"""What each field adds to a section's size besides name and value (RFC 9114 4.2.2)."""


def malformed(detail: str) -> StreamFault:
    return StreamFault(MESSAGE_ERROR, detail)


def section_size(fields: Fields) -> int:
    """The size that SETTINGS_MAX_FIELD_SECTION_SIZE bounds."""
    return sum(len(name) + len(value) for name, value in fields) + FIELD_OVERHEAD * len(fields)


def _split(section: Fields, allowed: frozenset[bytes]) -> tuple[dict[bytes, bytes], Fields]:
    """Pseudo-fields and the rest, each checked; raises StreamFault."""
    pseudo: dict[bytes, bytes] = {}
    fields: Fields = []
    for name, value in section:
        if BAD_VALUE.search(value):
            raise malformed(f"forbidden byte in the value of {name[:40]!r}")
        if name[:1] == b":":
            if fields or name in pseudo or name not in allowed:
                raise malformed(f"misplaced, repeated or unknown pseudo-field {name[:40]!r}")
            pseudo[name] = value
        else:
            _check_name(name, value)
            # pylsqpack does not say which lines had the N bit: every secret is taken to have had it.
            fields.append((name, NeverIndexed(value) if name in SECRET else value))
    return pseudo, fields


def _check_name(name: bytes, value: bytes) -> None:
    if not NAME.fullmatch(name):
        raise malformed(f"field name {name[:40]!r} is not a lower-case token")
    if name in CONNECTION_SPECIFIC or (name == b"te" and value.lower() != b"trailers"):
        raise malformed(f"connection-specific field {name!r}")


def content_length(fields: Fields) -> int | None:
    """The announced length, None when there is none; raises StreamFault for a repeated or non-numeric one."""
    found: int | None = None
    for name, value in fields:
        if name == b"content-length":
            if found is not None or not DIGITS.fullmatch(value):
                raise malformed("content-length is repeated or not a number")
            found = int(value)
    return found


def request_head(section: Fields, *, ended: bool) -> RequestHead:
    """A request's head; `ended`: the stream ends with this section, so no body follows. Raises StreamFault."""
    pseudo, fields = _split(section, REQUEST_PSEUDO)
    method = pseudo.get(b":method", b"")
    if not METHOD.fullmatch(method):
        raise malformed("no :method, or one that is not a token")
    authority, fields = _authority(pseudo, fields)
    target, scheme = _target(pseudo, method, authority)
    length = content_length(fields)
    if length is None and ended:
        length = 0
    head = RequestHead(method, target, scheme, authority, _join_cookies(fields), length)
    if method == b"CONNECT":
        head.length = None
    if b":protocol" in pseudo:
        head.protocol = pseudo[b":protocol"].lower()
        head.method, head.length = b"GET", 0  # the form that all versions share, see RequestHead
    head.expect_continue = (head.get(b"expect") or b"").lower() == b"100-continue"
    return head


def _target(pseudo: dict[bytes, bytes], method: bytes, authority: bytes) -> tuple[bytes, bytes]:
    """(target, scheme) by RFC 9114 4.3.1, 4.4 and RFC 9220; raises StreamFault."""
    scheme, path = pseudo.get(b":scheme"), pseudo.get(b":path")
    if method == b"CONNECT" and b":protocol" not in pseudo:
        if scheme is not None or path is not None or not authority:
            raise malformed("CONNECT takes :authority alone")
        return authority, b"https"
    if b":protocol" in pseudo and method != b"CONNECT":
        raise malformed(":protocol without CONNECT")
    if scheme not in (b"https", b"http"):
        raise malformed("no :scheme, or one that is not http or https")
    if path is None or not (PATH.fullmatch(path) or (path == b"*" and method == b"OPTIONS")):
        raise malformed("no :path, or one that is not an origin form")
    return path, scheme


def _authority(pseudo: dict[bytes, bytes], fields: Fields) -> tuple[bytes, Fields]:
    """`:authority` or Host, which must agree, and the fields without Host. b"" passes: refusing is the gateway's."""
    hosts = [value for name, value in fields if name == b"host"]
    authority = pseudo.get(b":authority")
    if hosts:
        fields = [field for field in fields if field[0] != b"host"]
        if len(hosts) > 1 or (authority is not None and authority.lower() != hosts[0].lower()):
            raise malformed(":authority and host differ, or host is repeated")
        authority = authority or hosts[0]
    if authority and not AUTHORITY.fullmatch(authority):
        raise malformed("authority is not host[:port]")
    return authority or b"", fields


def _join_cookies(fields: Fields) -> Fields:
    """One `cookie` field where there were several: HTTP/1.1 allows one line only (RFC 9114 4.2.1)."""
    cookies = [value for name, value in fields if name == b"cookie"]
    if len(cookies) < 2:
        return fields
    joined = [field for field in fields if field[0] != b"cookie"]
    joined.append((b"cookie", b"; ".join(cookies)))
    return joined


def response_head(section: Fields, *, method: bytes, websocket: bool = False) -> ResponseHead:
    """A response's head, interim or final; raises StreamFault. 101 does not exist in HTTP/3 (RFC 9114 4.5): it is what a 2xx
    to an extended CONNECT for a `websocket` becomes (RFC 9220 3)."""
    pseudo, fields = _split(section, frozenset({b":status"}))
    raw = pseudo.get(b":status", b"")
    if len(raw) != 3 or not raw.isdigit() or not 100 <= int(raw) <= 599 or raw == b"101":
        raise malformed(f"bad :status {raw[:8]!r}")
    status = int(raw)
    if websocket and 200 <= status < 300:
        return ResponseHead(101, fields, None)
    no_body = method == b"HEAD" or status in (204, 304) or status < 200
    return ResponseHead(status, fields, content_length(fields), no_body)


def trailer_fields(section: Fields) -> Fields:
    """Trailers that may go on; raises StreamFault for a pseudo-field."""
    return without(_split(section, frozenset())[1], NOT_IN_TRAILERS)


def _outgoing(fields: Fields) -> Fields:
    """Lower-cased, without what HTTP/3 must not carry. `te: trailers` is the one that may stay."""
    kept: Fields = []
    for raw, value in fields:
        name = raw.lower()
        if name in CONNECTION_SPECIFIC or name == b"host" or (name == b"te" and value.lower() != b"trailers"):
            continue
        kept.append((name, value))
    return kept


def request_section(head: RequestHead) -> Fields:
    """The field section of a request; b"websocket" becomes an extended CONNECT (RFC 9220), which has no key."""
    method, fields = head.method, _outgoing(head.fields)
    pseudo: Fields = [(b":scheme", head.scheme), (b":authority", head.authority), (b":path", head.target)]
    if head.protocol:
        method = b"CONNECT"
        pseudo.insert(0, (b":protocol", head.protocol))
        fields = [field for field in fields if field[0] != b"sec-websocket-key"]
    return [(b":method", method), *pseudo, *fields]


def response_section(head: ResponseHead, *, websocket: bool) -> Fields:
    """The field section of a response. The 101 that opens a WebSocket is a 200 here (RFC 9220 3, RFC 8441 5)."""
    status, fields = head.status, head.fields
    if websocket and status == 101:
        status = 200
        fields = [field for field in fields if field[0].lower() != b"sec-websocket-accept"]
    return [(b":status", b"%d" % status), *_outgoing(fields)]


def outgoing_trailers(fields: Fields) -> Fields:
    return [field for field in _outgoing(fields) if field[0][:1] != b":" and field[0] != b"content-length"]
