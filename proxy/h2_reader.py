"""Cut what a transport reads into HTTP/2 frames.

Theory: a frame is looked at where it lies in the read. Only a frame that the end of a read cuts is copied and completed;
joining it with the whole next read would copy a quarter of a megabyte to finish some bytes.
"""

from __future__ import annotations

from proxy.h2_errors import Code, H2ConnectionError
from proxy.h2_frames import DEFAULT_MAX_FRAME, FRAME_HEADER, FRAME_HEADER_BYTES, MAX_WINDOW, word


def _check_size(size: int) -> None:
    if size > DEFAULT_MAX_FRAME:
        raise H2ConnectionError(Code.FRAME_SIZE_ERROR, f"frame of {size} bytes where {DEFAULT_MAX_FRAME} are allowed")


class FrameReader:
    """Calls `_on_frame` for each whole frame, until `failed` is set. We advertise no larger frame than the default."""

    failed: H2ConnectionError | None

    def __init__(self) -> None:
        self._held = bytearray()  # a frame cut by the end of a read

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        raise NotImplementedError

    def _parse(self, chunk: bytes) -> None:
        at, end = (self._finish_held(chunk) if self._held else 0), len(chunk)
        while end - at >= FRAME_HEADER_BYTES and self.failed is None:
            high, low, kind, flags, stream_id = FRAME_HEADER.unpack_from(chunk, at)
            size = high << 8 | low
            _check_size(size)
            stop = at + FRAME_HEADER_BYTES + size
            if stop > end:
                break
            self._on_frame(kind, flags, stream_id & MAX_WINDOW, chunk[at + FRAME_HEADER_BYTES : stop])
            at = stop
        if at < end:
            self._held += chunk[at:]

    def _finish_held(self, chunk: bytes) -> int:
        """Complete the frame that an earlier read began; where in `chunk` the next one starts."""
        held = self._held
        at = max(0, FRAME_HEADER_BYTES - len(held))
        held += chunk[:at]
        if len(held) < FRAME_HEADER_BYTES:
            return len(chunk)
        size = int.from_bytes(held[:3], "big")
        _check_size(size)
        missing = FRAME_HEADER_BYTES + size - len(held)
        held += chunk[at : at + missing]
        if len(held) < FRAME_HEADER_BYTES + size:
            return len(chunk)
        whole = bytes(held)
        held.clear()
        self._on_frame(whole[3], whole[4], word(whole, 5), whole[FRAME_HEADER_BYTES:])
        return at + missing
