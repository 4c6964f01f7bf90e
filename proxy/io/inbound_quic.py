"""Listen for HTTP/3: one UDP socket, the connections behind it, found by connection id.

Theory: a datagram is routed by the id it names, never by where it came from, so a client whose NAT or Wi-Fi changed goes
on where it was (RFC 9000 9). The socket is drained up to DRAIN datagrams a wake-up, then each connection that got any sends
once: one datagram alone is answered at once, a burst pays for one set of acknowledgements.

What a stranger can cost is bounded: a connection is half open until its handshake is done; RETRY_ABOVE of them and the
next has to prove its address by a Retry token (RFC 9000 8.1.2), HALF_OPEN and it is refused. A datagram too short to
start a connection starts no answer either, except a stateless reset shorter than itself (RFC 9000 10.3.3).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket

from aioquic.buffer import Buffer  # type: ignore[attr-defined]
from aioquic.quic.crypto import CryptoPair
from aioquic.quic.packet import (
    QuicFrameType,
    QuicHeader,
    QuicPacketType,
    encode_quic_retry,
    encode_quic_version_negotiation,
    pull_quic_header,
)
from aioquic.quic.packet_builder import QuicPacketBuilder
from aioquic.quic.retry import QuicRetryTokenHandler

from config.model import Listen, Tickets
from proxy.io.quic_codes import TRANSPORT_CONNECTION_REFUSED, TRANSPORT_INVALID_TOKEN
from proxy.io.quic_flow import Bounds, FlowConnection, reset_token
from proxy.io.quic_link import Address
from proxy.io.quic_server import H3ServerConnection
from proxy.io.quic_socket import UdpSocket
from proxy.io.quic_tls import ServerTickets, key_bytes, server_configuration
from proxy.io.rims import Origin, Service

logger = logging.getLogger(__name__)

DRAIN = 64  # datagrams a wake-up: the loop's other sockets get their turn after about 5 ms of work
SMALLEST_INITIAL = 1200  # RFC 9000 14.1
CID_BYTES = 8
RETRY_ABOVE = 64
HALF_OPEN = 1024
RESETS_PER_S = 50  # stateless resets: an answer to anybody is a tool for somebody
SOCKET_BUFFER = 4 * 1024 * 1024  # bytes asked of the kernel; a burst that does not fit is lost and sent again


class QuicListener:
    """A listening address for h3. `close()` ends everything at once, `drain()` lets what runs end."""

    def __init__(
        self, listen: Listen, service: Service, udp: UdpSocket, cert_file: str, key_file: str, tickets: Tickets
    ) -> None:
        host, port = udp.sock.getsockname()[:2]
        self.address: tuple[str, int] = (host, port)
        self.full_handshakes = 0
        self.resumed_handshakes = 0
        self._name = str(listen)
        self._service = service
        self._udp = udp
        self._files = (cert_file, key_file)
        self._tickets = ServerTickets(tickets.lifetime_s)
        self._bounds = Bounds(streams=service.limits.max_streams)
        self._by_id: dict[bytes, H3ServerConnection] = {}
        self._ids: dict[H3ServerConnection, set[bytes]] = {}
        self._half_open: set[H3ServerConnection] = set()
        self._retry = QuicRetryTokenHandler()
        self._loop = asyncio.get_running_loop()
        self._draining = False
        self._closed = False
        self._resets, self._resets_until = RESETS_PER_S, 0.0
        self.reload_certificate()
        self._loop.add_reader(udp.sock, self._readable)

    @property
    def connections(self) -> int:
        return len(self._ids)

    def reload_certificate(self, cert_file: str = "", key_file: str = "") -> None:
        """Use the files as they are now for new connections. Raises OSError or ValueError, and then nothing changed."""
        cert, key = cert_file or self._files[0], key_file or self._files[1]
        self._config = server_configuration(cert, key, self._bounds, self._service.limits.idle_timeout_s)
        self._files = (cert, key)
        self._reset_key = key_bytes(self._config)

    def drain(self) -> None:
        """Refuse new connections; GOAWAY to the others, which close when their streams are done."""
        self._draining = True
        for connection in list(self._ids):
            connection.drain()

    def close(self) -> None:
        """Abort what is left and let go of the socket. Idempotent."""
        if self._closed:
            return
        self._closed = self._draining = True
        for connection in list(self._ids):
            connection.close_now()
            connection.dispose()
        self._by_id.clear()
        self._ids.clear()
        self._half_open.clear()
        self._udp.close()

    # -- datagrams ----------------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        touched: dict[H3ServerConnection, None] = {}
        receive = self._udp.receive
        for _ in range(DRAIN):
            try:
                datagram, address = receive()
            except (BlockingIOError, InterruptedError):
                break
            except OSError as exc:  # an ICMP error of an earlier datagram
                logger.debug("quic: %s: %s", self._name, exc)
                continue
            connection = self._route(datagram, address)
            if connection is not None:
                touched[connection] = None
                connection.link.receive(datagram, address)
        for connection in touched:
            if connection.quic.began:
                connection.link.flush()
            else:  # its first packet was not one: any stranger can make those, so nothing is kept of it
                connection.dispose()
                self.forget(connection)

    def _route(self, datagram: bytes, address: Address) -> H3ServerConnection | None:
        """Whose datagram it is; a new connection's when it may start one. Answers strangers itself."""
        if datagram and not datagram[0] & 0x80:
            connection = self._by_id.get(datagram[1 : 1 + CID_BYTES])
            if connection is None:
                self._reset(datagram, address)
            return connection
        try:
            header = pull_quic_header(Buffer(data=datagram), host_cid_length=CID_BYTES)
        except ValueError:  # BufferReadError is one
            return None
        connection = self._by_id.get(header.destination_cid)
        if connection is not None or len(datagram) < SMALLEST_INITIAL:
            return connection
        if header.version not in self._config.supported_versions:
            self._negotiate(header, address)
            return None
        return self._start(header, address) if header.packet_type == QuicPacketType.INITIAL else None

    def _negotiate(self, header: QuicHeader, address: Address) -> None:
        # A version negotiation packet is never answered by another: two servers would talk for ever.
        if header.packet_type != QuicPacketType.VERSION_NEGOTIATION:
            answer = encode_quic_version_negotiation(
                source_cid=header.destination_cid,
                destination_cid=header.source_cid,
                supported_versions=self._config.supported_versions,
            )
            self._udp.send(answer, address)

    def _start(self, header: QuicHeader, address: Address) -> H3ServerConnection | None:
        if self._draining or len(self._half_open) >= HALF_OPEN:
            self._udp.send(refusal(header, TRANSPORT_CONNECTION_REFUSED), address)
            return None
        original, retry_source = header.destination_cid, None
        if header.token or len(self._half_open) >= RETRY_ABOVE:
            if not header.token:
                self._send_retry(header, address)
                return None
            try:
                original = self._retry.validate_token(
                    address=address, destination_cid=header.destination_cid, token=header.token, now=self._loop.time()
                )
                retry_source = header.destination_cid
            except ValueError:
                # A token of an earlier run, or of another server, is no offence while there is room (RFC 9000 8.1.3).
                if len(self._half_open) >= RETRY_ABOVE:
                    self._udp.send(refusal(header, TRANSPORT_INVALID_TOKEN), address)
                    return None
        return self._open(header.destination_cid, original, retry_source, address)

    def _send_retry(self, header: QuicHeader, address: Address) -> None:
        source = os.urandom(CID_BYTES)
        token = self._retry.create_token(
            address=address,
            original_destination_connection_id=header.destination_cid,
            retry_source_connection_id=source,
            now=self._loop.time(),
        )
        answer = encode_quic_retry(
            version=header.version or 0,
            source_cid=source,
            destination_cid=header.source_cid,
            original_destination_cid=header.destination_cid,
            retry_token=token,
        )
        self._udp.send(answer, address)

    def _open(self, named: bytes, original: bytes, retry_source: bytes | None, address: Address) -> H3ServerConnection:
        quic = FlowConnection(
            bounds=self._bounds,
            reset_key=self._reset_key,
            ticket_lifetime_s=int(self._tickets.lifetime_s),
            configuration=self._config,
            original_destination_connection_id=original,
            retry_source_connection_id=retry_source,
            session_ticket_fetcher=self._tickets.take,
            session_ticket_handler=self._tickets.keep,
        )
        origin = Origin(address[0], address[1], self._name, b"https", "h3")
        connection = H3ServerConnection(self._service, origin, quic, self._udp.send, self)
        self._ids[connection] = {named, quic.host_cid}
        self._by_id[named] = self._by_id[quic.host_cid] = connection
        self._half_open.add(connection)
        return connection

    def _reset(self, datagram: bytes, address: Address) -> None:
        """Tell a peer whose connection this process does not know that it is over, so that it need not wait for it."""
        now = self._loop.time()
        if now >= self._resets_until:
            self._resets, self._resets_until = RESETS_PER_S, now + 1.0
        if len(datagram) < 43 or self._resets <= 0:
            return
        self._resets -= 1
        noise = bytearray(os.urandom(min(len(datagram) - 1, 64) - 16))
        noise[0] = noise[0] & 0x3F | 0x40
        token = reset_token(self._reset_key, datagram[1 : 1 + CID_BYTES])
        self._udp.send(bytes(noise) + token, address)

    # -- Table --------------------------------------------------------------------------------------------------------

    def established(self, connection: H3ServerConnection, *, resumed: bool) -> None:
        self._half_open.discard(connection)
        if resumed:
            self.resumed_handshakes += 1
        else:
            self.full_handshakes += 1

    def issued(self, connection: H3ServerConnection, cid: bytes) -> None:
        ids = self._ids.get(connection)
        if ids is not None:
            ids.add(cid)
            self._by_id[cid] = connection

    def retired(self, cid: bytes) -> None:
        connection = self._by_id.pop(cid, None)
        if connection is not None:
            self._ids[connection].discard(cid)

    def forget(self, connection: H3ServerConnection) -> None:
        self._half_open.discard(connection)
        for cid in self._ids.pop(connection, ()):
            self._by_id.pop(cid, None)


