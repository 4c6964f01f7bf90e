"""`headrace env`: the variables that point SDKs and tools at the daemon."""

from __future__ import annotations

import argparse
import os
import sys
from typing import cast

from headrace import exits
from headrace.client import load_or_fail
from headrace.console import say
from headrace.environment import Shell, render, wanted


def run(args: argparse.Namespace) -> int:
    config = load_or_fail(args.config).config
    shell = cast(Shell, args.shell or shell_of(os.environ.get("SHELL", "")))
    sys.stdout.write(render(config, shell, os.environ, args.undo))
    for note in () if args.undo else wanted(config).notes:
        say(f"headrace: {note}")  # as comments an `eval` would swallow them
    return exits.OK


def shell_of(path: str) -> str:
    """The form for a user's login shell: POSIX shells read bash's."""
    return "fish" if path.rpartition("/")[2] == "fish" else "bash"
