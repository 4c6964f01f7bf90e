"""Error codes of HTTP/2, and the one table between them and the relay's `Abort`.

Theory: a fault on the wire is a stream's (RFC 9113 5.4.2: RST_STREAM, the others go on) or the connection's (5.4.1: GOAWAY,
all end). What the relay means by an `Abort` becomes a code by who is told, and a code that came becomes an `Abort` by who
said it; no other file decides that.
"""

from __future__ import annotations

from enum import IntEnum

from proxy.messages import Abort, Cause, Party, Stage


class Code(IntEnum):
    """RFC 9113 section 7."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


def code_name(code: int) -> str:
    """For people: CANCEL, or 0x1f for a number that RFC 9113 does not name."""
    return Code(code).name if code in Code._value2member_map_ else f"0x{code:x}"


class H2ConnectionError(Exception):
    """The peer broke a rule that ends the connection. The detail is ours: no byte of the peer's fields is in it."""

    def __init__(self, code: Code, detail: str) -> None:
        super().__init__(f"{code.name}: {detail}")
        self.code = code
        self.detail = detail


class H2StreamError(Exception):
    """The peer broke a rule that ends one stream."""

    def __init__(self, code: Code, detail: str) -> None:
        super().__init__(f"{code.name}: {detail}")
        self.code = code
        self.detail = detail


# What a client is told. A fault of the edge must not look like one of the client (PROTOCOL_ERROR), nor like a polite end.
_TO_CLIENT = {
    Cause.CANCELLED: Code.CANCEL,
    Cause.LOST: Code.INTERNAL_ERROR,
    Cause.BROKEN: Code.INTERNAL_ERROR,
    Cause.TIMED_OUT: Code.INTERNAL_ERROR,
    Cause.REFUSED: Code.CANCEL,
}


def code_for_client(abort: Abort, *, answered: bool) -> Code:
    """The RST_STREAM code for a client whose exchange ends with `abort`; `answered`: it has a response head already.

    REFUSED_STREAM vouches that nothing was processed (RFC 9113 8.7), so it is said only when that is true.
    """
    if abort.unprocessed and not answered:
        return Code.REFUSED_STREAM
    if abort.by is Party.CLIENT and abort.cause is Cause.BROKEN:
        return Code.PROTOCOL_ERROR
    return _TO_CLIENT[abort.cause]


def code_for_edge(abort: Abort) -> Code:
    """The RST_STREAM code for an edge: CANCEL, unless the edge itself broke a rule."""
    return Code.PROTOCOL_ERROR if abort.by is Party.EDGE and abort.cause is Cause.BROKEN else Code.CANCEL


_FROM_EDGE = {
    Code.CANCEL: Cause.CANCELLED,
    Code.REFUSED_STREAM: Cause.REFUSED,
    Code.ENHANCE_YOUR_CALM: Cause.REFUSED,
    Code.HTTP_1_1_REQUIRED: Cause.REFUSED,
}


def abort_by_client(code: int) -> Abort:
    """A client's RST_STREAM: it does not want the rest, whatever its reason."""
    return Abort(Party.CLIENT, Stage.HEAD, Cause.CANCELLED, f"h2 stream reset {code_name(code)}", code)


def abort_by_edge(code: int, stage: Stage) -> Abort:
    """An edge's RST_STREAM before the end of its answer.

    HTTP_1_1_REQUIRED counts as unprocessed too: the edge refused to look at the request in this version.
    """
    unprocessed = stage is not Stage.BODY and code in (Code.REFUSED_STREAM, Code.HTTP_1_1_REQUIRED)
    cause = _FROM_EDGE.get(code, Cause.LOST)  # type: ignore[call-overload]
    return Abort(Party.EDGE, stage, cause, f"h2 stream reset {code_name(code)}", code, unprocessed)
