"""Turn our own failures into answers that SDKs understand.

Theory: an SDK retries by status and by `x-should-retry`. It is told `true` only when the edge got no byte, `false` when the
outcome is unknown, and nothing when the status says enough. Bodies are JSON in the dialect of the route, and Retry-After is
at most 30 s, since some SDKs sleep for any value they are told.

Who is to blame decides the status, one table for all: see STATUS_OF.
"""

from __future__ import annotations

import json

from proxy.messages import Abort, Cause, Fields, Party, ResponseHead, Stage

MAX_RETRY_AFTER_S = 30

STATUS_OF = {
    # (stage, cause) of an edge's failure -> status, code
    (Stage.CONNECT, Cause.LOST): (502, "edge_unreachable"),
    (Stage.CONNECT, Cause.TIMED_OUT): (504, "edge_connect_timeout"),
    (Stage.CONNECT, Cause.BROKEN): (502, "edge_tls_failed"),
    (Stage.CONNECT, Cause.REFUSED): (503, "no_edge_available"),
    (Stage.CONNECT, Cause.CANCELLED): (502, "edge_unreachable"),
    (Stage.HEAD, Cause.LOST): (502, "edge_lost"),
    (Stage.HEAD, Cause.TIMED_OUT): (504, "edge_timeout"),
    (Stage.HEAD, Cause.BROKEN): (502, "edge_broke_protocol"),
    (Stage.HEAD, Cause.REFUSED): (503, "edge_refused"),
    (Stage.HEAD, Cause.CANCELLED): (502, "edge_cancelled"),
}

ALLOW = (b"allow", b"GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS")
"""What is passed on; other methods are too, but TRACE and CONNECT."""

TYPES = {
    400: "invalid_request_error", 403: "permission_error", 404: "not_found_error", 405: "invalid_request_error",
    408: "timeout_error", 413: "request_too_large", 414: "request_too_large", 421: "invalid_request_error",
    425: "invalid_request_error", 426: "invalid_request_error", 429: "rate_limit_error", 431: "request_too_large",
    501: "invalid_request_error", 502: "proxy_error", 503: "overloaded_error", 504: "timeout_error",
    505: "invalid_request_error", 508: "proxy_error",
}  # fmt: skip


def dialect_of(path: bytes) -> str:
    """`anthropic` for the messages API and its relatives, else `openai`."""
    path = path.split(b"?", 1)[0]
    return "anthropic" if b"/v1/messages" in path or path[-12:] == b"/v1/complete" else "openai"


def body_of(dialect: str, status: int, message: str, code: str) -> bytes:
    """The JSON of one error in a dialect; `code` is ours and stable."""
    kind = TYPES.get(status, "proxy_error")
    if dialect == "anthropic":
        return json.dumps({"type": "error", "error": {"type": kind, "message": message}}).encode()
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


def own_answer(
    status: int,
    message: str,
    *,
    code: str,
    dialect: str = "openai",
    should_retry: bool | None = None,
    retry_after_s: int | None = None,
    fields: Fields | None = None,
) -> tuple[ResponseHead, bytes]:
    """Head and body of an answer that no edge gave. `message` says what, why and what to do; never user data."""
    body = body_of(dialect, status, f"headrace: {message}", code)
    head: Fields = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"cache-control", b"no-store"),
    ]
    if should_retry is not None:
        head.append((b"x-should-retry", b"true" if should_retry else b"false"))
    if status == 405:
        head.append(ALLOW)  # RFC 9110 15.5.6
    if retry_after_s is None and status in (429, 503):
        retry_after_s = 1
    if retry_after_s is not None:
        head.append((b"retry-after", b"%d" % min(MAX_RETRY_AFTER_S, max(0, retry_after_s))))
    return ResponseHead(status, head + (fields or []), length=len(body)), body


def for_abort(abort: Abort, dialect: str, *, edge: str, sent: bool) -> tuple[ResponseHead, bytes]:
    """The answer to a client whose exchange an edge failed before its first byte; `sent`: request bytes had left."""
    stage = Stage.HEAD if abort.stage is Stage.BODY else abort.stage
    status, code = STATUS_OF[stage, abort.cause] if abort.by is not Party.US else (503, "no_edge_available")
    if abort.by is Party.US and abort.cause is Cause.TIMED_OUT:
        status, code = 504, "edge_timeout"
    if abort.by is Party.CLIENT and abort.cause is Cause.TIMED_OUT:
        return own_answer(408, abort.detail, code="request_timeout", dialect=dialect)
    where = f"edge {edge}: " if edge else ""
    return own_answer(
        status, f"{where}{abort.detail or code}", code=code, dialect=dialect, should_retry=abort.unprocessed or not sent
    )


# What the relay says in its own name, one function for each case. Each gives a head and a body.


def shed(pool: str, reason: str, retry_after_s: int, dialect: str) -> tuple[ResponseHead, bytes]:
    """Nobody may be tried: why, and when to come again, rather than a queue without bound."""
    message = f"pool {pool}: {reason}"
    return own_answer(
        503, message, code="no_edge_available", dialect=dialect, should_retry=True, retry_after_s=retry_after_s
    )


def body_too_large(limit: int, dialect: str) -> tuple[ResponseHead, bytes]:
    message = f"request body of more than {limit} bytes; raise proxy.max_body_size"
    return own_answer(413, message, code="body_too_large", dialect=dialect)


def redirect_not_followed(dialect: str, *, replayable: bool) -> tuple[ResponseHead, bytes]:
    """An edge redirects to another edge, and that cannot be followed. Passing it on would hand out the address of an edge,
    which the client may not reach and must not know."""
    if replayable:
        message = "the edges of the pool redirect in a loop"
        return own_answer(508, message, code="redirect_loop", dialect=dialect, should_retry=False)
    message = "the edge moved, and the request's body is no longer held"
    return own_answer(503, message, code="redirect_not_followed", dialect=dialect, should_retry=True)


def no_websocket(dialect: str, version: str) -> tuple[ResponseHead, bytes]:
    """The edge answered an upgrade as if it were a plain request (RFC 9110 15.5.22)."""
    fields: Fields = [(b"upgrade", b"websocket")] if version == "h1" else []
    message = "the edge does not speak WebSocket on this path"
    return own_answer(426, message, code="no_websocket", dialect=dialect, fields=fields)


def options_of_ours() -> ResponseHead:
    """The answer to an OPTIONS that may go no further (RFC 9110 7.6.2): what is known without asking an edge."""
    return ResponseHead(204, [ALLOW], length=0, no_body=True)


def go_to_standby(location: bytes, dialect: str) -> tuple[ResponseHead, bytes]:
    """No active edge takes an upgrade: where the standby is (RFC 9110 15.4.8)."""
    message = "no active edge takes this WebSocket; a standby does"
    return own_answer(307, message, code="standby", dialect=dialect, fields=[(b"location", location)])
