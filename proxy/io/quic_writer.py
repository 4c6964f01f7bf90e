"""Fill packets by asking only the streams that have something to say.

Theory: for every packet aioquic walks all streams of the connection, twice over, to ask each whether its window moved,
whether it is finished, whether it has bytes; then it walks them once more for an empty packet. With a hundred open event
streams and one event to send that walk is the cost of the event. Here a stream stands in `_due` from the moment something
happened to it (bytes written, a frame came, a delivery was lost) until it has nothing left to say.

The order within a packet is aioquic's own: ACK, path and connection frames, limits, pings, CRYPTO, streams; among these as
`proxy.turns` says, by RFC 9218, the control and QPACK streams first. Bytes wait on their streams until a packet has room, so
an urgent answer overtakes whatever the congestion window has not taken yet. Before the handshake is confirmed (Initial,
Handshake and 0-RTT packets) aioquic writes.

Like `quic_flow` this reaches into private parts. `tests/proxy/h3/test_h3_flow.py` pins the text of the method that is
replaced, so a new version of the library is compared by a person before it is used.
Rules for editing: 1. whatever gives a stream something to say puts it into `_due`; 2. nothing leaves `_due` but in
`_write_due`.
"""

from __future__ import annotations

from typing import Any

from aioquic import tls
from aioquic.buffer import size_uint_var
from aioquic.quic.connection import (
    RESET_STREAM_FRAME_CAPACITY,
    STOP_SENDING_FRAME_CAPACITY,
    QuicConnection,
    QuicNetworkPath,
    stream_is_client_initiated,
)
from aioquic.quic.packet import QuicFrameType, QuicPacketType
from aioquic.quic.packet_builder import QuicDeliveryState, QuicPacketBuilder
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.quic.stream import QuicStream

from proxy.priority import UNSAID, Priority
from proxy.turns import Turns

ROOM = 64
"""Bytes that a packet must have left to ask another stream: the largest frame without data takes 25."""
CRITICAL = Priority(0, incremental=True)
"""Of unidirectional streams: what the others carry cannot be read without QPACK's, and all of them are small."""


