"""A listener's UDP socket: what could not be sent waits, and answers leave from the address that was asked.

Theory: UDP has no connection that remembers which of a machine's addresses a client spoke to. A socket bound to one
address answers from it; one bound to the wildcard would answer from whatever the routing table prefers, and a client of
the machine's second address drops that. So the wildcard asks for the destination of each datagram (`IP_PKTINFO`,
RFC 3542 for IPv6) and keeps it with the peer's address, which nobody above looks into.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections import deque

from resolver.io.quic_door import Address

logger = logging.getLogger(__name__)

MAX_DATAGRAM = 65_535
UNSENT = 512  # datagrams kept while the socket takes none; beyond that they are lost, as on any path
IP_PKTINFO = 8  # Linux; the socket module names it from 3.12 on


class UdpSocket:
    """A non-blocking UDP socket that keeps what it could not send at once, up to UNSENT datagrams."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[tuple[bytes, Address]] = deque(maxlen=UNSENT)
        self._wildcard = sock.getsockname()[0] in ("0.0.0.0", "::")  # noqa: S104 - compared, not bound
        self._transmit = self._send_from if self._wildcard else sock.sendto
        if self._wildcard:
            if sock.family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
            else:
                sock.setsockopt(socket.IPPROTO_IP, IP_PKTINFO, 1)

    def receive(self) -> tuple[bytes, Address]:
        """The next datagram and who sent it. Raises BlockingIOError when there is none, another OSError for ICMP."""
        if not self._wildcard:
            return self.sock.recvfrom(MAX_DATAGRAM)
        datagram, extras, _, address = self.sock.recvmsg(MAX_DATAGRAM, 64)
        for _level, kind, content in extras:
            if kind == IP_PKTINFO:
                # Answers go out from the address itself; the interface is the routing table's to choose.
                return datagram, (*address, (kind, struct.pack("=I4s4s", 0, content[4:8], bytes(4))))
            if kind == socket.IPV6_PKTINFO:
                return datagram, (*address, (kind, content))
        return datagram, (*address, None)

    def _send_from(self, datagram: bytes, address: Address) -> None:
        *peer, local = address
        level = socket.IPPROTO_IPV6 if self.sock.family == socket.AF_INET6 else socket.IPPROTO_IP
        self.sock.sendmsg([datagram], [(level, *local)] if local else [], 0, tuple(peer))

    def send(self, datagram: bytes, address: Address) -> None:
        """Send or keep. A path that the kernel knows to be broken loses it: QUIC repeats what matters."""
        if self._unsent:
            self._unsent.append((datagram, address))
            return
        try:
            self._transmit(datagram, address)
        except BlockingIOError:
            self._unsent.append((datagram, address))
            self._loop.add_writer(self.sock, self._writable)
        except OSError as exc:
            logger.debug("quic: a datagram of %d bytes was not sent: %s", len(datagram), exc)

    def _writable(self) -> None:
        while self._unsent:
            datagram, address = self._unsent[0]
            try:
                self._transmit(datagram, address)
            except BlockingIOError:
                return
            except OSError as exc:
                logger.debug("quic: a datagram of %d bytes was not sent: %s", len(datagram), exc)
            self._unsent.popleft()
        self._loop.remove_writer(self.sock)

    def close(self) -> None:
        self._loop.remove_reader(self.sock)
        self._loop.remove_writer(self.sock)
        self.sock.close()
