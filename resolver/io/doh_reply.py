"""Judge an HTTP response that should carry a DNS message, for HTTP/2 and HTTP/3 alike (RFC 8484 4.2).

A reply counts only when it is 200, `application/dns-message`, whole, at most 65535 bytes and for our question; anything
else is a lie told politely (a portal page, a redirect, another question) and never followed.
"""

from __future__ import annotations

from collections.abc import Iterable

from resolver import outgoing as o
from resolver.errors import Malformed
from resolver.io.channel import Failure
from resolver.io.warm import Errand, Link, WarmChannel
from resolver.standing import Fault

MAX_BODY = 65535
MEDIA_TYPE = b"application/dns-message"


class Exchange:
    """One request in flight and what came of its response so far."""

    __slots__ = ("_age_s", "_body", "_trouble", "errand")

    def __init__(self, errand: Errand) -> None:
        self.errand = errand
        self._trouble: Failure | None = Failure(Fault.UNREACHABLE, "stream ended without a response")
        self._age_s = 0
        self._body = b""

    def take_head(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        fields = dict(headers)
        status = fields.get(b":status", b"")
        self._trouble = judge_head(int(status) if status.isdigit() else 0, fields.get(b"content-type", b""))
        age = fields.get(b"age", b"")
        self._age_s = int(age) if age.isdigit() and len(age) < 10 else 0

    def take_body(self, piece: bytes) -> bool:
        """False when the body broke its bound and the stream should be cut."""
        if self._trouble is not None:
            return True
        self._body += piece
        if len(self._body) > MAX_BODY:
            self._trouble = Failure(Fault.LYING, f"body of more than {MAX_BODY} bytes")
            self._body = b""
        return self._trouble is None

    def end(self, channel: WarmChannel, link: Link) -> None:
        """The stream is over: the reply goes to who asked, its TTLs lowered by the time it lay in an HTTP cache, or why there
        is none."""
        result = self._trouble or judge_body(self._body, self.errand.question, self._age_s)
        if isinstance(result, Failure):
            self.errand.finish(result)
        else:
            channel.answered(link, self.errand, result)


def request_fields(authority: str, path: str) -> list[tuple[bytes, bytes]]:
    """The head of every POST but its content-length, which comes last."""
    return [
        (b":method", b"POST"),
        (b":scheme", b"https"),
        (b":authority", authority.encode()),
        (b":path", path.encode()),
        (b"accept", MEDIA_TYPE),
        (b"content-type", MEDIA_TYPE),
    ]


def authority_of(host: str, port: int) -> str:
    host = f"[{host}]" if ":" in host else host
    return host if port == 443 else f"{host}:{port}"


def judge_head(status: int, content_type: bytes) -> Failure | None:
    """Why a response cannot be an answer, or None."""
    if 300 <= status < 400:
        return Failure(Fault.LYING, f"HTTP {status}: a redirect is not followed")
    if status == 429 or status >= 500:
        return Failure(Fault.UNREACHABLE, f"HTTP {status}")
    if status != 200:
        return Failure(Fault.LYING, f"HTTP {status}")
    if content_type.split(b";")[0].strip().lower() != MEDIA_TYPE:
        shown = "".join(c for c in content_type[:40].decode("ascii", "replace") if c.isprintable())
        return Failure(Fault.LYING, f"HTTP 200 with {shown or 'no content-type'}: a portal or no resolver")
    return None


def judge_body(body: bytes, question: bytes, age_s: int) -> bytes | Failure:
    if len(body) < 12 or o.match(body, body[0] << 8 | body[1], question) is o.Match.OTHER:
        return Failure(Fault.LYING, f"HTTP 200 with {len(body)} bytes that answer another question")
    try:
        return o.aged(body, age_s) if age_s else body
    except Malformed as exc:
        return Failure(Fault.LYING, str(exc))
