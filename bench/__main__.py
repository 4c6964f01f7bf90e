"""`python -m bench [NAME] [options]`: measure beside peers and record ratios under bench/results/."""

from __future__ import annotations

import sys
from importlib import import_module

NAMES = ("dns", "dns_day", "http", "streams", "tls", "quic", "h3", "startup", "soak", "smuggling")

BY_NAME_ALONE = ("fuzz_dns", "fuzz_rims")
"""Those that take a quarter of an hour and have no peer."""


def main(argv: list[str]) -> int:
    chosen, options = (argv[:1], argv[1:]) if argv and not argv[0].startswith("-") else (list(NAMES), argv)
    if unknown := set(chosen) - {*NAMES, *BY_NAME_ALONE}:
        print(f"no bench {', '.join(unknown)}; there are {', '.join((*NAMES, *BY_NAME_ALONE))}", file=sys.stderr)
        return 2
    codes = [int(import_module(f"bench.{name}").main(options)) for name in chosen]
    return max(codes)


sys.exit(main(sys.argv[1:]))
