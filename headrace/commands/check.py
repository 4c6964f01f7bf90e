"""`headrace check`: every problem of a configuration, offline and without side effects."""

from __future__ import annotations

import argparse
import os

from config.load import ConfigError, find_file, load
from config.reading import Problem
from headrace import exits
from headrace.console import put_json, say
from headrace.wording import counted


def run(args: argparse.Namespace) -> int:
    file = find_file(args.file, os.environ)
    try:
        notes = list(load(file, os.environ).notes)
    except ConfigError as exc:
        return _report(args, file, list(exc.problems), [])
    return _report(args, file, [], notes)


def _report(args: argparse.Namespace, file: object, problems: list[Problem], notes: list[Problem]) -> int:
    if args.json:
        put_json(
            {
                "file": str(file) if file else None,
                "ok": not problems,
                "problems": [_fields(problem) for problem in problems],
                "notes": [_fields(note) for note in notes],
            }
        )
    else:
        for problem in problems:
            say(str(problem))
        for note in notes:
            say(f"{note} (note)")
        say(f"{file or 'defaults (no file)'}: {counted(len(problems), 'problem') if problems else 'ok'}")
    return exits.USAGE if problems else exits.OK


def _fields(problem: Problem) -> dict[str, object]:
    return {
        "file": problem.file,
        "line": problem.line,
        "column": problem.column,
        "key": problem.path,
        "text": problem.text,
    }
