"""Keep the door of a QUIC service: one UDP socket, the connections behind it, found by connection id.

Theory: a datagram is routed by the id it names, never by where it came from, so a client whose NAT or Wi-Fi changed goes
on where it was (RFC 9000 9). The socket is drained up to DRAIN datagrams a wake-up, then each connection that got any sends
once: one datagram alone is answered at once, a burst pays for one set of acknowledgements.

What a stranger can cost is bounded: a connection is half open until its handshake is done; RETRY_ABOVE of them and the
next has to prove its address by a Retry token (RFC 9000 8.1.2), HALF_OPEN and it is refused. A datagram too short to
start a connection starts no answer either, except a stateless reset shorter than itself (RFC 9000 10.3.3).

The service behind it says what a connection is: `open` makes one, the rest of `Guest` is what the door needs of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import socket
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

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

from resolver.io.quic_enums import look_up_by_identity

look_up_by_identity()

logger = logging.getLogger("headrace.resolver")

DRAIN = 64  # datagrams a wake-up: the loop's other sockets get their turn after about 5 ms of work
SMALLEST_INITIAL = 1200  # RFC 9000 14.1
CID_BYTES = 8
RETRY_ABOVE = 64
HALF_OPEN = 1024
RESETS_PER_S = 50  # stateless resets: an answer to anybody is a tool for somebody
TRANSPORT_CONNECTION_REFUSED, TRANSPORT_INVALID_TOKEN = 0x2, 0xB  # RFC 9000 20.1

Address = Any
"""What the socket calls its peer; only compared and handed back."""


class Socket(Protocol):
    """`resolver.io.quic_socket.UdpSocket`, or one like it."""

    sock: socket.socket

    def receive(self) -> tuple[bytes, Address]: ...
    def send(self, datagram: bytes, address: Address) -> None: ...
    def close(self) -> None: ...


class Guest(Protocol):
    """A connection, as its door sees it."""

    @property
    def cid(self) -> bytes:
        """The id we gave it."""

    @property
    def began(self) -> bool:
        """Whether a packet of the peer's was ever decrypted."""

    def receive(self, datagram: bytes, address: Address) -> None: ...
    def flush(self) -> None:
        """Send what is ready, once for all datagrams of a wake-up."""

    def drain(self) -> None: ...
    def close_now(self) -> None: ...
    def dispose(self) -> None:
        """Let go of every timer."""


G = TypeVar("G", bound=Guest)
Open = Callable[[bytes, "bytes | None", Address], G]
"""(the id that the client first named, the Retry's source id if there was one, address) -> a connection."""


