"""The TLS tickets that a QUIC listener gives out: bounded, dated, each good for one handshake, for 0-RTT where that is allowed.

Theory: aioquic's TLS takes no OpenSSL context, so no ticket key ring reaches it; a ticket is the random name of a secret
kept here. That it is taken out when it is used is the whole defence against a replayed 0-RTT flight (RFC 8446 8.1): the
second copy finds no ticket, its early data is never decrypted, and it goes on as a full handshake.

Where early data is off, a ticket does not offer it (RFC 8446 4.6.1), and a client that sends some on the strength of an older
ticket is resumed without it: its packets find no key, and it sends them again after the handshake (4.2.10).

aioquic asks for none of this, so `TicketedConnection` reaches into it; `tests/proxy/h3/test_h3_flow.py` names each private
part.
"""

from __future__ import annotations

from collections import OrderedDict
from datetime import timedelta
from typing import Any

from aioquic import tls
from aioquic.buffer import Buffer  # type: ignore[attr-defined]
from aioquic.quic.connection import QuicConnection
from aioquic.tls import SessionTicket

from config.model import Tickets

MAX_SERVER_TICKETS = 10_000  # about 1 KiB each


class ServerTickets:
    """Those of one listener, by the configuration's rules."""

    def __init__(self, rules: Tickets, capacity: int = MAX_SERVER_TICKETS) -> None:
        self.rules = rules
        self._capacity = capacity
        self._tickets: OrderedDict[bytes, SessionTicket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def lifetime_s(self) -> int:
        return int(self.rules.lifetime_s)

    @property
    def early_data(self) -> bool:
        return self.rules.early_data != "off"

    def keep(self, ticket: SessionTicket) -> None:
        """aioquic's handler of a ticket that was given out."""
        ticket.not_valid_after = ticket.not_valid_before + timedelta(seconds=self.lifetime_s)
        self._tickets[ticket.ticket] = ticket
        if len(self._tickets) > self._capacity:
            self._tickets.popitem(last=False)

    def take(self, label: bytes) -> SessionTicket | None:
        """The ticket of this name, once. aioquic checks that it is still valid."""
        return self._tickets.pop(label, None)


class TicketedConnection(QuicConnection):
    """A server's connection that gives and takes `tickets`; without them it is aioquic's, for clients."""

    def __init__(self, *, tickets: ServerTickets | None = None, **rest: Any) -> None:
        if tickets is not None:
            rest |= {"session_ticket_fetcher": tickets.take, "session_ticket_handler": tickets.keep}
        super().__init__(**rest)
        self._tickets = tickets

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        if self._tickets is not None:
            self._shorten(self.tls, self._tickets.lifetime_s)
            if not self._tickets.early_data:
                self.tls._max_early_data = None

    def _shorten(self, context: tls.Context, lifetime_s: int) -> None:
        """aioquic writes a lifetime of one day into every ticket; it stands behind the type and the 24-bit length."""
        stock = context._server_handle_finished

        def finished(input_buf: Buffer, output_buf: Buffer) -> None:
            start = output_buf.tell()
            stock(input_buf, output_buf)
            end = output_buf.tell()
            if end > start + 8:
                output_buf.seek(start + 4)
                output_buf.push_uint32(lifetime_s)
                output_buf.seek(end)

        context._server_handle_finished = finished  # type: ignore[method-assign]

    def _update_traffic_key(
        self, direction: tls.Direction, epoch: tls.Epoch, cipher_suite: tls.CipherSuite, secret: bytes
    ) -> None:
        if epoch is tls.Epoch.ZERO_RTT and self._tickets is not None and not self._tickets.early_data:
            self.tls.early_data_accepted = False  # said in EncryptedExtensions, which are still to be written
            return
        super()._update_traffic_key(direction, epoch, cipher_suite, secret)
