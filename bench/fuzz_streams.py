"""The rims with streams, h2 and h3, for `bench.fuzz_rims`: many exchanges on one connection."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Sequence

from aioquic.quic.events import HandshakeCompleted
from aioquic.quic.packet import QuicFrameType

from bench.rim_mutations import Mutator, reads
from bench.rim_seeds import h2_answers, h2_requests, h3_answers, h3_control, h3_requests
from bench.rim_stage import MAX_HEAD, FuzzService, Transport, Watched, held_bytes
from proxy.io.inbound_h2 import H2ServerConnection
from proxy.io.outbound_h2 import H2EdgeConnection
from proxy.io.outbound_quic import H3EdgeConnection
from proxy.io.quic_codes import ConnectionFault
from proxy.io.quic_flow import Bounds, FlowConnection, configuration
from proxy.io.quic_server import H3ServerConnection
from proxy.io.rims import EdgeConnection, Origin
from proxy.messages import RequestHead

ORIGIN = ("192.0.2.1", 5, "https://127.0.0.1:1", b"https")
BOUNDS = Bounds(stream_window=256 * 1024)
KEPT = 128 * 1024
"""Bytes of a connection beside what was given to its legs: blocks, tables, memories of blocks, frames."""


def ask(dice: random.Random, rim: EdgeConnection) -> Watched:
    head = RequestHead(b"GET", b"/x", b"https", b"a.test", [(b"x-mine", b"1")])
    way = dice.randrange(4)
    if way == 1:
        head.method, head.length = b"POST", None
    elif way == 2 and getattr(rim, "allows_websocket", False):
        head.protocol = b"websocket"
    return Watched.asking(rim, head, open_end=way == 1)


def act(dice: random.Random, legs: Sequence[Watched]) -> None:
    if legs:
        dice.choice(legs).act(dice)


def check_over(legs: Sequence[Watched]) -> None:
    for watched in legs:
        assert watched.over, f"{watched!r} was left alone"


class H2Server:
    def __init__(self) -> None:
        self._mutator = Mutator(h2_requests())

    async def __call__(self, dice: random.Random) -> None:
        service = FuzzService(dice)
        rim = H2ServerConnection(service, Origin(*ORIGIN, "h2"))
        wire = Transport(rim)
        rim.connection_made(wire)
        for read in reads(dice, self._mutator.pieces(dice)):
            if wire.closing:
                break
            rim.data_received(read)
            await _turn(dice, rim, service.taken)
        await _end(dice, rim, wire, service.taken)
        assert not service.connected
        assert not rim._h2.streams and rim._h2.sender.queued == 0


class H2Client:
    def __init__(self) -> None:
        self._mutator = Mutator(h2_answers())

    async def __call__(self, dice: random.Random) -> None:
        rim = H2EdgeConnection(max_header_bytes=MAX_HEAD)
        wire = Transport(rim)
        rim.connection_made(wire)
        asked = [ask(dice, rim)]
        for read in reads(dice, self._mutator.pieces(dice)):
            if wire.closing:
                break
            if rim.room and not dice.randrange(3):
                asked.append(ask(dice, rim))
            rim.data_received(read)
            await _turn(dice, rim, asked)
        await _end(dice, rim, wire, asked)
        assert (rim.active, rim.room, rim.closed) == (0, 0, True)


async def _turn(dice: random.Random, rim: H2ServerConnection | H2EdgeConnection, legs: Sequence[Watched]) -> None:
    act(dice, legs)
    if not dice.randrange(6):
        rim.pause_writing()
        if dice.randrange(2):
            rim.resume_writing()
    await asyncio.sleep(0)


async def _end(
    dice: random.Random, rim: H2ServerConnection | H2EdgeConnection, wire: Transport, legs: Sequence[Watched]
) -> None:
    await asyncio.sleep(0)
    if not dice.randrange(4):
        given = 3000 * 40
        assert (kept := held_bytes(rim)) <= KEPT + given, f"{kept} bytes are kept"
    for watched in legs:
        watched.act(dice)
    await asyncio.sleep(0)
    wire.lose(ConnectionResetError() if dice.randrange(2) else None)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    check_over(legs)


class NoTable:
    """A listener that keeps no table."""

    def established(self, connection: H3ServerConnection, *, resumed: bool) -> None: ...
    def issued(self, connection: H3ServerConnection, cid: bytes) -> None: ...
    def retired(self, cid: bytes) -> None: ...
    def forget(self, connection: H3ServerConnection) -> None: ...


def quic_of(*, is_client: bool) -> FlowConnection:
    """A connection whose handshake counts as done, and which has no path: what is written stays in its buffers."""
    config = configuration(is_client=is_client, bounds=BOUNDS, idle_timeout_s=60)
    if is_client:
        made = FlowConnection(bounds=BOUNDS, configuration=config)
    else:
        config.certificate = config.private_key = object()  # no handshake will ask for them
        made = FlowConnection(bounds=BOUNDS, configuration=config, original_destination_connection_id=bytes(8))
    made._handshake_complete = True
    made._remote_max_streams_bidi = made._remote_max_streams_uni = 100
    return made


class Streams:
    """What one side of an h3 connection says: some request streams, and its unidirectional ones."""

    def __init__(self, corpus: Sequence[tuple[bytes, ...]]) -> None:
        self._requests = Mutator(corpus)
        self._controls = Mutator(h3_control())

    def drawn(self, dice: random.Random, *, first_uni: int, ids: Sequence[int]) -> list[tuple[int, bytes, bool]]:
        unis = range(first_uni, first_uni + 4 * dice.randrange(4), 4)
        queues = [self._stream(dice, each, self._requests) for each in ids]
        queues += [self._stream(dice, each, self._controls) for each in unis]
        said: list[tuple[int, bytes, bool]] = []
        while queues := [queue for queue in queues if queue]:
            said.append(dice.choice(queues).pop(0))
        return said

    def _stream(self, dice: random.Random, stream_id: int, mutator: Mutator) -> list[tuple[int, bytes, bool]]:
        said = [(stream_id, read, False) for read in reads(dice, mutator.pieces(dice))]
        if dice.randrange(3) and not stream_id & 2:
            if said and dice.randrange(2):
                said[-1] = (stream_id, said[-1][1], True)
            else:
                said.append((stream_id, b"", True))
        return said


class H3Server:
    def __init__(self) -> None:
        self._streams = Streams(h3_requests())

    async def __call__(self, dice: random.Random) -> None:
        service = FuzzService(dice)
        quic = quic_of(is_client=False)
        rim = H3ServerConnection(service, Origin(*ORIGIN, "h3"), quic, lambda *_: None, NoTable())
        rim.on_handshake(HandshakeCompleted(alpn_protocol="h3", early_data_accepted=False, session_resumed=False))
        try:
            for said in self._streams.drawn(dice, first_uni=2, ids=range(0, 4 * dice.randrange(1, 4), 4)):
                hear(dice, rim, said)
                act(dice, service.taken)
                if rim._lost:
                    break
            assert (kept := held_bytes(rim.h3)) <= KEPT + 3 * BOUNDS.stream_window, f"{kept} bytes are kept"
            await asyncio.sleep(0)
            rim.link.close(0, "over")
            check_over(service.taken)
            assert (rim.active, service.connected) == (0, 0)
        finally:
            rim.dispose()


class H3Client:
    def __init__(self) -> None:
        self._streams = Streams(h3_answers())

    async def __call__(self, dice: random.Random) -> None:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        rim = H3EdgeConnection(sock, quic_of(is_client=True), ("127.0.0.1", 9))
        try:
            rim.on_handshake(HandshakeCompleted(alpn_protocol="h3", early_data_accepted=False, session_resumed=False))
            asked = [ask(dice, rim) for _ in range(dice.randrange(1, 4))]
            for said in self._streams.drawn(dice, first_uni=3, ids=range(0, 4 * len(asked), 4)):
                hear(dice, rim, said)
                act(dice, asked)
                if rim.closed:
                    break
            await asyncio.sleep(0)
            rim.link.close(0, "over")
            check_over(asked)
            assert (rim.active, rim.room) == (0, 0)
        finally:
            rim._let_go()
        await asyncio.sleep(0)


def hear(dice: random.Random, rim: H3ServerConnection | H3EdgeConnection, said: tuple[int, bytes, bool]) -> None:
    """A stream's bytes as the link passes them on, and now and then its reset."""
    stream_id, chunk, fin = said
    if stream_id in rim.quic._withheld and len(rim.h3._readers[stream_id].held) + len(chunk) > BOUNDS.stream_window:
        return  # a peer gets no credit for more
    if not rim.quic.knows(stream_id):
        rim.quic._get_or_create_stream(QuicFrameType.STREAM_BASE, stream_id)
    try:
        if not dice.randrange(40):
            rim.on_stream_reset(stream_id, 0x10C)
        elif not dice.randrange(40):
            if stream_id & 2 == 0:
                rim.on_stream_stopped(stream_id, 0x10C)
        else:
            rim.on_stream(stream_id, chunk, fin)
    except ConnectionFault as fault:
        rim.link.close(fault.code, fault.detail)
