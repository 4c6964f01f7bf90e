"""Find where each key and value of a TOML text stands, because `tomllib` gives values without positions.

Theory: the text has been accepted by `tomllib` already, so this scanner only needs to know where things begin and end:
keys, the four kinds of string, arrays, inline tables, and everything else up to the next delimiter. It mirrors how TOML
names things: `[[pool]]` opens the next element of `pool`, and `[pool.llm]` below it belongs to the last one opened.
Rules for editing: 1. never judge the text, tomllib does; 2. strings are skipped here and decoded by tomllib.
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_right
from dataclasses import dataclass, field

KeyPath = tuple[str | int, ...]
"""`("pool", 0, "hedge", "after")` is `pool[0].hedge.after`."""

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_SCALAR = re.compile(r"[^,\]}#\n]*")
_BASIC = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_LITERAL = re.compile(r"'[^'\n]*'")
# Up to two quotes may stand right before the closing three (TOML 1.0, "String").
_LONG_BASIC = re.compile(r'"""(?:[^\\]|\\.)*?"""(?!"(?!"))"{0,2}', re.DOTALL)
_LONG_LITERAL = re.compile(r"'''.*?'''(?!'(?!'))'{0,2}", re.DOTALL)


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """Counted from 1, columns in characters, as editors count."""

    line: int
    column: int


@dataclass(slots=True)
class Positions:
    """Where the key of a path stands, and where its value begins. A table's key position is its header."""

    keys: dict[KeyPath, Position] = field(default_factory=dict)
    values: dict[KeyPath, Position] = field(default_factory=dict)

    def of_key(self, path: KeyPath) -> Position:
        """The key's position, or that of the nearest table around it."""
        return self._nearest(path, self.keys)

    def of_value(self, path: KeyPath) -> Position:
        return self.values.get(path) or self.of_key(path)

    @staticmethod
    def _nearest(path: KeyPath, positions: dict[KeyPath, Position]) -> Position:
        while path:
            if path in positions:
                return positions[path]
            path = path[:-1]
        return Position(1, 1)


def find_positions(text: str) -> Positions:
    """Positions of everything in a text that `tomllib` accepts; what cannot be followed is left out, never raised."""
    return _Scanner(text.replace("\r\n", "\n")).scan()


def path_text(path: KeyPath) -> str:
    """`pool[0].edge[1].url`; a key that is not bare is quoted, as TOML would."""
    words: list[str] = []
    for part in path:
        if isinstance(part, int):
            words.append(f"[{part}]")
        else:
            name = part if _BARE.fullmatch(part) else '"' + part.replace("\\", "\\\\").replace('"', '\\"') + '"'
            words.append(f".{name}" if words else name)
    return "".join(words)


def _decoded(string: str) -> str:
    try:
        return str(tomllib.loads(f"k = {string}")["k"])
    except tomllib.TOMLDecodeError:
        return string


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.line_starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self.found = Positions()
        self.opened: dict[KeyPath, int] = {}  # arrays of tables: elements so far
        self.table: KeyPath = ()

    def scan(self) -> Positions:
        self._skip(_BLANK)
        while self.at < len(self.text):
            before = self.at
            if self._see("["):
                self._header()
            else:
                self._pair(self.table)
            self._skip(_BLANK)
            if self.at == before:  # not TOML after all: stop rather than spin
                break
        return self.found

    def _header(self) -> None:
        start, many = self.at, self.text.startswith("[[", self.at)
        self.at += 2 if many else 1
        names = [name for name, _ in self._names()]
        path = (*self._inside(names[:-1]), names[-1])
        if many:
            self.opened[path] = self.opened.get(path, -1) + 1
            path += (self.opened[path],)
        self.table = path
        self.found.keys.setdefault(path, self._position(start))
        self.at += 2 if many else 1

    def _inside(self, names: list[str]) -> KeyPath:
        """The path of a header's parents: each array of tables stands for its last element."""
        path: KeyPath = ()
        for name in names:
            path += (name,)
            if path in self.opened:
                path += (self.opened[path],)
        return path

    def _pair(self, table: KeyPath) -> None:
        path = table
        for name, start in self._names():
            path += (name,)
            self.found.keys.setdefault(path, self._position(start))
        if self._see("="):
            self.at += 1
            self._skip(_SPACE)
            self._value(path)

    def _names(self) -> list[tuple[str, int]]:
        """A dotted key and where each part begins."""
        names: list[tuple[str, int]] = []
        while True:
            self._skip(_SPACE)
            names.append(self._name())
            self._skip(_SPACE)
            if not self._see("."):
                return names
            self.at += 1

    def _name(self) -> tuple[str, int]:
        start = self.at
        for pattern in (_BASIC, _LITERAL):
            if match := pattern.match(self.text, self.at):
                self.at = match.end()
                return _decoded(match[0]), start
        match = _BARE.match(self.text, self.at)
        self.at = match.end() if match else self.at
        return (match[0] if match else ""), start

    def _value(self, path: KeyPath) -> None:
        self.found.values[path] = self._position(self.at)
        if self._see("["):
            self._array(path)
        elif self._see("{"):
            self._inline_table(path)
        else:
            self._scalar()

    def _array(self, path: KeyPath) -> None:
        self.at += 1
        self._skip(_BLANK)
        index = 0
        while self.at < len(self.text) and not self._see("]"):
            self.found.keys.setdefault((*path, index), self._position(self.at))
            self._value((*path, index))
            self._skip(_BLANK)
            index += 1
            if not self._see(","):
                break
            self.at += 1
            self._skip(_BLANK)
        self.at += 1

    def _inline_table(self, path: KeyPath) -> None:
        self.at += 1
        self._skip(_BLANK)  # newlines inside are TOML 1.1; harmless here
        while self.at < len(self.text) and not self._see("}"):
            self._pair(path)
            self._skip(_BLANK)
            if not self._see(","):
                break
            self.at += 1
            self._skip(_BLANK)
        self.at += 1

    def _scalar(self) -> None:
        for pattern in (_LONG_BASIC, _LONG_LITERAL, _BASIC, _LITERAL, _SCALAR):
            if match := pattern.match(self.text, self.at):
                self.at = match.end()
                return

    def _see(self, word: str) -> bool:
        return self.text.startswith(word, self.at)

    def _skip(self, pattern: re.Pattern[str]) -> None:
        if match := pattern.match(self.text, self.at):
            self.at = match.end()

    def _position(self, offset: int) -> Position:
        line = bisect_right(self.line_starts, offset)
        return Position(line, offset - self.line_starts[line - 1] + 1)
