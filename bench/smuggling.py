"""The whole smuggling corpus through the gateway to every real origin that is installed; holes are what must never be."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

from bench.measure import RESULTS
from headrace.lab.ca import issue
from tests.fuzz.corpus import corpus
from tests.fuzz.origins import ORIGINS, lacking
from tests.fuzz.smuggler import smuggle


async def row(name: str) -> dict[str, object]:
    if said := lacking(name):
        return {"origin": name, "left_out": said}
    with tempfile.TemporaryDirectory(prefix="bench-smuggling-") as folder:
        verdict = await smuggle(name, corpus(), issue(Path(folder), ["localhost", "127.0.0.1"]))
    return {
        "origin": name,
        "cases": verdict.cases,
        "forwarded": verdict.forwarded,
        "seen_by_origin": verdict.seen,
        "holes": verdict.holes[:20],
    }


def main(argv: list[str]) -> int:
    argparse.ArgumentParser(prog="bench smuggling", description=__doc__).parse_args(argv)
    rows = [asyncio.run(row(name)) for name in ORIGINS]
    told = {"date": time.strftime("%Y-%m-%d"), "origins": rows}
    (RESULTS / "smuggling.json").write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps(told, indent=1))
    return 1 if any(each.get("holes") for each in rows) else 0
