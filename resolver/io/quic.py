"""QUIC connections to upstreams: datagrams, timers, handshake and tickets, below DoQ and DNS over HTTP/3.

Theory: aioquic's `QuicConnection` is the state machine; this protocol moves datagrams on a connected socket and turns
its timer. `opened` returns once the handshake is done and the certificate verified; nothing is sent before that, so that
no query travels as early data that could be replayed (RFC 9250 4.5). A ticket is offered once (RFC 8446 C.4).
A subclass says how an errand becomes a stream and what a stream's bytes mean.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, cast

from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.tls import SessionTicket

from resolver.io.addresses import AddressBook, dial
from resolver.io.channel import Clock, Failure, words
from resolver.io.warm import DIAL_TIMEOUT_S, MAX_IN_FLIGHT, Errand, Link, WarmChannel
from resolver.quirks import IdleLimit
from resolver.standing import Fault

IDLE_TIMEOUT_S = 60.0
CRYPTO_ERROR, ALERTS_OF_CERTIFICATES = 0x100, frozenset({42, 43, 44, 45, 46, 48})  # RFC 9000 20.1, RFC 8446 6


@dataclass(slots=True)
class QuicMemory:
    """What one connection leaves for the next: the newest ticket and the address validation token. Each is used once (RFC
    8446 C.4, RFC 9000 8.1.3): twice, they would tell who we are, and one that a server cannot bear would be the last dial.

    A token spares the round trip of a Retry, so it is kept where there was one. Knot DNS sends tokens without ever sending a
    Retry, and fails every connection that shows one (3.6-dev: it forgets the original connection id).
    """

    tickets: list[SessionTicket] = field(default_factory=list)
    token: bytes = b""

    def keep_ticket(self, ticket: SessionTicket) -> None:
        self.tickets[:] = [ticket]

    def apply(self, configuration: QuicConfiguration) -> None:
        """For one dial."""
        configuration.token, self.token = self.token, b""
        configuration.session_ticket = self.tickets.pop() if self.tickets else None


class QuicLink(asyncio.DatagramProtocol):
    """One connection of a `WarmChannel`; see the module's head."""

    ALPN: ClassVar[str]
    NO_ERROR: ClassVar[int]

    def __init__(
        self, channel: WarmChannel, clock: Clock, configuration: QuicConfiguration, memory: QuicMemory
    ) -> None:
        self._channel, self._clock = channel, clock
        self._loop = asyncio.get_running_loop()
        self.quic = QuicConnection(
            configuration=configuration,
            session_ticket_handler=memory.keep_ticket,
            token_handler=self._keep_token,
        )
        self._memory = memory
        self.heard_at = 0.0
        self.answers = 0
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._transport: asyncio.DatagramTransport | None = None
        self._peer = ("", 0)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        self._flushing = False
        self._broken = ""

    def _keep_token(self, token: bytes) -> None:
        if self.quic._retry_count:
            self._memory.token = token

    # --- of a subclass -----------------------------------------------------------------------------------------------

    def errands(self) -> Iterable[Errand]:
        raise NotImplementedError

    def submit(self, errand: Errand) -> None:
        raise NotImplementedError

    def on_event(self, event: events.QuicEvent) -> None:
        raise NotImplementedError

    def in_flight(self) -> int:
        raise NotImplementedError

    # --- of the channel ----------------------------------------------------------------------------------------------

    def takes_more(self) -> bool:
        usable = self._transport is not None and not self._broken
        return usable and self._ready.done() and self.in_flight() < MAX_IN_FLIGHT

    def shut(self) -> None:
        self.end(self._broken or "closed by us", self.NO_ERROR)

    def end(self, reason: str, code: int) -> None:
        """Say goodbye with an application code and close."""
        if self._transport is None:
            return
        self._broken = self._broken or reason
        self.quic.close(error_code=code)
        self._flush()
        self._transport.close()

    # --- of the loop -------------------------------------------------------------------------------------------------

    async def opened(self, address: str, port: int) -> None:
        """Connect. Raises OSError; the link is closed then."""
        try:
            await self._loop.create_datagram_endpoint(lambda: self, remote_addr=(address, port))
            self._peer = (address, port)
            self.quic.connect(self._peer, now=self._loop.time())
            self._flush()
            await self._ready
        except BaseException:
            self._ready.cancel()
            if self._transport is not None:
                self._transport.abort()
            raise

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)
        self.heard_at = self._clock()

    def datagram_received(self, data: bytes, addr: object) -> None:
        self.heard_at = self._clock()
        self.quic.receive_datagram(data, self._peer, now=self._loop.time())
        self._take_events()
        self._flush()
        # The library tells of a close only when its draining period is over, three PTOs later; what waits must move now.
        ended = self.quic._close_event
        if ended is not None:
            self._lose(_reason(ended))

    def error_received(self, exc: Exception) -> None:
        # The socket is connected, so this is about our port pair: nobody listens there any more.
        self._lose(words(exc))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        if not self._ready.done():
            self._ready.set_exception(ConnectionError(self._broken or "closed during the handshake"))
        self._channel.lost(self, self._broken or "closed before it answered")

    # --- the state machine -------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Send what the state machine holds, once for everything of this loop turn."""
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._transport is None or self._transport.is_closing():
            return
        for datagram, _ in self.quic.datagrams_to_send(now=self._loop.time()):
            self._transport.sendto(datagram)
        self._set_timer(self.quic.get_timer())

    def _set_timer(self, due_at: float | None) -> None:
        if due_at == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = due_at
        self._timer = None if due_at is None else self._loop.call_at(due_at, self._on_timer)

    def _on_timer(self) -> None:
        due_at, self._timer, self._timer_at = self._timer_at, None, None
        assert due_at is not None
        self.quic.handle_timer(now=max(due_at, self._loop.time()))
        self._take_events()
        self._flush()

    def _take_events(self) -> None:
        while (event := self.quic.next_event()) is not None:
            if isinstance(event, events.HandshakeCompleted):
                if not self._ready.done():
                    self._ready.set_result(None)
            elif isinstance(event, events.ConnectionTerminated):
                self._lose(_reason(event))
            else:
                self.on_event(event)

    def _lose(self, reason: str) -> None:
        self._broken = self._broken or reason
        if self._transport is not None:
            self._transport.abort()


