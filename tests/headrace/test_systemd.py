"""The units are what systemd accepts, confined as we claim, and the program can live under what they deny."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.peers import selfsigned

ROOT = Path(__file__).parents[2]
UNITS = {"system": ROOT / "systemd" / "headrace.service", "user": ROOT / "systemd" / "user" / "headrace.service"}
EXPOSURE = 2.0

needs_systemd = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
each_unit = pytest.mark.parametrize("kind", UNITS)


def lines(kind: str) -> list[tuple[str, str]]:
    text = UNITS[kind].read_text()
    return [tuple(line.split("=", 1)) for line in text.splitlines() if "=" in line and line[0] not in "#;"]  # type: ignore[misc]


def analyze(*arguments: str | Path, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | (environ or {}),
    )


@needs_systemd
@each_unit
def test_systemd_accepts_the_unit_without_a_word(kind: str, tmp_path: Path) -> None:
    program = tmp_path / "headrace"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "headrace.service"
    unit.write_text(re.sub(r"(?m)^ExecStart=\S+", f"ExecStart={program}", UNITS[kind].read_text()))
    mode = ["--user"] if kind == "user" else []
    said = analyze(*mode, "verify", "--man=no", unit, environ={"XDG_RUNTIME_DIR": str(tmp_path)})
    ours = [line for line in said.stderr.splitlines() if "headrace.service" in line]
    assert (said.returncode, ours) == (0, [])


@needs_systemd
@each_unit
def test_exposure_stays_at_or_below_two(kind: str) -> None:
    said = analyze("security", "--offline=yes", "--no-pager", UNITS[kind])
    level = re.search(r"Overall exposure level.*: ([0-9.]+)", said.stdout)
    assert level is not None, said.stderr
    assert float(level[1]) <= EXPOSURE


@each_unit
def test_unit_notifies_is_watched_reloads_and_drains(kind: str) -> None:
    unit = dict(lines(kind))
    assert unit["Type"] == "notify" and unit["WatchdogSec"] and unit["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert unit["ExecStart"].endswith("/headrace run")
    assert int(unit["TimeoutStopSec"].removesuffix("s")) > 30, "the default drain_timeout must fit in"


def test_system_service_is_nobody_and_keeps_its_state_for_itself() -> None:
    unit = dict(lines("system"))
    assert (unit["DynamicUser"], unit["StateDirectory"], unit["StateDirectoryMode"]) == ("yes", "headrace", "0700")
    assert "LoadCredential=" in UNITS["system"].read_text()


UNDER_DENIAL = """
import ctypes, mmap, os, sys
assert ctypes.CDLL(None).prctl(65, 1, 0, 0, 0) == 0  # PR_SET_MDWE, inherited by what is executed
try:
    mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
except PermissionError:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def has_denial() -> bool:
    probe = "import ctypes, sys; sys.exit(ctypes.CDLL(None).prctl(65, 1, 0, 0, 0) != 0)"
    return subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


@pytest.mark.skipif(not has_denial(), reason="this kernel cannot deny writable and executable memory (Linux 6.3)")
def test_tickets_and_loop_work_where_memory_for_code_is_denied(tmp_path: Path) -> None:
    cert = selfsigned.write(tmp_path / "one.pem", "one")
    story = ROOT / "tests" / "peers" / "rotation_story.py"
    for arguments in (
        [str(story), cert, str(tmp_path)],
        ["-c", "import uvloop, aioquic, headrace.daemon; print('true')"],
    ):
        run = subprocess.run(
            [sys.executable, "-c", UNDER_DENIAL, *arguments], capture_output=True, text=True, check=False, cwd=ROOT
        )
        assert run.returncode == 0 and "true" in run.stdout, run.stderr
