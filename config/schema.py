"""Every key of headrace.toml: its name, its field, what it may be, and its default.

Read it beside `config/model.py`, which says what the fields mean. A new key is one line here and one field there.
"""

from __future__ import annotations

from pathlib import Path

from config import model, rules, values
from config.kinds import (
    Address,
    Choice,
    Duration,
    File,
    Flag,
    Folder,
    Hidden,
    Made,
    Number,
    OffOrDuration,
    Size,
    Text,
    TrustAnchors,
    Url,
)
from config.kinds import WholeSeconds as Ttl
from config.tables import Key, Listed, Named, Table, Tables

DNS_SCHEMES = ("udp", "tcp", "tls", "quic")
UPSTREAM_SCHEMES = ("https", "h3", "tls", "quic", "udp", "tcp")
DAY_S = 86_400.0
KIB, MIB = 1024, model.MIB


def _listens(*addresses: tuple[str, int]) -> tuple[model.Listen, ...]:
    return tuple(model.Listen(scheme, "127.0.0.1", port) for scheme, port in addresses)


DEFAULT_UPSTREAMS = (
    model.DnsUpstream(
        "https",
        "cloudflare-dns.com",
        443,
        "/dns-query",
        addresses=("1.1.1.1", "1.0.0.1", "2606:4700:4700::1111"),
    ),
    model.DnsUpstream(
        "https",
        "dns.quad9.net",
        443,
        "/dns-query",
        addresses=("9.9.9.9", "149.112.112.112", "2620:fe::fe"),
    ),
)


def _openai_like(name: str, host: str) -> model.Pool:
    edge = model.Edge(id=f"{name}-direct", scheme="https", host=host, port=443)
    return model.Pool(name=name, edges=(edge,), hosts=(f"{name}.localhost",), path=f"/{name}")


DEFAULT_POOLS = (_openai_like("openai", "api.openai.com"), _openai_like("anthropic", "api.anthropic.com"))
"""What is served without any file. A file that names no pool has none: what is written is what is served."""

LOG = Table(
    model.Log(),
    (
        Key("level", Choice(("debug", "info", "warning", "error"))),
        Key("format", Choice(("auto", "text", "json"))),
    ),
)

UPSTREAM = Table(
    model.DnsUpstream("https", "", 443),
    (
        Key("url", Url(UPSTREAM_SCHEMES, "/dns-query"), ("scheme", "host", "port", "path"), needed=True),
        Key("addresses", Listed(Text(values.read_address), most=16)),
        Key("server_name", Text(values.read_host)),
        Key("ca_file", File()),
        Key("weight", Number(0, 1_000_000)),
    ),
    rules.upstream,
)

ZONE = Table(
    model.Zone("", ()),
    (
        Key("name", Text(values.read_host, empty=False), needed=True),
        Key(
            "upstream",
            Listed(Made(Url(UPSTREAM_SCHEMES, "/dns-query"), rules.zone_upstream, rules.url_of_upstream), most=16),
            ("upstreams",),
            needed=True,
        ),
        Key("dnssec", Choice(("insecure", "validate"))),
    ),
    rules.zone,
)

RECORD = Table(
    model.Record("", "", ""),
    (
        Key("name", Text(values.read_host, empty=False), needed=True),
        Key("type", Text(str.upper, empty=False), needed=True),
        Key("value", Text(empty=False), needed=True),
        Key("ttl", Ttl(), ("ttl_s",)),
    ),
    rules.record,
)

DNS_CACHE = Table(
    model.DnsCache(),
    (
        Key("entries", Number(0, 10_000_000)),
        Key("size", Size(64 * KIB, 64 * 1024 * MIB), ("size_bytes",)),
        Key("min_ttl", Duration(high=DAY_S), ("min_ttl_s",)),
        Key("max_ttl", Duration(high=7 * DAY_S), ("max_ttl_s",)),
        Key("max_negative_ttl", Duration(high=DAY_S), ("max_negative_ttl_s",)),
        Key("serve_stale", Duration(high=7 * DAY_S), ("serve_stale_s",)),
        Key("stale_answer_after", Duration(high=60.0), ("stale_answer_after_s",)),
        Key("prefetch", Flag()),
        Key("persist", Flag()),
        Key("redis", Hidden(rules.redis_url)),
    ),
    rules.dns_cache,
)

