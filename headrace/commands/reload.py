"""`headrace reload`: have the daemon load its configuration again, and hear what it says of it."""

from __future__ import annotations

import argparse

from headrace import exits
from headrace.client import Daemon, load_or_fail
from headrace.console import put_json, say


def run(args: argparse.Namespace) -> int:
    answer = Daemon(load_or_fail(args.config)).post("/reload")
    problems = list(answer["problems"])
    if args.json:
        put_json({name: value for name, value in answer.items() if name != "version"})
    else:
        for problem in problems:
            say(problem)
        for note in answer["notes"]:
            say(note)
        say("reloaded" if answer["applied"] else "nothing was changed: the old configuration goes on")
    return exits.OK if answer["applied"] else exits.USAGE
