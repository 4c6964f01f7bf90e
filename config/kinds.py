"""The kinds of single values that a key may have: how each is read from TOML, and how it is shown again.

Theory: a kind reads what `tomllib` gave, at a `Spot` that takes its problems, and returns the model's value or `BAD`.
Reading never stops at a problem: the default stands in, so that one run finds them all.
Rules for editing: 1. a kind knows nothing of a certain key, bounds are its arguments; 2. every kind that may hold a
secret shows "***"; 3. what came through a source is never repeated in a problem;
4. a kind is compared with nothing: `eq` and `frozen` would cost each start a millisecond for each class (measured).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from config import values
from config.model import Listen, Secret
from config.reading import Spot, did_you_mean, quoted
from config.values import Wrong


class Bad:
    """What reading gives when the value cannot be used; its problem is noted already."""


BAD: Final = Bad()

Around = Mapping[str, Any]
"""The fields of the table around a value, as far as they are read."""


class Kind(Protocol):
    def read(self, raw: object, spot: Spot, default: Any, around: Around) -> Any:
        """The model's value, or BAD. `default`: what the key is without a value."""

    def show(self, value: Any) -> Any:
        """The value as plain TOML types, secrets hidden."""


TYPE_NAMES = {str: "a string", bool: "true or false", int: "a whole number", float: "a number"}
TYPE_NAMES |= {list: "an array", dict: "a table"}


def type_name(raw: object) -> str:
    return TYPE_NAMES.get(type(raw), "a date or time")


class Leaf:
    """A kind whose value is one TOML value, which may come through a source."""

    secret = False

    def read(self, raw: object, spot: Spot, default: Any, around: Around) -> Any:
        try:
            fetched = spot.reading.sources.fetch(raw)
        except Wrong as exc:
            spot.problem(f"the value {exc.what}; {exc.remedy}")
            return BAD
        spot.came_from(fetched.origin, raw)
        try:
            return self.parse(fetched.value, spot, fetched.origin)
        except Wrong as exc:
            hidden = "the value" if self.secret or may_hold_secret(fetched.value) else ""
            spot.wrong(exc, f"the value of {fetched.origin}" if fetched.origin else hidden or quoted(fetched.value))
            return BAD

    def parse(self, value: object, spot: Spot, source: str) -> Any:
        raise NotImplementedError

    def show(self, value: Any) -> Any:
        return value


def may_hold_secret(value: object) -> bool:
    """A URL with user name, password or query, right or wrong, is not repeated."""
    return isinstance(value, str) and ("@" in value or "?" in value)


def expect_text(value: object) -> str:
    if not isinstance(value, str):
        raise Wrong(f"is {type_name(value)}", "write a string in quotes")
    return value


@dataclass(eq=False, repr=False)
class Text(Leaf):
    """A string; `check` returns its usual form or raises Wrong. Empty is allowed where it has a meaning."""

    check: Callable[[str], str] = str
    empty: bool = True

    def parse(self, value: object, spot: Spot, source: str) -> str:
        text = expect_text(value)
        if not text:
            if not self.empty:
                raise Wrong("is empty", "give it a value")
            return ""
        return self.check(text)


class Hidden(Leaf):
    """A `Secret`. Never part of a problem, shown as "***"."""

    secret = True

    def __init__(self, check: Callable[[str], object] = str) -> None:
        self.check = check

    def parse(self, value: object, spot: Spot, source: str) -> Secret:
        text = expect_text(value)
        if text:
            self.check(text)
        return Secret(text)

    def show(self, value: Secret) -> str:
        return str(value)


@dataclass(eq=False, repr=False)
class Choice(Leaf):
    options: tuple[str, ...]

    def parse(self, value: object, spot: Spot, source: str) -> str:
        text = expect_text(value)
        if text in self.options:
            return text
        near = "" if source else did_you_mean(text, self.options)
        offer = f'did you mean "{near}"? Possible: ' if near else "use one of "
        raise Wrong("is not possible here", offer + ", ".join(f'"{option}"' for option in self.options))