class DueConnection(QuicConnection):
    """A QuicConnection whose packets cost by what is in them, not by how many streams are open."""

    def __init__(self, **rest: Any) -> None:
        self._due: Turns[QuicStream] = Turns()
        self._priorities: dict[int, Priority] = {}  # of open streams that somebody spoke for
        super().__init__(**rest)

    def mark(self, stream: QuicStream) -> None:
        """Something happened to a stream: the next packet asks it."""
        stream_id = stream.stream_id or 0
        priority = CRITICAL if stream_id & 2 else self._priorities.get(stream_id, UNSAID)
        self._due.add(stream_id, stream, priority)

    def priority_of(self, stream_id: int) -> Priority:
        return self._priorities.get(stream_id, UNSAID)

    def prioritize(self, stream_id: int, priority: Priority) -> None:
        """Serve an open request stream by another priority from now on, what waits of it included."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._priorities[stream_id] = priority
            if self._due.remove(stream_id):
                self.mark(stream)

    def _get_or_create_stream(self, frame_type: int, stream_id: int) -> QuicStream:
        stream = super()._get_or_create_stream(frame_type, stream_id)
        self.mark(stream)
        return stream

    def _unblock_streams(self, is_unidirectional: bool) -> None:
        blocked = self._streams_blocked_uni if is_unidirectional else self._streams_blocked_bidi
        for stream in blocked:
            self.mark(stream)
        super()._unblock_streams(is_unidirectional)

    def _on_max_stream_data_delivery(self, delivery: QuicDeliveryState, stream: QuicStream) -> None:
        super()._on_max_stream_data_delivery(delivery, stream)
        if delivery is not QuicDeliveryState.ACKED:
            self.mark(stream)

    def _on_stream_delivery(
        self, delivery: QuicDeliveryState, stream: QuicStream, start: int, stop: int, fin: bool
    ) -> None:
        stream.sender.on_data_delivery(delivery, start, stop, fin)
        if fin or delivery is not QuicDeliveryState.ACKED or stream.sender.is_finished:
            self.mark(stream)

    def _on_reset_delivery(self, delivery: QuicDeliveryState, stream: QuicStream) -> None:
        stream.sender.on_reset_delivery(delivery)
        self.mark(stream)

    def _on_stop_delivery(self, delivery: QuicDeliveryState, stream: QuicStream) -> None:
        stream.receiver.on_stop_sending_delivery(delivery)
        self.mark(stream)

    # -- packets ------------------------------------------------------------------------------------------------------

    def _write_application(self, builder: QuicPacketBuilder, network_path: QuicNetworkPath, now: float) -> None:
        if not self._handshake_confirmed:
            super()._write_application(builder, network_path, now)
            return
        # New streams come to the queue of the stock writer, which nobody else reads from here on.
        for stream in self._streams_queue:
            self.mark(stream)
        self._streams_queue.clear()
        space, pacer = self._spaces[tls.Epoch.ONE_RTT], self._loss._pacer
        while True:
            # An ACK that is not due yet goes along with what is sent anyway (RFC 9000 13.2.1): aioquic lets it wait for a
            # packet and a timer of its own, which for one request at a time is half of all packets.
            acknowledge = space.ack_at is not None and (space.ack_at <= now or self._has_words())
            if space.ack_at is None or space.ack_at > now:  # acknowledgements are not paced
                self._pacing_at = pacer.next_send_time(now=now)
                if self._pacing_at is not None:
                    return
            builder.start_packet(QuicPacketType.ONE_RTT, self._cryptos[tls.Epoch.ONE_RTT])
            if acknowledge:
                self._write_ack_frame(builder=builder, space=space, now=now)
            self._write_path(builder, network_path, now)
            self._write_connection_limits(builder=builder, space=space)
            self._write_rest(builder, space)
            discarded = self._write_due(builder, space)
            empty = builder.packet_is_empty
            if not empty:
                pacer.update_after_send(now=now)
            # A discarded stream may give the peer a new one, which the next packet says. With nothing due the next
            # packet would be empty, and an empty one costs a third of a full one.
            if not discarded and (empty or not self._due):
                return

    def _has_words(self) -> bool:
        """Whether a stream would put a frame into a packet now."""
        for stream in self._due:
            sender = stream.sender
            if sender.reset_pending or stream.receiver.stop_pending:
                return True
            if not (sender.buffer_is_empty or stream.is_blocked):
                credit = self._remote_max_data > self._remote_max_data_used
                return credit and sender.next_offset < stream.max_stream_data_remote
        return False

    def _write_path(self, builder: QuicPacketBuilder, path: QuicNetworkPath, now: float) -> None:
        if not (path.is_validated or path.local_challenge_sent):
            self._write_path_challenge_frame(builder=builder, network_path=path)
            if path.validation_deadline is None:
                probe_s = max(self._loss.get_probe_timeout(), 2 * self._configuration.initial_rtt)
                path.validation_deadline = now + 3 * probe_s  # RFC 9000 8.2.4
        if self._handshake_done_pending:
            self._write_handshake_done_frame(builder=builder)
            self._handshake_done_pending = False
        while path.remote_challenges:
            self._write_path_response_frame(builder=builder, challenge=path.remote_challenges[0])
            path.remote_challenges.popleft()
        for connection_id in self._host_cids:
            if not connection_id.was_sent:
                self._write_new_connection_id_frame(builder=builder, connection_id=connection_id)
        while self._retire_connection_ids:
            self._write_retire_connection_id_frame(builder=builder, sequence_number=self._retire_connection_ids[0])
            self._retire_connection_ids.pop(0)

    def _write_rest(self, builder: QuicPacketBuilder, space: QuicPacketSpace) -> None:
        if self._streams_blocked_pending:
            for kind, blocked, limit in (
                (QuicFrameType.STREAMS_BLOCKED_BIDI, self._streams_blocked_bidi, self._remote_max_streams_bidi),
                (QuicFrameType.STREAMS_BLOCKED_UNI, self._streams_blocked_uni, self._remote_max_streams_uni),
            ):
                if blocked:
                    self._write_streams_blocked_frame(builder=builder, frame_type=kind, limit=limit)
            self._streams_blocked_pending = False
        if self._ping_pending:
            self._write_ping_frame(builder, self._ping_pending)
            self._ping_pending.clear()
        if self._probe_pending:
            self._write_ping_frame(builder, comment="probe")
            self._probe_pending = False
        crypto = self._crypto_streams[tls.Epoch.ONE_RTT]
        if not crypto.sender.buffer_is_empty:
            self._write_crypto_frame(builder=builder, space=space, stream=crypto)

    def _write_due(self, builder: QuicPacketBuilder, space: QuicPacketSpace) -> int:
        """Ask the due streams until the packet is full; how many were finished and are forgotten."""
        due, discarded = self._due, 0
        asked: list[QuicStream] = []  # once a packet: one that lacks credit would be asked for ever
        while builder.remaining_flight_space >= ROOM and (stream := due.next()) is not None:
            if stream.is_finished:
                discarded += self._discard(stream.stream_id or 0)
            elif self._ask(builder, space, stream):
                asked.append(stream)
        for stream in asked:
            self.mark(stream)
        return discarded

    def _ask(self, builder: QuicPacketBuilder, space: QuicPacketSpace, stream: QuicStream) -> bool:
        """Let a stream put its frames into the packet; whether it has more to say."""
        self._write_stream_limits(builder=builder, space=space, stream=stream)
        sender = stream.sender
        if stream.receiver.stop_pending:
            self._write_stop_sending_frame(builder=builder, stream=stream)
        if sender.reset_pending:
            self._write_reset_stream_frame(builder=builder, stream=stream)
        elif not stream.is_blocked and not sender.buffer_is_empty:
            credit = sender.highest_offset + self._remote_max_data - self._remote_max_data_used
            credit = min(credit, stream.max_stream_data_remote)
            self._remote_max_data_used += self._write_stream_frame(builder, space, stream, credit)
            if len(sender._pending) or sender._pending_eof:
                return True
            sender.buffer_is_empty = True
        return not sender.buffer_is_empty or sender.reset_pending or stream.receiver.stop_pending

    def _discard(self, stream_id: int) -> bool:
        self._priorities.pop(stream_id, None)
        if self._streams.pop(stream_id, None) is None:
            return False
        if stream_is_client_initiated(stream_id) != self._is_client:
            self._stream_limit(stream_id).value += 1
        return True

    def _write_stream_frame(
        self, builder: QuicPacketBuilder, space: QuicPacketSpace, stream: QuicStream, max_offset: int
    ) -> int:
        """One STREAM frame; how much of the connection's credit it took. The stock writer calls it too, so that what
        is lost of an early packet comes to `_due` as well."""
        sender, stream_id = stream.sender, stream.stream_id or 0
        before, offset = sender.highest_offset, sender.next_offset
        overhead = 3 + size_uint_var(stream_id) + (size_uint_var(offset) if offset else 0)
        frame = sender.get_frame(builder.remaining_flight_space - overhead, max_offset)
        if frame is None:
            return 0
        size = len(frame.data)
        kind = QuicFrameType.STREAM_BASE | 2 | (4 if frame.offset else 0) | (1 if frame.fin else 0)
        buf = builder.start_frame(
            kind,
            capacity=overhead,
            handler=self._on_stream_delivery,
            handler_args=(stream, frame.offset, frame.offset + size, frame.fin),
        )
        buf.push_uint_var(stream_id)
        if frame.offset:
            buf.push_uint_var(frame.offset)
        buf.push_uint16(size | 0x4000)
        buf.push_bytes(frame.data)
        return sender.highest_offset - before

    def _write_reset_stream_frame(self, builder: QuicPacketBuilder, stream: QuicStream) -> None:
        buf = builder.start_frame(
            QuicFrameType.RESET_STREAM,
            capacity=RESET_STREAM_FRAME_CAPACITY,
            handler=self._on_reset_delivery,
            handler_args=(stream,),
        )
        frame = stream.sender.get_reset_frame()
        for number in (frame.stream_id, frame.error_code, frame.final_size):
            buf.push_uint_var(number)

    def _write_stop_sending_frame(self, builder: QuicPacketBuilder, stream: QuicStream) -> None:
        buf = builder.start_frame(
            QuicFrameType.STOP_SENDING,
            capacity=STOP_SENDING_FRAME_CAPACITY,
            handler=self._on_stop_delivery,
            handler_args=(stream,),
        )
        frame = stream.receiver.get_stop_frame()
        buf.push_uint_var(frame.stream_id)
        buf.push_uint_var(frame.error_code)
