"""The headrace.toml that points a daemon at a lab.

Written with the contract's keys, so that the lab proves the file a user would write and not a shortcut into the program.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace.lab.ports import HOST, free_ports

Value = str | int | float | bool | Sequence["Value"] | Mapping[str, "Value"]


@dataclass(frozen=True, slots=True)
class DaemonPorts:
    """Where the daemon under test listens; free when they were chosen."""

    dns: int
    dot: int
    https: int
    http: int
    admin: int

    @classmethod
    def choose(cls) -> DaemonPorts:
        return cls(*free_ports(5))

    @property
    def https_url(self) -> str:
        return f"https://{HOST}:{self.https}"

    @property
    def http_url(self) -> str:
        return f"http://{HOST}:{self.http}"

    @property
    def admin_url(self) -> str:
        return f"http://{HOST}:{self.admin}"


@dataclass(frozen=True, slots=True)
class EdgeEntry:
    """One `[[pool.edge]]`; `more` holds further keys of it."""

    edge_id: str
    url: str
    more: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Settings:
    """What differs between labs, demos and tests. Mappings are added to their tables, key by key."""

    state_dir: Path
    ca_file: Path
    upstreams: Sequence[str]
    edges: Sequence[EdgeEntry]
    ports: DaemonPorts
    resolver: Mapping[str, Value] = field(default_factory=dict)
    cache: Mapping[str, Value] = field(default_factory=dict)
    proxy: Mapping[str, Value] = field(default_factory=dict)
    forward_allow: Sequence[str] = ()
    tickets: Mapping[str, Value] = field(default_factory=dict)
    pool: Mapping[str, Value] = field(default_factory=dict)
    websocket: Mapping[str, Value] = field(default_factory=dict)
    admin_token: str = ""


def render(settings: Settings) -> str:
    """The whole file. The edges live on loopback under names, which is what rebind protection exists to refuse."""
    ports = settings.ports
    dns: dict[str, Value] = {
        "listen": [f"{scheme}://{HOST}:{port}" for scheme, port in _dns_listens(ports)],
        "strategy": "failover",
        "bootstrap": [],
        "hosts_files": [],
        "rebind_protection": False,
    }
    proxy: dict[str, Value] = {
        "listen": [f"https://{HOST}:{ports.https}", f"h3://{HOST}:{ports.https}", f"http://{HOST}:{ports.http}"],
        "drain_timeout": "5s",
    }
    pool: dict[str, Value] = {
        "name": "lab",
        "hosts": ["lab.localhost"],
        "path": "/lab",
        "probe": {"interval": "1s", "timeout": "1s"},
    }
    parts = [
        _table("", {"state_dir": str(settings.state_dir), "log": {"level": "info", "format": "text"}}),
        _table("[resolver]", dns | dict(settings.resolver)),
        *[_table("[[resolver.upstream]]", _upstream(url, settings.ca_file)) for url in settings.upstreams],
        _table("[resolver.cache]", settings.cache),
        _table("[proxy]", proxy | dict(settings.proxy)),
        _table("[proxy.forward]", {"allow": list(settings.forward_allow)}),
        _table("[tls.tickets]", settings.tickets),
        _table("[[pool]]", pool | dict(settings.pool)),
        *[_table("[[pool.edge]]", _edge(entry, settings.ca_file)) for entry in settings.edges],
        _table("[pool.websocket]", settings.websocket),
        _table("[admin]", {"listen": ports.admin_url, "token": settings.admin_token}),
    ]
    return "\n".join(part for part in parts if part)


def _dns_listens(ports: DaemonPorts) -> list[tuple[str, int]]:
    return [("udp", ports.dns), ("tcp", ports.dns), ("tls", ports.dot)]


def _upstream(url: str, ca_file: Path) -> dict[str, Value]:
    if url.startswith(("udp:", "tcp:")):
        return {"url": url}
    return {"url": url, "addresses": [HOST], "ca_file": str(ca_file)}


def _edge(entry: EdgeEntry, ca_file: Path) -> dict[str, Value]:
    trust: dict[str, Value] = {} if entry.url.startswith("http:") else {"ca_file": str(ca_file)}
    return {"id": entry.edge_id, "url": entry.url} | trust | dict(entry.more)


def _table(header: str, values: Mapping[str, Value]) -> str:
    lines = [f"{key} = {_toml(value)}" for key, value in values.items()]
    if not lines:
        return ""
    return "\n".join([header, *lines] if header else lines) + "\n"


def _toml(value: Value) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, str):
        # A JSON string is a TOML basic string as long as nothing outside the BMP is escaped as a pair.
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Sequence):
        return "[" + ", ".join(_toml(each) for each in value) + "]"
    return json.dumps(value)
