"""DNS over QUIC upstreams: a stream for each question, two bytes of length before each message (RFC 9250).

Theory: streams tell questions apart, so the id on the wire is 0 (4.2.1); keepalive and foreign ids would be protocol
errors (4.2.1, 5.5.2). The stream ends with the question, and the answer with the peer's FIN. A reply that breaks these
rules, or answers another question, ends the connection with DOQ_PROTOCOL_ERROR.
"""

from __future__ import annotations

from collections.abc import Iterable

from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration

from resolver import outgoing as o
from resolver.io.addresses import AddressBook
from resolver.io.channel import Clock
from resolver.io.quic import QuicLink, QuicMemory, failed_stream, quic_channel
from resolver.io.warm import Errand, WarmChannel

PROTOCOL_ERROR = 2  # DOQ_PROTOCOL_ERROR


class DoqLink(QuicLink):
    """One DoQ connection; `_flight` holds each stream's errand and the bytes of its answer so far."""

    ALPN, NO_ERROR = "doq", 0

    def __init__(
        self, channel: WarmChannel, clock: Clock, configuration: QuicConfiguration, memory: QuicMemory
    ) -> None:
        super().__init__(channel, clock, configuration, memory)
        self._flight: dict[int, tuple[Errand, bytearray]] = {}

    def errands(self) -> Iterable[Errand]:
        return [errand for errand, _ in self._flight.values()]

    def in_flight(self) -> int:
        return len(self._flight)

    def submit(self, errand: Errand) -> None:
        message = o.compose(errand.out, 0, errand.question, padded=True)
        stream_id = self.quic.get_next_available_stream_id()
        self._flight[stream_id] = (errand, bytearray())
        self.quic.send_stream_data(stream_id, len(message).to_bytes(2) + message, end_stream=True)
        self.wake()

    def on_event(self, event: events.QuicEvent) -> None:
        if isinstance(event, events.StreamDataReceived):
            self._hear(event)
        elif isinstance(event, events.StreamReset | events.StopSendingReceived):
            errand, _ = self._flight.pop(event.stream_id, (None, None))
            if errand is not None:
                errand.finish(failed_stream(event.error_code))

    def _hear(self, event: events.StreamDataReceived) -> None:
        if event.stream_id not in self._flight:
            return
        errand, unread = self._flight[event.stream_id]
        unread += event.data
        size = int.from_bytes(unread[:2]) if len(unread) >= 2 else 0
        if event.end_stream or len(unread) > 2 + size > 2:
            reply = bytes(unread[2:])
            if len(reply) != size or o.match(reply, 0, errand.question) is o.Match.OTHER:
                self.end(f"{len(reply)} bytes that answer no question of this stream", PROTOCOL_ERROR)
                return
            del self._flight[event.stream_id]
            self._channel.answered(self, errand, reply)


def doq_channel(book: AddressBook, port: int, *, server_name: str, ca_file: str, clock: Clock) -> WarmChannel:
    """One warm DoQ connection."""

    def make(channel: WarmChannel, configuration: QuicConfiguration, memory: QuicMemory) -> QuicLink:
        return DoqLink(channel, clock, configuration, memory)

    return quic_channel(book, port, DoqLink.ALPN, make, server_name=server_name, ca_file=ca_file, clock=clock)
