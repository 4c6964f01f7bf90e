"""Frame and unframe HTTP/3 on one QUIC connection: control, QPACK and request streams, bytes in, plain calls out.

Theory: aioquic brings an `H3Connection`, and the tests use it as the peer and the oracle. It is not used here because a
malformed message closes its whole connection where RFC 9114 4.1.2 wants one stream reset, GOAWAY is not spoken, a field
section has no bound before or after decompression, and its per-byte header checks are a tenth of a small request's time.
What is kept of the library is what is hard: pylsqpack and the transport.

      H3Frames.receive(id, data, fin) -> Reader -> sink.on_section / on_body / on_finished
      H3Frames.send_section / send_body <- legs

Faults: `StreamFault` goes to the sink, which resets its stream; `ConnectionFault` goes up to whoever owns the connection.
Rules for editing: 1. a buffer here is bounded by the section limit or by a flow-control window, say which; 2. after
every call of a sink look at `reader.dead`: the sink may have ended the stream; 3. no clock, no socket.
"""

from __future__ import annotations

from typing import Protocol

import pylsqpack
from aioquic.buffer import encode_uint_var

from proxy.hpack_encoder import STABLE
from proxy.io.quic_codes import (
    CLOSED_CRITICAL_STREAM,
    EXCESSIVE_LOAD,
    FRAME_ERROR,
    FRAME_UNEXPECTED,
    QPACK_DECODER_STREAM_ERROR,
    QPACK_DECOMPRESSION_FAILED,
    QPACK_ENCODER_STREAM_ERROR,
    ConnectionFault,
    StreamFault,
)
from proxy.io.quic_control import (
    DATA,
    GOAWAY,
    HEADERS,
    NO_FRAME,
    NOT_ON_REQUEST,
    PRIORITY_UPDATE,
    SETTINGS,
    ControlReader,
)
from proxy.io.quic_flow import FlowConnection
from proxy.io.quic_heads import section_size
from proxy.io.quic_uni import CONTROL, QPACK_DECODER, QPACK_ENCODER, PeerStreams
from proxy.io.quic_wire import (
    LONGEST_STRING,
    SETTING_BLOCKED,
    SETTING_CONNECT,
    SETTING_SECTION_SIZE,
    SETTING_TABLE_CAPACITY,
    count_lines,
    frame,
    is_literal,
    never_indexed,
    read_varint,
)
from proxy.messages import Fields
from proxy.secret_fields import KEYS

TABLE_CAPACITY = 4096
BLOCKED_STREAMS = 16
MAX_LINES = 1024
"""Field lines in a section. A one-byte line may name a table entry of TABLE_CAPACITY bytes, and the decoder has no
bound of its own: without this 64 KiB of lines became 256 MiB of fields."""


IDLE_FRAMES = 100
IDLE_SHARE = 16
"""Frames of a stream that say nothing, and what part of its bytes they may be beyond that: each is cheap to send and legal
(RFC 9114 10.5, CVE-2019-9518). Grease is one or two."""


class Sink(Protocol):
    """Who hears what a request stream says. May raise StreamFault from the first three."""

    def on_section(self, section: Fields, *, last: bool) -> None:
        """A HEADERS frame, decoded. `last`: the stream ends right behind it."""

    def on_body(self, chunk: bytes) -> None:
        """DATA, never empty."""

    def on_finished(self) -> None:
        """FIN, after everything else."""

    def on_oversized(self, size: str) -> None:
        """A field section beyond a limit, "70000 bytes" or "2000 lines" long; the stream is dead afterwards."""

    def on_fault(self, fault: StreamFault) -> None:
        """The stream broke a rule and must be reset; the reader is dead already."""

    def wants_body(self) -> bool:
        """Whether DATA may come now: after the head, before trailers."""

    def wants_section(self) -> bool:
        """Whether HEADERS may come now."""


class Reader:
    """Where one request stream stands between its frames."""

    __slots__ = ("blocked", "dead", "held", "held_end", "idle", "kind", "left", "rest", "sink", "stream_id", "taken")

    def __init__(self, stream_id: int, sink: Sink) -> None:
        self.stream_id = stream_id
        self.sink = sink
        self.kind = NO_FRAME
        self.left = 0
        self.rest = b""  # a frame's head or an unfinished section: at most the section limit and a few bytes
        self.blocked = False  # waits for the peer's QPACK encoder
        self.held = b""  # what came behind a blocked section: at most a window, no credit is given meanwhile
        self.held_end = False
        self.dead = False
        self.taken = 0  # bytes of the stream that came here
        self.idle = 0  # frames that said nothing


