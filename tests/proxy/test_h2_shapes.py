"""Requests known by their shape: what may be answered unread, and what must be read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy import h2_frames as wire
from proxy.h2_shapes import Find, Shapes
from proxy.hpack import Decoder
from proxy.hpack_encoder import Encoder, standing_block
from tests.proxy.h2_wire import Seen, Served, body, frame

Fields = list[tuple[bytes, bytes]]
AGENT = (b"user-agent", b"stub")
READY = (standing_block([(b":status", b"200"), (b"content-length", b"5")]), b"ready")


def get(path: bytes, *more: tuple[bytes, bytes], method: bytes = b"GET") -> Fields:
    return [(b":method", method), (b":scheme", b"https"), (b":authority", b"a.test"), (b":path", path), *more]


class Asking(Served):
    """A client with a table of its own, beside a service that has /q?known ready."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.coder = Encoder()
        self.h2.shortcut_for = lambda head: self.find if head.target.startswith(b"/q?") else None
        self.next_id = 1

    @staticmethod
    def find(coded_path: bytes) -> tuple[bytes, bytes] | None:
        return READY if b"known" in coded_path else None

    def get(self, path: bytes, *more: tuple[bytes, bytes], flags: int = 0, prefix: bytes = b"") -> list[Seen]:
        block = self.coder.encode(get(path, *more))
        self.say(frame(wire.HEADERS, wire.END_HEADERS | wire.END_STREAM | flags, self.next_id, prefix + block))
        self.next_id += 2
        return self.heard()

    def learned(self, *more: tuple[bytes, bytes]) -> Asking:
        """Twice: the first request moves the table, the second has a shape."""
        self.get(b"/q?a", *more)
        self.get(b"/q?b", *more)
        return self


def whole(stream_id: int) -> list[Seen]:
    fields = [(b":status", b"200"), (b"content-length", b"5")]
    return [Seen("Headers", stream_id, fields, False), Seen("Data", stream_id, b"ready", True)]


def test_a_known_path_in_a_known_shape_is_answered_without_a_stream() -> None:
    client = Asking().learned(AGENT)
    asked = len(client.requests)
    assert client.get(b"/q?known", AGENT) == whole(5)
    assert client.get(b"/q?known", AGENT) == whole(7)
    assert len(client.requests) == asked
    assert list(client.h2.streams) == [1, 3]


def test_what_is_not_ready_and_what_has_another_shape_goes_the_usual_way() -> None:
    client = Asking().learned(AGENT)
    for path, more in (
        (b"/q?other", [AGENT]),
        (b"/q?known", [AGENT, (b"content-length", b"0")]),
        (b"/q?known", []),
        (b"/q?known", [(b"user-agent", b"another")]),
    ):
        asked = len(client.requests)
        assert client.get(path, *more) == []
        assert len(client.requests) == asked + 1
        assert client.requests[-1][1].target == path


def test_a_table_that_moved_makes_every_shape_unknown() -> None:
    client = Asking().learned(AGENT)
    client.get(b"/q?c", AGENT, (b"accept", b"*/*"))  # inserts, so that every index means another field
    asked = len(client.requests)
    assert client.get(b"/q?known", AGENT) == []
    assert len(client.requests) == asked + 1
    assert client.get(b"/q?known", AGENT) == whole(9)  # it was learned anew


def test_a_priority_in_front_of_the_block_is_no_part_of_the_shape() -> None:
    client = Asking().learned()
    priority = (0x8000_0001).to_bytes(4) + b"\xff"
    assert client.get(b"/q?known", flags=wire.HAS_PRIORITY, prefix=priority) == whole(5)
    on_itself = (client.next_id).to_bytes(4) + b"\xff"
    assert client.get(b"/q?known", flags=wire.HAS_PRIORITY, prefix=on_itself)[0].kind == "RstStream"


def test_an_answer_that_no_window_has_room_for_goes_the_usual_way() -> None:
    client = Asking(hello=wire.PREFACE + wire.settings({wire.INITIAL_WINDOW_SIZE: 4})).learned()
    assert client.get(b"/q?known") == []
    client = Asking().learned()
    client.h2.sender.blocked = True
    assert client.get(b"/q?known") == []


def test_an_answer_uses_up_the_connections_window() -> None:
    client = Asking().learned()
    before = client.h2.sender.window
    client.get(b"/q?known")
    assert client.h2.sender.window == before - 5


def test_nothing_is_answered_above_the_goaway() -> None:
    client = Asking().learned()
    client.h2.drain()
    client.heard()
    assert client.get(b"/q?known") == []


@pytest.mark.parametrize("stream_id", [1, 3, 4])
def test_a_stream_that_may_not_open_is_the_connections_error(stream_id: int) -> None:
    client = Asking().learned()
    client.next_id = stream_id
    assert client.get(b"/q?known")[-1].kind in ("GoAway", "RstStream")


def test_data_after_a_whole_answer_is_late() -> None:
    client = Asking().learned()
    client.get(b"/q?known")
    client.say(body(5, b"more"))
    assert client.heard()[-1].kind == "GoAway"


def test_a_block_in_two_frames_teaches_nothing() -> None:
    client = Asking().learned()
    block = client.coder.encode(get(b"/q?c", (b"x-one", b"1")))
    client.say(
        frame(wire.HEADERS, wire.END_STREAM, 5, block[:4]), frame(wire.CONTINUATION, wire.END_HEADERS, 5, block[4:])
    )
    assert [head.target for _, head, _ in client.requests] == [b"/q?a", b"/q?b", b"/q?c"]
    assert client.h2._blocks.whole == b""


NAMES = st.sampled_from([b"accept", b"user-agent", b"x-thing", b"cookie", b"origin", b"content-length"])
VALUES = st.sampled_from([b"", b"a", b"*/*", b"known", b"x" * 200])
PATHS = st.sampled_from([b"/", b"/q?known", b"/q?" + b"k" * 150, b"/q?" + b"~" * 120])
REQUESTS = st.builds(lambda path, more: get(path, *more), PATHS, st.lists(st.tuples(NAMES, VALUES), max_size=3))


@given(st.lists(REQUESTS, max_size=8))
def test_what_is_answered_differs_from_what_was_learned_in_the_path_alone(requests: list[Fields]) -> None:
    coder, decoder = Encoder(), Decoder(65_536)
    shapes = Shapes(decoder)
    for fields in requests:
        block = coder.encode(fields)
        learned = shapes.answer(block)
        assert decoder.decode(block) == fields
        if learned is not None:
            assert learned[0] == _but_the_path(fields)
        shapes.learn(block, _telling(fields))


def _but_the_path(fields: Fields) -> bytes:
    return repr([field for field in fields if field[0] != b":path"]).encode()


def _telling(fields: Fields) -> Find:
    rest = _but_the_path(fields)
    return lambda _: (rest, b"")


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_no_bytes_make_it_raise(learned: bytes, asked: bytes) -> None:
    shapes = Shapes(Decoder(65_536))
    shapes.learn(learned, lambda _: READY)
    shapes.answer(asked)
