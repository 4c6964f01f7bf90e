"""Node's own fetch and http2, which every node SDK stands on: a cut stream is an error there, and leaving stops the model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from headrace.lab.story import Stage
from tests.e2e.stage import needs, run

pytestmark = [pytest.mark.asyncio(loop_scope="session"), needs("node")]

SCRIPT = Path(__file__).parent / "node" / "cuts.mjs"
TOKENS = 5


async def seen(stage: Stage, what: str) -> dict[str, Any]:
    ports = stage.daemon.ports
    bases = [ports.http_url + "/lab", ports.https_url.replace("127.0.0.1", "localhost") + "/lab"]
    env = {"PATH": os.environ["PATH"], "NODE_EXTRA_CA_CERTS": str(stage.daemon.ca_file)}
    ran = await run("node", str(SCRIPT), what, *bases, env=env)
    assert ran.code == 0, ran.err
    found: dict[str, Any] = json.loads(ran.out)
    return found


def set_all(stage: Stage, **controls: object) -> None:
    for edge in stage.lab.edges.values():
        edge.controls.change(controls)


def count(stage: Stage, what: str) -> int:
    return sum(edge.tally.numbers[what] for edge in stage.lab.edges.values())


async def test_a_cut_stream_is_an_error_and_never_an_end(stage: Stage) -> None:
    set_all(stage, cut_after=TOKENS)
    found = await seen(stage, "cut")
    for name, one in found.items():
        assert (one["status"], one["ended"]) == (200, False), name
        assert one["events"] >= TOKENS, name
        assert one["error"], name
    assert found["plain"]["error"] == found["secure"]["error"] == "TypeError: terminated"
    assert found["h2"]["code"] == 2  # INTERNAL_ERROR


async def test_a_whole_stream_is_an_end_and_no_error(stage: Stage) -> None:
    for name, one in (await seen(stage, "whole")).items():
        assert (one["status"], one["ended"], one["error"], one.get("code", 0)) == (200, True, "", 0), name


async def test_leaving_in_mid_stream_stops_the_model(stage: Stage) -> None:
    set_all(stage, token_s=0.2, tokens=1000)
    before = count(stage, "cancelled")
    found = await seen(stage, "leave")
    for edge in stage.lab.edges.values():
        await edge.tally.until("running", 0)
    assert count(stage, "cancelled") == before + 3
    assert found["plain"]["error"].startswith("AbortError")
