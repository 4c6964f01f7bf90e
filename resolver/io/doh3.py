"""DNS over HTTPS upstreams by HTTP/3: POST, a stream for each question (RFC 8484, RFC 9114)."""

from __future__ import annotations

from collections.abc import Iterable

from aioquic.h3 import events as h3
from aioquic.h3.connection import H3Connection
from aioquic.h3.exceptions import H3Error
from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration

from resolver import outgoing as o
from resolver.io.addresses import AddressBook
from resolver.io.channel import Clock
from resolver.io.doh_reply import Exchange, authority_of, request_fields
from resolver.io.quic import QuicLink, QuicMemory, failed_stream, quic_channel
from resolver.io.warm import Errand, WarmChannel

REQUEST_REJECTED, REQUEST_CANCELLED = 0x10B, 0x10C  # RFC 9114 8.1


class Doh3Link(QuicLink):
    """One HTTP/3 connection."""

    ALPN, NO_ERROR = "h3", 0x100

    def __init__(
        self,
        channel: WarmChannel,
        clock: Clock,
        configuration: QuicConfiguration,
        memory: QuicMemory,
        fields: list[tuple[bytes, bytes]],
    ) -> None:
        super().__init__(channel, clock, configuration, memory)
        self._fields = fields
        self._h3: H3Connection | None = None
        self._streams: dict[int, Exchange] = {}

    def errands(self) -> Iterable[Errand]:
        return [exchange.errand for exchange in self._streams.values()]

    def in_flight(self) -> int:
        return len(self._streams)

    def submit(self, errand: Errand) -> None:
        if self._h3 is None:
            self._h3 = H3Connection(self.quic)
        message = o.compose(errand.out, 0, errand.question, padded=True)
        stream_id = self.quic.get_next_available_stream_id()
        self._streams[stream_id] = Exchange(errand)
        self._h3.send_headers(stream_id, [*self._fields, (b"content-length", b"%d" % len(message))])
        self._h3.send_data(stream_id, message, end_stream=True)
        self.wake()

    def on_event(self, event: events.QuicEvent) -> None:
        if isinstance(event, events.StreamReset | events.StopSendingReceived):
            self._on_reset(event.stream_id, event.error_code)
            return
        if self._h3 is None:  # before our first request: the peer's control stream, read when ours is there
            self._h3 = H3Connection(self.quic)
        try:
            for heard in self._h3.handle_event(event):
                self._hear(heard)
        except H3Error as exc:  # aioquic closes by itself for most; this is the belt
            self.end(f"broke HTTP/3: {exc}".lower()[:120], self.NO_ERROR)

    def _hear(self, event: h3.H3Event) -> None:
        if not isinstance(event, h3.HeadersReceived | h3.DataReceived):
            return
        exchange = self._streams.get(event.stream_id)
        if exchange is None:
            return
        if isinstance(event, h3.HeadersReceived):
            exchange.take_head(event.headers)
        elif not exchange.take_body(event.data):
            self.quic.stop_stream(event.stream_id, REQUEST_CANCELLED)
            self._finish(event.stream_id)
            return
        if event.stream_ended:
            self._finish(event.stream_id)

    def _finish(self, stream_id: int) -> None:
        exchange = self._streams.pop(stream_id, None)
        if exchange is not None:
            exchange.end(self._channel, self)

    def _on_reset(self, stream_id: int, code: int) -> None:
        exchange = self._streams.pop(stream_id, None)
        if exchange is None:
            return
        if code == REQUEST_REJECTED:
            self._channel.retire(self)
            self._channel.move([exchange.errand], "request rejected", ever_answered=True)
        else:
            exchange.errand.finish(failed_stream(code))


def doh3_channel(
    book: AddressBook, port: int, *, path: str, server_name: str, ca_file: str, clock: Clock
) -> WarmChannel:
    """One warm h3 connection. `server_name` replaces the host in the certificate check only, never in `:authority`."""
    fields = request_fields(authority_of(book.host, port), path)

    def make(channel: WarmChannel, configuration: QuicConfiguration, memory: QuicMemory) -> QuicLink:
        return Doh3Link(channel, clock, configuration, memory, fields)

    return quic_channel(book, port, Doh3Link.ALPN, make, server_name=server_name, ca_file=ca_file, clock=clock)
