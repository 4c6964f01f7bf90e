"""`headrace version`."""

from __future__ import annotations

import argparse

from headrace import exits
from headrace.console import put, put_json


def run(args: argparse.Namespace) -> int:
    if args.json:
        import platform  # the daemon imports this module for its version alone

        put_json({"headrace": own_version(), "python": platform.python_version(), "system": platform.system()})
    else:
        put(f"headrace {own_version()}")
    return exits.OK


def own_version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # 15 ms that a start need not wait for

    try:
        return version("headrace")
    except PackageNotFoundError:
        return "unknown (not installed)"
