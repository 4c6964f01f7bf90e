"""A file of 200 MB up through the vendor's package: whole, and not held in the daemon."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio

from headrace.lab import Lab
from headrace.lab.daemon import Daemon
from headrace.lab.settings import EdgeEntry
from headrace.lab.story import Stage

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.alone, pytest.mark.timeout(180)]

PIECE = hashlib.sha256(b"seed").digest() * 32_768  # 1 MiB
PIECES = 200
SPARE_KIB = 96 * 1024
"""What the daemon may grow by: windows and buffers of both sides, and what an allocator keeps."""


@pytest_asyncio.fixture(loop_scope="session")
async def stage(request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    """A lab whose edges are spoken to in one version."""
    async with Lab() as lab:
        edges = [EdgeEntry(edge.id, edge.url, {"protocol": request.param}) for edge in lab.edges.values()]
        settings = lab.settings(edges=edges)
        async with Daemon(lab.write_settings(settings), settings.state_dir, settings.ports) as daemon:
            yield Stage(lab, daemon)


def peak_kib(pid: int) -> int:
    """The most memory that a process ever had resident."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


# Not towards h3: on loopback its time is that of the lab's own receiver, half a minute.
@pytest.mark.parametrize(("listener", "stage"), [("plain", "h1"), ("tls", "h2")], indirect=["stage"])
async def test_a_file_of_200_mb_goes_up_whole_and_does_not_stay_in_memory(
    listener: str, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(stage.daemon.ca_file))
    ports, digest = stage.daemon.ports, hashlib.sha256()
    base = ports.http_url if listener == "plain" else ports.https_url.replace("127.0.0.1", "localhost")
    assert stage.daemon.pid is not None
    before = peak_kib(stage.daemon.pid)
    with tempfile.TemporaryFile() as file:
        for _ in range(PIECES):
            file.write(PIECE)
            digest.update(PIECE)
        file.seek(0)
        async with openai.AsyncOpenAI(base_url=base + "/lab/v1", api_key="sk-lab", max_retries=0) as client:
            made = await client.files.create(file=("big.jsonl", file), purpose="batch")
    assert made.bytes == PIECES * len(PIECE)
    assert made.id == f"file-{digest.hexdigest()[:16]}-{made.bytes}"
    assert peak_kib(stage.daemon.pid) - before < SPARE_KIB
