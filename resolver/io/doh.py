"""DNS over HTTPS upstreams: POST over one warm HTTP/2 connection (RFC 8484, RFC 9113).

Theory: bytes in, events out: the `h2` package is the state machine, this protocol moves bytes and maps streams to
errands; `doh_reply` judges what came. What the peer says about the connection:

    GOAWAY            no new streams here; those above its last id were not looked at and move, the rest is heard out
    REFUSED_STREAM    not looked at: moves
    MAX_CONCURRENT    more wait here in order, sent as streams end

Rules for editing: 1. the id on the wire is 0 (RFC 8484 4.1), streams tell questions apart; 2. nothing is ever sent to
another origin than the one configured.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import cast

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
from h2.connection import ConnectionState
from hyperframe.frame import Frame, GoAwayFrame

from resolver import outgoing as o
from resolver.io.channel import Clock, Failure, words
from resolver.io.doh_channel import Allowance
from resolver.io.doh_reply import Exchange, request_fields
from resolver.io.tls_client import remember
from resolver.io.warm import MAX_IN_FLIGHT, Errand, WarmChannel
from resolver.standing import Fault

WINDOW = 1 << 20  # of the connection: a thousand small answers never wait for a WINDOW_UPDATE


class PatientConnection(h2.connection.H2Connection):
    """An `H2Connection` that goes on reading after GOAWAY. The package takes GOAWAY for the end, yet RFC 9113 6.8 lets
    the streams up to the last id finish, and their frames may even follow in the same segment."""

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Frame], list[h2.events.Event]]:
        unsent = self.data_to_send()
        frames, events = super()._receive_goaway_frame(frame)
        self._data_to_send += unsent
        self.state_machine.state = ConnectionState.CLIENT_OPEN
        return frames, events


class DohLink(asyncio.Protocol):
    """One HTTP/2 connection of a `WarmChannel`."""

    def __init__(self, channel: WarmChannel, clock: Clock, authority: str, path: str, allowance: Allowance) -> None:
        self._channel, self._clock, self._allowance = channel, clock, allowance
        self.heard_at = 0.0
        self.answers = 0
        self._head = request_fields(authority, path)
        config = h2.config.H2Configuration(
            client_side=True, header_encoding=None, validate_outbound_headers=False, normalize_outbound_headers=False
        )
        self._h2 = PatientConnection(config)
        self._streams: dict[int, Exchange] = {}
        self._held: deque[Errand] = deque()  # beyond the peer's MAX_CONCURRENT_STREAMS
        self._transport: asyncio.Transport | None = None
        self._flushing = False
        self._going = False
        self._broken = ""

    # --- of the channel ----------------------------------------------------------------------------------------------

    def takes_more(self) -> bool:
        usable = self._transport is not None and not self._going and not self._broken
        return usable and len(self._streams) + len(self._held) < MAX_IN_FLIGHT

    def errands(self) -> Iterable[Errand]:
        return [*(stream.errand for stream in self._streams.values()), *self._held]

    def submit(self, errand: Errand) -> None:
        if self._h2.open_outbound_streams >= self._allowance.streams:
            self._held.append(errand)
        else:
            self._send(errand)

    def shut(self) -> None:
        self._going = True
        if self._transport is not None:
            self._transport.abort()

    # --- of the loop -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        tls = transport.get_extra_info("ssl_object")
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self.heard_at = self._clock()
        if tls is not None and tls.selected_alpn_protocol() != "h2":
            self._break(f"speaks {tls.selected_alpn_protocol() or 'no HTTP/2'}, not h2")
            return
        self._h2.local_settings = h2.settings.Settings(
            client=True,
            initial_values={
                h2.settings.SettingCodes.ENABLE_PUSH: 0,
                h2.settings.SettingCodes.MAX_HEADER_LIST_SIZE: 16384,
            },
        )
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(WINDOW)
        self._flush()

    def data_received(self, chunk: bytes) -> None:
        self.heard_at = self._clock()
        if self.answers == 0 and self._transport is not None:
            remember(self._transport)
        try:
            for event in self._h2.receive_data(chunk):
                self._on(event)
        except h2.exceptions.ProtocolError as exc:
            self._break(f"broke HTTP/2: {exc}".lower()[:120])
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._channel.lost(self, self._broken or (words(exc) if exc else "closed before it answered"))

    # --- streams -----------------------------------------------------------------------------------------------------

    def _send(self, errand: Errand) -> None:
        message = o.compose(errand.out, 0, errand.question, padded=True)
        stream_id = self._h2.get_next_available_stream_id()
        self._streams[stream_id] = Exchange(errand)
        self._h2.send_headers(stream_id, [*self._head, (b"content-length", b"%d" % len(message))])
        self._h2.send_data(stream_id, message, end_stream=True)
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        octets = self._h2.data_to_send()
        if octets and self._transport is not None:
            self._transport.write(octets)

    def _send_held(self) -> None:
        while self._held and not self._going and self._h2.open_outbound_streams < self._allowance.streams:
            errand = self._held.popleft()
            if not errand.finished:
                self._send(errand)

    def _on(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.DataReceived():
                self._on_body(event)
            case h2.events.ResponseReceived():
                self._on_head(event)
            case h2.events.StreamEnded():
                self._on_end(event.stream_id)
            case h2.events.StreamReset():
                self._on_reset(event)
            case h2.events.ConnectionTerminated():
                self._on_goaway(event)
            case h2.events.RemoteSettingsChanged():
                self._allowance.streams = self._h2.remote_settings.max_concurrent_streams
                self._send_held()

    def _on_head(self, event: h2.events.ResponseReceived) -> None:
        exchange = self._streams.get(event.stream_id)
        if exchange is not None:
            exchange.take_head(event.headers)

    def _on_body(self, event: h2.events.DataReceived) -> None:
        self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        exchange = self._streams.get(event.stream_id)
        if exchange is not None and not exchange.take_body(event.data):
            self._h2.reset_stream(event.stream_id, h2.errors.ErrorCodes.CANCEL)
            self._on_end(event.stream_id)

    def _on_end(self, stream_id: int) -> None:
        exchange = self._streams.pop(stream_id, None)
        if exchange is not None:
            exchange.end(self._channel, self)
            self._send_held()

    def _on_reset(self, event: h2.events.StreamReset) -> None:
        stream = self._streams.pop(event.stream_id, None)
        if stream is None:
            return
        if event.error_code == h2.errors.ErrorCodes.REFUSED_STREAM:
            # The connection may be what is overloaded: a fresh one is the only place where the retry makes sense.
            self._going = True
            self._channel.retire(self)
            self._channel.move([stream.errand], "stream refused", ever_answered=True)
        else:
            stream.errand.finish(Failure(Fault.UNREACHABLE, f"stream reset with code {int(event.error_code or 0):#x}"))
        self._send_held()

    def _on_goaway(self, event: h2.events.ConnectionTerminated) -> None:
        self._going = True
        last = event.last_stream_id or 0
        unseen = [self._streams.pop(i).errand for i in list(self._streams) if i > last] + list(self._held)
        self._held.clear()
        self._channel.retire(self)
        self._channel.move(unseen, f"goaway with code {int(event.error_code or 0):#x}", ever_answered=True)
        if not self._streams:
            self.shut()

    def _break(self, reason: str) -> None:
        self._broken = reason
        self.shut()
