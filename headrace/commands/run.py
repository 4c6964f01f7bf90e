"""`headrace run`: the daemon in the foreground."""

from __future__ import annotations

import argparse

from headrace.client import load_or_fail


def run(args: argparse.Namespace) -> int:
    loaded = load_or_fail(args.config)
    from headrace.daemon import serve

    return serve(loaded, named=args.config)