class Flag(Leaf):
    def parse(self, value: object, spot: Spot, source: str) -> bool:
        if source and value in ("true", "false"):
            return value == "true"
        if not isinstance(value, bool):
            raise Wrong(f"is {type_name(value)}", "write true or false, without quotes")
        return value


@dataclass(eq=False, repr=False)
class Number(Leaf):
    """A number in bounds. `whole`: no fraction. `hint` ends the remedy."""

    low: float
    high: float
    whole: bool = True
    hint: str = ""

    def parse(self, value: object, spot: Spot, source: str) -> int | float:
        number = self._number(value, source)
        if not self.low <= number <= self.high:
            raise Wrong("is out of range", f"use {self.low:.12g} to {self.high:.12g}{self.hint}")
        return number

    def _number(self, value: object, source: str) -> int | float:
        wanted = "a whole number" if self.whole else "a number"
        if source and isinstance(value, str):
            try:
                value = int(value) if self.whole else float(value)
            except ValueError as exc:
                raise Wrong(f"is not {wanted}", "change it at its source") from exc
        if isinstance(value, int) and not isinstance(value, bool):
            return value if self.whole else float(value)
        if isinstance(value, float) and not self.whole and math.isfinite(value):
            return value
        raise Wrong(f"is {type_name(value)}", f"write {wanted}, without quotes")


