"""The way out is gone for five seconds under 200 queries a second: what the clients of a real daemon get (D30)."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.net.outage import OUT_S, RATE
from tests.patience import timed

ROOT = Path(__file__).parent.parent.parent


def _may_make_namespaces() -> bool:
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return False
    return subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(not _may_make_namespaces(), reason="needs root, iproute2 and network namespaces")


async def outage(kind: str, way: str, folder: Path) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        *("unshare", "-n", sys.executable, "-m", "tests.net.outage", kind, way, str(folder)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("kind", "way"), [("udp", "silent"), ("tls", "silent"), ("https", "route"), ("quic", "silent")]
)
@timed
async def test_known_names_are_served_throughout_and_new_ones_soon_after(kind: str, way: str, tmp_path: Path) -> None:
    found = await outage(kind, way, tmp_path)
    during = found["during"]
    assert during["asked"] > 0.5 * RATE * OUT_S
    assert during["answered"] == during["asked"], during["reasons"]
    assert during["slowest_s"] < 1.0  # stale_answer_after and what a loaded machine adds
    assert found["after"]["answered"] == found["after"]["asked"]
    assert found["new_during"]["answered"] <= 1  # the way was really gone; one may have been asked before
    assert 0 <= found["new_name_after_s"] < 2.0
    assert ("the way out changed" in found["log"]) is (way == "route")
    # With a way out and no upstream that answers a portal is suspected, and said so; no name but check names goes elsewhere.
    assert ("a portal may stand in the way" in found["log"]) is (way == "silent")
