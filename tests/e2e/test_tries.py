"""The lines that a kept demo prints and the README shows, run by a shell word for word."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from headrace.lab.story import Stage
from headrace.lab.tries import TRIES, Try, exports, invitation
from tests.e2e.stage import Ran, run, started

pytestmark = pytest.mark.asyncio(loop_scope="session")
ADDRESS = "192.0.2.10"

EXPECTED: dict[str, tuple[str, ...]] = {
    "stream over HTTP/1.1": ("data: [DONE]",),
    "stream over HTTP/2": ("data: [DONE]",),
    "openai, only the base URL changed": ("headrace",),
    "anthropic, only the base URL changed": ("headrace",),
    "fetch of Node": ("data: [DONE]",),
    "WebSocket": ('"type":"session.created"',),
    "DNS over UDP": (ADDRESS, "(UDP)"),
    "DNS over TCP": (ADDRESS, "(TCP)"),
    "DNS over TLS": (ADDRESS, "TLS session (TLS1.3)"),
    "DNS over HTTPS": (ADDRESS, "HTTP session (HTTP/2-POST)"),
    "browser through the PAC file": ("headrace lab edge-a",),
    "slow an edge": ('"first_token_s": 1.5',),
    "kill an edge": ("edge-b",),
    "see its state": ("edge-a", "edge-b", "edge-c"),
    "see where the time went": ("time", "where the time went"),
}


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def kept() -> AsyncIterator[Stage]:
    """A stage of this file's own: some of the lines break edges."""
    async with started() as stage:
        yield stage


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder with a short path: a browser's profile holds a socket, whose path may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="try-", dir="/tmp") as folder:
        yield Path(folder)


async def typed(stage: Stage, each: Try, home: Path) -> Ran:
    """Run it in a shell in which the exports and the virtual environment are set."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {"HOME": str(home), "TMPDIR": str(home), "PATH": path, **exports(stage)}
    return await run("bash", "-c", each.command, within_s=150, env=environ)


@pytest.mark.parametrize("each", TRIES, ids=lambda each: each.name)
async def test_a_line_does_what_it_says(kept: Stage, each: Try, home: Path) -> None:
    if shutil.which(each.tool) is None and each.tool not in ("python", "headrace"):
        pytest.skip(f"{each.tool} is not installed")
    if each.name == "see where the time went":
        await typed(kept, TRIES[0], home)
    ran = await typed(kept, each, home)
    assert ran.code == 0, ran.err
    assert [part for part in EXPECTED[each.name] if part not in ran.out] == []


async def test_the_invitation_defines_every_variable_that_its_lines_use(kept: Stage) -> None:
    lines = invitation(kept)
    script = "\n".join((*[line for line in lines if line.startswith("export ")], 'echo "$HTTP $CA $DOH $LAB_SPKI"'))
    ran = await run("bash", "-uc", script, env={"PATH": os.environ["PATH"]})
    values = exports(kept)
    assert ran.out.split() == [values[name] for name in ("HTTP", "CA", "DOH", "LAB_SPKI")]
    assert [
        each.command for each in TRIES if not set(each.command.splitlines()) <= set("\n".join(lines).splitlines())
    ] == []