class QuicDoor(Generic[G]):
    """Routes the datagrams of one socket, which it owns. `versions` are the QUIC versions spoken."""

    def __init__(self, udp: Socket, open_one: Open[G], *, versions: list[int], reset_key: bytes) -> None:
        self.reset_key = reset_key
        self._udp = udp
        self._open_one = open_one
        self._versions = versions
        self._by_id: dict[bytes, G] = {}
        self._ids: dict[G, set[bytes]] = {}
        self._half_open: set[G] = set()
        self._retry = QuicRetryTokenHandler()
        self._loop = asyncio.get_running_loop()
        self._draining = self._closed = False
        self._resets, self._resets_until = RESETS_PER_S, 0.0
        self._loop.add_reader(udp.sock, self._readable)

    @property
    def connections(self) -> int:
        return len(self._ids)

    def guests(self) -> list[G]:
        """Those inside, in the order of their arrival."""
        return list(self._ids)

    def drain(self) -> None:
        """Refuse new connections; the others close when their work is done."""
        self._draining = True
        for guest in self.guests():
            guest.drain()

    def close(self) -> None:
        """Abort what is left and let go of the socket. Idempotent."""
        if self._closed:
            return
        self._closed = self._draining = True
        for guest in self.guests():
            guest.close_now()
            guest.dispose()
        self._by_id.clear()
        self._ids.clear()
        self._half_open.clear()
        self._udp.close()

    # --- datagrams ---------------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        touched: dict[G, None] = {}
        receive = self._udp.receive
        for _ in range(DRAIN):
            try:
                datagram, address = receive()
            except (BlockingIOError, InterruptedError):
                break
            except OSError as exc:  # an ICMP error of an earlier datagram
                logger.debug("quic: %s", exc)
                continue
            guest = self._route(datagram, address)
            if guest is not None:
                touched[guest] = None
                guest.receive(datagram, address)
        for guest in touched:
            if guest.began:
                guest.flush()
            else:  # its first packet was not one: any stranger can make those, so nothing is kept of it
                guest.dispose()
                self.forget(guest)

    def _route(self, datagram: bytes, address: Address) -> G | None:
        """Whose datagram it is; a new connection's when it may start one. Answers strangers itself."""
        if datagram and not datagram[0] & 0x80:
            guest = self._by_id.get(datagram[1 : 1 + CID_BYTES])
            if guest is None:
                self._reset(datagram, address)
            return guest
        try:
            header = pull_quic_header(Buffer(data=datagram), host_cid_length=CID_BYTES)
        except ValueError:  # BufferReadError is one
            return None
        guest = self._by_id.get(header.destination_cid)
        if guest is not None or len(datagram) < SMALLEST_INITIAL:
            return guest
        if header.version not in self._versions:
            self._negotiate(header, address)
            return None
        return self._admit(header, address) if header.packet_type == QuicPacketType.INITIAL else None

    def _negotiate(self, header: QuicHeader, address: Address) -> None:
        # A version negotiation packet is never answered by another: two servers would talk for ever.
        if header.packet_type != QuicPacketType.VERSION_NEGOTIATION:
            answer = encode_quic_version_negotiation(
                source_cid=header.destination_cid,
                destination_cid=header.source_cid,
                supported_versions=self._versions,
            )
            self._udp.send(answer, address)

    def _admit(self, header: QuicHeader, address: Address) -> G | None:
        if self._draining or len(self._half_open) >= HALF_OPEN:
            self._udp.send(refusal(header, TRANSPORT_CONNECTION_REFUSED), address)
            return None
        crowded = len(self._half_open) >= RETRY_ABOVE
        if crowded and not header.token:
            self._send_retry(header, address)
            return None
        original, retry_source = header.destination_cid, None
        if header.token:
            try:
                original = self._retry.validate_token(
                    address=address, destination_cid=header.destination_cid, token=header.token, now=self._loop.time()
                )
                retry_source = header.destination_cid
            except ValueError:
                # A token of an earlier run, or of another server, is no offence while there is room (RFC 9000 8.1.3).
                if crowded:
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

    def _open(self, named: bytes, original: bytes, retry_source: bytes | None, address: Address) -> G:
        guest = self._open_one(original, retry_source, address)
        self._ids[guest] = {named, guest.cid}
        self._by_id[named] = self._by_id[guest.cid] = guest
        self._half_open.add(guest)
        return guest

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
        self._udp.send(bytes(noise) + reset_token(self.reset_key, datagram[1 : 1 + CID_BYTES]), address)

    # --- what connections say ----------------------------------------------------------------------------------------

    def established(self, guest: G) -> None:
        """Its handshake is done: it is no longer half open."""
        self._half_open.discard(guest)

    def issued(self, guest: G, cid: bytes) -> None:
        ids = self._ids.get(guest)
        if ids is not None:
            ids.add(cid)
            self._by_id[cid] = guest

    def retired(self, cid: bytes) -> None:
        guest = self._by_id.pop(cid, None)
        if guest is not None:
            self._ids[guest].discard(cid)

    def forget(self, guest: G) -> None:
        """The transport is done with it, closing period included."""
        self._half_open.discard(guest)
        for cid in self._ids.pop(guest, ()):
            self._by_id.pop(cid, None)


def reset_token(key: bytes, cid: bytes) -> bytes:
    """The stateless reset token of a connection id: the same after a restart as long as the key is (RFC 9000 10.3.2)."""
    return hmac.new(key, b"stateless reset" + cid, hashlib.sha256).digest()[:16]


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