def refusal(header: QuicHeader, code: int) -> bytes:
    """An Initial that closes a connection before there is one (RFC 9000 5.2.2, 8.1.3): no state, one packet."""
    crypto = CryptoPair()
    crypto.setup_initial(cid=header.destination_cid, is_client=False, version=header.version or 0)
    builder = QuicPacketBuilder(
        host_cid=header.destination_cid,
        peer_cid=header.source_cid,
        version=header.version or 0,
        is_client=False,
        max_datagram_size=SMALLEST_INITIAL,
    )
    builder.start_packet(QuicPacketType.INITIAL, crypto)
    buf = builder.start_frame(QuicFrameType.TRANSPORT_CLOSE, capacity=16)
    buf.push_uint_var(code)
    buf.push_uint_var(QuicFrameType.PADDING)
    buf.push_uint_var(0)
    return builder.flush()[0][0]


async def listen_quic(
    listen: Listen, service: Service, *, cert_file: str, key_file: str, tickets: Tickets
) -> QuicListener:
    """Serve h3 on a UDP address; port 0 takes any, `address` says which. Raises OSError or ValueError."""
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        sock.setblocking(False)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)
        sock.bind((listen.host, listen.port))
        return QuicListener(listen, service, UdpSocket(sock), cert_file, key_file, tickets)
    except BaseException:
        sock.close()
        raise


__all__ = ["QuicListener", "UdpSocket", "listen_quic"]
