"""What a chat request's fields take on the wire to an edge, and which secrets a table may keep."""

from __future__ import annotations

import secrets

import pylsqpack
import pytest

from proxy import h2_frames as wire
from proxy.hpack_encoder import Encoder
from proxy.io.quic_codes import ConnectionFault
from proxy.io.quic_control import SETTINGS
from proxy.io.quic_h3 import H3Frames
from proxy.io.quic_uni import CONTROL, QPACK_DECODER, QPACK_ENCODER
from proxy.io.quic_wire import frame, read_varint
from proxy.messages import Fields, NeverIndexed, RequestHead
from proxy.secret_fields import may_be_indexed
from tests.proxy.h2_wire import GET, Edge, Served, coded

KEY = "sk-proj-" + secrets.token_urlsafe(48)
CHAT: Fields = [
    (b"accept", b"application/json"),
    (b"user-agent", b"AsyncOpenAI/Python 2.7.5"),
    (b"authorization", f"Bearer {KEY}".encode()),
    (b"content-type", b"application/json"),
]
LIMIT = 42


def chat(length: int) -> RequestHead:
    fields = [*CHAT, (b"content-length", b"%d" % length)]
    return RequestHead(b"POST", b"/v1/chat/completions", b"https", b"api.openai.com", fields, length)


def block_size(output: bytes) -> int:
    """Bytes of the header block in one turn's output."""
    at = 0
    while output[at + 3] != wire.HEADERS:
        at += 9 + int.from_bytes(output[at : at + 3], "big")
    return int.from_bytes(output[at : at + 3], "big")


def test_h2_fields_of_a_second_chat_request_fit_42_bytes() -> None:
    edge, sizes = Edge(), []
    for length in (1234, 2345):
        leg = edge.h2.open()
        leg.head(chat(length))
        output = edge.h2.sender.take()
        sizes.append(block_size(output))
        assert (b"authorization", CHAT[2][1]) in edge.eyes.read(output)[0].value
    # :method, :scheme and :path are in the block beside the six: three bytes of it
    assert sizes[0] > 100
    assert sizes[1] - 3 <= LIMIT


class Wires:
    """A transport that hands one side's streams to the other side's decoder."""

    def __init__(self) -> None:
        self.written: dict[int, bytes] = {}
        self._next = 2

    def get_next_available_stream_id(self, *, is_unidirectional: bool) -> int:
        self._next += 4
        return self._next - 4

    def write(self, stream_id: int, chunk: bytes, *, fin: bool = False) -> None:
        self.written[stream_id] = self.written.get(stream_id, b"") + chunk


class Deaf:
    def __getattr__(self, name: str) -> object:
        return lambda *_: None


def test_h3_fields_of_a_second_chat_request_fit_42_bytes() -> None:
    # Given an edge whose SETTINGS allow a table
    wires, far = Wires(), pylsqpack.Decoder(4096, 16)
    frames = H3Frames(wires, Deaf(), is_client=True, limit=65536)  # type: ignore[arg-type]
    frames.receive(3, bytes((CONTROL,)) + frame(SETTINGS, b"\x01\x50\x00\x07\x10"), False)
    frames.receive(7, bytes((QPACK_DECODER,)), False)
    encoder_id = next(key for key, value in wires.written.items() if value[0] == QPACK_ENCODER)
    sizes, seen = [], 1
    for number in range(4):
        # When chat requests go out one after the other
        section = [(b":method", b"POST"), (b":scheme", b"https"), (b":authority", b"api.openai.com")]
        section += [(b":path", b"/v1/chat/completions"), *CHAT, (b"content-length", b"%d" % (1234 + number))]
        frames.send_section(4 * number, section)
        instructions, seen = wires.written[encoder_id][seen:], len(wires.written[encoder_id])
        block = wires.written[4 * number]
        length = read_varint(block, 1)
        assert length is not None
        far.feed_encoder(instructions)
        acknowledged, fields = far.feed_header(4 * number, block[length[1] :])
        frames.receive(7, acknowledged, False)
        assert sorted(fields) == sorted(section)
        sizes.append(len(instructions) + length[0])
    # Then the second one costs this much, with what its encoder said on the side (pseudo-fields included)
    assert sizes[0] > 100
    assert max(sizes[1:]) <= LIMIT


def test_a_value_whose_client_asked_for_it_is_never_indexed_behind_us_either() -> None:
    # Given a client that sends a key as a never-indexed literal, and the same key in the edge's table for another client
    served, edge = Served(), Edge()
    key = CHAT[2][1]
    block = coded(GET) + b"\x1f\x08" + bytes((len(key),)) + key
    served.say(wire.frame(wire.HEADERS, wire.END_HEADERS | wire.END_STREAM, 1, block))
    head = served.requests[0][1]
    edge.ask(fields=[CHAT[2]])
    edge.heard()
    # When the request goes on to the edge, Then the whole literal does, each time
    for _ in range(3):
        edge.h2.open().head(head)
        output = edge.h2.sender.take()
        assert block_size(output) > len(key) // 2
        assert edge.eyes.read(output)[0].value[-1] == CHAT[2]


VALUES: list[tuple[bytes, bytes, bool]] = [
    (b"authorization", b"Bearer " + b"0123456789abcdef" * 2, True),
    (b"authorization", b"bearer sk-" + b"aB3dE5fG7hI9jK1lM2nO4pQ6rS8tU0v", True),
    (b"x-api-key", b"sk-ant-api03-aB3dE5fG7hI9jK1lM2nO4pQ6rS8tU0v", True),
    (b"authorization", b"Bearer token-abc123", False),
    (b"authorization", b"Bearer " + b"a" * 64, False),
    (b"authorization", b"Bearer " + b"correct horse battery staple is a password", False),
    (b"authorization", b"Basic " + b"0123456789abcdef" * 4, False),
    (b"authorization", b"0123456789abcdef" * 4, False),
    (b"cookie", b"session=" + b"0123456789abcdef" * 4, False),
    (b"authorization", NeverIndexed(b"Bearer " + b"0123456789abcdef" * 2), False),
]


@pytest.mark.parametrize(("name", "value", "may"), VALUES, ids=[repr(value)[:24] for _, value, _ in VALUES])
def test_a_table_keeps_keys_by_their_entropy_alone(name: bytes, value: bytes, may: bool) -> None:
    assert may_be_indexed(name, value) is may
    encoder, field = Encoder(indexes_keys=True), (name, value)
    encoder.encode([field])
    assert (len(encoder.encode([field])) == 1) is may
    # Towards clients, where answers of many go one way, nothing of the kind is kept.
    towards_clients = Encoder()
    towards_clients.encode([field])
    assert len(towards_clients.encode([field])) > 1


def test_many_keys_do_not_push_out_what_everyone_needs() -> None:
    encoder = Encoder(indexes_keys=True)
    encoder.encode([CHAT[1]])
    for number in range(200):
        encoder.encode([(b"authorization", b"Bearer %032d" % number + b"abcdefghijkl")])
    assert len(encoder.encode([CHAT[1]])) == 1


def test_a_bad_insert_count_still_ends_the_connection() -> None:
    frames = H3Frames(Wires(), Deaf(), is_client=True, limit=65536)  # type: ignore[arg-type]
    with pytest.raises(ConnectionFault):
        frames.receive(7, bytes((QPACK_DECODER,)) + b"\x05", False)
