"""Fetch values that stand elsewhere: `${NAME}`, `{ file = "/path" }`, `{ credential = "name" }`.

Rules for editing: 1. what is fetched never reaches a message, only its name does; 2. a missing source is a problem, an
empty one too: a header of "Bearer " helps nobody; 3. a final newline of a file is dropped, editors add it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from config.values import Wrong

_REFERENCE = re.compile(r"\$(\$?)\{([^}]*)\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MAX_BYTES = 1024 * 1024
"""A secret or a list of addresses fits; a mistyped path to a disk image does not stop the start."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A value with where it came from: "env NAME", "file /path" or "credential name"; "" when it stands in the file."""

    value: object
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Sources:
    """The environment and the directories that values may come from. `base`: where relative paths begin."""

    environ: Mapping[str, str]
    base: Path

    def fetch(self, value: object) -> Fetched:
        """The value itself, or what it refers to. Raises `Wrong` for a source that is missing or empty."""
        if isinstance(value, str) and "${" in value:
            return self._expand(value)
        if isinstance(value, dict) and value.keys() == {"file"}:
            return self._read(self.base / Path(str(value["file"])).expanduser(), f"file {value['file']}")
        if isinstance(value, dict) and value.keys() == {"credential"}:
            return self._credential(str(value["credential"]))
        return Fetched(value)

    def _expand(self, text: str) -> Fetched:
        names: list[str] = []

        def replacement(match: re.Match[str]) -> str:
            if match[1]:  # "$${" is how a literal "${" is written
                return match[0][1:]
            names.append(match[2])
            return self._variable(match[2])

        value = _REFERENCE.sub(replacement, text)
        return Fetched(value, f"env {', '.join(names)}" if names else "")

    def _variable(self, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise Wrong("has ${...} without the name of a variable", "write ${NAME}, or $${ for a literal ${")
        if not self.environ.get(name):
            state = "is empty" if name in self.environ else "is not set"
            raise Wrong(f"refers to ${{{name}}}, which {state}", "set it in the environment of headrace")
        return self.environ[name]

    def _credential(self, name: str) -> Fetched:
        directory = self.environ.get("CREDENTIALS_DIRECTORY")
        if not directory:
            raise Wrong(
                f"refers to the credential {name}, but CREDENTIALS_DIRECTORY is not set",
                f"start headrace by systemd with LoadCredential={name}:/path, or use {{ file = ... }}",
            )
        if "/" in name or name in ("", ".", ".."):
            raise Wrong("is not the name of a credential", "a credential is a plain file name")
        return self._read(Path(directory) / name, f"credential {name}")

    def _read(self, path: Path, origin: str) -> Fetched:
        try:
            with path.open(encoding="utf-8") as file:
                text = file.read(MAX_BYTES + 1)
        except (OSError, UnicodeDecodeError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8 text"
            raise Wrong(f"refers to {origin}, which cannot be read ({reason})", "create it, or fix its mode") from exc
        if not text.strip() or len(text) > MAX_BYTES:
            raise Wrong(f"refers to {origin}, which is {'too long' if text.strip() else 'empty'}", "check its content")
        return Fetched(text.removesuffix("\n").removesuffix("\r"), origin)
