"""What `FlowConnection` relies on inside aioquic, and the credit it gives."""

from __future__ import annotations

import hashlib
import inspect
import random
from pathlib import Path
from typing import Any

import aioquic
import pytest
from aioquic import tls
from aioquic.quic import connection as stock
from aioquic.quic import events
from aioquic.quic.connection import QuicConnection
from aioquic.quic.recovery import QuicPacketPacer, QuicPacketRecovery
from aioquic.quic.stream import QuicStream, QuicStreamReceiver, QuicStreamSender

from config.model import Tickets
from proxy.io.quic_flow import Bounds, FlowConnection, configuration
from proxy.io.quic_tls import client_configuration, server_configuration
from resolver.io.quic_door import reset_token
from resolver.io.quic_tickets import ServerTickets
from tests.peers.h3peers import make_authority

METHODS: list[tuple[Any, str, list[str]]] = [
    (QuicConnection, "_initialize", ["self", "peer_cid"]),
    (QuicConnection, "_replenish_connection_ids", ["self"]),
    (QuicConnection, "_update_traffic_key", ["self", "direction", "epoch", "cipher_suite", "secret"]),
    (QuicConnection, "_parse_transport_parameters", ["self", "data", "from_session_ticket"]),
    (QuicConnection, "_write_stream_limits", ["self", "builder", "space", "stream"]),
    (QuicConnection, "_write_connection_limits", ["self", "builder", "space"]),
    (QuicConnection, "_on_max_stream_data_delivery", ["self", "delivery", "stream"]),
    (QuicConnection, "_on_connection_limit_delivery", ["self", "delivery", "limit"]),
    (QuicConnection, "_stream_is_discarded", ["self", "stream_id"]),
    (QuicConnection, "_get_or_create_stream_for_send", ["self", "stream_id"]),
    (QuicConnection, "_write_stream_frame", ["self", "builder", "space", "stream", "max_offset"]),
    (QuicConnection, "_write_reset_stream_frame", ["self", "builder", "stream"]),
    (QuicConnection, "_write_stop_sending_frame", ["self", "builder", "stream"]),
    (QuicConnection, "_get_or_create_stream", ["self", "frame_type", "stream_id"]),
    (QuicConnection, "_unblock_streams", ["self", "is_unidirectional"]),
    (QuicStreamSender, "reset", ["self", "error_code"]),
    (QuicStreamSender, "write", ["self", "data", "end_stream"]),
    (QuicStreamReceiver, "starting_offset", ["self"]),
    (QuicStreamReceiver, "stop", ["self", "error_code"]),
    (tls.Context, "_server_handle_hello", ["self", "input_buf", "initial_buf", "handshake_buf"]),
    (tls.Context, "_server_handle_finished", ["self", "input_buf", "output_buf"]),
]


@pytest.mark.parametrize(("owner", "name", "arguments"), METHODS, ids=lambda x: x if isinstance(x, str) else "")
def test_a_private_method_we_override_or_call_is_as_we_know_it(owner: Any, name: str, arguments: list[str]) -> None:
    assert list(inspect.signature(getattr(owner, name)).parameters) == arguments


@pytest.mark.parametrize("kind", [tls.Epoch, stock.QuicConnectionState])
def test_members_that_a_datagram_is_looked_up_by_are_hashed_by_the_interpreter(kind: type) -> None:
    assert kind.__hash__ is object.__hash__
    assert all({member: member.name}[member] == member.name for member in kind)


def test_the_ends_of_a_connection_are_still_found_among_them() -> None:
    states = stock.QuicConnectionState
    ends = {state for state in states if state in stock.END_STATES}
    assert ends == {states.CLOSING, states.DRAINING, states.TERMINATED}


