"""`python -m bench [NAME] [options]`: measure beside peers and record ratios under bench/results/."""

from __future__ import annotations

import sys
from importlib import import_module

NAMES = ("dns", "http", "streams", "tls", "quic", "startup", "soak", "smuggling")


def main(argv: list[str]) -> int:
    chosen, options = (argv[:1], argv[1:]) if argv and not argv[0].startswith("-") else (list(NAMES), argv)
    if unknown := set(chosen) - set(NAMES):
        print(f"no bench {', '.join(unknown)}; there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    codes = [int(import_module(f"bench.{name}").main(options)) for name in chosen]
    return max(codes)


sys.exit(main(sys.argv[1:]))
