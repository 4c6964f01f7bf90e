"""The vendors' node packages through the daemon: the same results as from the edge itself.

The packages are installed once into a cache outside the tree, by exact versions (`node/package.json`). Without node, npm or a
registry that answers the tests say so and are skipped.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.lab.story import Stage
from tests.e2e.stage import needs, run

pytestmark = [pytest.mark.asyncio(loop_scope="session"), needs("node"), needs("npm"), pytest.mark.timeout(180)]

HERE = Path(__file__).parent / "node"
UPLOAD_BYTES = 50 * 1024 * 1024
INSTALL_S = 120.0


def _cache() -> Path:
    """A folder of the user's cache for exactly these versions."""
    name = hashlib.sha256((HERE / "package.json").read_bytes()).hexdigest()[:16]
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace-e2e" / f"node-{name}"


async def _installed() -> Path | str:
    """The folder with node_modules, or why there is none."""
    folder = _cache()
    if (folder / "complete").exists():
        return folder
    # Beside it, then renamed: workers that come at once must not see half of it.
    building = folder.with_name(f"{folder.name}.{os.getpid()}")
    building.mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / "package.json", building)
    options = [
        "--no-package-lock",
        "--no-audit",
        "--no-fund",
        "--ignore-scripts",
        "--fetch-retries=1",
        "--prefix",
        str(building),
    ]
    try:
        ran = await run("npm", "install", *options, within_s=INSTALL_S)
    except TimeoutError:
        return f"npm did not install the packages in {INSTALL_S:g} s"
    if ran.code:
        shutil.rmtree(building, ignore_errors=True)
        return f"npm could not install the packages: {ran.err.strip().splitlines()[0] if ran.err.strip() else ran.code}"
    (building / "complete").touch()
    try:
        building.rename(folder)
    except OSError:
        shutil.rmtree(building, ignore_errors=True)  # another worker was first
    return folder


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def packages() -> AsyncIterator[Path]:
    """The script, where node finds its modules: beside it."""
    found = await _installed()
    if isinstance(found, str):
        pytest.skip(found)
    script = found / f"calls-{os.getpid()}.mjs"
    shutil.copy(HERE / "calls.mjs", script)
    yield script
    script.unlink()


async def called(script: Path, base: str, ca_file: Path) -> dict[str, Any]:
    """The results of all calls against one base URL."""
    env = {"PATH": os.environ["PATH"], "NODE_EXTRA_CA_CERTS": str(ca_file)}
    ran = await run("node", str(script), base, str(UPLOAD_BYTES), within_s=150, env=env)
    assert ran.code == 0, ran.err
    results: dict[str, Any] = json.loads(ran.out)
    return results


async def test_every_call_gives_the_same_through_us_as_without_us(stage: Stage, packages: Path) -> None:
    edge = next(iter(stage.lab.edges.values()))
    ours_base = stage.daemon.ports.https_url.replace("127.0.0.1", "localhost") + "/lab"
    direct, ours = await asyncio.gather(
        called(packages, f"https://127.0.0.1:{edge.port}", stage.lab.ca_file),
        called(packages, ours_base, stage.daemon.ca_file),
    )
    for name, result in direct.items():
        assert ours[name] == result, name
    # And it is what was asked for, not the same failure twice
    assert len(ours["chat"]) > 50
    assert ours["chatStream"]["text"] == ours["chat"]
    assert ours["responsesStream"][-1] == "response.completed"
    assert ours["messagesStream"]["kinds"][-1] == "message_stop"
    assert ours["messagesStream"]["content"] == ours["messages"]
    assert len(ours["embeddings"]) == 2
    assert ours["upload"]["made"]["bytes"] == ours["upload"]["bytes"] == UPLOAD_BYTES
    assert ours["realtime"]["kinds"].count("response.output_text.delta") == 24
    assert ours["realtime"]["code"] == 1000
    assert [status for _, status, _ in ours["refused"]] == [400, 404, 400]
    assert not [name for name, result in ours.items() if isinstance(result, str) and "Error" in result]


async def test_plain_http_works_the_same_but_for_the_socket(stage: Stage, packages: Path) -> None:
    # The package asks for wss whatever the base says, which a plain listener cannot answer.
    ours = await called(packages, stage.daemon.ports.http_url + "/lab", stage.daemon.ca_file)
    failed = {name for name, result in ours.items() if isinstance(result, str) and "Error" in result}
    assert failed == {"realtime"}
    assert ours["upload"]["bytes"] == UPLOAD_BYTES
