"""Decide where a heartbeat may stand in an event stream, and what it says.

Theory: a comment line is nothing to a reader of event streams (WHATWG HTML 9.2.6), if it is one line with one end: after an
`id:` a comment with an empty line behind it is an event without data for openai-python, which it tries to decode. Between
whole lines it may even stand inside an event. Anthropic's SDKs know `event: ping` with data, which is an event and needs a
place between two.

Rules for editing: 1. pure; 2. a byte inside somebody's line is a broken token: when in doubt, say nothing.
"""

from __future__ import annotations

from proxy.messages import ResponseHead

COMMENT = b": \n"
PING = b'event: ping\ndata: {"type": "ping"}\n\n'


def takes_heartbeats(head: ResponseHead) -> bool:
    """Whether bytes may be added to this answer: an event stream without length, in no coding."""
    kind = head.get(b"content-type") or b""
    plain = (head.get(b"content-encoding") or b"identity").lower() == b"identity"
    return head.length is None and not head.no_body and plain and kind[:17].lower() == b"text/event-stream"


class Gaps:
    """Where an event stream stands between its lines."""

    __slots__ = ("_tail",)

    def __init__(self) -> None:
        self._tail = b"\n\n"  # before the first byte is as good as between two events

    def passed(self, chunk: bytes) -> None:
        """These bytes of the stream went out."""
        self._tail = (self._tail + chunk[-4:])[-4:]

    def heartbeat(self, dialect: str) -> bytes:
        """What may be said here; b"" inside a line, and after a bare CR, whose LF may be still to come."""
        if dialect == "anthropic" and self._tail.endswith((b"\n\n", b"\n\r\n")):
            return PING
        return COMMENT if self._tail.endswith(b"\n") else b""
