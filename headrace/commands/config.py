"""`headrace config show`: the effective configuration, and where each value came from."""

from __future__ import annotations

import argparse

from config.show import as_json, as_toml
from headrace import exits
from headrace.client import load_or_fail
from headrace.console import put, put_json, say


def run(args: argparse.Namespace) -> int:
    loaded = load_or_fail(args.config)
    if args.json:
        put_json({"file": str(loaded.file) if loaded.file else None, "values": as_json(loaded)})
    else:
        say(f"# {loaded.file or 'defaults (no file)'}")
        put(as_toml(loaded, origins=args.origin).rstrip("\n"))
    return exits.OK
