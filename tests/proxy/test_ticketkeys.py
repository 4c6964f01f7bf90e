"""The ring of ticket keys, read as transcripts and as properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.ticketkeys import KEY_BYTES, BrokenRing, TicketKey, TicketKeys, keys_from_bytes

HOUR = 3600.0
RING = TicketKeys(lifetime_s=1 * HOUR, rotate_every_s=12 * HOUR, keep=3)


def fresh(letter: str) -> bytes:
    return letter.encode() * KEY_BYTES


def letters(ring: TicketKeys) -> str:
    return "".join(chr(key.name[0]) for key in ring.keys)


def test_a_day_of_rotations() -> None:
    ring = RING
    assert ring.due(0.0) and ring.current is None
    ring = ring.advance(0.0, fresh("a"))
    assert letters(ring) == "a" and not ring.due(11.9 * HOUR) and ring.due(12 * HOUR)
    ring = ring.advance(12 * HOUR, fresh("b"))
    assert letters(ring) == "ba"
    assert ring.next_at(12 * HOUR) == 13 * HOUR, "the retired key is dropped before the next rotation"
    assert letters(ring.pruned(13 * HOUR - 1)) == "ba"
    assert letters(ring.pruned(13 * HOUR)) == "b"
    assert ring.pruned(13 * HOUR).next_at(13 * HOUR) == 24 * HOUR


def test_retired_key_opens_for_a_full_lifetime_after_its_successor_came_not_after_it_was_made() -> None:
    ring = RING.advance(0.0, fresh("a")).advance(12 * HOUR, fresh("b"))
    assert ring.pruned(12.9 * HOUR).find(b"a" * 16) is not None
    assert ring.pruned(13.1 * HOUR).find(b"a" * 16) is None


def test_keep_bounds_the_ring_however_often_it_is_rotated_by_hand() -> None:
    ring = RING
    for second, letter in enumerate("abcdefg"):
        ring = ring.advance(float(second), fresh(letter))
    assert letters(ring) == "gfed"


def test_keep_zero_leaves_only_the_key_that_seals() -> None:
    ring = TicketKeys(keep=0).advance(0.0, fresh("a")).advance(1.0, fresh("b"))
    assert letters(ring) == "b"


def test_unknown_name_finds_nothing() -> None:
    assert RING.advance(0.0, fresh("a")).find(b"z" * 16) is None


def test_clock_set_back_makes_a_rotation_due_and_the_fresh_key_seals() -> None:
    ring = RING.advance(1000 * HOUR, fresh("a"))
    assert ring.due(10 * HOUR)
    ring = ring.advance(10 * HOUR, fresh("b"))
    assert letters(ring) == "ba"
    assert letters(ring.merge(10 * HOUR, ())) == "ba", "a key from the future must not go in front again"


def test_rotations_within_one_tick_of_the_clock_keep_their_order_in_a_merge() -> None:
    ring = RING.advance(5.0, fresh("c")).advance(5.0, fresh("b")).advance(5.0, fresh("a"))
    assert letters(ring.merge(5.0, ring.keys)) == letters(ring) == "abc"


def test_two_workers_that_rotated_apart_agree_after_a_merge() -> None:
    shared = RING.advance(0.0, fresh("a"))
    one, two = shared.advance(12 * HOUR, fresh("b")), shared.advance(12 * HOUR + 5, fresh("c"))
    now = 12 * HOUR + 10
    assert letters(one.merge(now, two.keys)) == letters(two.merge(now, one.keys)) == "cba"


def test_merge_keeps_our_own_copy_of_a_key_we_already_hold() -> None:
    ring = RING.advance(0.0, fresh("a"))
    merged = ring.merge(1.0, keys_from_bytes(ring.to_bytes()))
    assert merged.keys[0].secret is ring.keys[0].secret


def test_a_key_that_another_worker_dates_into_the_future_is_dated_now() -> None:
    theirs = RING.advance(5 * HOUR, fresh("b"))
    merged = RING.advance(0.0, fresh("a")).merge(HOUR, theirs.keys)
    assert [key.made_at for key in merged.keys] == [HOUR, 0.0]


def test_new_rules_apply_at_once() -> None:
    ring = RING
    for second, letter in enumerate("abcd"):
        ring = ring.advance(float(second), fresh(letter))
    assert letters(ring.configured(4.0, lifetime_s=HOUR, rotate_every_s=HOUR, keep=1)) == "dc"


def test_views_tell_ids_and_ages_and_no_key_bytes() -> None:
    ring = RING.advance(0.0, fresh("a")).advance(12 * HOUR, fresh("b"))
    seals, opens = ring.views(12.5 * HOUR)
    assert (seals.seals, seals.age_s, opens.seals, opens.age_s) == (True, 0.5 * HOUR, False, 12.5 * HOUR)
    assert opens.opens_for_s == 0.5 * HOUR
    assert len({seals.id, opens.id}) == 2 and len(seals.id) == 8


def test_repr_hides_the_secret() -> None:
    key = TicketKey.made(b"n" * 16 + b"S" * 64, 0.0)
    assert "SSSS" not in repr(RING.advance(0.0, b"n" * 16 + b"S" * 64)) and "SSSS" not in repr(key)


def test_wiped_key_holds_only_zeros() -> None:
    key = TicketKey.made(fresh("a"), 0.0)
    key.wipe()
    assert key.secret == bytearray(64)


def test_wrong_size_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="80 bytes, not 48"):
        RING.advance(0.0, bytes(48))


@pytest.mark.parametrize(
    ("stored", "says"),
    [
        (b"", "begin otherwise"),
        (b"x" * 500, "begin otherwise"),
        (RING.advance(0.0, fresh("a")).to_bytes()[:-1], "checksum"),
        (RING.advance(0.0, fresh("a")).to_bytes() + b"\n", "checksum"),
    ],
)
def test_damaged_file_is_named(stored: bytes, says: str) -> None:
    with pytest.raises(BrokenRing, match=says):
        keys_from_bytes(stored)


def test_wiped_key_is_never_believed() -> None:
    ring = RING.advance(0.0, fresh("a"))
    ring.keys[0].wipe()
    with pytest.raises(BrokenRing, match="wiped"):
        keys_from_bytes(ring.to_bytes())


waits = st.lists(st.floats(0, 2e5), max_size=12)


def rotated(ring: TicketKeys, path: list[float], by: str = "w") -> tuple[TicketKeys, float]:
    """The ring after a rotation at the end of each wait, with keys that say which worker made them, and the time."""
    now = 1.7e9
    for turn, wait in enumerate(path):
        now += wait
        ring = ring.advance(now, f"{by}{turn}".encode().ljust(KEY_BYTES, b"."))
    return ring, now


@given(waits, st.integers(0, 5))
def test_ring_is_bounded_and_its_first_key_is_the_freshest(path: list[float], keep: int) -> None:
    ring, _ = rotated(TicketKeys(keep=keep), path)
    assert len(ring.keys) <= keep + 1
    assert [key.made_at for key in ring.keys] == sorted((key.made_at for key in ring.keys), reverse=True)
    assert not path or (ring.current is not None and ring.current.name.startswith(b"w%d." % (len(path) - 1)))


@given(waits, st.floats(0, 3599))
def test_the_key_that_sealed_opens_for_a_lifetime_after_the_next_rotation(path: list[float], later: float) -> None:
    ring, now = rotated(TicketKeys(keep=3), path)
    sealed = ring.advance(now, b"sealed the ticket".ljust(KEY_BYTES))
    assert sealed.advance(now + 9e4, fresh("z")).pruned(now + 9e4 + later).find(b"sealed the ticke") is not None


@given(waits)
def test_stored_ring_comes_back_equal(path: list[float]) -> None:
    ring, _ = rotated(TicketKeys(keep=5), path)
    back = keys_from_bytes(ring.to_bytes())
    assert back == ring.keys and [k.made_at for k in back] == [k.made_at for k in ring.keys]


@given(waits, st.data())
def test_any_changed_byte_is_noticed(path: list[float], draw: st.DataObject) -> None:
    stored = bytearray(rotated(TicketKeys(), path)[0].to_bytes())
    stored[draw.draw(st.integers(0, len(stored) - 1))] ^= draw.draw(st.integers(1, 255))
    with pytest.raises(BrokenRing):
        keys_from_bytes(bytes(stored))


@given(st.binary(max_size=400))
def test_any_bytes_are_keys_or_broken(stored: bytes) -> None:
    with pytest.raises(BrokenRing):
        keys_from_bytes(stored)


@given(waits, waits)
def test_merge_is_the_same_from_either_side_and_settles(one: list[float], two: list[float]) -> None:
    (a, then), (b, later) = rotated(RING, one, "a"), rotated(RING, two, "b")
    now = max(then, later)
    ab, ba = a.merge(now, b.keys), b.merge(now, a.keys)
    assert [(k.name, k.made_at) for k in ab.keys] == [(k.name, k.made_at) for k in ba.keys]
    assert ab.merge(now, b.keys).keys == ab.keys