def test_private_attributes_are_where_we_look_for_them() -> None:
    quic = client()
    for name in (
        "_streams",
        "_host_cids",
        "_state",
        "_close_event",
        "_network_paths",
        "_handshake_complete",
        "_peer_cid",
    ):
        assert hasattr(quic, name), name
    for name in ("_local_max_data", "_local_max_streams_bidi", "_local_max_streams_uni"):
        limit = getattr(quic, name)
        assert {"frame_type", "sent", "used", "value"} <= vars(limit).keys(), name
    for name in ("_remote_max_streams_bidi", "_local_next_stream_id_bidi", "_max_datagram_size"):
        assert isinstance(getattr(quic, name), int), name
    stream = QuicStream(0, 1, 1)
    assert {"max_stream_data_local", "max_stream_data_local_sent"} <= vars(stream).keys()
    assert {"_buffer_start", "_buffer_stop", "_buffer_fin", "_reset_error_code", "highest_offset"} <= vars(
        stream.sender
    ).keys()
    assert {"_final_size", "highest_offset", "is_finished"} <= vars(stream.receiver).keys()
    assert isinstance(quic._loss, QuicPacketRecovery) and isinstance(quic._loss._pacer, QuicPacketPacer)
    assert hasattr(quic._loss._cc, "_max_datagram_size")
    assert hasattr(tls.Context(is_client=False), "_max_early_data")


def test_stock_still_doubles_windows_on_receipt_which_is_why_we_do_not_use_it() -> None:
    assert "max_stream_data_local *= 2" in inspect.getsource(QuicConnection._write_stream_limits)
    assert "value *= 2" in inspect.getsource(QuicConnection._write_connection_limits)
    assert "ticket_lifetime=86400" in inspect.getsource(tls.Context._server_handle_finished)


def test_method_that_the_writer_replaces_has_the_text_that_it_was_written_from() -> None:
    # A new aioquic changed it? Read what changed, bring quic_writer.py after it, then put the new digest here.
    text = inspect.getsource(QuicConnection._write_application) + inspect.getsource(QuicConnection._write_stream_frame)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "f2de87f6ba2fd79d", aioquic.__version__


def client(bounds: Bounds | None = None) -> FlowConnection:
    bounds = bounds or Bounds()
    return FlowConnection(bounds=bounds, configuration=configuration(is_client=True, bounds=bounds, idle_timeout_s=9))


class Builder:
    """Takes limit frames and remembers what they said."""

    def __init__(self) -> None:
        self.said: list[int] = []

    def start_frame(self, frame_type: int, **_: Any) -> Builder:
        return self

    def push_uint_var(self, value: int) -> None:
        self.said.append(value)


def received(quic: FlowConnection, stream: QuicStream, size: int) -> list[int]:
    """Let a stream have brought `size` more bytes; what the limits then say."""
    stream.receiver._buffer_start += size
    stream.receiver.highest_offset += size
    quic._local_max_data.used += size
    return limits(quic, stream)


def limits(quic: FlowConnection, stream: QuicStream) -> list[int]:
    builder = Builder()
    quic._write_stream_limits(builder, None, stream)  # type: ignore[arg-type]
    quic._write_connection_limits(builder, None)  # type: ignore[arg-type]
    return builder.said


def with_stream(bounds: Bounds) -> tuple[FlowConnection, QuicStream]:
    quic = client(bounds)
    stream = quic._streams[0] = QuicStream(0, bounds.stream_window, 0)
    return quic, stream


def test_limits_rise_by_what_was_taken_never_double() -> None:
    quic, stream = with_stream(Bounds(stream_window=1000, connection_window=10_000))
    assert received(quic, stream, 400) == []
    assert received(quic, stream, 200) == [0, 1600]
    assert received(quic, stream, 100) == []
    assert received(quic, stream, 800) == [0, 2500]


def test_withheld_stream_gets_no_credit_and_all_of_it_when_released() -> None:
    quic, stream = with_stream(Bounds(stream_window=1000, connection_window=10_000))
    quic.withhold(0)
    assert received(quic, stream, 1000) == []
    quic.release(0)
    assert limits(quic, stream) == [0, 2000]


def test_connection_credit_leaves_out_what_withheld_streams_owe() -> None:
    quic, stream = with_stream(Bounds(stream_window=10_000, connection_window=1000))
    assert received(quic, stream, 600) == [1600]
    quic.withhold(0)
    assert received(quic, stream, 600) == []
    assert received(quic, stream, 400) == []
    quic.release(0)
    assert limits(quic, stream) == [2600]


def test_finished_stream_costs_no_limit_frame() -> None:
    quic, stream = with_stream(Bounds(stream_window=1000, connection_window=10_000))
    stream.receiver._final_size = 900
    assert received(quic, stream, 900) == []


def test_lost_limit_frame_is_said_again() -> None:
    quic, stream = with_stream(Bounds(stream_window=1000, connection_window=10_000))
    received(quic, stream, 600)
    quic._on_max_stream_data_delivery(stock.QuicDeliveryState.LOST, stream)
    assert limits(quic, stream) == [0, 1600]


