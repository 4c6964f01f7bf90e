"""The saved cache: aged by the time switched off, and never believed when anything about it is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import dns.message
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resolver import snapshot
from resolver.cache import Cache
from resolver.errors import Malformed
from resolver.io import files
from tests.resolver.test_cache import asking, cache_of, said


def full(now: float = 100.0) -> Cache:
    cache = cache_of(stale_s=50)
    for name, *records in (("a.example", "60 A 192.0.2.1"), ("b.example", "300 A 192.0.2.2", "10 A 192.0.2.3")):
        q = asking(name)
        cache.put(q, said(q, *records), now, source="tls://peer")
    q = asking("gone.example")
    cache.put(q, said(q, rcode="NXDOMAIN", soa="example. 200 200"), now)
    return cache


def reborn(content: bytes, wall: float, now: float = 5.0) -> Cache:
    cache = cache_of(stale_s=50)
    snapshot.restore(cache, snapshot.read(content, wall), now)
    return cache


def test_entries_come_back_aged_by_the_time_switched_off() -> None:
    content = snapshot.write(full(), 110.0, wall=1000.0)
    cache = reborn(content, wall=1020.0)
    entry = cache.fresh(asking("a.example"), 5.0)
    assert entry is not None and entry.source == "tls://peer"
    assert (5.0 - entry.stored_at, entry.expires_at - 5.0) == (30.0, 30.0)
    assert cache.denied_above(asking("x.gone.example"), 5.0) is not None


def test_what_expired_while_off_is_stale_and_what_is_too_old_is_gone() -> None:
    content = snapshot.write(full(), 110.0, wall=1000.0)
    cache = reborn(content, wall=1070.0)
    assert cache.fresh(asking("a.example"), 5.0) is None
    assert cache.stale(asking("a.example"), 5.0) is not None
    assert cache.stale(asking("b.example"), 5.0) is None, "its ten seconds and the fifty of serve_stale are over"


@given(st.integers(0, 500), st.integers(0, 100_000))
def test_no_age_off_gives_a_longer_life_than_was_left(left_on: int, off: int) -> None:
    content = snapshot.write(full(), 100.0 + left_on, wall=1000.0)
    for saved in snapshot.read(content, 1000.0 + off):
        stored_ttl = {b"a": 60, b"b": 10, b"g": 200}[saved.key[4:5]]
        assert saved.left_s <= stored_ttl - left_on - off
        assert saved.age_s >= left_on + off


@given(st.binary(max_size=400))
def test_bytes_that_are_not_ours_are_refused(content: bytes) -> None:
    with pytest.raises(Malformed):
        snapshot.read(content, 1000.0)


@given(st.data())
def test_a_file_with_one_changed_or_missing_byte_is_refused(data: st.DataObject) -> None:
    content = bytearray(snapshot.write(full(), 110.0, wall=1000.0))
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[at] ^= data.draw(st.integers(1, 255))
    else:
        del content[at:]
    with pytest.raises(Malformed):
        snapshot.read(bytes(content), 1000.0)


def test_a_file_from_the_future_is_refused() -> None:
    content = snapshot.write(full(), 110.0, wall=10_000.0)
    with pytest.raises(Malformed, match="future"):
        snapshot.read(content, 1000.0)


def test_the_file_is_private_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    state = tmp_path / "new" / "state"
    assert files.write_cache_file(state, b"first")
    assert files.write_cache_file(state, b"second")
    assert files.read_cache_file(state) == b"second"
    assert os.stat(state / files.CACHE_FILE).st_mode & 0o777 == 0o600
    assert os.listdir(state) == [files.CACHE_FILE]


def test_a_state_dir_that_cannot_be_written_is_one_line_of_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert not files.write_cache_file(blocked, b"x")
    assert [r.message.split(":")[0] for r in caplog.records] == ["DNS cache not saved"]


def test_an_entry_whose_message_answers_another_name_is_refused() -> None:
    cache = full()
    a, b = (cache.fresh(asking(name), 101.0) for name in ("a.example", "b.example"))
    assert a is not None and b is not None
    a.answer = b.answer
    with pytest.raises(Malformed, match="not the one of its key"):
        snapshot.read(snapshot.write(cache, 110.0, 1000.0), 1000.0)


def test_messages_pass_a_restart_unchanged() -> None:
    cache = full()
    again = reborn(snapshot.write(cache, 110.0, 1000.0), 1000.0)
    before, after = (c.fresh(asking("a.example"), 6.0) for c in (cache, again))
    assert before is not None and after is not None
    assert (before.answer, before.key) == (after.answer, after.key) or before.answer is not None
    assert after.answer is not None and before.answer is not None
    assert (after.answer.wire, after.answer.ttl_at) == (before.answer.wire, before.answer.ttl_at)
    assert dns.message.from_wire(after.answer.wire).answer
