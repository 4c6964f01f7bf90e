"""Listen for HTTP/3: what a connection is that comes through the QUIC door (`resolver/io/quic_door.py`)."""

from __future__ import annotations

from config.model import Listen, Tickets
from proxy.io.quic_flow import Bounds, FlowConnection
from proxy.io.quic_server import H3ServerConnection
from proxy.io.quic_tls import key_bytes, server_configuration
from proxy.io.rims import Origin, Service
from resolver.io.quic_bind import bind_quic
from resolver.io.quic_door import Address, QuicDoor
from resolver.io.quic_socket import UdpSocket
from resolver.io.quic_tickets import ServerTickets


class QuicListener(QuicDoor[H3ServerConnection]):
    """A listening address for h3. `close()` ends everything at once, `drain()` sends GOAWAY and lets what runs end."""

    def __init__(
        self, listen: Listen, service: Service, udp: UdpSocket, cert_file: str, key_file: str, tickets: Tickets
    ) -> None:
        host, port = udp.sock.getsockname()[:2]
        self.address: tuple[str, int] = (host, port)
        self.full_handshakes = 0
        self.resumed_handshakes = 0
        self._name = str(listen)
        self._service = service
        self._files = (cert_file, key_file)
        self._tickets = ServerTickets(tickets)
        self._bounds = Bounds(streams=service.limits.max_streams)
        self.reload_certificate()
        super().__init__(udp, self._make, versions=self._config.supported_versions, reset_key=self.reset_key)

    def reload_certificate(self, cert_file: str = "", key_file: str = "") -> None:
        """Use the files as they are now for new connections. Raises OSError or ValueError, and then nothing changed."""
        cert, key = cert_file or self._files[0], key_file or self._files[1]
        self._config = server_configuration(cert, key, self._bounds, self._service.limits.idle_timeout_s)
        self._files = (cert, key)
        self.reset_key = key_bytes(self._config)

    def retune(self, tickets: Tickets) -> None:
        """Give and take tickets by other rules from the next handshake on."""
        self._tickets.rules = tickets

    def _make(self, original: bytes, retry_source: bytes | None, address: Address) -> H3ServerConnection:
        quic = FlowConnection(
            bounds=self._bounds,
            reset_key=self.reset_key,
            tickets=self._tickets,
            configuration=self._config,
            original_destination_connection_id=original,
            retry_source_connection_id=retry_source,
        )
        origin = Origin(address[0], address[1], self._name, b"https", "h3")
        return H3ServerConnection(self._service, origin, quic, self._udp.send, self)

    def established(self, guest: H3ServerConnection, *, resumed: bool = False) -> None:
        super().established(guest)
        if resumed:
            self.resumed_handshakes += 1
        else:
            self.full_handshakes += 1


async def listen_quic(
    listen: Listen, service: Service, *, cert_file: str, key_file: str, tickets: Tickets
) -> QuicListener:
    """Serve h3 on a UDP address; port 0 takes any, `address` says which. Raises OSError or ValueError."""
    sock = bind_quic(listen)
    try:
        return QuicListener(listen, service, UdpSocket(sock), cert_file, key_file, tickets)
    except BaseException:
        sock.close()
        raise


__all__ = ["QuicListener", "listen_quic"]