def test_writing_to_a_finished_or_reset_stream_is_refused_without_an_error() -> None:
    quic, stream = with_stream(Bounds())
    assert quic.write(0, b"x")
    assert quic.write(0, b"", fin=True)
    assert not quic.write(0, b"y")
    quic.abandon(0, 7)
    assert not quic.write(0, b"z")
    assert quic.unsent(0) == 0
    quic.abandon(0, 8)
    assert stream.sender._reset_error_code == 7
    quic.stop(400, 1)
    quic.abandon(400, 1)


def test_unsent_counts_what_was_never_in_a_packet() -> None:
    quic, stream = with_stream(Bounds())
    quic.write(0, bytes(5000))
    stream.sender.get_frame(1200, 1 << 20)
    assert quic.unsent(0) == 3800


def test_reset_token_depends_on_key_and_id_alone() -> None:
    assert reset_token(b"k", b"12345678") == reset_token(b"k", b"12345678")
    assert len({reset_token(k, c) for k in (b"k", b"l") for c in (b"a" * 8, b"b" * 8)}) == 4


def test_server_tickets_are_bounded_and_good_for_one_handshake() -> None:
    tickets = ServerTickets(Tickets(lifetime_s=3600), capacity=2)
    for name in (b"1", b"2", b"3"):
        tickets.keep(_ticket(name))
    assert len(tickets) == 2
    assert tickets.take(b"1") is None
    kept = tickets.take(b"3")
    assert kept is not None and (kept.not_valid_after - kept.not_valid_before).total_seconds() == 3600
    assert tickets.take(b"3") is None


def _ticket(name: bytes) -> tls.SessionTicket:
    now = tls.utcnow()
    return tls.SessionTicket(1, tls.CipherSuite.AES_128_GCM_SHA256, now, now, b"secret", "localhost", name)


# -- the writer, over a line that loses


class Line:
    """Two connections and a line between them: 20 ms each way, some datagrams lost, time that only passes in here."""

    def __init__(self, directory: Path, loss: float, seed: int, bounds: Bounds) -> None:
        ca_file, pem_file = make_authority(directory)
        self.draw, self.loss, self.now = random.Random(seed), loss, 0.0
        self.client = FlowConnection(
            bounds=bounds, configuration=client_configuration("localhost", ca_file, bounds, 60)
        )
        self.client.connect(("server", 1), 0.0)
        self.server = FlowConnection(
            bounds=bounds,
            configuration=server_configuration(pem_file, pem_file, bounds, 60),
            original_destination_connection_id=self.client.original_destination_connection_id,
        )
        self._flying: list[tuple[float, FlowConnection, bytes, tuple[str, int]]] = []
        self.got: dict[FlowConnection, dict[int, bytearray]] = {self.client: {}, self.server: {}}
        self.ended: dict[FlowConnection, set[int]] = {self.client: set(), self.server: set()}
        self.reset: dict[FlowConnection, set[int]] = {self.client: set(), self.server: set()}

    def run(self, until_s: float) -> None:
        """Let time pass until nothing flies and no timer is due before `until_s`."""
        while self.now < until_s:
            for quic, peer, name in ((self.client, self.server, "client"), (self.server, self.client, "server")):
                if quic.has_path or quic is self.client:
                    for datagram, _ in quic.datagrams_to_send(self.now):
                        if self.draw.random() >= self.loss:
                            self._flying.append((self.now + 0.02, peer, datagram, (name, 1)))
            timers = [t for t in (q.get_timer() for q in (self.client, self.server) if q.has_path) if t is not None]
            self.now = max(self.now, min([f[0] for f in self._flying] + timers + [until_s]))
            arrived = [f for f in self._flying if f[0] <= self.now]
            self._flying = [f for f in self._flying if f[0] > self.now]
            for _, quic, datagram, address in arrived:
                quic.receive_datagram(datagram, address, self.now)
            for quic in (self.client, self.server):
                timer = quic.get_timer() if quic.has_path else None
                if timer is not None and timer <= self.now:
                    quic.handle_timer(self.now)
                self._hear(quic)

    def _hear(self, quic: FlowConnection) -> None:
        while (event := quic.next_event()) is not None:
            if isinstance(event, events.StreamDataReceived):
                self.got[quic].setdefault(event.stream_id, bytearray()).extend(event.data)
                if event.end_stream:
                    self.ended[quic].add(event.stream_id)
            elif isinstance(event, events.StreamReset):
                self.reset[quic].add(event.stream_id)


