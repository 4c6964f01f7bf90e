"""A judgement over the local certificate is believed for the very files, names and times that were judged, and no others."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from config.load import default_config
from config.model import Config, Pool
from headrace import judged, trust
from headrace.identity import certificate_for, names_of
from headrace.judged import recall

HOSTS, ADDRESSES = ["localhost", "openai.localhost"], ["127.0.0.1", "::1"]
ASKED = [*HOSTS, *ADDRESSES]
DAY_S = 86_400.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A CA's folder with a certificate that was issued and judged."""
    trust.issue(tmp_path, HOSTS, ADDRESSES)
    return tmp_path / "ca"


def test_what_was_judged_is_recalled_with_the_names_of_the_certificate(folder: Path) -> None:
    found = recall(folder, ASKED, now=time.time())
    assert found is not None and sorted(found.names) == sorted(HOSTS)


def test_it_holds_as_long_as_the_certificate_needs_no_renewal(folder: Path) -> None:
    begin = time.time()
    ages = {age: recall(folder, ASKED, now=begin + age * DAY_S) is not None for age in (-1, 0, 59, 61, 3600)}
    assert ages == {-1: False, 0: True, 59: True, 61: False, 3600: False}


def test_it_ends_when_the_ca_is_to_be_renewed(tmp_path: Path) -> None:
    born = datetime.now(UTC) - timedelta(days=3550)
    trust.ensure_ca(tmp_path, at=born)
    trust.issue(tmp_path, HOSTS, ADDRESSES, at=born + timedelta(days=3540))
    found = recall(tmp_path / "ca", ASKED, now=time.time())
    assert found is not None and found.good_until < time.time() + 11 * DAY_S, "a leaf alone would be good for 50 days"


@pytest.mark.parametrize("asked", [[*ASKED, "vllm.localhost"], ASKED[1:], ["localhost"], []])
def test_other_names_are_judged_anew(folder: Path, asked: list[str]) -> None:
    assert recall(folder, asked, now=time.time()) is None


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


SPOILED: dict[str, Callable[[Path], object]] = {
    "certificate changed": lambda folder: flip(folder / "server.pem"),
    "certificate gone": lambda folder: (folder / "server.pem").unlink(),
    "certificate's key readable by others": lambda folder: (folder / "server.pem").chmod(0o640),
    "ca changed": lambda folder: flip(folder / "ca.pem"),
    "ca's key changed": lambda folder: flip(folder / "ca-key.pem"),
    "ca's key readable by others": lambda folder: (folder / "ca-key.pem").chmod(0o604),
    "bundle cut": lambda folder: (folder / "bundle.pem").write_text(""),
    "bundle gone": lambda folder: (folder / "bundle.pem").unlink(),
    "judgement gone": lambda folder: (folder / judged.FILE).unlink(),
    "judgement cut": lambda folder: (folder / judged.FILE).write_bytes((folder / judged.FILE).read_bytes()[:-9]),
    "judgement of another shape": lambda folder: (folder / judged.FILE).write_text("[1]"),
    "judgement writable by others": lambda folder: (folder / judged.FILE).chmod(0o622),
}


@pytest.mark.parametrize("spoil", SPOILED)
def test_files_that_are_not_as_they_were_are_judged_anew(folder: Path, spoil: str) -> None:
    SPOILED[spoil](folder)
    assert recall(folder, ASKED, now=time.time()) is None


def test_new_roots_of_the_system_are_judged_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roots = tmp_path / "roots.pem"
    roots.write_text("one\n")
    monkeypatch.setattr(trust, "SYSTEM_ROOTS", (str(roots),))
    trust.issue(tmp_path, HOSTS, ADDRESSES)
    assert recall(tmp_path / "ca", ASKED, now=time.time()) is not None
    roots.write_text("one\ntwo\n")
    assert recall(tmp_path / "ca", ASKED, now=time.time()) is None


def test_without_roots_of_the_system_nothing_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "system_roots", lambda: None)
    trust.issue(tmp_path, HOSTS, ADDRESSES)
    assert recall(tmp_path / "ca", ASKED, now=time.time()) is None


def test_a_shared_ca_certificate_does_not_cost_the_judgement(folder: Path) -> None:
    (folder / "ca.pem").chmod(0o644)
    assert recall(folder, ASKED, now=time.time()) is not None


def served(tmp_path: Path, *hosts: str) -> Config:
    config = default_config({"HOME": str(tmp_path)})
    return replace(
        config, state_dir=tmp_path, pools=(*config.pools, *(Pool(host, (), hosts=(host,)) for host in hosts))
    )


def test_the_same_certificate_is_shown_with_and_without_a_judgement(tmp_path: Path) -> None:
    config = served(tmp_path, "vllm.localhost")
    first = certificate_for(config, tmp_path)
    assert recall(tmp_path / "ca", [*names_of(config)[0], *names_of(config)[1]], now=time.time()) is not None
    assert certificate_for(config, tmp_path) == first and "vllm.localhost" in first.names


def test_a_pool_that_is_new_gets_its_name(tmp_path: Path) -> None:
    certificate_for(served(tmp_path), tmp_path)
    assert "vllm.localhost" in certificate_for(served(tmp_path, "vllm.localhost"), tmp_path).names


PROGRAM = """
import sys
from pathlib import Path
from config.load import default_config
from headrace.identity import certificate_for
certificate_for(default_config({"HOME": sys.argv[1]}), Path(sys.argv[1]))
print("cryptography.x509" in sys.modules)
"""


def test_a_second_start_reads_no_certificate(tmp_path: Path) -> None:
    def start() -> str:
        argv = [sys.executable, "-c", PROGRAM, str(tmp_path)]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()

    assert [start(), start()] == ["True", "False"]