RESOLVER = Table(
    model.Resolver(
        listen=_listens(("udp", 5353), ("tcp", 5353), ("tls", 8853), ("quic", 8853)),
        upstreams=DEFAULT_UPSTREAMS,
    ),
    (
        Key("listen", Listed(Address(DNS_SCHEMES), most=64)),
        Key("doh_path", Text(rules.doh_path, empty=False)),
        Key("strategy", Choice(("fastest", "race", "failover", "weighted"))),
        Key("bootstrap", Listed(Text(values.read_address), most=16)),
        Key("dnssec", Choice(("off", "log", "validate"))),
        Key("trust_anchors", TrustAnchors()),
        Key("timeout", Duration(0.05, 30.0), ("timeout_s",)),
        Key("hosts_files", Listed(File(), most=64)),
        Key("blocklists", Listed(File(), most=256)),
        Key("rebind_protection", Flag()),
        Key("ecs", Choice(("strip", "pass"))),
        Key("rate_limit", Number(0, 1_000_000), ("rate_limit_per_s",)),
        Key("query_log", Choice(("off", "domains", "names"))),
        Key("upstream", Tables(UPSTREAM, most=64), ("upstreams",)),
        Key("zone", Tables(ZONE), ("zones",)),
        Key("record", Tables(RECORD, most=65_536), ("records",)),
        Key("cache", DNS_CACHE),
    ),
    rules.resolver,
)

FORWARD = Table(
    model.Forward(),
    (Key("enabled", Flag()), Key("allow", Listed(Text(values.read_host_pattern)))),
)

PROXY = Table(
    model.Proxy(listen=_listens(("https", 8443), ("h3", 8443), ("http", 8080))),
    (
        Key("listen", Listed(Address(("https", "h3", "http"), rules.proxy_listen), most=64)),
        Key("max_connections", Number(1, 1_000_000)),
        Key("max_header_size", Size(4 * KIB, 1 * MIB), ("max_header_bytes",)),
        Key("max_body_size", Size(1, 1024 * 1024 * MIB), ("max_body_bytes",)),
        Key("idle_timeout", Duration(1.0, DAY_S), ("idle_timeout_s",)),
        Key("header_timeout", Duration(0.1, 3600.0), ("header_timeout_s",)),
        Key("drain_timeout", Duration(0.0, DAY_S), ("drain_timeout_s",)),
        Key("trusted_proxies", Listed(Text(values.read_network))),
        Key("allowed_origins", Listed(Text(values.read_origin))),
        Key("forward", FORWARD),
    ),
    rules.proxy,
)

TICKETS = Table(
    model.Tickets(),
    (
        # RFC 8446 4.6.1: no ticket may be used longer than seven days.
        Key("lifetime", Duration(1.0, 7 * DAY_S), ("lifetime_s",)),
        Key(
            "rotate_every",
            Duration(1.0, DAY_S, above="leaves one stolen key good for too long"),
            ("rotate_every_s",),
        ),
        Key("keep", Number(0, 64)),
        Key("early_data", Choice(("off", "safe-methods"))),
        Key("redis", Hidden(rules.redis_url)),
    ),
)

TLS = Table(
    model.Tls(),
    (
        Key("cert_file", File()),
        Key("key_file", File()),
        Key("min_version", Choice(("1.2", "1.3"))),
        Key("tickets", TICKETS),
    ),
    rules.tls,
)

PROBE = Table(
    model.Probe(),
    (
        Key("interval", Duration(0.1, DAY_S, below="would load the edges"), ("interval_s",)),
        Key("timeout", Duration(0.01, 300.0), ("timeout_s",)),
        Key("method", Text(values.read_token, empty=False)),
        Key("path", Text(rules.request_path)),
        Key("fall", Number(1, 100)),
        Key("rise", Number(1, 100)),
    ),
)

METRICS = Table(
    model.Metrics(),
    (
        Key("kind", Choice(("none", "vllm", "sglang", "tgi", "llamacpp", "triton", "dcgm", "auto"))),
        Key("url", Text(rules.http_url)),
    ),
)

EDGE = Table(
    model.Edge(id="", scheme="https", host="", port=443),
    (
        Key("id", Text(rules.label, empty=False), needed=True),
        Key("url", Url(("https", "http", "h3")), ("scheme", "host", "port", "base_path"), needed=True),
        Key("weight", Number(0, 1_000_000, whole=False)),
        Key("standby", Flag()),
        Key("protocol", Choice(("auto", "h1", "h2", "h3"))),
        Key("max_active", Number(0, 1_000_000)),
        Key("addresses", Listed(Text(values.read_address), most=64)),
        Key("server_name", Text(values.read_host)),
        Key("ca_file", File()),
        Key("client_cert", File()),
        Key("headers", Named(Hidden(rules.field_value), rules.field_name)),
        Key("metrics", METRICS),
    ),
    rules.edge,
)