@pytest.mark.parametrize("seed", range(6))
def test_every_byte_of_every_stream_survives_a_line_that_loses(tmp_path: Path, seed: int) -> None:
    bounds = Bounds(streams=64, stream_window=20_000, connection_window=60_000)
    line = Line(tmp_path, 0.08 if seed else 0.0, seed, bounds)
    line.run(2.0)
    assert line.client.handshake_done and line.server.handshake_done
    draw = random.Random(seed)
    bodies: dict[int, bytes] = {}
    for number in range(40):
        stream_id = line.client.open_request()
        bodies[stream_id] = draw.randbytes(draw.choice([1, 100, 3000, 30_000]))
        line.client.write(stream_id, bodies[stream_id], fin=True)
        if number % 10 == 9:
            line.run(line.now + 0.05)
    line.run(line.now + 60)
    assert {k: bytes(v) for k, v in line.got[line.server].items() if k % 4 == 0} == bodies
    assert line.ended[line.server] == bodies.keys()
    # When each is answered by its mirror, some are given up midway
    given_up = set(list(bodies)[::7])
    for stream_id, body in bodies.items():
        line.server.write(stream_id, body[::-1], fin=stream_id not in given_up)
    line.run(line.now + 0.03)
    for stream_id in given_up:
        line.server.abandon(stream_id, 9)
    line.run(line.now + 60)
    for stream_id, body in bodies.items():
        if stream_id in given_up:
            assert stream_id in line.reset[line.client]
        else:
            assert line.got[line.client][stream_id] == body[::-1]
    # Then nothing is left of them on either side
    assert line.server.open_requests == line.client.open_requests == 0
    assert not line.server._due and not line.client._due


def test_more_requests_than_granted_wait_for_their_turn(tmp_path: Path) -> None:
    bounds = Bounds(streams=4, stream_window=20_000, connection_window=60_000)
    line = Line(tmp_path, 0.05, 3, bounds)
    line.run(2.0)
    for _ in range(30):
        line.client.write(line.client.open_request(), b"x" * 500, fin=True)
    for _ in range(60):
        line.run(line.now + 1)
        for stream_id in set(line.ended[line.server]):
            line.server.write(stream_id, b"y", fin=True)
    assert len(line.ended[line.client]) == 30
    assert line.client.open_requests == 0


@pytest.mark.parametrize("seed", range(4))
def test_what_was_written_arrives_before_a_reset_that_waits_for_it(tmp_path: Path, seed: int) -> None:
    bounds = Bounds(streams=64, stream_window=20_000, connection_window=60_000)
    line = Line(tmp_path, 0.12 if seed else 0.0, seed, bounds)
    line.run(5.0)
    streams = [line.client.open_request() for _ in range(10)]
    for stream_id in streams:
        line.client.write(stream_id, b"asked", fin=True)
    line.run(line.now + 10)
    for stream_id in streams:
        line.server.write(stream_id, b"event" * 1000)
        line.server.part(stream_id, 7, by=line.now + 100)
        assert not line.server.write(stream_id, b"late")
        assert not line.reset[line.client]
    line.run(line.now + 110)
    assert [bytes(line.got[line.client][stream_id]) for stream_id in streams] == [b"event" * 1000] * 10
    assert line.reset[line.client] == set(streams)
    assert line.server.open_requests == 0


def test_a_reset_waits_no_longer_than_it_may(tmp_path: Path) -> None:
    bounds = Bounds(streams=64, stream_window=1000, connection_window=60_000)
    line = Line(tmp_path, 0.0, 1, bounds)
    line.run(2.0)
    stream_id = line.client.open_request()
    line.client.write(stream_id, b"asked", fin=True)
    line.run(line.now + 1)
    line.client.withhold(stream_id)  # it reads no more than one window
    line.server.write(stream_id, bytes(5000))
    line.server.part(stream_id, 7, by=line.now + 10)
    line.run(line.now + 9.9)
    assert not line.reset[line.client]
    line.run(line.now + 0.2)
    assert line.reset[line.client] == {stream_id}
