"""What a server asks of its own process: descriptors enough, and a collector that does not walk what stays."""

from __future__ import annotations

import contextlib
import gc
import resource

MOST_DESCRIPTORS = 1 << 20


def take_descriptors() -> None:
    """All the descriptors that we may have. The soft limit of 1024 is there for select(2), which nothing here uses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def keep_what_exists() -> None:
    """Call it once, when all is loaded and made: what exists lives as long as the process, and is not looked at again.

    Exchanges leave no cycles behind, so looking for some every 700 objects (the default) costs a fifth of a small request
    for nothing.
    """
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 50)