WEBSOCKET = Table(
    model.WebSocket(),
    (
        Key(
            "ping_interval",
            Duration(0.1, 30.0, above="is longer than middleboxes keep an idle connection"),
            ("ping_interval_s",),
        ),
        Key("pong_timeout", Duration(0.1, 3600.0), ("pong_timeout_s",)),
        Key("on_edge_failure", Choice(("redirect", "reconnect", "replay"))),
        Key("replay_messages", Number(0, 1000)),
        Key("follow_redirects", Number(0, 20)),
    ),
    rules.websocket,
)

LLM = Table(
    model.Llm(),
    (
        Key("cache", Choice(("off", "deterministic", "all"))),
        Key("cache_ttl", Duration(1.0, 30 * DAY_S), ("cache_ttl_s",)),
        Key("cache_size", Size(1 * MIB, 1024 * 1024 * MIB), ("cache_bytes",)),
        Key("cache_redis", Hidden(rules.redis_url)),
        Key("coalesce", Flag()),
        Key("max_messages", Number(0, 100_000)),
        Key("default_max_tokens", Number(0, 10_000_000)),
        Key("force_stream", Flag()),
        Key("heartbeat", OffOrDuration(0.1, 600.0), ("heartbeat_s",)),
        Key("affinity", Choice(("none", "prefix", "session"))),
    ),
)

PRIORITY = Table(
    model.PathPriority(""),
    (
        Key("path", Text(rules.request_path, empty=False), needed=True),
        Key("urgency", Number(0, 7, hint=", 0 is the most urgent (RFC 9218 4.1)")),
        Key("incremental", Flag()),
    ),
    rules.priority,
)

POOL = Table(
    model.Pool("", ()),
    (
        Key("name", Text(rules.label, empty=False), needed=True),
        Key("hosts", Listed(Text(values.read_host))),
        Key("path", Text(rules.prefix)),
        Key("strategy", Choice(("adaptive", "weighted", "least-requests", "failover", "hash"))),
        Key(
            "retry",
            Table(model.Retry(), (Key("attempts", Number(0, 10)), Key("budget", Number(0, 1, whole=False)))),
        ),
        Key(
            "hedge",
            Table(
                model.Hedge(),
                (
                    Key("after", Duration(0.05, 600.0, below="would hedge every request", words=("off", "p95"))),
                    Key("budget", Number(0, 1, whole=False)),
                ),
            ),
        ),
        Key(
            "timeouts",
            Table(
                model.Timeouts(),
                (
                    Key("connect", Duration(0.01, 300.0), ("connect_s",)),
                    Key("first_byte", Duration(0.01, DAY_S), ("first_byte_s",)),
                    Key("idle", Duration(0.01, DAY_S), ("idle_s",)),
                    Key("total", Duration(0.1, 7 * DAY_S, zero=True), ("total_s",)),
                ),
            ),
        ),
        Key("all_down", Choice(("best-effort", "reject"))),
        Key("default_priority", Text(rules.priority_value, empty=False)),
        Key("keep_warm", Number(0, 64)),
        Key("probe", PROBE),
        Key("edge", Tables(EDGE), ("edges",), needed=True),
        Key("websocket", WEBSOCKET),
        Key("llm", LLM),
        Key("priority", Tables(PRIORITY), ("priorities",)),
    ),
    rules.pool,
)

ADMIN = Table(
    model.Admin(listen=model.Listen("http", "127.0.0.1", 9443)),
    (
        Key("listen", Address(("http",), rules.admin_listen, optional=True)),
        Key("metrics", Flag()),
        Key("token", Hidden(rules.token)),
    ),
    rules.admin,
)

TELEMETRY = Table(
    model.Telemetry(),
    (
        Key("otlp_endpoint", Text(rules.otlp_url)),
        Key("sample_ratio", Number(0, 1, whole=False)),
        Key("sample_errors", Number(0, 1, whole=False)),
        Key("labels", Named(Text(rules.label_header, empty=False), rules.label, most=16)),
        Key("webhook", Hidden(rules.webhook_url)),
    ),
)

ROOT = Table(
    model.Config(
        state_dir=Path(),
        resolver=RESOLVER.blank,
        proxy=PROXY.blank,
        admin=ADMIN.blank,
    ),
    (
        Key("state_dir", Folder()),
        Key("workers", Number(1, 64)),
        Key("log", LOG),
        Key("resolver", RESOLVER),
        Key("proxy", PROXY),
        Key("tls", TLS),
        Key("probe", PROBE),  # before the pools, which inherit it
        Key("pool", Tables(POOL, inherits=("probe",)), ("pools",)),
        Key("admin", ADMIN),
        Key("telemetry", TELEMETRY),
    ),
    rules.whole,
)
