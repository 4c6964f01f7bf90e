"""Answer DNS over HTTPS without knowing which HTTP carries it (RFC 8484).

Theory: a rim hands over method, target, content type and whole body, and gets status, fields and body back; on a cache
hit before the call returns. HTTP's caches must not keep an answer longer than DNS would: `max-age` is the smallest TTL
of the answer as the client gets it, and what has no time of its own is not stored at all.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from resolver import wire as w
from resolver.errors import Malformed
from resolver.io.service import STREAM_LIMIT, ResolverService
from resolver.memos import Memo

MEDIA_TYPE = b"application/dns-message"
LARGEST_BODY = 65_535
_LONGEST_TARGET = 4 * LARGEST_BODY // 3 + 64


@dataclass(frozen=True, slots=True)
class DohReply:
    """An HTTP answer. The rim adds `content-length` and, for HEAD, leaves the body out."""

    status: int
    fields: list[tuple[bytes, bytes]]
    body: bytes


Done = Callable[[DohReply], None]


class Ready(NamedTuple):
    """An answer at hand for one target, until its TTLs change or its entry does."""

    memo: Memo
    reply: DohReply


class DohService:
    """The resource at `path` (without query)."""

    def __init__(self, service: ResolverService, path: str = "/dns-query") -> None:
        self._service = service
        self.path = path.encode()
        self._replies = service.counter("https")

    def claims(self, target: bytes) -> bool:
        """Whether a request target is ours to answer."""
        return target.partition(b"?")[0] == self.path

    def respond(
        self,
        method: bytes,
        target: bytes,
        content_type: bytes | None,
        body: bytes,
        done: Done,
        client: str = "",
    ) -> None:
        """Calls `done` exactly once, at the latest when the resolver's time is over. `client` is an address, for the query
        log and the rate limit."""
        query = self._query(method, target, content_type, body)
        if isinstance(query, DohReply):
            done(query)
            return
        limit = self._service.rate_limit
        if limit is not None and client and not limit.admits(client, self._service.now()):
            done(self._answered(self._service.refuse_rate(query), "policy", client))
            return
        reply = self._service.look(query, STREAM_LIMIT, sealed=True)
        if isinstance(reply, bytes):
            done(self._answered(reply, "", client))
        else:
            self._service.wait(reply, lambda message, source: done(self._answered(message, source, client)))

    def _answered(self, message: bytes, source: str, client: str) -> DohReply:
        if message:
            self._service.counter("https")[message[3] & 15] += 1
            if self._service.query_log is not None:
                self._service.query_log("https", client, message, source)
        return _answered(message)

    def _is_plain(self) -> bool:
        """Whether an answer may be given without knowing to whom: nobody counts or notes clients."""
        return self._service.query_log is None and self._service.rate_limit is None

    def ready(self, target: bytes) -> Ready | None:
        """The answer to a GET of `target` when it is known now, and nothing else needs to hear of it."""
        path, _, parameters = target.partition(b"?")
        query = _from_parameters(parameters) if path == self.path else b""
        if not isinstance(query, bytes) or not query or not self._is_plain():
            return None
        memo = self._service.memo(query, sealed=True)
        if memo is None and isinstance(self._service.look(query, STREAM_LIMIT, sealed=True), bytes):
            memo = self._service.memo(query, sealed=True)
        if memo is None:
            return None
        reply = _answered(query[:2] + memo.tail)
        return Ready(memo, reply)

    def is_true(self, ready: Ready) -> bool:
        """Whether a ready answer may still be given; counts it as given."""
        memo, service = ready.memo, self._service
        if service.now() >= memo.until or memo.entry.answer is not memo.answer or not self._is_plain():
            return False
        service.used(memo)
        self._replies[memo.tail[1] & 15] += 1
        return True

    def _query(self, method: bytes, target: bytes, content_type: bytes | None, body: bytes) -> bytes | DohReply:
        path, _, parameters = target.partition(b"?")
        if path != self.path:
            return _refusal(404, "no such resource")
        if method in (b"GET", b"HEAD"):
            return _from_parameters(parameters)
        if method != b"POST":
            return _refusal(405, "GET, HEAD or POST", (b"allow", b"GET, HEAD, POST"))
        media_type = (content_type or b"").partition(b";")[0].strip().lower()
        if media_type != MEDIA_TYPE:
            return _refusal(415, "the body must be application/dns-message")
        if len(body) > LARGEST_BODY:
            return _refusal(413, f"more than {LARGEST_BODY} bytes")
        return _checked(body)


def _from_parameters(parameters: bytes) -> bytes | DohReply:
    if len(parameters) > _LONGEST_TARGET:
        return _refusal(414, f"a target of more than {_LONGEST_TARGET} bytes")
    encoded = next((p[4:] for p in parameters.split(b"&") if p.startswith(b"dns=")), None)
    if encoded is None:
        return _refusal(400, "no dns parameter (RFC 8484 4.1)")
    try:
        # Padding is forbidden and some clients send it; it says nothing, so it is taken off rather than refused.
        bare = unquote_to_bytes(encoded).rstrip(b"=")
        return _checked(base64.b64decode(bare + b"=" * (-len(bare) % 4), altchars=b"-_", validate=True))
    except (binascii.Error, ValueError):
        return _refusal(400, "the dns parameter is not base64url (RFC 4648 5)")


def _checked(query: bytes) -> bytes | DohReply:
    """A message that gets no DNS answer still gets an HTTP one."""
    if len(query) < w.HEADER:
        return _refusal(400, f"{len(query)} bytes are no DNS message")
    if query[2] & 0x80:
        return _refusal(400, "a DNS response is no question")
    return query


def _answered(message: bytes) -> DohReply:
    if not message:
        return _refusal(400, "no DNS query")
    age_s = freshness_s(message)
    control = b"no-store" if age_s is None else b"max-age=%d" % age_s
    return DohReply(200, [(b"content-type", MEDIA_TYPE), (b"cache-control", control)], message)


def freshness_s(message: bytes) -> int | None:
    """How long HTTP may keep it (RFC 8484 5.1); None when it must not.

    The smallest TTL of the answer section; for a negative answer the SOA's, which the cache has already brought down to
    RFC 2308's. Failures and answers without either have no time of their own.
    """
    try:
        found = w.scan(message)
    except Malformed:
        return None
    if found.rcode not in (w.NOERROR, w.NXDOMAIN):
        return None
    answers = found.records[: found.answers]
    times = [r.ttl_s for r in answers] if answers else []
    if not answers or found.rcode == w.NXDOMAIN:
        times += [r.ttl_s for r in found.records[found.answers :] if r.type == w.SOA]
    return min(times, default=None)


def _refusal(status: int, text: str, *fields: tuple[bytes, bytes]) -> DohReply:
    own = [(b"content-type", b"text/plain; charset=utf-8"), (b"cache-control", b"no-store")]
    return DohReply(status, [*own, *fields], text.encode() + b"\n")
