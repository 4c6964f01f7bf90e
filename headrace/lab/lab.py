"""The lab: an encrypted DNS upstream, three inference edges and their CA, in one process on loopback.

async with Lab() as lab:
    lab.edges["edge-a"].controls.first_token_s = 0.5
    config_file = lab.write_settings(lab.settings())
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from headrace.lab import ca
from headrace.lab.control import ControlListener
from headrace.lab.edge import LabEdge
from headrace.lab.nameserver import HOST as DNS_HOST
from headrace.lab.nameserver import Nameserver
from headrace.lab.settings import DaemonPorts, EdgeEntry, Settings, render
from headrace.lab.zone import lab_zone

EDGE_IDS = ("edge-a", "edge-b", "edge-c")


class Lab:
    """Real servers over real TLS. Everything it made, files included, is gone when the block ends."""

    def __init__(self, edge_ids: Sequence[str] = EDGE_IDS) -> None:
        self._edge_ids = tuple(edge_ids)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.edges: dict[str, LabEdge] = {}

    async def __aenter__(self) -> Lab:
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-lab-")
        self.folder = Path(self._folder.name)
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    @property
    def ca_file(self) -> Path:
        return self.ca.ca_file

    def settings(self, **changes: Any) -> Settings:
        """A configuration with three equal edges in the pool "lab"; `changes` replaces fields of `Settings`."""
        defaults: dict[str, Any] = {
            "state_dir": self.folder / "state",
            "ca_file": self.ca_file,
            "upstreams": [self.nameserver.doh_url, self.nameserver.dot_url],
            "edges": [EdgeEntry(edge.id, edge.url) for edge in self.edges.values()],
            "ports": DaemonPorts.choose(),
            "forward_allow": [f"*.lab.example:{edge.port}" for edge in self.edges.values()],
        }
        return Settings(**{**defaults, **changes})

    def write_settings(self, settings: Settings) -> Path:
        """Write the file, and make `state_dir`; returns the file's path."""
        settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.folder / "headrace.toml"
        path.write_text(render(settings), encoding="utf-8")
        return path

    async def _start(self) -> None:
        hosts = [f"{edge_id}.lab.example" for edge_id in self._edge_ids]
        self.ca = await asyncio.to_thread(ca.issue, self.folder, [DNS_HOST, *hosts, "localhost", "127.0.0.1", "::1"])
        self.nameserver = Nameserver(self.ca)
        for edge_id, host in zip(self._edge_ids, hosts, strict=True):
            self.edges[edge_id] = LabEdge(edge_id, host, self.ca, self._url_of)
        self.control = ControlListener(self.edges, self.nameserver)
        await self.nameserver.start()
        for edge in self.edges.values():
            await edge.start()
        await self.control.start()
        self.nameserver.zone = lab_zone([(edge.host, edge.port) for edge in self.edges.values()])

    async def _stop(self) -> None:
        for edge in self.edges.values():
            await edge.kill()
        if hasattr(self, "control"):
            await self.nameserver.kill()
            await self.control.stop()
        if self._folder is not None:
            self._folder.cleanup()

    def _url_of(self, edge_id: str) -> str:
        return self.edges[edge_id].url
