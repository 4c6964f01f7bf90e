"""The numbers that HTTP/3 puts on its endings, and the one table between them and `Abort`.

Theory: an ending has three readers. The peer sees a code in RESET_STREAM, STOP_SENDING or CONNECTION_CLOSE; the relay
sees an `Abort`; the parser raises a fault. RFC 9114 section 8.1 names the codes, 4.1.1 says what a cancelled or a
rejected request may claim.
Rules for editing: 1. pure; 2. a code is chosen here and nowhere else.
"""

from __future__ import annotations

from proxy.messages import Abort, Cause, Party, Stage

NO_ERROR = 0x100
GENERAL_PROTOCOL_ERROR = 0x101
INTERNAL_ERROR = 0x102
STREAM_CREATION_ERROR = 0x103
CLOSED_CRITICAL_STREAM = 0x104
FRAME_UNEXPECTED = 0x105
FRAME_ERROR = 0x106
EXCESSIVE_LOAD = 0x107
ID_ERROR = 0x108
SETTINGS_ERROR = 0x109
MISSING_SETTINGS = 0x10A
REQUEST_REJECTED = 0x10B
REQUEST_CANCELLED = 0x10C
REQUEST_INCOMPLETE = 0x10D
MESSAGE_ERROR = 0x10E
CONNECT_ERROR = 0x10F
VERSION_FALLBACK = 0x110
QPACK_DECOMPRESSION_FAILED = 0x200
QPACK_ENCODER_STREAM_ERROR = 0x201
QPACK_DECODER_STREAM_ERROR = 0x202

# Transport codes that this program sends itself (RFC 9000 section 20.1).
TRANSPORT_INTERNAL_ERROR = 0x1
TRANSPORT_CONNECTION_REFUSED = 0x2
TRANSPORT_INVALID_TOKEN = 0xB

UNPROCESSED = frozenset({REQUEST_REJECTED, VERSION_FALLBACK})
"""An edge that resets with one of these vouches that the request was not processed (RFC 9114 sections 4.1.1, 8.1)."""


class StreamFault(Exception):
    """The peer broke a rule on one stream: the stream is reset, the connection goes on."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"{detail} (h3 error {code:#x})")
        self.code = code
        self.detail = detail


class ConnectionFault(Exception):
    """The peer broke a rule that takes the whole connection with it."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"{detail} (h3 error {code:#x})")
        self.code = code
        self.detail = detail


# What a client is told when its exchange ends early, by who ended it and why. REQUEST_REJECTED promises that nothing
# was processed (a client may repeat a POST on the strength of it), so it is only for an `unprocessed` one.
TO_CLIENT = {
    Cause.CANCELLED: REQUEST_CANCELLED,
    Cause.LOST: INTERNAL_ERROR,
    Cause.BROKEN: INTERNAL_ERROR,
    Cause.TIMED_OUT: INTERNAL_ERROR,
    Cause.REFUSED: EXCESSIVE_LOAD,
}


def code_for_client(abort: Abort, *, tunnel: bool = False) -> int:
    """The code that resets a client's stream for this abort; the peer's own fault is named to it."""
    if abort.by is Party.CLIENT and abort.cause is Cause.BROKEN:
        return MESSAGE_ERROR
    if abort.unprocessed and abort.stage is Stage.CONNECT:
        return REQUEST_REJECTED
    if tunnel and abort.by is Party.EDGE:
        return CONNECT_ERROR
    return TO_CLIENT[abort.cause]


def code_for_edge(abort: Abort) -> int:
    """The code that cancels a request at an edge: its own broken rule is named, anything else is a cancel."""
    if abort.by is Party.EDGE and abort.cause is Cause.BROKEN:
        return MESSAGE_ERROR
    return REQUEST_CANCELLED
