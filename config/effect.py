"""Keys that are accepted and have no effect yet, in one place: `headrace check` says so for each one that is set."""

from __future__ import annotations

from config.reading import Spot

NO_EFFECT: dict[str, tuple[object, ...]] = {
    "workers": (1,),
    "tls.tickets.redis": ("",),
    "pool.hedge.after": ("off",),
    "pool.hedge.budget": (0.05,),
    "pool.edge.metrics.kind": ("none",),
    "pool.edge.metrics.url": ("",),
    "pool.llm.cache": ("off",),
    "pool.llm.cache_ttl": ("1h",),
    "pool.llm.cache_size": ("256MiB",),
    "pool.llm.cache_redis": ("",),
    "pool.llm.coalesce": (False,),
    "pool.llm.max_messages": (0,),
    "pool.llm.default_max_tokens": (0,),
    "pool.llm.force_stream": (False,),
    "pool.llm.affinity": ("prefix", "none"),
    "telemetry.otlp_endpoint": ("",),
    "telemetry.sample_ratio": (0.01,),
    "telemetry.sample_errors": (1.0, 1),
    "telemetry.labels": ({},),
    "telemetry.webhook": ("",),
}
"""Key, and the values that need no remark: what happens anyway."""


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
