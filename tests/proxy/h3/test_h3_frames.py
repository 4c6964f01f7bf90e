"""The framing alone: integers, lines, literals, and the order in which a stream's parts may come."""

from __future__ import annotations

from contextlib import suppress

import pylsqpack
import pytest
from aioquic.buffer import encode_uint_var
from aioquic.h3.connection import encode_frame
from hypothesis import given
from hypothesis import strategies as st

from proxy.io.quic_codes import ConnectionFault, StreamFault
from proxy.io.quic_flow import Bounds, FlowConnection, configuration
from proxy.io.quic_h3 import H3Frames, Sink
from proxy.io.quic_wire import count_lines, frame, never_indexed, parse_settings, read_varint
from proxy.messages import Fields

NAMES = st.binary(min_size=1, max_size=300).map(lambda raw: bytes(97 + byte % 26 for byte in raw))


@given(st.integers(0, 2**62 - 1), st.binary(max_size=4))
def test_integers_are_read_where_they_are_whole(value: int, after: bytes) -> None:
    coded = encode_uint_var(value)
    assert read_varint(coded + after, 0) == (value, len(coded))
    for cut in range(len(coded)):
        assert read_varint(coded[:cut], 0) is None


@given(st.integers(0, 0xF0700), st.binary(max_size=200))
def test_frames_are_those_of_the_oracle(kind: int, payload: bytes) -> None:
    assert frame(kind, payload) == encode_frame(kind, payload)


@given(st.lists(st.tuples(NAMES, st.binary(max_size=300)), max_size=12))
def test_lines_are_counted_without_decoding(fields: Fields) -> None:
    _, section = pylsqpack.Encoder().encode(0, fields)
    assert count_lines(section) == len(fields)


@given(
    st.lists(
        st.tuples(st.one_of(NAMES, st.just(b"authorization"), st.just(b"cookie")), st.binary(max_size=400)),
        min_size=1,
        max_size=6,
    )
)
def test_never_indexed_lines_are_what_a_decoder_reads(fields: Fields) -> None:
    _, headers = pylsqpack.Decoder(0, 0).feed_header(0, b"\0\0" + never_indexed(fields))
    assert headers == fields
    assert count_lines(b"\0\0" + never_indexed(fields)) == len(fields)


@given(st.binary(max_size=200))
def test_counting_lines_of_nonsense_ends(section: bytes) -> None:
    with suppress(IndexError):
        assert count_lines(section) <= len(section)


@pytest.mark.parametrize("payload", [b"\x01", b"\x40", b"\x02\x01", b"\x01\x01\x01\x02", b"\x08\x02"])
def test_bad_settings_are_connection_faults(payload: bytes) -> None:
    with pytest.raises(ConnectionFault):
        parse_settings(payload)


class Noted(Sink):
    """A sink that follows the order of a request and notes what comes."""

    def __init__(self) -> None:
        self.said: list[object] = []

    def on_section(self, section: Fields, *, last: bool) -> None:
        self.said.append(("section", section, last))

    def on_body(self, chunk: bytes) -> None:
        if self.said and isinstance(self.said[-1], bytes):
            chunk = self.said.pop() + chunk  # type: ignore[operator]
        self.said.append(chunk)

    def on_finished(self) -> None:
        self.said.append("end")

    def on_oversized(self, size: str) -> None:
        self.said.append(("oversized", size))

    def on_fault(self, fault: StreamFault) -> None:
        self.said.append(fault)

    def wants_body(self) -> bool:
        return bool(self.said)

    def wants_section(self) -> bool:
        return True


class Owner:
    def __init__(self) -> None:
        self.sink = Noted()
        self.goaways: list[int] = []

    def accept(self, stream_id: int) -> Sink:
        return self.sink

    def on_goaway(self, last_id: int) -> None:
        self.goaways.append(last_id)

    def on_settings(self) -> None: ...


def frames(*, is_client: bool = True, limit: int = 1000) -> tuple[H3Frames, Owner]:
    bounds = Bounds()
    quic = FlowConnection(bounds=bounds, configuration=configuration(is_client=True, bounds=bounds, idle_timeout_s=9))
    owner = Owner()
    return H3Frames(quic, owner, is_client=is_client, limit=limit), owner


SECTION: Fields = [(b":status", b"200"), (b"x", b"y" * 30)]


def whole(body: bytes) -> bytes:
    _, section = pylsqpack.Encoder().encode(0, SECTION)
    grease = encode_frame(0x21 + 0x1F * 5, b"?" * 70)
    return encode_frame(1, section) + grease + encode_frame(0, body) + encode_frame(0, b"") + encode_frame(0, b"tail")


