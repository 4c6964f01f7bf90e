"""Listen for DNS over QUIC: what a connection is that comes through the door (`quic_door.py`)."""

from __future__ import annotations

from pathlib import Path

from aioquic.quic.configuration import QuicConfiguration
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509 import load_pem_x509_certificates

from config.model import Listen, Tickets
from resolver.io.doq_server import DoqConnection, DoqTransport
from resolver.io.quic_bind import bind_quic
from resolver.io.quic_door import CID_BYTES, Address, QuicDoor
from resolver.io.quic_socket import UdpSocket
from resolver.io.quic_tickets import ServerTickets
from resolver.io.service import ResolverService

ALPN = "doq"
IDLE_TIMEOUT_S = 30.0
MOST_CONNECTIONS = 1024  # about 100 KiB each
STREAM_WINDOW = 65_537  # one message and its length; aioquic doubles it once, and a second message ends the connection
CONNECTION_WINDOW = 512 * 1024


class DoqListener(QuicDoor[DoqConnection]):
    """A listening address for DoQ, on a socket that is bound already. Raises OSError or ValueError for bad files."""

    def __init__(
        self, listen: Listen, service: ResolverService, udp: UdpSocket, cert_file: str, key_file: str, tickets: Tickets
    ) -> None:
        self.address: tuple[str, int] = udp.sock.getsockname()[:2]
        self.listen = listen
        self.full_handshakes = self.resumed_handshakes = 0
        self._service = service
        self._files = (cert_file, key_file)
        self._tickets = ServerTickets(tickets)
        self.reload_certificate()
        super().__init__(udp, self._make, versions=self._config.supported_versions, reset_key=self.reset_key)

    def reload_certificate(self, cert_file: str = "", key_file: str = "") -> None:
        """Use the files as they are now for new connections. Raises OSError or ValueError, and then nothing changed."""
        cert, key = cert_file or self._files[0], key_file or self._files[1]
        config = _configuration(cert, key)
        self._config, self._files = config, (cert, key)
        self.reset_key = config.private_key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())

    def retune(self, tickets: Tickets) -> None:
        """Give and take tickets by other rules from the next handshake on."""
        self._tickets.rules = tickets

    def _make(self, original: bytes, retry_source: bytes | None, address: Address) -> DoqConnection:
        if self.connections >= MOST_CONNECTIONS:
            self._make_room()
        quic = DoqTransport(
            reset_key=self.reset_key,
            configuration=self._config,
            original_destination_connection_id=original,
            retry_source_connection_id=retry_source,
            tickets=self._tickets,
        )
        return DoqConnection(self._service, quic, self._udp.send, address[0], self)

    def _make_room(self) -> None:
        """The one that is longest without a question goes."""
        idle = min(self.guests(), key=lambda guest: guest.idle_since)
        idle.close_now()
        idle.dispose()
        self.forget(idle)

    def established(self, guest: DoqConnection, *, resumed: bool = False) -> None:
        super().established(guest)
        if resumed:
            self.resumed_handshakes += 1
        else:
            self.full_handshakes += 1


def _configuration(cert_file: str, key_file: str) -> QuicConfiguration:
    config = QuicConfiguration(
        is_client=False,
        alpn_protocols=[ALPN],
        connection_id_length=CID_BYTES,
        idle_timeout=IDLE_TIMEOUT_S,
        max_data=CONNECTION_WINDOW,
        max_stream_data=STREAM_WINDOW,
    )
    # Not aioquic's own loaders: they stumble over a key behind the certificates, which one file may well hold.
    certificates = load_pem_x509_certificates(Path(cert_file).read_bytes())
    config.certificate, config.certificate_chain = certificates[0], certificates[1:]
    config.private_key = load_pem_private_key(Path(key_file or cert_file).read_bytes(), None)
    return config


def listen_doq(
    listen: Listen, service: ResolverService, *, cert_file: str, key_file: str, tickets: Tickets
) -> DoqListener:
    """Serve DoQ on a UDP address; port 0 takes any, `address` says which. Raises OSError or ValueError."""
    sock = bind_quic(listen)
    try:
        return DoqListener(listen, service, UdpSocket(sock), cert_file, key_file, tickets)
    except BaseException:
        sock.close()
        raise
