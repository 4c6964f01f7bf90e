"""`headrace demo` as a user runs it: short, checked, and gone without a trace."""

from __future__ import annotations

import asyncio
import io
import json
import os
import resource
import signal
import sys
from pathlib import Path

import pytest

from headrace.demo import Telling, tell
from headrace.lab.story import STEPS, Fact, Stage, StepFailed
from tests.e2e.stage import run
from tests.patience import soon

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]
DEMO = (sys.executable, "-m", "headrace", "demo")


async def test_the_demo_gives_the_same_facts_as_json(tmp_path: Path) -> None:
    spent_s = cpu_s()
    ran = await run(*DEMO, "--json", within_s=200, env={**os.environ, "TMPDIR": str(tmp_path)})
    spent_s = cpu_s() - spent_s
    told = json.loads(ran.out)
    assert told["ok"], told
    assert (ran.code, told["ok"], told["version"]) == (0, True, 1)
    assert [step["name"] for step in told["steps"]] == [name for name, _ in STEPS]
    assert told["steps"][0]["facts"]["upstream_questions"] == 1
    # 25 s is the promise; a busy machine stretches what the processor does, and the rest are the story's own waits.
    assert spent_s < 15


async def test_a_kept_demo_holds_its_steps_in_forty_lines_and_leaves_nothing_behind(tmp_path: Path) -> None:
    process, told, daemon = await begin(tmp_path, "--keep")
    assert process.stdout is not None and process.stderr is not None
    invited = b""
    async with asyncio.timeout(200):
        while b"/kill" not in invited:
            line = await process.stderr.readline()
            assert line, (invited + await process.stdout.read()).decode()
            invited += line
    assert b"curl -N --http1.1" in invited and b"OPENAI_BASE_URL" in invited
    process.send_signal(signal.SIGTERM)
    out, _ = await soon(process.communicate())
    lines = (told + out).decode().splitlines()
    assert process.returncode == 130 and len(lines) <= 40
    assert [f"{number} {name}" in (told + out).decode() for number, (name, _) in enumerate(STEPS, 1)] == [True] * 9
    assert_nothing_left(tmp_path, daemon)


async def test_ctrl_c_in_the_middle_leaves_nothing_behind(tmp_path: Path) -> None:
    process, _, daemon = await begin(tmp_path)
    process.send_signal(signal.SIGINT)
    _, err = await soon(process.communicate())
    assert (process.returncode, err) == (130, b"")
    assert_nothing_left(tmp_path, daemon)


def cpu_s() -> float:
    """Of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def begin(folder: Path, *options: str) -> tuple[asyncio.subprocess.Process, bytes, int]:
    """A demo whose daemon runs: the process, its first line, and the daemon's pid."""
    process = await asyncio.create_subprocess_exec(
        *DEMO,
        *options,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    assert process.stdout is not None
    first = await soon(process.stdout.readline())
    (made,) = folder.iterdir()
    return process, first, json.loads((made / "state" / "running.json").read_text())["pid"]


def assert_nothing_left(folder: Path, daemon: int) -> None:
    assert list(folder.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(daemon, 0)


async def test_a_step_that_does_not_hold_is_named_and_ends_the_story(stage: Stage) -> None:
    async def holds(_: Stage) -> list[Fact]:
        return [Fact("two and two are four", {"sum": 4})]

    async def fails(_: Stage) -> list[Fact]:
        raise StepFailed("two and two were 5")

    out = io.StringIO()
    telling = Telling(out, as_json=False)
    assert await tell(telling, stage, (("sums", holds), ("doubt", fails), ("never", holds))) is False
    assert out.getvalue().splitlines() == [
        "1 sums       two and two are four",
        "2 doubt      FAILED: two and two were 5",
    ]
