"""Gather what one run of the loader finds: every problem with its place, and where each value came from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from config.sources import Sources
from config.toml_lines import KeyPath, Position, Positions, path_text
from config.values import Wrong


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to mend. `str()` is `file:line:column: key.path: what is wrong; what to do`."""

    file: str
    line: int
    column: int
    path: str
    text: str

    def __str__(self) -> str:
        subject = f"{self.path}: " if self.path else ""
        return f"{self.file}:{self.line}:{self.column}: {subject}{self.text}"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an effective value came from. `source` as in `sources.Fetched`; line 0: no file says it.

    `written` is the file's own text of a value that came through `source`: what may be shown of it.
    """

    line: int = 0
    source: str = ""
    written: object = None


@dataclass(slots=True)
class Reading:
    file: str
    positions: Positions
    sources: Sources
    problems: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    claims: dict[tuple[str, object], KeyPath] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Spot:
    """A place in the configuration, for those who read there."""

    reading: Reading
    path: KeyPath = ()

    def at(self, *keys: str | int) -> Spot:
        return Spot(self.reading, self.path + keys)

    @property
    def is_written(self) -> bool:
        """Does the file say something here?"""
        positions = self.reading.positions
        return self.path in positions.values or self.path in positions.keys

    def problem(self, text: str, *, on_key: bool = False) -> None:
        """Note a problem, once: the same value may be looked at by more than one rule."""
        found = self._placed(text, on_key)
        if found not in self.reading.problems:
            self.reading.problems.append(found)

    def wrong(self, wrong: Wrong, subject: str) -> None:
        self.problem(f"{subject} {wrong.what}; {wrong.remedy}")

    def note(self, text: str) -> None:
        self.reading.notes.append(self._placed(text, on_key=False))

    def _placed(self, text: str, on_key: bool) -> Problem:
        positions = self.reading.positions
        place: Position = positions.of_key(self.path) if on_key else positions.of_value(self.path)
        return Problem(self.reading.file, place.line, place.column, path_text(self.path), text)

    def came_from(self, source: str, written: object) -> None:
        line = self.reading.positions.of_key(self.path).line
        self.reading.origins[self.path] = Origin(line, source, written if source else None)

    def claim(self, group: str, name: object, *, remedy: str, shown: str = "") -> None:
        """Take a name that may be taken once in a group; the second one is the problem, and names the first."""
        first = self.reading.claims.setdefault((group, name), self.path)
        if first != self.path:
            line = self.reading.positions.of_value(first).line
            origin = self.reading.origins.get(self.path)
            subject = "the value" if origin and origin.source else shown or quoted(name)
            self.problem(f"{subject} is already {path_text(first)} in line {line}; {remedy}")


def quoted(value: object) -> str:
    """A value as a message shows it: short, on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        text = value if len(value) <= 60 else value[:57] + "..."
        return '"' + text.encode("unicode_escape").decode("ascii").replace('"', '\\"') + '"'
    return str(value)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The nearest known name, or "" when none is near."""
    import difflib  # only a mistake pays for it

    names = list(known)
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    if not near:  # `rotate` for `rotate_every`, `upstreams` for `upstream`
        near = [known for known in names if known.startswith(name.lower()) or name.lower().startswith(known)][:1]
    return near[0] if near else ""
