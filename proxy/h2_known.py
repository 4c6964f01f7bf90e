"""Know the head of a request again by the bytes of its header block.

Theory: once the table of a connection is warm, requests that are alike come as the same bytes. As long as the table stands,
equal bytes mean equal fields, so what was read from them, and judged by RFC 9113 8, holds for the next ones too.

Rules for editing: 1. a block that moves the table is never learned, and what was learned counts only while the table
stands; 2. nothing is kept here that the decoder would not keep: both go with the connection.
"""

from __future__ import annotations

from typing import NamedTuple

from proxy.hpack import Decoder
from proxy.messages import RequestHead
from proxy.priority import Priority, of_fields

MOST_HEADS = 64


class KnownHead(NamedTuple):
    """A request without a tunnel; `said`: how urgent it is, by its own word."""

    head: RequestHead
    said: Priority | None

    def again(self) -> RequestHead:
        """A head of its own for another request; the fields are one list for all, which nobody changes in place."""
        head = self.head
        return RequestHead(
            head.method, head.target, head.scheme, head.authority, head.fields, head.length, b"", head.expect_continue
        )


class KnownHeads:
    """The heads of one connection; `ended`: END_STREAM came with the block, which a length is judged by."""

    __slots__ = ("_changes", "_decoder", "_heads")

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._changes = decoder.changes
        self._heads: tuple[dict[bytes, KnownHead], dict[bytes, KnownHead]] = ({}, {})

    def find(self, block: bytes, ended: bool) -> KnownHead | None:
        """What a whole block says, if it was learned and the table stands."""
        return self._heads[ended].get(block) if self._changes == self._decoder.changes else None

    def learn(self, block: bytes, head: RequestHead, ended: bool) -> None:
        """Keeps what was read from the block that was decoded last, when that can be told from its bytes."""
        if not self._decoder.knows(block) or head.protocol or head.method == b"CONNECT":
            return
        if self._changes != self._decoder.changes:
            self._changes = self._decoder.changes
            self._heads = ({}, {})
        heads = self._heads[ended]
        if len(heads) >= MOST_HEADS:
            heads.clear()
        heads[block] = KnownHead(head, of_fields(head.fields))
