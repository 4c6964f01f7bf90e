"""`headrace demo`: the program against embedded edges, on this machine alone."""

from __future__ import annotations

import argparse

from headrace.demo import run as tell


def run(args: argparse.Namespace) -> int:
    return tell(as_json=args.json, keep=args.keep)
