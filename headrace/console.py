"""Speak to people and programs: data on stdout, talk on stderr, tables, colour only where it is wanted."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from headrace import exits

FORMAT = 1
"""The "version" field of JSON on stdout; it grows when a field changes its meaning or goes."""


class Failure(Exception):
    """A command cannot go on. The message says what, why and what to do; `code` is the exit code."""

    def __init__(self, message: str, code: int = exits.PROBLEM) -> None:
        super().__init__(message)
        self.code = code


def say(text: str) -> None:
    """A line for people, on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def put(text: str) -> None:
    """A line of data, on stdout."""
    sys.stdout.write(text + "\n")


def put_json(fields: dict[str, object]) -> None:
    put(json.dumps({"version": FORMAT, **fields}, indent=2, ensure_ascii=False))


COLOURS = {"red": "31", "green": "32", "yellow": "33", "dim": "2", "bold": "1"}


def coloured(text: str, colour: str) -> str:
    """The text in colour on a terminal; plain elsewhere and with NO_COLOR (no-color.org)."""
    if not colour or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty():
        return text
    return f"\033[{COLOURS[colour]}m{text}\033[0m"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> list[str]:
    """Lines in columns, the last one ragged. `right`: heads of columns that hold numbers."""
    widths = [max(len(cell) for cell in column) for column in zip(heads, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if head in right else cell.ljust(width)
            for cell, width, head in zip(cells, widths, heads, strict=True)
        )
        return "  ".join(padded).rstrip()

    return [line(heads), *(line(row) for row in rows)]
