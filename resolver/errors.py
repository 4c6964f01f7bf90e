"""What can go wrong while a name is resolved, and what each failure knows.

Theory: a failure inside one exchange belongs to that exchange; what leaves an upstream set is `UpstreamsFailed` with a
cause for each upstream that was tried, because the text goes to the client as an extended error (RFC 8914).
Rules for editing: 1. texts are lower case and name the numbers seen; 2. never a key, a cookie or a query name from
another client.
"""

from __future__ import annotations


class ResolverError(Exception):
    """Any failure of the resolver that a caller may want to tell apart from a bug."""


class Malformed(ResolverError):
    """Bytes that are no DNS message (RFC 1035 4.1): the text says which rule broke and where."""


class UpstreamsFailed(ResolverError):
    """Nobody gave a usable answer in time.

    `causes` holds (upstream url, reason) in the order they failed; empty when there was nobody to ask.
    `ede` is the extended error for the client: 22 no reachable authority, 23 network error, 9 and 6-12 DNSSEC.
    """

    def __init__(self, causes: tuple[tuple[str, str], ...] = (), *, ede: int = 22) -> None:
        self.causes = causes
        self.ede = ede
        super().__init__("; ".join(f"{url}: {reason}" for url, reason in causes) or "no upstream to ask")


class NotBelieved(UpstreamsFailed):
    """An answer came that DNSSEC proves false. No old data stands in for it: that would hide an attack or a mistake."""


class NoAddress(ResolverError):
    """A name that cannot be dialled: `rcode` as text (NXDOMAIN, NOERROR for no data, SERVFAIL) and why."""

    def __init__(self, name: str, rcode: str, detail: str = "") -> None:
        self.name = name
        self.rcode = rcode
        self.detail = detail
        super().__init__(f"no address for {name}: {rcode}" + (f" ({detail})" if detail else ""))
