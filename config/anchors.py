"""Read trust anchors: the DS and DNSKEY records, in zone-file form, at which DNSSEC's chains of trust begin.

Theory: a file names an owner in each line, so that it may hold the root's keys, an island of trust (RFC 4033 2) or both.
Only what we could ever verify with counts as an anchor: a line that is anything else is a mistake worth telling.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

ROOT = """\
. IN DS 20326 8 2 E06D44B80B8F1D39A95C0B0D7C65D08458E880409BBC683457104237C7F8EC8D
. IN DS 38696 8 2 683D2D0ACB8C9B712A1948B27F741219298D0A450D612C483AF444A4C0FB2B16
"""
"""The root zone's anchors as of https://data.iana.org/root-anchors/root-anchors.xml: KSK-2017, and KSK-2024 (published
2024-07-18), which signs from October 2026 on."""

MOST_BYTES = 1024 * 1024

Anchor = tuple[str, str, str]
"""Owner (absolute, lower case), DS or DNSKEY, and the record in presentation form."""


def parse(text: str) -> list[Anchor]:
    """The anchors of a zone-file text. Raises ValueError with the line that is none, or when there is not one."""
    found = [anchor for number, line in enumerate(text.splitlines(), 1) for anchor in _line(number, line)]
    if not found:
        raise ValueError("holds no DS or DNSKEY record")
    return found


def _line(number: int, line: str) -> Iterator[Anchor]:
    import dns.exception  # only those who name a file pay for it
    import dns.name
    import dns.rdata

    words = line.split(";")[0].split()
    if not words:
        return
    owner, *rest = words
    while rest and (rest[0].isdigit() or rest[0].upper() == "IN"):  # TTL and class may stand in either order
        del rest[0]
    kind = rest[0].upper() if rest else ""
    if kind not in ("DS", "DNSKEY"):
        raise ValueError(f"line {number} is no DS or DNSKEY record")
    try:
        name = dns.name.from_text(owner).canonicalize().to_text()
        dns.rdata.from_text("IN", kind, " ".join(rest[1:]))
    except (dns.exception.DNSException, ValueError) as exc:
        raise ValueError(f"line {number} is no {kind} record ({exc})".lower()) from exc
    yield name, kind, " ".join(rest[1:])


def by_owner(anchors: list[Anchor]) -> Mapping[str, list[tuple[str, str]]]:
    """(type, record) of each owner. The root's anchors of ours stand unless the list has some of its own."""
    found: dict[str, list[tuple[str, str]]] = {}
    for owner, kind, record in anchors:
        found.setdefault(owner, []).append((kind, record))
    if "." not in found:
        found["."] = [(kind, record) for _, kind, record in parse(ROOT)]
    return found
