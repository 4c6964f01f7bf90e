"""Turn headrace.toml into a `Config`, or say everything that is wrong with it in one go.

Where a value comes from: the file, through `${NAME}`, `{ file = }` or `{ credential = }` where it says so, else the
default. Without any file the resolver and two pools are served, as `config/example.toml` spells out; a file that names
no [[pool]] has no pool, because what is written is what is served. A file without [[resolver.upstream]] still has the
default upstreams: a resolver that asks nobody would be of no use.
Nothing here opens a socket or writes a file.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from config.effect import note_no_effect
from config.model import Config
from config.reading import Origin, Problem, Reading, Spot
from config.schema import DEFAULT_POOLS, ROOT
from config.sources import Sources
from config.toml_lines import KeyPath, find_positions

MAX_FILE_BYTES = 16 * 1024 * 1024


class ConfigError(Exception):
    """The configuration cannot be used; `problems` has every reason, in the file's order."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A usable configuration, with what may be said about it. `file` is None for the defaults."""

    config: Config
    file: Path | None = None
    notes: tuple[Problem, ...] = ()
    origins: Mapping[KeyPath, Origin] = field(default_factory=dict)


def load(file: Path | None, environ: Mapping[str, str]) -> Loaded:
    """The configuration of a file, or the defaults for None. Raises ConfigError."""
    if file is None:
        return Loaded(default_config(environ), None, (), _state_dir_origin({}, environ))
    return load_text(read_text(file), str(file), environ, base=file.absolute().parent)


def default_config(environ: Mapping[str, str]) -> Config:
    blank: Config = ROOT.blank
    return replace(blank, state_dir=default_state_dir(environ), pools=DEFAULT_POOLS)


def load_text(
    text: str,
    name: str,
    environ: Mapping[str, str],
    *,
    base: Path,
) -> Loaded:
    """`name` stands in messages; relative file names begin at `base`."""
    raw = _parse(text, name)
    reading = Reading(name, find_positions(text), Sources(environ, base))
    spot = Spot(reading)
    config: Config = ROOT.read(raw, spot, replace(ROOT.blank, state_dir=default_state_dir(environ)), {})
    if reading.problems:
        raise ConfigError(_in_order(reading.problems))
    note_no_effect(raw, spot)
    origins = reading.origins | _state_dir_origin(reading.origins, environ)
    return Loaded(config, Path(name), tuple(_in_order(reading.notes)), origins)


def read_text(file: Path) -> str:
    """The file's text. Raises ConfigError when it cannot be read."""
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError([_at_start(file, f"is longer than {MAX_FILE_BYTES} bytes; name the right file")])
        return content.decode("utf-8")
    except OSError as exc:
        raise ConfigError([_at_start(file, f"cannot be read ({exc.strerror}); check its name and mode")]) from exc
    except UnicodeDecodeError as exc:
        line = exc.object[: exc.start].count(b"\n") + 1
        problem = Problem(str(file), line, 1, "", f"is not UTF-8 at byte {exc.start}; save it as UTF-8")
        raise ConfigError([problem]) from exc


def find_file(named: str | None, environ: Mapping[str, str]) -> Path | None:
    """The file to load: `named`, $HEADRACE_CONFIG, the user's, the system's; None when there is none.

    The first two are returned whether they exist or not: a name that was given and is not there is a mistake.
    """
    if named or environ.get("HEADRACE_CONFIG"):
        return Path(named or environ["HEADRACE_CONFIG"]).expanduser()
    home = environ.get("XDG_CONFIG_HOME") or (f"{environ['HOME']}/.config" if environ.get("HOME") else "")
    candidates = [Path(home, "headrace", "headrace.toml")] if home else []
    candidates.append(Path("/etc/headrace/headrace.toml"))
    return next((path for path in candidates if path.is_file()), None)


def default_state_dir(environ: Mapping[str, str]) -> Path:
    """$STATE_DIRECTORY (systemd; its first, if many), $XDG_STATE_HOME/headrace, else ~/.local/state/headrace."""
    if environ.get("STATE_DIRECTORY"):
        return Path(environ["STATE_DIRECTORY"].split(":")[0])
    if environ.get("XDG_STATE_HOME"):
        return Path(environ["XDG_STATE_HOME"], "headrace")
    return Path(environ.get("HOME") or Path.home(), ".local", "state", "headrace")


def _state_dir_origin(origins: Mapping[KeyPath, Origin], environ: Mapping[str, str]) -> dict[KeyPath, Origin]:
    if ("state_dir",) in origins:
        return {}
    names = ("STATE_DIRECTORY", "XDG_STATE_HOME")
    source = next((f"env {name}" for name in names if environ.get(name)), "")
    return {("state_dir",): Origin(0, source)} if source else {}


def _parse(text: str, name: str) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError([_syntax_problem(str(exc), text, name)]) from exc
    except RecursionError as exc:
        raise ConfigError([Problem(name, 1, 1, "", "is nested too deeply; flatten it")]) from exc


def _syntax_problem(message: str, text: str, name: str) -> Problem:
    """tomllib says where at the end of its message: "(at line 3, column 9)" or "(at end of document)"."""
    match = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", message)
    what = message[: match.start()] if match else message
    lines = text.replace("\r\n", "\n").split("\n")
    line = int(match[1]) if match and match[1] else len(lines)
    column = int(match[2]) if match and match[2] else len(lines[-1]) + 1
    return Problem(name, line, column, "", f"not TOML: {what[:1].lower()}{what[1:]}; mend the syntax")


def _at_start(file: Path, text: str) -> Problem:
    return Problem(str(file), 1, 1, "", text)


def _in_order(problems: Sequence[Problem]) -> list[Problem]:
    return sorted(problems, key=lambda problem: (problem.line, problem.column))
