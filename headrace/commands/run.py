"""`headrace run`: the daemon in the foreground."""

from __future__ import annotations

import argparse
import gc

from headrace.client import load_or_fail


def run(args: argparse.Namespace) -> int:
    loaded = load_or_fail(args.config)
    # Until the daemon is ready and freezes what was made: it all stays, and to look through it again and again is a
    # tenth of the start.
    gc.disable()
    from headrace.daemon import serve

    return serve(loaded, named=args.config)
