"""Answer the small frames of HTTP/2: PRIORITY, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE (RFC 9113 6), and
PRIORITY_UPDATE (RFC 9218 7.1).

Theory: none of them carries a message; each moves what the connection or a stream may do, or wants a reply. Each costs a
budget (`proxy.h2_limits`), for each is cheap to send and legal one at a time.
"""

from __future__ import annotations

from collections.abc import Callable

from proxy.h2_errors import Code, H2ConnectionError, H2StreamError
from proxy.h2_frames import ACK, PING, SETTINGS_ACK, PeerSettings, frame, word
from proxy.h2_limits import Budgets
from proxy.h2_reader import FrameReader
from proxy.h2_sender import LARGEST_FRAME, Sender
from proxy.h2_streams import Stream

ENDED, RESET_BY_US, RESET_BY_PEER = range(3)
"""How a stream closed."""


class ControlFrames(FrameReader):
    """The part of a connection that hears them; `proxy.h2` sets what is named here, and has the frames that carry messages."""

    SERVER = False
    sender: Sender
    streams: dict[int, Stream]
    peer: PeerSettings
    peer_settled: bool
    last_id: int
    on_pong: Callable[[bytes], None]
    _budgets: Budgets
    _now: float

    def close_stream(self, stream: Stream, how: int) -> None:
        raise NotImplementedError

    def _refuse_idle(self, stream_id: int, what: str) -> None:
        if stream_id > self.last_id or stream_id % 2 == 0:
            raise H2ConnectionError(Code.PROTOCOL_ERROR, f"{what} on idle stream {stream_id}")

    def _on_priority(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._budgets.control.spend(self._now)
        if stream_id == 0:
            raise H2ConnectionError(Code.PROTOCOL_ERROR, "PRIORITY on stream 0")
        if len(payload) != 5:
            raise H2StreamError(Code.FRAME_SIZE_ERROR, f"PRIORITY of {len(payload)} bytes")
        if word(payload) == stream_id:
            raise H2StreamError(Code.PROTOCOL_ERROR, "stream that depends on itself")

    def _on_priority_update(self, flags: int, stream_id: int, payload: bytes) -> None:
        """RFC 9218 7.1."""
        self._budgets.control.spend(self._now)
        if stream_id != 0 or not self.SERVER:
            raise H2ConnectionError(Code.PROTOCOL_ERROR, f"PRIORITY_UPDATE on stream {stream_id}, or from a server")
        if len(payload) < 4:
            raise H2ConnectionError(Code.FRAME_SIZE_ERROR, f"PRIORITY_UPDATE of {len(payload)} bytes")
        if word(payload) == 0:
            raise H2ConnectionError(Code.PROTOCOL_ERROR, "PRIORITY_UPDATE for stream 0")
        self._prioritize(word(payload), payload[4:])

    def _prioritize(self, stream_id: int, value: bytes) -> None:
        """A server's: serve a stream by what its client now says of it."""

    def _on_rst_stream(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id == 0:
            raise H2ConnectionError(Code.PROTOCOL_ERROR, "RST_STREAM on stream 0")
        if len(payload) != 4:
            raise H2ConnectionError(Code.FRAME_SIZE_ERROR, f"RST_STREAM of {len(payload)} bytes")
        stream = self.streams.get(stream_id)
        if stream is None:
            self._refuse_idle(stream_id, "RST_STREAM")
            self._budgets.control.spend(self._now)
            return
        self._budgets.reset.spend(self._now)
        self.close_stream(stream, RESET_BY_PEER)
        code = int.from_bytes(payload, "big")
        stream.on_reset(code)

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id != 0:
            raise H2ConnectionError(Code.PROTOCOL_ERROR, f"SETTINGS on stream {stream_id}")
        self._budgets.settings.spend(self._now)
        if flags & ACK:
            if payload:
                raise H2ConnectionError(Code.FRAME_SIZE_ERROR, f"SETTINGS ACK of {len(payload)} bytes")
            return
        peer = self.peer
        peer.apply(payload, by_server=not self.SERVER)
        self.sender.max_frame = min(peer.max_frame_size, LARGEST_FRAME)
        self.sender.encoder.limit_table(peer.header_table_size)
        if peer.initial_window_size != self.sender.stream_window:
            self.sender.resize_windows(peer.initial_window_size, list(self.streams.values()))
        self.sender.control(SETTINGS_ACK)
        self.peer_settled = True
        self._on_settled()

    def _on_settled(self) -> None:
        """The peer's SETTINGS took effect."""

    def _on_push_promise(self, flags: int, stream_id: int, payload: bytes) -> None:
        # A server never gets one, a client said SETTINGS_ENABLE_PUSH 0 (RFC 9113 8.4).
        raise H2ConnectionError(Code.PROTOCOL_ERROR, "PUSH_PROMISE")

    def ping(self, payload: bytes) -> None:
        """Ask for a PING ACK; eight bytes, given back to `on_pong`."""
        self.sender.control(frame(PING, 0, 0, payload))

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id != 0:
            raise H2ConnectionError(Code.PROTOCOL_ERROR, f"PING on stream {stream_id}")
        if len(payload) != 8:
            raise H2ConnectionError(Code.FRAME_SIZE_ERROR, f"PING of {len(payload)} bytes")
        self._budgets.ping.spend(self._now)
        if flags & ACK:
            self.on_pong(payload)
        else:
            self.sender.control(frame(PING, ACK, 0, payload))

    def _on_goaway(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id != 0:
            raise H2ConnectionError(Code.PROTOCOL_ERROR, f"GOAWAY on stream {stream_id}")
        if len(payload) < 8:
            raise H2ConnectionError(Code.FRAME_SIZE_ERROR, f"GOAWAY of {len(payload)} bytes")
        self._budgets.control.spend(self._now)
        self._on_going_away(word(payload), int.from_bytes(payload[4:8], "big"))

    def _on_going_away(self, last_id: int, code: int) -> None:
        """The peer takes no new stream of ours."""

    def _on_window_update(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise H2ConnectionError(Code.FRAME_SIZE_ERROR, f"WINDOW_UPDATE of {len(payload)} bytes")
        self._budgets.control.spend(self._now)
        amount = word(payload)
        if stream_id == 0:
            if amount == 0:
                raise H2ConnectionError(Code.PROTOCOL_ERROR, "WINDOW_UPDATE of 0")
            self.sender.credit(None, amount)
            return
        stream = self.streams.get(stream_id)
        if stream is None:
            self._refuse_idle(stream_id, "WINDOW_UPDATE")
        elif amount == 0:
            raise H2StreamError(Code.PROTOCOL_ERROR, "WINDOW_UPDATE of 0")
        else:
            self.sender.credit(stream, amount)
