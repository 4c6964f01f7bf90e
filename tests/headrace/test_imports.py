"""Modules that nothing waits for are loaded beside the loop, and are the ones that the first look-up wants."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.imports import load_beside

WAITS_FOR_THE_LOOP = """
import time
until = time.monotonic() + 10
while "answered_meanwhile" not in __import__("sys").modules and time.monotonic() < until:
    pass
answered = "answered_meanwhile" in __import__("sys").modules
"""


async def test_the_loop_answers_while_a_module_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_to_load.py").write_text(WAITS_FOR_THE_LOOP)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "slow_to_load", raising=False)
    asyncio.get_running_loop().call_later(
        0.01, monkeypatch.setitem, sys.modules, "answered_meanwhile", sys.modules[__name__]
    )
    usual = sys.getswitchinterval()
    await load_beside("slow_to_load")
    assert sys.modules["slow_to_load"].answered
    assert sys.getswitchinterval() == usual


FIRST_LOOKUP = """
import sys
from importlib import import_module
import headrace.daemon
from headrace.imports import SOON
assert not [name for name in sys.modules if name.partition(".")[0] in ("dns", "h2", "aioquic", "cryptography", "hypercorn")]
for name in SOON:
    import_module(name)
loaded = set(sys.modules)
from resolver.io.lookup import read_reply
head = bytes.fromhex("0000 8180 0001 0002 0000 0000".replace(" ", ""))
question = bytes.fromhex("01610000 410001".replace(" ", ""))
address = bytes.fromhex("c00c 0001 0001 0000003c 0004 7f000001".replace(" ", ""))
service = bytes.fromhex("c00c 0041 0001 0000003c 000a 0001 00 0001 0003 02 6832".replace(" ", ""))
assert len(read_reply(head + question + address + service, "cache", 0.0).rrsets) == 2
print(*sorted(set(sys.modules) - loaded))
"""


def test_a_start_loads_no_library_of_a_part_that_waits_and_the_first_lookup_finds_all_loaded() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_LOOKUP], capture_output=True, text=True, check=False)
    assert (done.stderr, done.stdout.strip()) == ("", "")
