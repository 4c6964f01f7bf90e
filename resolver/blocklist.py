"""Read lists of names to block, in the three syntaxes people have, and match names against them.

    0.0.0.0 ads.example          a hosts line: exactly that name
    ads.example                  a name on a line: exactly that name
    ||ads.example^               the name and all below it, by whole labels
    *.ads.example                all below it
    @@||ok.ads.example^          an exception: it wins over every block

Theory: a million names must load in seconds and cost little, so they are kept as dotted bytes in sets; a look-up walks
the name's suffixes. Rules with `$` options, paths or patterns mean something to a browser that a resolver cannot know:
they are skipped and counted, never half obeyed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from resolver import wire as w

_HOSTS_ADDRESSES = {"0.0.0.0", "127.0.0.1", "::", "::1", "fe80::1%lo0", "255.255.255.255", "ff02::1", "ff02::2"}  # noqa: S104
_OWN_NAMES = {
    "localhost",
    "localhost.localdomain",
    "local",
    "broadcasthost",
    "ip6-localhost",
    "ip6-loopback",
    "0.0.0.0",  # noqa: S104 - a name in lists, not an address to bind
}
_COMMENT = re.compile(r"\s#.*")
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*\Z")


@dataclass(slots=True)
class Blocklist:
    """Names to block. `skipped` counts the lines that were rules we do not have."""

    exact: set[bytes] = field(default_factory=set)
    below: set[bytes] = field(default_factory=set)  # these names' children
    allowed: set[bytes] = field(default_factory=set)
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.exact) + len(self.below)

    def add_lines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._add(line)

    def _add(self, line: str) -> None:
        rule = line.strip("\ufeff \t\r\n").lower()
        if not rule or rule[0] in "#!" or rule.startswith("["):
            return
        # A comment stands behind white space: `example.com##.ad` is a rule for a browser, not the name before it.
        words = _COMMENT.sub("", rule).split()
        if len(words) > 1 and words[0] in _HOSTS_ADDRESSES:
            for name in words[1:]:
                self._add_name(name, self.exact)
        elif len(words) == 1:
            self._add_rule(words[0])
        else:
            self.skipped += 1

    def _add_rule(self, rule: str) -> None:
        if rule.startswith("@@||") and rule.endswith("^"):
            self._add_name(rule[4:-1], self.allowed)
        elif rule.startswith("||") and rule.endswith("^"):
            self._add_name(rule[2:-1], self.exact, self.below)
        elif rule.startswith("*."):
            self._add_name(rule[2:], self.below)
        else:
            self._add_name(rule, self.exact)

    def _add_name(self, name: str, *places: set[bytes]) -> None:
        name = name.removesuffix(".")
        if name in _OWN_NAMES:
            return
        if not _NAME.match(name):
            try:
                name = name.encode("idna").decode() if not name.isascii() else ""
            except UnicodeError:
                name = ""
        if not name:
            self.skipped += 1
            return
        for place in places:
            place.add(name.encode())

    def blocks(self, name: bytes) -> bool:
        """Whether a name (lower case, wire form) is blocked: all types of it are, or none."""
        if not self.exact and not self.below:
            return False
        dotted = w.name_to_text(name)[:-1].encode()
        parents = [dotted[at:] for at in _label_starts(dotted)]
        blocked = dotted in self.exact or any(parent in self.below for parent in parents[1:])
        return blocked and not any(parent in self.allowed for parent in parents)


def _label_starts(dotted: bytes) -> list[int]:
    starts = [0]
    while at := dotted.find(b".", starts[-1]) + 1:
        starts.append(at)
    return starts
