"""What a reload came to, and what of a new configuration only a restart can bring."""

from __future__ import annotations

from dataclasses import dataclass

from config.model import Config


@dataclass(frozen=True, slots=True)
class Reloaded:
    """`problems`: why nothing was changed. `notes`: what was taken but has no effect, or none before a restart."""

    applied: bool
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def needs_restart(old: Config, new: Config) -> list[str]:
    """A line for each change that the running process cannot take."""
    pairs = (
        ("state_dir", old.state_dir, new.state_dir),
        ("workers", old.workers, new.workers),
        ("tls.min_version", old.tls.min_version, new.tls.min_version),
        ("resolver.cache.redis", old.resolver.cache.redis, new.resolver.cache.redis),
        ("admin.listen", old.admin.listen, new.admin.listen),
        ("admin.token", old.admin.token, new.admin.token),
    )
    return [f"{name}: takes effect at the next start" for name, was, wanted in pairs if was != wanted]