@given(st.binary(min_size=1, max_size=200), st.lists(st.integers(1, 60), max_size=40))
def test_a_stream_means_the_same_however_it_is_cut(body: bytes, cuts: list[int]) -> None:
    wire, at = whole(body), 0
    h3, owner = frames()
    for cut in cuts:
        h3.receive(0, wire[at : at + cut], fin=False)
        at += cut
    h3.receive(0, wire[at:], fin=True)
    assert owner.sink.said == [("section", SECTION, False), body + b"tail", "end"]


def test_section_beyond_the_limit_is_not_buffered() -> None:
    h3, owner = frames(limit=100)
    h3.receive(0, b"\x01" + encode_uint_var(5000) + bytes(50), fin=False)
    h3.receive(0, bytes(4950), fin=True)
    assert owner.sink.said == [("oversized", "5000 bytes")]


def control(*parts: bytes) -> bytes:
    return b"\x00" + encode_frame(4, b"\x06\x40\x64") + b"".join(parts)


def test_goaway_may_only_go_down_and_names_a_request() -> None:
    h3, owner = frames()
    h3.receive(3, control(frame(7, b"\x08"), frame(7, b"\x04")), fin=False)
    assert owner.goaways == [8, 4]
    for last in (b"\x08", b"\x01", b"", b"\x04\x04"):
        with pytest.raises(ConnectionFault):
            h3.receive(3, frame(7, last), fin=False)


@pytest.mark.parametrize(
    "wire",
    [
        b"\x00" + frame(7, b"\x00"),
        control(frame(4, b"")),
        control(frame(0, b"x")),
        control(frame(0xD, b"\x01")),
        b"\x01\x00",
        b"\x00" + b"\x04" + encode_uint_var(1 << 20),
    ],
    ids=["goaway first", "settings twice", "data", "max push id from a server", "push stream", "endless settings"],
)
def test_control_streams_faults_take_the_connection(wire: bytes) -> None:
    h3, _ = frames()

    def byte_by_byte() -> None:
        for at in range(len(wire)):
            h3.receive(3, wire[at : at + 1], fin=False)

    with pytest.raises(ConnectionFault):
        byte_by_byte()


def test_critical_streams_are_one_of_a_kind_and_never_end() -> None:
    h3, _ = frames()
    h3.receive(3, control(), fin=False)
    with pytest.raises(ConnectionFault, match="second"):
        h3.receive(7, b"\x00", fin=False)
    with pytest.raises(ConnectionFault, match="ended"):
        h3.receive(3, b"", fin=True)
    with pytest.raises(ConnectionFault, match="reset"):
        h3.reset(3)


def test_unknown_unidirectional_streams_are_dropped_as_they_come() -> None:
    h3, _ = frames()
    for _ in range(100):
        h3.receive(11, b"\x40\x54" + bytes(1000), fin=False)
    h3.receive(11, b"", fin=True)
    assert len(h3._peer_streams) == 0


@pytest.mark.parametrize("said", [b"", b"\x40"], ids=["nothing", "half a type"])
def test_streams_that_end_before_they_say_their_type_leave_nothing_behind(said: bytes) -> None:
    h3, _ = frames()
    for index in range(100):
        h3.receive(15 + 4 * index, said, fin=True)
    assert len(h3._peer_streams) == 0


@pytest.mark.parametrize("stream_id", [3, 7])
def test_nonsense_on_qpack_streams_takes_the_connection(stream_id: int) -> None:
    h3, _ = frames()
    kind = b"\x02" if stream_id == 3 else b"\x03"
    with pytest.raises(ConnectionFault):
        h3.receive(stream_id, kind + b"\xff" * 40, fin=False)


def test_truncated_section_is_a_fault_not_a_wait() -> None:
    _, section = pylsqpack.Encoder().encode(0, SECTION)
    line = len(pylsqpack.Encoder().encode(0, SECTION[:1])[1])
    for cut in set(range(len(section))) - {line}:
        h3, owner = frames()
        with pytest.raises(ConnectionFault):
            h3.receive(0, encode_frame(1, section[:cut]), fin=True)
        assert owner.sink.said == []


@pytest.mark.parametrize("idle", [frame(0, b""), frame(0x21, b""), frame(0x21, b"?")], ids=["DATA", "grease", "more"])
def test_a_flood_of_frames_that_say_nothing_takes_the_connection(idle: bytes) -> None:
    h3, owner = frames()
    h3.receive(0, whole(b"some"), fin=False)
    with pytest.raises(ConnectionFault, match="say nothing"):
        h3.receive(0, idle * 200, fin=False)
    h3, owner = frames()
    h3.receive(0, whole(b"some"), fin=False)
    for _ in range(200):  # beside real content as many may come as a sender that flushes often makes
        h3.receive(0, frame(0, bytes(100)) + idle, fin=False)
    assert owner.sink.said[-1] == b"some" + b"tail" + bytes(20_000)
