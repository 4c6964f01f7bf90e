"""TLS for QUIC: the listener's certificate, and the tickets and tokens that edges gave us.

Theory: aioquic's TLS takes no OpenSSL context, so neither the ticket key ring nor its session cache reach it. The tickets
that we gave out are in `resolver/io/quic_tickets.py`. A client's ticket is used once (RFC 8446 C.4), and never for another
trust: resumption skips the certificate check.
"""

from __future__ import annotations

import ssl
from collections import OrderedDict, deque
from collections.abc import Hashable
from pathlib import Path

import certifi
from aioquic.quic.configuration import QuicConfiguration
from aioquic.tls import SessionTicket
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509 import load_pem_x509_certificates

from proxy.io.quic_flow import Bounds, configuration

MAX_EDGES = 256
TICKETS_PER_EDGE = 4


class QuicSessions:
    """What edges gave us for the next connection, newest first: TLS tickets (each used once) and address tokens."""

    def __init__(self, edges: int = MAX_EDGES, per_edge: int = TICKETS_PER_EDGE) -> None:
        self._edges = edges
        self._per_edge = per_edge
        self._tickets: OrderedDict[Hashable, deque[SessionTicket]] = OrderedDict()
        self._tokens: OrderedDict[Hashable, bytes] = OrderedDict()

    def keep(self, edge: Hashable, ticket: SessionTicket) -> None:
        self._tickets.setdefault(edge, deque(maxlen=self._per_edge)).append(ticket)
        self._tickets.move_to_end(edge)
        if len(self._tickets) > self._edges:
            self._tickets.popitem(last=False)

    def take(self, edge: Hashable) -> SessionTicket | None:
        """The newest valid ticket for this edge, or None."""
        tickets = self._tickets.get(edge)
        while tickets:
            ticket = tickets.pop()
            if ticket.is_valid:
                return ticket
        return None

    def keep_token(self, edge: Hashable, token: bytes) -> None:
        self._tokens[edge] = token
        self._tokens.move_to_end(edge)
        if len(self._tokens) > self._edges:
            self._tokens.popitem(last=False)

    def take_token(self, edge: Hashable) -> bytes:
        """An address validation token saves a Retry round trip; b"" when there is none."""
        return self._tokens.pop(edge, b"")

    def forget(self) -> None:
        """After a change of trust: nothing may be resumed."""
        self._tickets.clear()
        self._tokens.clear()


def server_configuration(cert_file: str, key_file: str, bounds: Bounds, idle_timeout_s: float) -> QuicConfiguration:
    """Raises OSError or ValueError when the files cannot be read or hold no certificate."""
    config = configuration(is_client=False, bounds=bounds, idle_timeout_s=idle_timeout_s)
    # Not aioquic's own loaders: they stumble over a key behind the certificates, which one file may well hold.
    certificates = load_pem_x509_certificates(Path(cert_file).read_bytes())
    config.certificate, config.certificate_chain = certificates[0], certificates[1:]
    config.private_key = load_pem_private_key(Path(key_file or cert_file).read_bytes(), None)
    return config


def key_bytes(config: QuicConfiguration) -> bytes:
    """A secret that is the same after a restart: what stateless reset tokens are derived from."""
    raw: bytes = config.private_key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
    return raw


def client_configuration(server_name: str, ca_file: str, bounds: Bounds, idle_timeout_s: float) -> QuicConfiguration:
    """Verifies always: the system's roots (SSL_CERT_FILE and SSL_CERT_DIR are heard) and `ca_file` besides.

    Raises OSError when `ca_file` cannot be read.
    """
    config = configuration(is_client=True, bounds=bounds, idle_timeout_s=idle_timeout_s)
    config.server_name = server_name
    config.verify_mode = ssl.CERT_REQUIRED
    roots = ssl.get_default_verify_paths()
    # The directory is looked up by hash; a bundle is parsed whole (10 ms) at every handshake, as aioquic keeps no store.
    config.capath = roots.capath
    config.cafile = None if roots.capath else roots.cafile or certifi.where()
    if ca_file:
        config.cadata = Path(ca_file).read_bytes()
    return config
