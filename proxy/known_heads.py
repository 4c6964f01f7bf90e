"""Recognise a message head that was read before, but for the number in its Content-Length.

Theory: what an SDK sends over one connection differs from call to call in its body and in the length of that. A head equal
to one that was judged, but for those digits, has the same meaning but for that length (RFC 9112 6.3 gives the field no other
effect), so it needs neither to be read nor to be judged again: two comparisons of bytes take the place of both.

      POST /v1/chat HTTP/1.1 CRLF ... content-length: | 417 | CRLF ... CRLF CRLF | body
      `------------- before ------------------------' digits `---- after -------'

Rules for editing: 1. pure; 2. only heads that the reader took without complaint become a shape; 3. a message that is not
whole, or followed by anything, is nobody's: the ordinary way takes it.

Of h2 and h3, whose heads come compressed, the decoded fields are compared instead.
"""

from __future__ import annotations

import re

from proxy.messages import RequestHead

LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(0|[1-9][0-9]{0,14})\r\n", re.IGNORECASE)
ANY_LENGTH = re.compile(rb"\r\ncontent-length[ \t]*:", re.IGNORECASE)
MAX_BYTES = 4096
"""Longer heads are read each time: a shape is kept for as long as its connection."""


def are_alike(one: RequestHead, other: RequestHead) -> bool:
    """Whether two decoded heads differ in nothing but how long their bodies are, which both say.

    What has a protocol, an Expect, or a body that says its own end is like nothing else.
    """
    if one.target != other.target or one.method != other.method or one.authority != other.authority:
        return False
    if other.length is None or other.protocol or other.expect_continue or one.scheme != other.scheme:
        return False
    if one.fields == other.fields:
        return one.length == other.length
    return len(one.fields) == len(other.fields) and all(
        mine == its or (mine[0] == its[0] == b"content-length")
        for mine, its in zip(one.fields, other.fields, strict=True)
    )


class Shape:
    """All heads that equal one but for the digits of its Content-Length; without that field, that one head."""

    __slots__ = ("_last_head", "_last_size", "after", "before", "digits_at", "has_length")

    def __init__(self, raw: bytes) -> None:
        """`raw`: a whole head, empty line included. ValueError for one that no shape can be made of."""
        found = LENGTH.search(raw)
        if len(raw) > MAX_BYTES or len(ANY_LENGTH.findall(raw)) != (found is not None):
            raise ValueError("too long, or more than one plain content-length")
        self.has_length = found is not None
        self.before = raw if found is None else raw[: found.start(1)]
        self.after = b"" if found is None else raw[found.end(1) :]
        self.digits_at = len(self.before)
        self._last_head, self._last_size = raw, -1  # of the last message that was one

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shape) and (self.before, self.after) == (other.before, other.after)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<Shape of {self.digits_at} + {len(self.after)} bytes>"  # the bytes may hold a secret

    def body_at(self, message: bytes) -> int:
        """Where the body begins if `message` is one whole message of this shape and nothing else; 0 otherwise.

        >>> head = b"PUT / HTTP/1.1\\r\\nContent-Length: %d\\r\\n\\r\\n"
        >>> Shape(head % 3).body_at(head % 2 + b"ok"), Shape(head % 3).body_at(head % 2 + b"o")
        (37, 0)
        """
        if len(message) == self._last_size and message.startswith(self._last_head):
            return len(self._last_head)
        at = self.digits_at
        if not message.startswith(self.before):
            return 0
        if not self.has_length:
            return at if len(message) == at else 0
        stop = message.find(b"\r", at, at + 16)
        digits = message[at:stop]
        if not digits.isdigit() or (digits[0] == 0x30 and stop - at > 1) or not message.startswith(self.after, stop):
            return 0
        body_at = stop + len(self.after)
        if body_at + int(digits) != len(message):
            return 0
        self._last_head, self._last_size = message[:body_at], len(message)
        return body_at
