"""Frame boundaries however bytes are cut, what passes unchanged, and when a silent peer is asked or given up."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode
from websockets.streams import StreamReader

from proxy.websocket import MAX_KEPT, Beat, FrameScanner, Op, Opening, Pulse, close_frame, frame, masked

OURS = b"\x01ours\x02\x03\x04"
MASK = b"\x11\x22\x33\x44"


def wire(op: int, payload: bytes = b"", *, fin: bool = True, rsv: int = 0, mask: bytes = b"", wide: int = 0) -> bytes:
    """A frame as any peer may send it; `wide` forces a longer length than needed (126 or 127)."""
    n, bit = len(payload), 0x80 if mask else 0
    form = max(wide, 127 if n > 65535 else 126 if n > 125 else 0)
    length = bytes([bit | (form or n)]) + (b"" if not form else struct.pack("!H" if form == 126 else "!Q", n))
    return bytes([fin << 7 | rsv << 4 | op]) + length + mask + (masked(payload, mask) if mask else payload)


def fed(scanner: FrameScanner, *chunks: bytes) -> bytes:
    return b"".join(scanner.feed(chunk) for chunk in chunks if chunk)


# ------------------------------------------------------------------------------------------ what passes


def test_whole_frames_pass_as_the_same_object() -> None:
    chunk = wire(Op.TEXT, b"hello", mask=MASK) * 3
    assert FrameScanner().feed(chunk) is chunk


@pytest.mark.parametrize("size", [0, 1, 125, 126, 127, 65535, 65536, 70000])
@pytest.mark.parametrize("mask", [b"", MASK])
def test_boundary_is_found_for_each_form_of_length(size: int, mask: bytes) -> None:
    whole = wire(Op.BINARY, b"x" * size, mask=mask)
    scanner = FrameScanner()
    assert fed(scanner, whole[:-1]) == (whole[:-1] if size else b"")
    assert scanner.at_boundary == (size == 0), "a held header leaves a boundary, a begun payload does not"
    fed(scanner, whole[-1:])
    assert scanner.at_boundary and scanner.messages == 1


def test_length_longer_than_needed_still_ends_where_it_says() -> None:
    scanner = FrameScanner()
    two = wire(Op.TEXT, b"ab", wide=127) + wire(Op.TEXT, b"cd", wide=126)
    assert fed(scanner, two) == two and scanner.messages == 2 and scanner.at_boundary


def test_boundary_inside_a_chunk_is_told() -> None:
    scanner = FrameScanner()
    whole, begun = wire(Op.TEXT, b"whole"), wire(Op.TEXT, b"begun")[:4]
    passed = scanner.feed(whole + begun)
    assert passed[: scanner.boundary] == whole and passed[scanner.boundary :] == begun


def test_payload_of_a_long_frame_is_not_held() -> None:
    scanner = FrameScanner()
    scanner.feed(wire(Op.BINARY, b"y" * 100_000)[:11])
    assert scanner.feed(b"y" * 5000) == b"y" * 5000 and scanner.boundary == -1


def test_control_frame_between_fragments_leaves_the_message_open() -> None:
    scanner = FrameScanner()
    fed(scanner, wire(Op.TEXT, b"a", fin=False), wire(Op.PING, b"p"))
    assert scanner.in_message and scanner.at_boundary and scanner.messages == 0
    fed(scanner, wire(Op.CONTINUATION, b"b"))
    assert not scanner.in_message and scanner.messages == 1


def test_deflated_and_reserved_frames_pass_without_judgement() -> None:
    scanner = FrameScanner()
    odd = wire(Op.TEXT, b"\xff\xff", rsv=4) + wire(3, b"reserved") + wire(11, b"control")
    assert fed(scanner, odd) == odd and not scanner.broken


@pytest.mark.parametrize(
    "bad",
    [
        wire(Op.PING, b"x" * 126),
        wire(Op.PING, b"x", fin=False),
        bytes([0x82, 127]) + b"\xff" * 8 + b"x",
    ],
    ids=["long control frame", "fragmented control frame", "length with its top bit"],
)
def test_broken_frame_passes_and_nothing_is_believed_after_it(bad: bytes) -> None:
    scanner = FrameScanner(OURS)
    good, pong = wire(Op.TEXT, b"good"), wire(Op.PONG, OURS)
    passed = scanner.feed(good + bad)
    assert passed == good + bad and passed[: scanner.boundary] == good
    assert scanner.broken and not scanner.at_boundary
    assert scanner.feed(pong) == pong and scanner.boundary == -1


def test_start_of_a_frame_that_never_came_is_given_back_at_the_end() -> None:
    scanner = FrameScanner()
    assert scanner.feed(b"\x89") == b"" and scanner.at_boundary
    assert scanner.rest() == b"\x89" and scanner.rest() == b""


# ------------------------------------------------------------------------------------------ our pongs, their closes


@pytest.mark.parametrize("mask", [b"", MASK])
def test_pong_that_answers_our_ping_is_swallowed_and_its_neighbours_pass(mask: bytes) -> None:
    scanner = FrameScanner(OURS)
    one, two = wire(Op.TEXT, b"one", mask=mask), wire(Op.PONG, b"theirs", mask=mask)
    pong = wire(Op.PONG, OURS + b"7", mask=mask)
    passed = scanner.feed(pong + one + pong + two + pong + one[:-1])
    assert passed == one + two + one[:-1] and scanner.pongs == 3
    assert passed[: scanner.boundary] == one + two


def test_pong_cut_into_bytes_is_swallowed() -> None:
    scanner = FrameScanner(OURS)
    assert fed(scanner, *(bytes([b]) for b in wire(Op.PONG, OURS + b"12", mask=MASK))) == b""
    assert scanner.pongs == 1 and scanner.rest() == b""


def test_nothing_of_a_large_read_is_kept_when_a_pong_was_taken_out_of_it() -> None:
    scanner = FrameScanner(OURS)
    large = wire(2, bytes(100_000))
    assert fed(scanner, wire(9, b"x") + wire(10, OURS) + large) == wire(9, b"x") + large
    assert scanner._out == []


def test_ping_with_our_payload_is_not_a_pong() -> None:
    scanner = FrameScanner(OURS)
    assert scanner.feed(wire(Op.PING, OURS)) == wire(Op.PING, OURS)


def test_close_of_sixty_minutes_passes_with_code_and_text() -> None:
    scanner = FrameScanner()
    close = close_frame(1001, "maximum duration of 60 minutes")
    assert scanner.feed(close) == close and scanner.close_code == 1001


def test_empty_close_means_no_status() -> None:
    scanner = FrameScanner()
    assert scanner.feed(wire(Op.CLOSE, b"")) == wire(Op.CLOSE, b"") and scanner.close_code == 1005


@pytest.mark.parametrize("code", [1005, 1006, 1015])
@pytest.mark.parametrize(("mask", "instead"), [(b"", 1011), (MASK, 1002)], ids=["of an edge", "of a client"])
def test_code_that_never_belongs_on_the_wire_is_replaced(code: int, mask: bytes, instead: int) -> None:
    scanner = FrameScanner()
    text = wire(Op.TEXT, b"before", mask=mask)
    passed = scanner.feed(text + wire(Op.CLOSE, struct.pack("!H", code) + b"why", mask=mask))
    assert passed == text + wire(Op.CLOSE, struct.pack("!H", instead) + b"why", mask=mask)
    assert scanner.close_code == instead


@pytest.mark.parametrize("code", [0, 999, 1005, 1006, 1015, 5000])
def test_we_cannot_write_a_forbidden_close(code: int) -> None:
    with pytest.raises(ValueError, match=str(code)):
        close_frame(code, "")


def test_long_reason_is_cut_at_a_whole_character() -> None:
    close = close_frame(1011, "é" * 100)
    assert len(close) - 2 <= 125 and close[4:].decode() == "é" * 61


def parsed(raw: bytes, *, mask: bool) -> Frame:
    """The frame as the websockets library reads it."""
    reader = StreamReader()
    reader.feed_data(raw)
    reading = Frame.parse(reader.read_exact, mask=mask)
    with pytest.raises(StopIteration) as done:
        next(reading)
    result: Frame = done.value.value
    return result


def test_our_frames_are_read_by_another_library() -> None:
    assert parsed(frame(Op.PING, b"abc", MASK), mask=True) == Frame(Opcode.PING, b"abc")
    assert parsed(close_frame(1012, "restart"), mask=False) == Frame(Opcode.CLOSE, struct.pack("!H", 1012) + b"restart")


frames = st.builds(
    wire,
    st.sampled_from([0, 1, 2, 3, 8, 9, 10]),
    st.binary(max_size=125).filter(lambda p: struct.unpack("!H", p[:2].ljust(2))[0] not in (1005, 1006, 1015)),
    rsv=st.integers(0, 7),
    mask=st.sampled_from([b"", MASK]),
)


def cut(whole: bytes, at: list[int]) -> list[bytes]:
    edges = sorted({0, len(whole), *(a % (len(whole) + 1) for a in at)})
    return [whole[a:b] for a, b in itertools.pairwise(edges)]


@given(st.lists(frames, min_size=1, max_size=8), st.lists(st.integers(0, 2000), max_size=20))
def test_bytes_pass_unchanged_however_they_are_cut(sent: list[bytes], at: list[int]) -> None:
    scanner, out, ends = FrameScanner(OURS), b"", {0}
    for one in sent:
        ends.add(max(ends) + len(one))
    for chunk in cut(b"".join(sent), at):
        before = len(out)
        out += scanner.feed(chunk)
        assert scanner.boundary == -1 or before + scanner.boundary in ends
        assert scanner.at_boundary == (len(out) in ends)
    assert out + scanner.rest() == b"".join(sent)


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=20))
def test_any_bytes_pass_in_order(chunks: list[bytes]) -> None:
    scanner = FrameScanner()
    out = fed(scanner, *chunks) + scanner.rest()
    assert out == b"".join(chunks) or scanner.close_code == 1011


# ------------------------------------------------------------------------------------------ openings


def test_opening_without_a_number_is_every_byte_so_far() -> None:
    scanner, opening = FrameScanner(), Opening()
    sent = wire(Op.TEXT, b"session.update", mask=MASK) + wire(Op.TEXT, b"and half of the next", mask=MASK)[:9]
    opening.add(scanner.feed(sent), scanner)
    assert opening.take() == sent and opening.whole


def test_opening_of_one_message_holds_no_second_one_even_from_one_chunk() -> None:
    scanner, opening = FrameScanner(), Opening(messages=1)
    first, second = wire(Op.TEXT, b"session.update", mask=MASK), wire(Op.TEXT, b"response.create", mask=MASK)
    opening.add(scanner.feed(first[:3]), scanner)
    opening.add(scanner.feed(first[3:] + second), scanner)
    assert opening.take() == first and opening.whole


def test_opening_counts_fragments_as_one_message() -> None:
    scanner, opening = FrameScanner(), Opening(messages=1)
    message = wire(Op.TEXT, b"a", fin=False) + wire(Op.PING, b"p") + wire(Op.CONTINUATION, b"b")
    opening.add(scanner.feed(message + wire(Op.TEXT, b"next")), scanner)
    assert opening.take() == message


def test_opening_with_fewer_messages_than_asked_for_repeats_the_whole_ones() -> None:
    scanner, opening = FrameScanner(), Opening(messages=3)
    whole = wire(Op.TEXT, b"one", mask=MASK)
    opening.add(scanner.feed(whole + wire(Op.TEXT, b"begun", mask=MASK)[:8]), scanner)
    assert opening.take() == whole


def test_opening_beyond_its_bound_is_not_repeated() -> None:
    scanner, opening = FrameScanner(), Opening()
    opening.add(scanner.feed(wire(Op.BINARY, b"x" * MAX_KEPT)), scanner)
    assert not opening.whole and opening.take() == b""


# ------------------------------------------------------------------------------------------ pulse


def pulse() -> Pulse:
    return Pulse(interval_s=20.0, timeout_s=45.0, heard_at=0.0)


def test_silent_peer_is_asked_twice_and_given_up_45_seconds_after_it_was_heard() -> None:
    p = pulse()
    assert (p.next_at(), p.beat(19.9), p.beat(20.0)) == (20.0, Beat.NOTHING, Beat.PING)
    p.pinged(20.0)
    assert (p.next_at(), p.beat(39.9), p.beat(40.0)) == (40.0, Beat.NOTHING, Beat.PING)
    p.pinged(40.0)
    assert (p.next_at(), p.beat(44.9), p.beat(45.0)) == (45.0, Beat.NOTHING, Beat.GIVE_UP)


def test_answering_peer_is_asked_every_interval_from_the_start() -> None:
    p, asked = pulse(), []
    for now in range(130):
        if p.beat(float(now)) is Beat.PING:
            asked.append(now)
            p.pinged(float(now))
            p.heard(now + 0.01)
    assert asked[0] == 20 and all(b - a <= 21 for a, b in itertools.pairwise(asked))


def test_any_frame_starts_the_silence_anew() -> None:
    p = pulse()
    p.pinged(20.0)
    p.heard(44.0)
    assert p.beat(63.9) is Beat.NOTHING and p.beat(64.0) is Beat.PING


def test_peer_that_was_never_asked_is_not_given_up() -> None:
    assert pulse().beat(1e6) is Beat.PING


def test_forgiven_peer_is_asked_again_first() -> None:
    p = pulse()
    p.pinged(20.0)
    p.forgive(5000.0)
    assert p.beat(5000.0) is Beat.PING
    p.pinged(5000.0)
    assert p.beat(5024.0) is not Beat.GIVE_UP and p.beat(5025.0) is Beat.GIVE_UP
