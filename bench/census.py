"""Count what this process holds: descriptors, tasks, exchanges, objects of the proxy. Two censuses tell a leak.

An object that nobody reaches is collected first, and the allocator gives back what it can, so that what is left is held.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from bench.soak_stage import Stage

KEPT = frozenset({"RequestRecord", "Waterfall", "Transition", "_Row", "_Line"})
"""Kinds that are kept on purpose and within a bound: records, and memos of header lines."""


@dataclass(frozen=True, slots=True)
class Census:
    rss_bytes: int
    descriptors: int
    tasks: int
    exchanges: int
    connections: int
    speaking: int  # answers that the origin has not ended
    objects: Counter[str]

    def more_than(self, before: Census) -> dict[str, int]:
        """What there is more of than before; empty when nothing stayed behind. Memory is judged apart."""
        more = {
            "descriptors": self.descriptors - before.descriptors,
            "tasks": self.tasks - before.tasks,
            "exchanges": self.exchanges - before.exchanges,
            "connections": self.connections - before.connections,
            "speaking": self.speaking - before.speaking,
            **(self.objects - before.objects),
        }
        return {name: count for name, count in more.items() if count > 0}


def take_census(stage: Stage) -> Census:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return Census(
        rss_bytes(),
        len(os.listdir("/proc/self/fd")),
        len(asyncio.all_tasks()),
        stage.gateway.active,
        stage.gateway.connections,
        sum(len(edge.living) for edge in stage.edges),
        Counter(kind.__name__ for kind in map(type, gc.get_objects()) if is_ours(kind)),
    )


def is_ours(kind: type) -> bool:
    module = kind.__module__
    return isinstance(module, str) and module.startswith("proxy.") and kind.__name__ not in KEPT


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
