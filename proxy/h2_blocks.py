"""Assemble HEADERS and CONTINUATION frames into field lists, and bound what a block may cost (RFC 9113 4.3, 6.2, 6.10).

Theory: every block is decoded, whatever becomes of its stream, since the peer's table has moved with it. A list over the
limit is only that request's fault, so it is told apart from a block that is an attack: too many frames, too many bytes,
or a few bytes that index into megabytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from proxy.h2_errors import Code, H2ConnectionError
from proxy.h2_frames import DEFAULT_MAX_FRAME, END_HEADERS, END_STREAM, HAS_PRIORITY, unpadded, word
from proxy.h2_limits import BOMB_FACTOR, MAX_CONTINUATIONS
from proxy.hpack import CompressionError, Decoder, ListTooLargeError
from proxy.messages import Fields


@dataclass(slots=True)
class HeaderBlock:
    """One block while its frames come, and its list once they are there: None when it is over the limit."""

    stream_id: int
    ended: bool
    self_dependent: bool
    parts: list[bytes]
    size: int
    fields: Fields | None = None


class BlockReader:
    """One connection's blocks. `open_id`: the stream whose block waits for CONTINUATION frames, 0 for none."""

    __slots__ = ("_block", "_max_list_bytes", "decoder", "open_id", "whole")

    def __init__(self, max_list_bytes: int) -> None:
        self.decoder = Decoder(max_list_bytes)
        self._max_list_bytes = max_list_bytes
        self._block: HeaderBlock | None = None
        self.open_id = 0
        self.whole = b""  # the newest block that came in one frame

    def on_headers(self, flags: int, stream_id: int, payload: bytes) -> HeaderBlock | None:
        """The block, when this frame is all of it. Raises H2ConnectionError."""
        if stream_id == 0:
            raise H2ConnectionError(Code.PROTOCOL_ERROR, "HEADERS on stream 0")
        part = unpadded(payload, flags, "HEADERS")
        self_dependent = False
        if flags & HAS_PRIORITY:
            if len(part) < 5:
                raise H2ConnectionError(Code.FRAME_SIZE_ERROR, "HEADERS frame too short for its priority")
            self_dependent = word(part) == stream_id
            part = part[5:]
        block = HeaderBlock(stream_id, flags & END_STREAM != 0, self_dependent, [part], len(part))
        if flags & END_HEADERS:
            self.whole = part
            return self._decoded(block)
        self._block, self.open_id, self.whole = block, stream_id, b""
        return None

    def on_continuation(self, flags: int, payload: bytes) -> HeaderBlock | None:
        """The block, when this frame completes it. Raises H2ConnectionError."""
        block = self._block
        if block is None:
            raise H2ConnectionError(Code.PROTOCOL_ERROR, "CONTINUATION without an open header block")
        block.parts.append(payload)
        block.size += len(payload)
        if len(block.parts) > MAX_CONTINUATIONS or block.size > 2 * self._max_list_bytes + DEFAULT_MAX_FRAME:
            cost = f"header block of {block.size} bytes in {len(block.parts)} frames"
            raise H2ConnectionError(Code.ENHANCE_YOUR_CALM, cost)
        if not flags & END_HEADERS:
            return None
        self._block, self.open_id = None, 0
        return self._decoded(block)

    def _decoded(self, block: HeaderBlock) -> HeaderBlock:
        parts = block.parts
        try:
            block.fields = self.decoder.decode(parts[0] if len(parts) == 1 else b"".join(parts))
        except CompressionError as exc:
            raise H2ConnectionError(Code.COMPRESSION_ERROR, str(exc)) from exc
        except ListTooLargeError as exc:
            if exc.size > BOMB_FACTOR * self._max_list_bytes:
                raise H2ConnectionError(Code.ENHANCE_YOUR_CALM, f"header list of {exc.size} bytes") from exc
        return block
