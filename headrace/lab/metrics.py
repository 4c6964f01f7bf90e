"""An edge's /metrics under the names that vLLM uses, in Prometheus text form."""

from __future__ import annotations

from headrace.lab.controls import Controls, Tally

BLOCK_SIZE = 16
BLOCKS = 4096


def render(controls: Controls, tally: Tally, model: str) -> bytes:
    """Gauges of load from what runs now, counters from what was done; one engine, one model."""
    label = f'{{engine="0",model_name="{model}"}}'
    geometry = f'{{block_size="{BLOCK_SIZE}",engine="0",num_gpu_blocks="{BLOCKS}"}}'
    families: list[tuple[str, str, str, float]] = [
        ("vllm:num_requests_running", "gauge", label, tally.running),
        ("vllm:num_requests_waiting", "gauge", label, controls.waiting),
        ("vllm:kv_cache_usage_perc", "gauge", label, controls.kv_cache_usage),
        ("vllm:cache_config_info", "gauge", geometry, 1),
        ("vllm:num_preemptions_total", "counter", label, 0),
        ("vllm:generation_tokens_total", "counter", label, tally.numbers["tokens"]),
        ("vllm:request_success_total", "counter", label, tally.numbers["answered"]),
    ]
    lines: list[str] = []
    for name, kind, labels, value in families:
        family = name.removesuffix("_total") if kind == "counter" else name
        lines += [
            f"# HELP {family} of a headrace lab edge",
            f"# TYPE {family} {kind}",
            f"{name}{labels} {float(value)}",
        ]
    return ("\n".join(lines) + "\n").encode()
