"""What a configuration means: frozen values, with the unit of each number in its name.

Theory: `config/load.py` turns TOML into these and reports every problem; everything above this layer receives
them whole and never sees TOML. A reload makes a new `Config` and compares it with the old one by `==`.
Rules for editing: 1. no defaults that need a clock, the environment or a file: those are the loader's;
2. a key of the file and its field differ only in the unit (`idle_timeout` -> `idle_timeout_s`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

MIB = 1024 * 1024

NO_MAPPING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Secret:
    """A value that must never be printed: `str()` and `repr()` hide it, `reveal()` gives it."""

    value: str = field(repr=False)

    def reveal(self) -> str:
        return self.value

    def __str__(self) -> str:
        return "***" if self.value else ""

    def __bool__(self) -> bool:
        return bool(self.value)


@dataclass(frozen=True, slots=True)
class Listen:
    """One listening address: `tls://127.0.0.1:8853` is `Listen("tls", "127.0.0.1", 8853)`; IPv6 without brackets."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Log:
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "text", "json"] = "auto"


@dataclass(frozen=True, slots=True)
class DnsUpstream:
    """A resolver to ask. `url` scheme: https, h3, tls, quic, udp or tcp; `server_name` empty: the URL's host."""

    scheme: str
    host: str
    port: int
    path: str = ""
    addresses: tuple[str, ...] = ()
    server_name: str = ""
    ca_file: str = ""
    weight: int = 100

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"


@dataclass(frozen=True, slots=True)
class Zone:
    """Split horizon: names at or below `name` are asked of `upstreams` alone."""

    name: str
    upstreams: tuple[DnsUpstream, ...]
    dnssec: Literal["insecure", "validate"] = "insecure"  # has a say only where no trust anchor stands at the zone


@dataclass(frozen=True, slots=True)
class Record:
    """A local answer in presentation form, as in a zone file."""

    name: str
    type: str
    value: str
    ttl_s: int = 60


@dataclass(frozen=True, slots=True)
class DnsCache:
    entries: int = 100_000
    size_bytes: int = 128 * MIB  # messages, keys and what holds them
    min_ttl_s: float = 0.0
    max_ttl_s: float = 86_400.0
    max_negative_ttl_s: float = 3600.0
    serve_stale_s: float = 86_400.0
    stale_answer_after_s: float = 0.5
    prefetch: bool = True
    persist: bool = True
    redis: Secret = Secret("")


@dataclass(frozen=True, slots=True)
class Resolver:
    listen: tuple[Listen, ...] = ()
    doh_path: str = "/dns-query"
    strategy: Literal["fastest", "race", "failover", "weighted"] = "fastest"
    bootstrap: tuple[str, ...] = ("1.1.1.1", "9.9.9.9")
    dnssec: Literal["off", "log", "validate"] = "off"
    trust_anchors: str = ""  # a file; empty: the root's, as shipped
    timeout_s: float = 2.0
    hosts_files: tuple[str, ...] = ("/etc/hosts",)
    blocklists: tuple[str, ...] = ()
    rebind_protection: bool = True
    ecs: Literal["strip", "pass"] = "strip"
    rate_limit_per_s: int = 0
    query_log: Literal["off", "domains", "names"] = "off"
    upstreams: tuple[DnsUpstream, ...] = ()
    zones: tuple[Zone, ...] = ()
    records: tuple[Record, ...] = ()
    cache: DnsCache = DnsCache()


@dataclass(frozen=True, slots=True)
class Forward:
    enabled: bool = True
    allow: tuple[str, ...] = ("*.openai.com", "chatgpt.com", "*.anthropic.com", "claude.ai")


@dataclass(frozen=True, slots=True)
class Proxy:
    listen: tuple[Listen, ...] = ()
    max_connections: int = 4096
    max_header_bytes: int = 64 * 1024
    max_body_bytes: int = 512 * MIB
    idle_timeout_s: float = 120.0
    header_timeout_s: float = 10.0
    drain_timeout_s: float = 30.0
    trusted_proxies: tuple[str, ...] = ()  # addresses or networks in CIDR form
    allowed_origins: tuple[str, ...] = ()  # sites whose pages may call us: "https://app.example"
    forward: Forward = Forward()


@dataclass(frozen=True, slots=True)
class Tickets:
    lifetime_s: float = 3600.0
    rotate_every_s: float = 43_200.0
    keep: int = 3
    early_data: Literal["off", "safe-methods"] = "safe-methods"
    redis: Secret = Secret("")


@dataclass(frozen=True, slots=True)
class Tls:
    cert_file: str = ""  # empty: the local CA issues one
    key_file: str = ""
    min_version: Literal["1.2", "1.3"] = "1.3"
    tickets: Tickets = Tickets()