class Owner(Protocol):
    """The connection, as its frames see it."""

    def accept(self, stream_id: int) -> Sink | None:
        """A stream that the peer opened; None: its bytes are dropped. Raises ConnectionFault on a client."""

    def on_goaway(self, last_id: int) -> None: ...

    def on_settings(self) -> None: ...

    def on_priority(self, stream_id: int, value: bytes) -> None:
        """A client says how urgent a request is, open or not. Raises ConnectionFault for an id that it may not use."""


class H3Frames:
    """HTTP/3's framing for one connection, either side. `limit`: bytes of a field section that we accept."""

    def __init__(self, quic: FlowConnection, owner: Owner, *, is_client: bool, limit: int) -> None:
        self._quic = quic
        self._owner = owner
        self._is_client = is_client
        self._limit = limit
        self._decoder = pylsqpack.Decoder(TABLE_CAPACITY, BLOCKED_STREAMS)
        self._encoder = pylsqpack.Encoder()
        self._primed = False
        self._readers: dict[int, Reader] = {}
        self.settings: dict[int, int] | None = None
        hear = {
            CONTROL: ControlReader(self, is_client=is_client).feed,
            QPACK_ENCODER: self._hear_encoder,
            QPACK_DECODER: self._hear_decoder,
        }
        self._peer_streams = PeerStreams(hear, is_client=is_client)
        self._control = self._open_uni(CONTROL)
        quic.write(self._control, frame(SETTINGS, self._our_settings()))
        self._encoder_id = self._open_uni(QPACK_ENCODER)
        self._decoder_id = self._open_uni(QPACK_DECODER)

    def _open_uni(self, role: int) -> int:
        stream_id = self._quic.get_next_available_stream_id(is_unidirectional=True)
        self._quic.write(stream_id, encode_uint_var(role))
        return stream_id

    def _our_settings(self) -> bytes:
        ours = {
            SETTING_TABLE_CAPACITY: TABLE_CAPACITY,
            SETTING_SECTION_SIZE: self._limit,
            SETTING_BLOCKED: BLOCKED_STREAMS,
        }
        if not self._is_client:
            ours[SETTING_CONNECT] = 1
        return b"".join(encode_uint_var(key) + encode_uint_var(value) for key, value in ours.items())

    # -- sending --------------------------------------------------------------------------------------------------

    def send_section(self, stream_id: int, section: Fields) -> None:
        """One HEADERS frame. Secrets and giants go behind the rest as never-indexed lines: the order
        of names has no meaning (RFC 9110 5.3)."""
        literal = [field for field in section if is_literal(field, indexes_keys=self._is_client)]
        if literal:
            section = [field for field in section if not is_literal(field, indexes_keys=self._is_client)]
        if self._is_client and not self._primed and self.settings is not None:
            self._prime(stream_id, section)
        instructions, block = self._encoder.encode(stream_id, section)
        if instructions:
            self._quic.write(self._encoder_id, instructions)
        if literal:
            block += never_indexed(literal)
        self._quic.write(stream_id, frame(HEADERS, block))

    def _prime(self, stream_id: int, section: Fields) -> None:
        """Let the encoder see the lasting fields of a connection's first request once before it writes them.

        ls-qpack takes a field into the table when it comes the second time, so that only the third request would be short.
        What is thrown away here was all literals: no acknowledgement of it is waited for.
        """
        self._primed = True
        self._encoder.encode(stream_id, [field for field in section if field[0] in STABLE or field[0] in KEYS])

    def send_body(self, stream_id: int, chunk: bytes) -> None:
        self._quic.write(stream_id, frame(DATA, chunk))

    def send_priority(self, stream_id: int, value: bytes) -> None:
        """A client's PRIORITY_UPDATE (RFC 9218 7.2); a server that does not know it passes over it (RFC 9114 9)."""
        self._quic.write(self._control, frame(PRIORITY_UPDATE, encode_uint_var(stream_id) + value))

    def send_goaway(self, stream_id: int) -> None:
        self._quic.write(self._control, frame(GOAWAY, encode_uint_var(stream_id)))

    # -- receiving ------------------------------------------------------------------------------------------------

    def attach(self, stream_id: int, sink: Sink) -> None:
        """A client's own request: what comes on this stream goes to the sink."""
        self._readers[stream_id] = Reader(stream_id, sink)

    def detach(self, stream_id: int) -> None:
        """Nothing more is wanted from this stream; its bytes are dropped, its pending section is given up."""
        reader = self._readers.get(stream_id)
        if reader is None or reader.dead:
            return
        reader.dead = True
        reader.rest = reader.held = b""
        self._quic.release(stream_id)
        # RFC 9204 2.2.2.2: else the peer's encoder keeps the entries that unread sections refer to.
        self._quic.write(self._decoder_id, self._decoder.cancel_stream(stream_id))

    def finished(self, stream_id: int) -> None:
        """Both directions are over. A dead reader stays only as long as the transport may still bring bytes for it."""
        reader = self._readers.get(stream_id)
        if reader is not None:
            reader.dead = True
        if len(self._readers) > 64 and len(self._readers) > 2 * self._quic.open_streams:
            for old in [key for key, each in self._readers.items() if each.dead and not self._quic.knows(key)]:
                del self._readers[old]

    def receive(self, stream_id: int, chunk: bytes, fin: bool) -> None:
        """Bytes of any stream, in order. Raises ConnectionFault."""
        if stream_id & 2:
            self._peer_streams.receive(stream_id, chunk, fin)
            return
        reader = self._readers.get(stream_id)
        if reader is None:
            sink = self._owner.accept(stream_id)
            if sink is None:
                return
            reader = self._readers[stream_id] = Reader(stream_id, sink)
        self._feed(reader, chunk, fin)

    def reset(self, stream_id: int) -> None:
        """The peer reset one of its streams. Raises ConnectionFault for those that must stay."""
        self._peer_streams.reset(stream_id)

    def stopped(self, stream_id: int) -> None:
        """The peer sent STOP_SENDING for a stream of ours."""
        if stream_id in (self._control, self._encoder_id, self._decoder_id):
            raise ConnectionFault(CLOSED_CRITICAL_STREAM, f"critical stream {stream_id} was stopped")

    def _feed(self, reader: Reader, chunk: bytes, fin: bool) -> None:
        if reader.dead:
            return
        if reader.blocked:
            reader.held += chunk  # counted when it is fed
            reader.held_end |= fin
            return
        reader.taken += len(chunk)
        try:
            self._parse(reader, chunk, fin)
        except StreamFault as fault:
            self.detach(reader.stream_id)
            reader.sink.on_fault(fault)

    def _parse(self, reader: Reader, chunk: bytes, fin: bool) -> None:
        block = reader.rest + chunk if reader.rest else chunk
        at, size = 0, len(block)
        while at < size and not reader.dead:
            if reader.kind == NO_FRAME:
                after = self._start_frame(reader, block, at)
                if after is None:
                    break
                at = after
            stop = min(size, at + reader.left)
            if reader.kind == HEADERS:
                if stop - at < reader.left:
                    break
                reader.kind = NO_FRAME
                # A FIN in a frame of its own counts as well: else a GET would seem to have a body of unknown length.
                last = stop == size and (fin or self._quic.final_size(reader.stream_id) == reader.taken)
                if not self._section(reader, block[at:stop], last=last):
                    reader.held, reader.held_end, reader.rest = block[stop:], fin, b""
                    reader.taken -= size - stop
                    return
            else:
                reader.left -= stop - at
                kind = reader.kind
                if not reader.left:
                    reader.kind = NO_FRAME
                if kind == DATA and stop > at:
                    reader.sink.on_body(block[at:stop] if at or stop < size else block)
            at = stop
        if reader.dead:
            return
        reader.rest = block[at:]
        if fin:
            # RFC 9114 7.1: a frame that the end of its stream cuts short takes the connection.
            if reader.rest or reader.kind != NO_FRAME:
                raise ConnectionFault(FRAME_ERROR, f"stream {reader.stream_id} ended inside a frame")
            reader.sink.on_finished()

    def _start_frame(self, reader: Reader, block: bytes, at: int) -> int | None:
        """Read a frame's kind and length; the position behind them, None when they are not whole or not wanted."""
        kind = read_varint(block, at)
        length = read_varint(block, kind[1]) if kind is not None else None
        if kind is None or length is None:
            return None
        reader.kind, (reader.left, after) = kind[0], length
        if reader.kind == DATA:
            allowed = reader.sink.wants_body()
        elif reader.kind == HEADERS:
            allowed = reader.sink.wants_section()
            if allowed and reader.left > self._limit:
                # Compression never makes a section longer by more than a few bytes: not even decoded it fits.
                self.detach(reader.stream_id)
                reader.sink.on_oversized(f"{reader.left} bytes")
                return None
        else:
            allowed = reader.kind not in NOT_ON_REQUEST
        if not allowed:
            raise ConnectionFault(
                FRAME_UNEXPECTED, f"frame {reader.kind:#x} on stream {reader.stream_id} in this place"
            )
        if reader.kind != HEADERS and (reader.kind != DATA or not reader.left):
            self._count_idle(reader)
        if not reader.left and reader.kind != HEADERS:
            reader.kind = NO_FRAME  # an empty DATA or unknown frame says nothing
        return after

    @staticmethod
    def _count_idle(reader: Reader) -> None:
        reader.idle += 1
        if reader.idle > IDLE_FRAMES and reader.idle * IDLE_SHARE > reader.taken:
            detail = f"{reader.idle} frames that say nothing in {reader.taken} bytes of stream {reader.stream_id}"
            raise ConnectionFault(EXCESSIVE_LOAD, detail)

    def _section(self, reader: Reader, block: bytes, *, last: bool) -> bool:
        """Decode and deliver a section; False when it must wait for the QPACK encoder stream."""
        if len(block) > MAX_LINES and (lines := self._lines(block)) > MAX_LINES:
            # Not even decoded: the peer's encoder is told so (RFC 9204 2.2.2.2), and other streams go on.
            self.detach(reader.stream_id)
            reader.sink.on_oversized(f"{lines} lines")
            return True
        try:
            control, section = self._decoder.feed_header(reader.stream_id, block)
        except pylsqpack.StreamBlocked:
            reader.blocked = True
            self._quic.withhold(reader.stream_id)
            return False
        except pylsqpack.DecompressionFailed as exc:
            if len(block) > LONGEST_STRING * 5 // 8:  # it may be right, and only too long
                self.detach(reader.stream_id)
                reader.sink.on_oversized(f"{len(block)} bytes")
                return True
            raise ConnectionFault(QPACK_DECOMPRESSION_FAILED, "a field section does not decode") from exc
        self._deliver(reader, control, section, last=last)
        return True

    @staticmethod
    def _lines(block: bytes) -> int:
        try:
            return count_lines(block)
        except IndexError:
            return 0  # the decoder says what is wrong with it

    def _deliver(self, reader: Reader, control: bytes, section: Fields, *, last: bool) -> None:
        if control:
            self._quic.write(self._decoder_id, control)
        size = section_size(section)
        if size > self._limit:
            self.detach(reader.stream_id)
            reader.sink.on_oversized(f"{size} bytes")
        else:
            reader.sink.on_section(section, last=last)

    def _unblock(self, stream_id: int) -> None:
        reader = self._readers[stream_id]
        try:
            control, section = self._decoder.resume_header(stream_id)
        except pylsqpack.DecompressionFailed as exc:
            raise ConnectionFault(QPACK_DECOMPRESSION_FAILED, "a field section does not decode") from exc
        reader.blocked = False
        self._quic.release(stream_id)
        held, end = reader.held, reader.held_end
        reader.held, reader.held_end = b"", False
        try:
            self._deliver(reader, control, section, last=end and not held)  # a FIN on its own was held too
        except StreamFault as fault:
            self.detach(stream_id)
            reader.sink.on_fault(fault)
        self._feed(reader, held, end)

    # -- the peer's control and QPACK streams ---------------------------------------------------------------------

    def _hear_encoder(self, block: bytes) -> None:
        try:
            unblocked = self._decoder.feed_encoder(block)
        except pylsqpack.EncoderStreamError as exc:
            raise ConnectionFault(QPACK_ENCODER_STREAM_ERROR, "the encoder stream does not parse") from exc
        for each in unblocked:
            self._unblock(each)

    def _hear_decoder(self, block: bytes) -> None:
        try:
            self._encoder.feed_decoder(block)
        except pylsqpack.DecoderStreamError as exc:
            raise ConnectionFault(QPACK_DECODER_STREAM_ERROR, "the decoder stream does not parse") from exc

    def take_settings(self, settings: dict[int, int]) -> None:
        """The peer's SETTINGS came."""
        self.settings = settings
        instructions = self._encoder.apply_settings(
            max_table_capacity=min(settings.get(SETTING_TABLE_CAPACITY, 0), TABLE_CAPACITY),
            blocked_streams=min(settings.get(SETTING_BLOCKED, 0), BLOCKED_STREAMS),
        )
        if instructions:
            self._quic.write(self._encoder_id, instructions)
        self._owner.on_settings()

    def on_goaway(self, last_id: int) -> None:
        self._owner.on_goaway(last_id)

    def on_priority(self, stream_id: int, value: bytes) -> None:
        self._owner.on_priority(stream_id, value)
