"""Show an effective configuration as TOML, each value with where it came from, and no secret.

Rules for editing: what came through `${NAME}`, `{ file = }` or `{ credential = }` is shown as the file wrote it, never as
what it became, because nobody can know which of those are secret.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from config.kinds import Kind
from config.load import Loaded
from config.reading import Origin
from config.schema import ROOT
from config.tables import Key, Table, Tables
from config.toml_lines import KeyPath, path_text


@dataclass(frozen=True, slots=True)
class Shown:
    """One effective value: its path, its plain value with secrets hidden, and its origin for people."""

    path: KeyPath
    value: object
    origin: str


def effective(loaded: Loaded) -> list[Shown]:
    """Every effective value in the schema's order."""
    return [shown for _, shown in _walk(ROOT, loaded.config, (), loaded) if shown is not None]


def as_toml(loaded: Loaded, *, origins: bool = False) -> str:
    """The whole as TOML; `origins` adds to each line the file and line, the source, or "default"."""
    lines: list[str] = []
    for header, shown in _walk(ROOT, loaded.config, (), loaded):
        if header:
            lines += ["", header] if lines else [header]
        if shown is not None:
            line = f"{_key(str(shown.path[-1]))} = {plain(shown.value)}"
            lines.append(f"{line}  # {shown.origin}" if origins else line)
    return "\n".join(lines) + "\n"


def as_json(loaded: Loaded) -> dict[str, object]:
    """Paths to values and origins, for programs."""
    return {path_text(shown.path): {"value": shown.value, "origin": shown.origin} for shown in effective(loaded)}


def _walk(table: Table, instance: object, path: KeyPath, loaded: Loaded) -> Iterator[tuple[str, Shown | None]]:
    """Headers and values. Plain keys before tables, as TOML needs it."""
    for key in table.keys:
        if not isinstance(key.kind, Table | Tables):
            yield "", _shown(key.kind, key, instance, (*path, key.name), loaded)
    for key in table.keys:
        if isinstance(key.kind, Table):
            yield f"[{_header((*path, key.name))}]", None
            yield from _walk(key.kind, key.value_in(instance), (*path, key.name), loaded)
        elif isinstance(key.kind, Tables):
            for index, element in enumerate(key.value_in(instance)):
                yield f"[[{_header((*path, key.name))}]]", None
                yield from _walk(key.kind.table, element, (*path, key.name, index), loaded)


def _shown(kind: Kind, key: Key, instance: object, path: KeyPath, loaded: Loaded) -> Shown:
    value = _as_written(kind.show(key.value_in(instance)), path, loaded.origins)
    return Shown(path, value, _origin_text(path, loaded))


def _as_written(value: object, path: KeyPath, origins: Mapping[KeyPath, Origin]) -> object:
    """The value with everything that came through a source put back to what the file says."""
    origin = origins.get(path)
    if origin is not None and origin.source and origin.written is not None:
        return origin.written
    if isinstance(value, list):
        return [_as_written(element, (*path, index), origins) for index, element in enumerate(value)]
    if isinstance(value, dict):
        return {name: _as_written(element, (*path, name), origins) for name, element in value.items()}
    return value


def _origin_text(path: KeyPath, loaded: Loaded) -> str:
    own = loaded.origins.get(path)
    below = [origin for name, origin in loaded.origins.items() if name[: len(path)] == path and name != path]
    sources = dict.fromkeys(origin.source for origin in ([own] if own else []) + below if origin.source)
    line = own.line if own and own.line else min((origin.line for origin in below if origin.line), default=0)
    place = f"{loaded.file}:{line}" if line else ""
    return " from ".join([*filter(None, [place, ", ".join(sources)])]) or "default"


def _header(path: KeyPath) -> str:
    return ".".join(_key(part) for part in path if isinstance(part, str))


def plain(value: object) -> str:
    """A TOML literal of plain types, on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(plain(element) for element in value) + "]"
    if isinstance(value, Mapping):
        pairs = [f"{_key(name)} = {plain(element)}" for name, element in value.items()]
        return "{ " + ", ".join(pairs) + " }" if pairs else "{ }"
    return f"{value:g}" if isinstance(value, float) and value.is_integer() else str(value)


def _key(name: str) -> str:
    return name if name and all(c.isascii() and (c.isalnum() or c in "_-") for c in name) else json.dumps(name)
