"""A slice of the soak: all nine pairs, clients that leave, edges that die; nothing is told wrong or left behind."""

from __future__ import annotations

from pathlib import Path

from bench.soak import soak


async def test_every_stream_is_recorded_as_its_client_saw_it_and_nothing_is_left_behind(tmp_path: Path) -> None:
    report = await soak(tmp_path, streams=90, seconds=5)
    assert report.wrong == []
    assert report.left_behind == {}
    assert report.kills > 0
    assert report.endings["whole"] > 90 and report.endings["left"] > 0