@dataclass(eq=False, repr=False)
class Duration(Leaf):
    """Seconds. `below` says why less than `low` is no good; `zero` allows 0 as "none";
    `words` stand for themselves."""

    low: float = 0.0
    high: float = 366 * 86_400.0
    below: str = "is too short"
    above: str = "is too long"
    zero: bool = False
    words: tuple[str, ...] = ()

    def parse(self, value: object, spot: Spot, source: str) -> float | str:
        if isinstance(value, str) and value in self.words:
            return value
        seconds = self._seconds(value)
        if seconds == 0 and self.zero:
            return 0.0
        if seconds < self.low:
            raise Wrong(self.below, f"use at least {values.show_duration(self.low)} or remove the key")
        if seconds > self.high:
            raise Wrong(self.above, f"use at most {values.show_duration(self.high)}")
        return seconds

    def _seconds(self, value: object) -> float:
        if isinstance(value, str):
            return values.read_duration(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            if value == 0:
                return 0.0
            raise Wrong("has no unit", f'write it as a string, as in "{value:g}s"')
        raise Wrong(f"is {type_name(value)}", 'write a duration, as in "30s"')

    def show(self, value: float | str) -> str:
        return value if isinstance(value, str) else values.show_duration(value)


@dataclass(eq=False, repr=False)
class WholeSeconds(Leaf):
    """A TTL: whole seconds, at most 2^31 - 1 (RFC 2181 8)."""

    def parse(self, value: object, spot: Spot, source: str) -> int:
        seconds = Duration(high=2**31 - 1.0).parse(value, spot, source)
        if not isinstance(seconds, float) or not seconds.is_integer():
            raise Wrong("is not a whole number of seconds", "a TTL has no fractions")
        return int(seconds)

    def show(self, value: int) -> str:
        return values.show_duration(float(value))


@dataclass(eq=False, repr=False)
class OffOrDuration(Leaf):
    """Seconds, 0.0 for "off"."""

    low: float
    high: float

    def parse(self, value: object, spot: Spot, source: str) -> float:
        seconds = Duration(self.low, self.high, zero=True, words=("off",)).parse(value, spot, source)
        return seconds if isinstance(seconds, float) else 0.0

    def show(self, value: float) -> str:
        return values.show_duration(value) if value else "off"


@dataclass(eq=False, repr=False)
class Size(Leaf):
    low: int
    high: int

    def parse(self, value: object, spot: Spot, source: str) -> int:
        if not isinstance(value, str):
            raise Wrong(f"is {type_name(value)}", 'write a size with its unit, as in "64KiB"')
        size = values.read_size(value)
        if not self.low <= size <= self.high:
            raise Wrong("is out of range", f"use {values.show_size(self.low)} to {values.show_size(self.high)}")
        return size

    def show(self, value: int) -> str:
        return values.show_size(value)


@dataclass(eq=False, repr=False)
class File(Leaf):
    """A file that exists and can be read, as an absolute path; relative ones begin at the configuration's folder."""

    def parse(self, value: object, spot: Spot, source: str) -> str:
        text = expect_text(value)
        if not text:
            return ""
        path = spot.reading.sources.base / Path(text).expanduser()
        try:
            with path.open("rb"):
                pass
        except OSError as exc:
            raise Wrong(
                f"cannot be read ({exc.strerror})", "name a file that exists and that headrace may read"
            ) from exc
        return str(path)


class TrustAnchors(File):
    """A file of DS and DNSKEY records in zone-file form."""

    def parse(self, value: object, spot: Spot, source: str) -> str:
        from config import anchors  # only who names a file pays for it

        path = super().parse(value, spot, source)
        if path:
            try:
                anchors.parse(Path(path).read_bytes()[: anchors.MOST_BYTES].decode("ascii", "replace"))
            except ValueError as exc:
                raise Wrong(
                    f"does not hold trust anchors ({exc})", "write lines as in: corp.example. DS 12345 13 2 ab12..."
                ) from exc
        return path


@dataclass(eq=False, repr=False)
class Folder(Leaf):
    """An absolute path that need not exist yet; "" is the default."""

    def read(self, raw: object, spot: Spot, default: Any, around: Around) -> Any:
        return default if raw == "" else super().read(raw, spot, default, around)

    def parse(self, value: object, spot: Spot, source: str) -> Path:
        path = Path(expect_text(value)).expanduser()
        if not path.is_absolute():
            raise Wrong("is a relative path", "write it from the root, as in /var/lib/headrace")
        return path

    def show(self, value: Path) -> str:
        return str(value)


TRANSPORTS = {"udp": "UDP", "quic": "UDP", "h3": "UDP"}
"""What a listener's scheme binds; TCP for all others."""


def accept_listen(listen: Listen) -> None:
    """For listeners that may stand on any address."""


@dataclass(eq=False, repr=False)
class Address(Leaf):
    """A `Listen` whose port nobody else has; "" gives None where a listener may be left out."""

    schemes: tuple[str, ...]
    check: Callable[[Listen], None] = accept_listen
    optional: bool = False

    def parse(self, value: object, spot: Spot, source: str) -> Listen | None:
        text = expect_text(value)
        if not text and self.optional:
            return None
        listen = values.read_listen(text, self.schemes)
        self.check(listen)
        if listen.port:
            transport = TRANSPORTS.get(listen.scheme, "TCP")
            socket_name = f"{transport} {listen.host} port {listen.port}"
            spot.claim("listen", socket_name, remedy="give each listener its own port", shown=socket_name)
        return listen

    def show(self, value: Listen | None) -> str:
        return str(value or "")


@dataclass(eq=False, repr=False)
class Url(Leaf):
    """A URL that becomes several fields: (scheme, host, port, path).

    With `doh_path` it names a resolver: only DoH has a path, that one when it says none. Without, the path is a prefix.
    """

    schemes: tuple[str, ...]
    doh_path: str = ""

    def parse(self, value: object, spot: Spot, source: str) -> tuple[str, str, int, str]:
        text = expect_text(value)
        if not self.doh_path:
            scheme, host, port, path = values.read_url(text, self.schemes)
            return scheme, host, port, path.rstrip("/")
        scheme, host, port, path = values.read_url(text.removesuffix("{?dns}"), self.schemes)
        if path and scheme not in ("https", "h3"):
            raise Wrong("has a path", f"{scheme}:// ends with the host or port")
        return scheme, host, port, path or (self.doh_path if scheme in ("https", "h3") else "")

    def show(self, value: tuple[str, str, int, str]) -> str:
        return values.show_url(*value)


@dataclass(eq=False, repr=False)
class Made(Leaf):
    """A leaf whose value is made into something else, and back to be shown."""

    inner: Leaf
    make: Callable[[Any], Any]
    unmake: Callable[[Any], Any]

    def parse(self, value: object, spot: Spot, source: str) -> Any:
        return self.make(self.inner.parse(value, spot, source))

    def show(self, value: Any) -> Any:
        return self.inner.show(self.unmake(value))
