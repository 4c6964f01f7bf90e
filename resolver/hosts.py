"""Answer the names that the user's own words define: hosts files and `[[resolver.record]]`.

Theory: a name that is written down here is answered here for *all* types: a name with an A record only has no AAAA and
no HTTPS record, and asking upstream for those would leak the name and let a public answer slip in beside the local one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

from config.model import Record
from resolver import wire as w
from resolver.answer import LONGEST_CHAIN, Answer, Rr, compose
from resolver.question import Question

HOSTS_TTL_S = 60
_LOCALHOST = w.name_from_text("localhost")
_STAR = b"\1*"


def soa(owner: bytes, ttl_s: int = HOSTS_TTL_S) -> Rr:
    """The SOA of an answer of our own without data: clients may keep it, and not for long (RFC 2308 3)."""
    times = b"".join(n.to_bytes(4, "big") for n in (1, 3600, 600, 86_400, ttl_s))
    return Rr(owner, w.SOA, ttl_s, w.name_from_text("localhost") + w.name_from_text("nobody.invalid") + times)


def reverse_name(address: IPv4Address | IPv6Address) -> bytes:
    return w.name_from_text(address.reverse_pointer)


class LocalNames:
    """What hosts files and records say, by name and type; records win over hosts lines of the same name and type."""

    def __init__(self, hosts: Iterable[str] = (), records: Sequence[Record] = ()) -> None:
        self._names: dict[bytes, dict[int, list[Rr]]] = {}
        for record in records:
            self._add_record(record)
        written = {(name, kind) for name, types in self._names.items() for kind in types}
        for text in hosts:
            self._read_hosts(text, written)
        self._has_wildcards = any(name.startswith(_STAR) for name in self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _add_record(self, record: Record) -> None:
        """Raises ValueError when the record is none."""
        import dns.exception  # most configurations have no records, and start 25 ms sooner
        import dns.name
        import dns.rdata

        try:
            owner = (dns.name.from_text(record.name).to_wire() or b"").lower()
            rdata = dns.rdata.from_text("IN", record.type, record.value, origin=dns.name.root, relativize=False)
        except dns.exception.DNSException as exc:
            raise ValueError(f"record {record.name} {record.type}: {exc or type(exc).__name__}") from exc
        rr = Rr(owner, int(rdata.rdtype), record.ttl_s, rdata.to_wire() or b"")
        self._names.setdefault(owner, {}).setdefault(rr.type, []).append(rr)

    def _read_hosts(self, text: str, written: set[tuple[bytes, int]]) -> None:
        """Lines that are no hosts lines are passed over, as every libc does."""
        for line in text.splitlines():
            words = line.split("#", 1)[0].split()
            if len(words) > 1:
                self._add_host(words[0], words[1:], written)

    def _add_host(self, address_text: str, names: list[str], written: set[tuple[bytes, int]]) -> None:
        try:
            address = ip_address(address_text.split("%", 1)[0])
            owners = [w.name_from_text(name) for name in names]
        except ValueError:
            return
        kind = w.A if address.version == 4 else w.AAAA
        for owner in owners:
            # `localhost` is fixed by RFC 6761 6.3; a hosts file with only its IPv4 line must not hide ::1.
            if _LOCALHOST not in w.suffixes(owner) and (owner, kind) not in written:
                self._add_once(Rr(owner, kind, HOSTS_TTL_S, address.packed))
        pointer = reverse_name(address)
        if (pointer, w.PTR) not in written and pointer not in self._names:
            self._add_once(Rr(pointer, w.PTR, HOSTS_TTL_S, owners[0]))

    def _add_once(self, rr: Rr) -> None:
        known = self._names.setdefault(rr.owner, {}).setdefault(rr.type, [])
        if rr not in known:
            known.append(rr)

    def answer(self, question: Question) -> Answer | None:
        """The answer, None when the name is not written here. A local CNAME that leaves gives an `unfinished` one."""
        name = question.name
        if name not in self._names and not self._has_wildcards:
            return None
        chain: list[Rr] = []
        while len(chain) < LONGEST_CHAIN:
            types = self._types(name)
            if types is None:
                break
            if question.type in types:
                return compose(question, w.NOERROR, [*chain, *(rr._replace(owner=name) for rr in types[question.type])])
            if w.CNAME not in types:
                return compose(question, w.NOERROR, chain, [soa(name)])
            alias = types[w.CNAME][0]
            chain.append(alias._replace(owner=name))
            name = alias.rdata
        if not chain:
            return None
        return _unfinished(compose(question, w.NOERROR, chain), w.name_at(name, 0))

    def _types(self, name: bytes) -> dict[int, list[Rr]] | None:
        """The records at a name, or at `*` of its closest parent that has one (RFC 4592 without its corners)."""
        exact = self._names.get(name)
        if exact is not None or not self._has_wildcards:
            return exact
        parents = w.suffixes(name)
        next(parents)
        return next((types for parent in parents if (types := self._names.get(_STAR + parent))), None)


def _unfinished(answer: Answer, target: bytes) -> Answer:
    return Answer(answer.wire, answer.ttl_at, 0, answer.rcode, unfinished=target)
