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


_EXACT, _BELOW, _ALLOWED = 1, 2, 4

# Nearly every line of nearly every list: a hosts line of one name, a bare name, or a whole domain. One match tells, in a
# third of the time that splitting takes; whatever else there is goes the long way.
_USUAL = re.compile(
    r"(?:(?:0\.0\.0\.0|127\.0\.0\.1)[ \t]+|(\|\|))?([a-z0-9_-]+(?:\.[a-z0-9_-]+)+)(\^)?[ \t]*(?:[ \t]#.*)?\r?\n?\Z"
)


@dataclass(slots=True)
class Blocklist:
    """Names to block. `skipped` counts the lines that were rules we do not have.

    One dictionary from dotted names to what is said of them: a set for each kind would hold most names twice.
    """

    names: dict[bytes, int] = field(default_factory=dict)
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.names)

    def add_lines(self, lines: Iterable[str]) -> None:
        names, usual = self.names, _USUAL.match
        for line in lines:
            found = usual(line.lower())
            if found is None or bool(found[1]) != bool(found[3]) or found[2] in _OWN_NAMES or _is_address(found[2]):
                self._add(line)
                continue
            name = found[2].encode()
            names[name] = names.get(name, 0) | (_EXACT | _BELOW if found[1] else _EXACT)

    def _add(self, line: str) -> None:
        rule = line.strip("\ufeff \t\r\n").lower()
        if not rule or rule[0] in "#!" or rule.startswith("["):
            return
        # A comment stands behind white space: `example.com##.ad` is a rule for a browser, not the name before it.
        words = _COMMENT.sub("", rule).split()
        if len(words) > 1 and words[0] in _HOSTS_ADDRESSES:
            for name in words[1:]:
                self._add_name(name, _EXACT)
        elif len(words) == 1:
            self._add_rule(words[0])
        else:
            self.skipped += 1

    def _add_rule(self, rule: str) -> None:
        if rule.startswith("@@||") and rule.endswith("^"):
            self._add_name(rule[4:-1], _ALLOWED)
        elif rule.startswith("||") and rule.endswith("^"):
            self._add_name(rule[2:-1], _EXACT | _BELOW)
        elif rule.startswith("*."):
            self._add_name(rule[2:], _BELOW)
        else:
            self._add_name(rule, _EXACT)

    def _add_name(self, name: str, kind: int) -> None:
        name = name.removesuffix(".")
        if name in _OWN_NAMES:
            return
        if not name.isascii():
            name = _in_ascii(name)
        if not _NAME.match(name) or _is_address(name):
            self.skipped += 1
            return
        self.names[name.encode()] = self.names.get(name.encode(), 0) | kind

    def blocks(self, name: bytes) -> bool:
        """Whether a name (lower case, wire form) is blocked: all types of it are, or none."""
        if not self.names:
            return False
        dotted = w.name_to_text(name)[:-1].encode()
        said, parents = self.names.get(dotted, 0), 0
        at = 0
        while at := dotted.find(b".", at) + 1:
            parents |= self.names.get(dotted[at:], 0)
        return not (said | parents) & _ALLOWED and bool(said & _EXACT or parents & _BELOW)


def _in_ascii(name: str) -> str:
    try:
        return name.encode("idna").decode()
    except UnicodeError:
        return ""


def _is_address(name: str) -> bool:
    """A line of only an address is a list of something else: no name's last label is a number."""
    return name[-1:].isdigit() and name.rpartition(".")[2].isdigit()
