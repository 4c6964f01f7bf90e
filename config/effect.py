"""Keys that are accepted and have no effect yet, in one place: `headrace check` says so for each one that is set."""

from __future__ import annotations

from config.reading import Spot
from config.toml_lines import KeyPath

NO_EFFECT: dict[str, tuple[object, ...]] = {
    "workers": (1,),
    "resolver.dnssec": ("off",),
    "resolver.cache.redis": ("",),
    "tls.tickets.redis": ("",),
    "pool.hedge.after": ("off",),
    "pool.hedge.budget": (0.05,),
    "pool.edge.metrics.kind": ("none",),
    "pool.edge.metrics.url": ("",),
    "pool.websocket.replay_messages": (0,),
    "pool.default_priority": ("u=3",),
    "pool.priority.path": (),
    "pool.llm.cache": ("off",),
    "pool.llm.cache_ttl": ("1h",),
    "pool.llm.cache_size": ("256MiB",),
    "pool.llm.cache_redis": ("",),
    "pool.llm.coalesce": (False,),
    "pool.llm.max_messages": (0,),
    "pool.llm.default_max_tokens": (0,),
    "pool.llm.force_stream": (False,),
    "pool.llm.heartbeat": ("off", "0s"),
    "pool.llm.affinity": ("prefix", "none"),
    "telemetry.otlp_endpoint": ("",),
    "telemetry.sample_ratio": (0.01,),
    "telemetry.sample_errors": (1.0, 1),
    "telemetry.labels": ({},),
    "telemetry.webhook": ("",),
}
"""Key, and the values that need no remark: what happens anyway."""

NO_EFFECT_SCHEMES = {"resolver.listen": ("quic",), "resolver.upstream": ("quic", "h3")}
"""Arrays of URLs and the schemes in them that nothing serves or asks yet."""


def note_no_effect(raw: object, spot: Spot) -> None:
    """Walk the TOML as it was written and note every key that changes nothing."""
    name = ".".join(str(part) for part in spot.path if isinstance(part, str))
    if name in NO_EFFECT and raw not in NO_EFFECT[name]:
        spot.note("accepted, but has no effect yet")
    elif isinstance(raw, dict):
        for key, value in raw.items():
            note_no_effect(value, spot.at(key))
    elif isinstance(raw, list):
        for index, value in enumerate(raw):
            note_no_effect(value, spot.at(index))
    elif isinstance(raw, str):
        _note_scheme(raw, spot.path, spot)


def _note_scheme(text: str, path: KeyPath, spot: Spot) -> None:
    scheme, separator, _ = text.partition("://")
    place = ".".join(str(part) for part in path[:2])
    if separator and scheme in NO_EFFECT_SCHEMES.get(place, ()):
        spot.note(f"accepted, but {scheme}:// has no effect yet")