def _reason(event: events.ConnectionTerminated) -> str:
    alert = event.error_code - CRYPTO_ERROR
    detail = event.reason_phrase[:100].lower()
    if alert in ALERTS_OF_CERTIFICATES:
        return f"bad certificate: {detail}"
    return f"quic connection ended with code {event.error_code:#x}" + (f" ({detail})" if detail else "")


@dataclass(slots=True)
class QuicTrust:
    """The system's roots and `ca_file`. Read at the first dial: a missing file is one upstream's failure."""

    ca_file: str
    _extra: bytes | None = None

    def apply(self, configuration: QuicConfiguration) -> None:
        """Raises OSError when `ca_file` cannot be read."""
        if self._extra is None:
            self._extra = Path(self.ca_file).read_bytes() if self.ca_file else b""
        system = ssl.get_default_verify_paths()
        configuration.cafile, configuration.capath = system.cafile, system.capath
        configuration.cadata = self._extra or None
        configuration.verify_mode = ssl.CERT_REQUIRED


Make = Callable[[WarmChannel, QuicConfiguration, QuicMemory], QuicLink]


def quic_channel(
    book: AddressBook, port: int, alpn: str, make: Make, *, server_name: str, ca_file: str, clock: Clock
) -> WarmChannel:
    """One warm QUIC connection, resumed where the peer lets us; the certificate must be valid for `server_name`."""
    memory, trust = QuicMemory(), QuicTrust(ca_file)

    async def link_to(address: str, channel: WarmChannel) -> QuicLink:
        configuration = QuicConfiguration(is_client=True, alpn_protocols=[alpn], idle_timeout=IDLE_TIMEOUT_S)
        configuration.server_name = server_name or book.host
        memory.apply(configuration)
        trust.apply(configuration)
        link = make(channel, configuration, memory)
        await link.opened(address, port)
        return link

    async def connect(channel: WarmChannel) -> Link:
        return await dial(book, lambda address: link_to(address, channel), DIAL_TIMEOUT_S)

    return WarmChannel(connect, encrypted=True, clock=clock, idle=IdleLimit())


def failed_stream(code: int) -> Failure:
    return Failure(Fault.UNREACHABLE, f"stream reset with code {code:#x}")
