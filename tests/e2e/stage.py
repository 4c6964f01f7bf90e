"""Start the real program against the lab, and run the tools that people use."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from headrace.lab import Lab
from headrace.lab.clients import Answer, ask
from headrace.lab.daemon import Daemon
from headrace.lab.story import Stage, chat

QUESTION = "why does water fall?"
TURNS: list[dict[str, str]] = [{"role": "user", "content": QUESTION}]


def needs(tool: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(tool) is None, reason=f"{tool} is not installed")


@contextlib.asynccontextmanager
async def started(**changes: Any) -> AsyncIterator[Stage]:
    """A lab and a daemon that points at it; `changes` go to the lab's `Settings`."""
    async with Lab() as lab:
        settings = lab.settings(**changes)
        async with Daemon(lab.write_settings(settings), settings.state_dir, settings.ports) as daemon:
            yield Stage(lab, daemon)


async def answers(stage: Stage, count: int = 1, prefix: str = "probe") -> list[Answer]:
    """`count` chat completions through the plain listener, one after the other."""
    return [await ask("h1", stage.daemon.plain_target(), chat(f"{prefix}-{index}")) for index in range(count)]


async def still_serves(stage: Stage) -> bool:
    """Is the daemon alive, and does it answer over h1, h2 and h3?"""
    asked = [ask(version, stage.daemon.target(), chat(f"alive-{version}")) for version in ("h1", "h2", "h3")]
    seen = await asyncio.gather(*asked)
    return stage.daemon.running and all(each.status == 200 and each.clean for each in seen)


@dataclass(frozen=True, slots=True)
class Ran:
    code: int
    out: str
    err: str


async def run(*command: str, within_s: float = 120.0, env: dict[str, str] | None = None) -> Ran:
    """Run a tool to its end."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=env,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), within_s)
    except TimeoutError:
        process.kill()
        await process.communicate()
        raise
    assert process.returncode is not None
    return Ran(process.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"))
