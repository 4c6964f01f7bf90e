"""TLS for connections that we open: always verified, and resumed where the server lets us.

Theory: `loop.create_connection` takes no session, but asyncio and uvloop both make their TLS object through
`SSLContext.wrap_bio`, so a context that overrides it can hand one in. In TLS 1.3 the ticket comes after the handshake:
call `remember(transport)` once the first bytes of an answer came, not before.
Rules for editing: 1. there is no way to turn verification off, not for tests either; 2. a session is offered once
(RFC 8446 C.4: a ticket used twice lets an observer link two connections).
"""

from __future__ import annotations

import asyncio
import ssl
from collections import OrderedDict
from collections.abc import Sequence

MAX_SESSIONS = 256  # server names remembered by one context; a session is about 1 KiB


class ResumingContext(ssl.SSLContext):
    """A client context that offers the newest session it was given for a server name, once. Use `client_context`."""

    kept: OrderedDict[str, ssl.SSLSession]

    def __new__(cls) -> ResumingContext:
        self = super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)
        self.kept = OrderedDict()
        return self

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        offered = session or self.kept.pop(_key(server_hostname), None)
        return super().wrap_bio(incoming, outgoing, server_side, server_hostname, offered)

    def keep(self, server_hostname: str | bytes | None, session: ssl.SSLSession | None) -> None:
        """Keep a session for the next connection to that name; the name unused longest goes beyond MAX_SESSIONS."""
        # Before the ticket came a TLS 1.3 session exists but can resume nothing; it must not replace one that can.
        if session is None or not (session.has_ticket or session.id):
            return
        name = _key(server_hostname)
        self.kept[name] = session
        self.kept.move_to_end(name)
        while len(self.kept) > MAX_SESSIONS:
            self.kept.popitem(last=False)


def client_context(ca_file: str = "", alpn: Sequence[str] = ()) -> ResumingContext:
    """A context that trusts the system's roots and, beside them, those of `ca_file` (PEM, "" for none); TLS >= 1.2.

    Raises OSError (ssl.SSLError included) when `ca_file` cannot be read or holds no certificate.
    """
    context = ResumingContext()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    if ca_file:
        context.load_verify_locations(ca_file)
    if alpn:
        context.set_alpn_protocols(list(alpn))
    return context


def remember(transport: asyncio.BaseTransport) -> None:
    """Keep this connection's session for the next one to the same name; nothing for plain or foreign transports."""
    tls = transport.get_extra_info("ssl_object")
    context = getattr(tls, "context", None)
    if isinstance(context, ResumingContext):
        context.keep(tls.server_hostname, tls.session)


def was_resumed(transport: asyncio.BaseTransport) -> bool:
    """Whether this connection's handshake was an abbreviated one."""
    tls = transport.get_extra_info("ssl_object")
    return bool(tls is not None and tls.session_reused)


def _key(server_hostname: str | bytes | None) -> str:
    name = server_hostname.decode("ascii", "replace") if isinstance(server_hostname, bytes) else server_hostname
    return (name or "").lower()
