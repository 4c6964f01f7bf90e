"""The TLS tickets that a QUIC listener gave out: bounded, dated, and each good for one handshake.

Theory: aioquic's TLS takes no OpenSSL context, so no ticket key ring reaches it; a ticket is the random name of a secret
kept here. That it is taken out when it is used is the whole defence against a replayed 0-RTT flight (RFC 8446 8.1): the
second copy finds no ticket, its early data is never decrypted, and it goes on as a full handshake.
"""

from __future__ import annotations

from collections import OrderedDict
from datetime import timedelta

from aioquic.tls import SessionTicket

MAX_SERVER_TICKETS = 10_000  # about 1 KiB each


class ServerTickets:
    """The two methods are aioquic's handler and fetcher."""

    def __init__(self, lifetime_s: float, capacity: int = MAX_SERVER_TICKETS) -> None:
        self.lifetime_s = lifetime_s
        self._capacity = capacity
        self._tickets: OrderedDict[bytes, SessionTicket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tickets)

    def keep(self, ticket: SessionTicket) -> None:
        ticket.not_valid_after = ticket.not_valid_before + timedelta(seconds=self.lifetime_s)
        self._tickets[ticket.ticket] = ticket
        if len(self._tickets) > self._capacity:
            self._tickets.popitem(last=False)

    def take(self, label: bytes) -> SessionTicket | None:
        """The ticket of this name, once. aioquic checks that it is still valid."""
        return self._tickets.pop(label, None)
