"""`headrace demo`: what headrace does, shown and asserted on this machine alone."""

from __future__ import annotations

import argparse


def run(args: argparse.Namespace) -> int:
    from headrace.demo import run as tell

    return tell(as_json=args.json, keep=args.keep)
