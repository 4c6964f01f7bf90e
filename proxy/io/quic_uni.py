"""Tell the peer's unidirectional streams of HTTP/3 apart: which is control, which are QPACK's, which must never end.

Theory: each begins with its type (RFC 9114 6.2). One of each critical type may be, and it lasts as long as the connection.
A type that is unknown is read and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from proxy.io.quic_codes import CLOSED_CRITICAL_STREAM, ID_ERROR, STREAM_CREATION_ERROR, ConnectionFault
from proxy.io.quic_wire import read_varint

CONTROL, PUSH, QPACK_ENCODER, QPACK_DECODER = 0x0, 0x1, 0x2, 0x3
UNTOLD = -1
"""The type of a stream that has not said it yet."""


class _Stream:
    __slots__ = ("rest", "role")

    def __init__(self) -> None:
        self.role = UNTOLD
        self.rest = b""  # of its type's integer: under 8 bytes


class PeerStreams:
    """`hear` takes the bytes of each critical stream, by its type."""

    def __init__(self, hear: Mapping[int, Callable[[bytes], None]], *, is_client: bool) -> None:
        self._hear = hear
        self._is_client = is_client
        self._streams: dict[int, _Stream] = {}
        self._critical: dict[int, int] = {}  # type -> stream id

    def __len__(self) -> int:
        return len(self._streams)

    def receive(self, stream_id: int, chunk: bytes, fin: bool) -> None:
        """Bytes in order. Raises ConnectionFault."""
        stream = self._streams.get(stream_id)
        if stream is None:
            stream = self._streams[stream_id] = _Stream()
        if stream.role == UNTOLD:
            chunk = stream.rest + chunk
            role = read_varint(chunk, 0)
            if role is None:
                stream.rest = chunk
                if fin:
                    del self._streams[stream_id]  # it ended without a word, which is no fault (RFC 9114 6.2)
                return
            chunk, stream.rest = chunk[role[1] :], b""
            self._assign(stream_id, stream, role[0])
        if fin and stream_id in self._critical.values():
            raise ConnectionFault(CLOSED_CRITICAL_STREAM, f"critical stream {stream_id} ended")
        if stream.role in self._hear:
            self._hear[stream.role](chunk)
        if fin:
            del self._streams[stream_id]

    def _assign(self, stream_id: int, stream: _Stream, role: int) -> None:
        stream.role = role
        if role == PUSH:
            # We never send MAX_PUSH_ID, so a server has no push id to use; a client may not push at all.
            raise ConnectionFault(ID_ERROR if self._is_client else STREAM_CREATION_ERROR, "a push stream")
        if role in self._hear:
            if role in self._critical:
                raise ConnectionFault(STREAM_CREATION_ERROR, f"a second stream of type {role}")
            self._critical[role] = stream_id

    def reset(self, stream_id: int) -> None:
        """The peer reset one. Raises ConnectionFault for those that must stay (RFC 9114 6.2.1)."""
        if stream_id in self._critical.values():
            raise ConnectionFault(CLOSED_CRITICAL_STREAM, f"critical stream {stream_id} was reset")
        self._streams.pop(stream_id, None)
