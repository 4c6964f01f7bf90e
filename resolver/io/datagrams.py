"""Answer DNS over UDP: drain the socket, answer from memory, send (RFC 1035 4.2.1).

Theory: a datagram that can be answered from memory costs one wake-up's share, one look-up and one send: no transport
object, no task. Measured with the same cached answer: `loop.add_reader` on the socket, drained up to 64 datagrams for
each wake-up, 63 k queries a second; asyncio's datagram endpoint 17-21 k. The cap keeps other callbacks alive in a flood.

      bound to one address:  BatchedUdpListener on Linux, else UdpListener
      bound to every one:    EveryAddressUdpListener
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from config.model import Listen
from resolver.io import mmsg
from resolver.io.service import DATAGRAM_LIMIT, ResolverService, Wanted
from resolver.memos import Memos

log = logging.getLogger("headrace.resolver")

DRAIN = 64
"""Datagrams read for each wake-up."""
LARGEST_QUERY = 4096
ALONE, SINGLY = 8, 128
"""After so many wake-ups in a row with one datagram each, so many are taken singly before a batch is tried again."""
IP_PKTINFO = 8  # Linux; the socket module names it since 3.12
ANCILLARY = socket.CMSG_SPACE(20)  # in6_pktinfo, the larger of the two

Ancillary = tuple[int, int, bytes]


class UdpListener:
    """One bound socket. Replies that the kernel has no room for are lost, as datagrams are."""

    def __init__(self, listen: Listen, sock: socket.socket, service: ResolverService) -> None:
        self.listen = listen
        self._sock = sock
        self._service = service
        self._replies = service.counter("udp")
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._on_readable)

    def _on_readable(self) -> None:
        receive = self._sock.recvfrom
        for _ in range(DRAIN):
            try:
                wire, peer = receive(LARGEST_QUERY)
            except BlockingIOError:
                return
            except OSError:
                # Linux reports an ICMP error of an earlier reply here; the socket is fine.
                continue
            self._serve_one(wire, peer)

    def _serve_one(self, wire: bytes, peer: tuple[Any, ...]) -> None:
        reply = self._known(wire, peer[0])
        if isinstance(reply, Wanted):
            self._service.wait(reply, partial(self._answer, peer))
        elif reply:
            self._note(reply, peer[0])
            with suppress(OSError):
                self._sock.sendto(reply, peer)

    def _known(self, wire: bytes, host: str) -> bytes | Wanted:
        limit = self._service.rate_limit
        if limit is not None and not limit.admits(host, self._service.now()):
            return self._service.refuse_rate(wire)
        return self._service.look(wire, DATAGRAM_LIMIT)

    def _note(self, reply: bytes, host: str, source: str = "") -> None:
        self._replies[reply[3] & 15] += 1
        if self._service.query_log is not None:
            self._service.query_log("udp", host, reply, source)

    def _answer(self, peer: tuple[Any, ...], reply: bytes, source: str) -> None:
        if reply:
            self._note(reply, peer[0], source)
        self._send_late(partial(self._sock.sendto, reply, peer), reply)

    def _send_late(self, send: Callable[[], int], reply: bytes) -> None:
        if not reply or self._sock.fileno() < 0:
            return
        try:
            send()
        except OSError as exc:
            log.debug("a reply of %d bytes was not sent: %s", len(reply), exc)

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._sock.close()


class BatchedUdpListener(UdpListener):
    """The same with two system calls for up to 64 datagrams: what a loaded listener on Linux uses.

    Datagrams that come alone are not worth it: to call the C library takes more code and memory than the socket's own
    calls, all of it cold when the process just slept, and made a reply a third later.

          batch --ALONE wake-ups with one datagram each--> one at a time --SINGLY of them--> batch
    """

    def __init__(self, listen: Listen, sock: socket.socket, service: ResolverService) -> None:
        self._batch = mmsg.Batch(sock)
        self._memos, self._now = service.known(), service.now
        self._receive, self._send = sock.recvfrom, sock.sendto
        self._alone = 0
        super().__init__(listen, sock, service)

    def _on_readable(self) -> None:
        """`_alone` counts the wake-ups in a row that brought one datagram; after enough of them it goes below zero, and up
        again with each that is taken singly. If there are more, the loop calls again at once."""
        if self._alone >= 0:
            self._take_batch()
            return
        self._alone += 1
        try:
            wire, peer = self._receive(LARGEST_QUERY)
        except OSError:  # nothing there after all, or an ICMP error of an earlier reply
            return
        service, known = self._service, self._memos
        memo = known.find(wire[2:], self._now())
        if memo is None or service.rate_limit is not None or service.query_log is not None:
            self._serve_one(wire, peer)
            return
        tail = memo.tail
        try:
            self._send(wire[:2] + tail, peer)
        except OSError:
            return
        memo.entry.hits += 1
        known.hits += 1
        self._replies[tail[1] & 15] += 1

    def _take_batch(self) -> None:
        """One loop with everything in locals: a call for each datagram was a fifth of its cost."""
        batch, service = self._batch, self._service
        count = batch.receive()
        inbox, received, sizes, each = batch.inbox, batch.received, batch.sizes, mmsg.RECEIVED_EACH
        known = self._memos if service.rate_limit is None and service.query_log is None else Memos()
        now, replies, hits, first = service.now(), self._replies, 0, 0
        for slot in range(count):
            start = slot * mmsg.IN_BYTES
            asked = bytes(inbox[start + 2 : start + received[slot * each]])
            memo = known.get(asked)
            if memo is not None and not (now < memo.until and memo.entry.answer is memo.answer):
                memo = known.find(asked, now)
            if memo is not None:
                tail = memo.tail
                end = start + 2 + len(tail)
                inbox[start + 2 : end] = tail
                sizes[slot * 2 + 1] = end - start
                memo.entry.hits += 1
                replies[tail[1] & 15] += 1
                hits += 1
            elif reply := self._serve(batch.query(slot), slot):
                batch.put(slot, reply)
            else:
                batch.send(first, slot)
                first = slot + 1
        batch.send(first, count)
        service.count_known(hits)
        self._alone = 0 if count > 1 else self._alone + 1 if self._alone < ALONE else -SINGLY

    def _serve(self, wire: bytes, slot: int) -> bytes | None:
        service = self._service
        if service.rate_limit is None:
            reply = service.look(wire, DATAGRAM_LIMIT)
        else:
            reply = self._known(wire, self._batch.peer(slot)[0])
        if isinstance(reply, bytes):
            if reply:
                self._replies[reply[3] & 15] += 1
                if service.query_log is not None:
                    service.query_log("udp", self._batch.peer(slot)[0], reply)
            return reply
        service.wait(reply, partial(self._answer, self._batch.peer(slot)))
        return None


class EveryAddressUdpListener(UdpListener):
    """A socket bound to every address of the machine: each reply leaves from the address that its query came to.

    The kernel would choose the source by route, and a client drops what comes from an address it did not ask.
    """

    def __init__(self, listen: Listen, sock: socket.socket, service: ResolverService) -> None:
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
        else:
            sock.setsockopt(socket.IPPROTO_IP, IP_PKTINFO, 1)
        super().__init__(listen, sock, service)

    def _on_readable(self) -> None:
        for _ in range(DRAIN):
            try:
                wire, ancillary, _, peer = self._sock.recvmsg(LARGEST_QUERY, ANCILLARY)
            except BlockingIOError:
                return
            except OSError:
                continue
            source = [(level, kind, _as_source(level, value)) for level, kind, value in ancillary]
            reply = self._known(wire, peer[0])
            if isinstance(reply, Wanted):
                self._service.wait(reply, partial(self._answer_from, source, peer))
            else:
                self._answer_from(source, peer, reply, "")

    def _answer_from(self, source: list[Ancillary], peer: tuple[Any, ...], reply: bytes, came_from: str) -> None:
        if reply:
            self._note(reply, peer[0], came_from)
        self._send_late(partial(self._sock.sendmsg, [reply], source, 0, peer), reply)


def _as_source(level: int, info: bytes) -> bytes:
    """What came with the query, as the kernel wants it for the reply: for IPv4 without the interface, so that it routes."""
    return info if level == socket.IPPROTO_IPV6 else bytes(4) + info[4:8] + bytes(4)


def listener_for(listen: Listen) -> type[UdpListener]:
    if listen.host in ("0.0.0.0", "::"):  # noqa: S104 - the user's choice, asked for by name
        return EveryAddressUdpListener
    return BatchedUdpListener if mmsg.AVAILABLE else UdpListener