@dataclass(frozen=True, slots=True)
class Probe:
    interval_s: float = 30.0
    timeout_s: float = 3.0
    method: str = "GET"
    path: str = ""  # empty: TCP and TLS handshake only
    fall: int = 3
    rise: int = 2


@dataclass(frozen=True, slots=True)
class Retry:
    attempts: int = 2
    budget: float = 0.2  # retries as a share of requests


@dataclass(frozen=True, slots=True)
class Hedge:
    after: Literal["off", "p95"] | float = "off"  # a float is seconds
    budget: float = 0.05


@dataclass(frozen=True, slots=True)
class Timeouts:
    connect_s: float = 5.0
    first_byte_s: float = 120.0
    idle_s: float = 300.0
    total_s: float = 0.0  # 0: none


@dataclass(frozen=True, slots=True)
class Metrics:
    kind: Literal["none", "vllm", "sglang", "tgi", "llamacpp", "triton", "dcgm", "auto"] = "none"
    url: str = ""


@dataclass(frozen=True, slots=True)
class Edge:
    """One place that can answer. `base_path` is the URL's path, put before every target ("" for none)."""

    id: str
    scheme: Literal["https", "http", "h3"]
    host: str
    port: int
    base_path: str = ""
    weight: float = 100.0
    standby: bool = False
    protocol: Literal["auto", "h1", "h2", "h3"] = "auto"
    max_active: int = 0  # 0: the adaptive limiter decides
    addresses: tuple[str, ...] = ()
    server_name: str = ""  # TLS name; empty: host
    ca_file: str = ""
    client_cert: str = ""
    headers: Mapping[str, Secret] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    metrics: Metrics = Metrics()

    @property
    def tls_name(self) -> str:
        return self.server_name or self.host

    @property
    def is_tls(self) -> bool:
        return self.scheme != "http"

    @property
    def authority(self) -> str:
        """`host[:port]` as the Host field says it: the port only when it is not the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        own = 80 if self.scheme == "http" else 443
        return host if self.port == own else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class WebSocket:
    ping_interval_s: float = 20.0  # at most 30
    pong_timeout_s: float = 45.0
    on_edge_failure: Literal["redirect", "reconnect", "replay"] = "redirect"
    replay_messages: int = 0
    follow_redirects: int = 3


@dataclass(frozen=True, slots=True)
class Llm:
    cache: Literal["off", "deterministic", "all"] = "off"
    cache_ttl_s: float = 3600.0
    cache_bytes: int = 256 * MIB
    cache_redis: Secret = Secret("")
    coalesce: bool = False
    max_messages: int = 0
    default_max_tokens: int = 0
    force_stream: bool = False
    heartbeat_s: float = 0.0  # 0: off
    affinity: Literal["none", "prefix", "session"] = "prefix"


@dataclass(frozen=True, slots=True)
class PathPriority:
    path: str
    urgency: int = 3
    incremental: bool = False


@dataclass(frozen=True, slots=True)
class Pool:
    name: str
    edges: tuple[Edge, ...]
    hosts: tuple[str, ...] = ()
    path: str = ""  # prefix under the loopback names; stripped once
    strategy: Literal["adaptive", "weighted", "least-requests", "failover", "hash"] = "adaptive"
    retry: Retry = Retry()
    hedge: Hedge = Hedge()
    timeouts: Timeouts = Timeouts()
    all_down: Literal["best-effort", "reject"] = "best-effort"
    default_priority: str = "u=3"
    keep_warm: int = 1
    probe: Probe = Probe()
    websocket: WebSocket = WebSocket()
    llm: Llm = Llm()
    priorities: tuple[PathPriority, ...] = ()


@dataclass(frozen=True, slots=True)
class Admin:
    listen: Listen | None = None  # None: no admin listener
    metrics: bool = True
    token: Secret = Secret("")  # empty: one is generated in state_dir


@dataclass(frozen=True, slots=True)
class Telemetry:
    otlp_endpoint: str = ""
    sample_ratio: float = 0.01
    sample_errors: float = 1.0
    labels: Mapping[str, str] = field(default_factory=lambda: NO_MAPPING, hash=False)
    webhook: Secret = Secret("")


@dataclass(frozen=True, slots=True)
class Config:
    """The whole. `state_dir` is absolute and already decided by the loader."""

    state_dir: Path
    workers: int = 1
    log: Log = Log()
    resolver: Resolver = Resolver()
    proxy: Proxy = Proxy()
    tls: Tls = Tls()
    probe: Probe = Probe()
    pools: tuple[Pool, ...] = ()
    admin: Admin = Admin()
    telemetry: Telemetry = Telemetry()
