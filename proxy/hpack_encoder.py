"""Encode header lists as RFC 7541 says: what goes into the peer's table, and how little is said of what is there.

Theory: on a warm connection nearly every field is one dictionary look-up: 6 us for 20 fields seen before, where the `hpack`
package, the oracle in the tests, takes 34. What is put into the table decides how well it works:
  never     secrets: a never-indexed literal, so that no hop may index them and no length can be probed (7.1.3), but
            for keys that are safe by their entropy, towards edges (`proxy.secret_fields`);
  volatile  ids, dates, lengths, limits that count down: a plain literal, they would push the useful entries out;
  stable    names whose values repeat: inserted at first sight;
  unknown   inserted at second sight, so that an id under a name we do not know stays out by itself.

Rules for editing: 1. a new secret name goes into `secret_fields` first; 2. every memo has a bound.
"""

from __future__ import annotations

from collections import deque

from proxy.hpack import DEFAULT_TABLE_BYTES, ENTRY_OVERHEAD, KNOWN_LIMIT, MEMO_LIMIT, make_room, prefixed
from proxy.hpack_tables import STATIC, Field, huffman_encode
from proxy.messages import NAME, NeverIndexed
from proxy.secret_fields import SECRET, may_be_indexed

VOLATILE = frozenset({
    b"content-length", b"content-range", b"date", b"age", b"etag", b"last-modified", b"expires", b"if-none-match",
    b"if-modified-since", b"range", b"location", b"retry-after", b"retry-after-ms", b"x-request-id", b"request-id",
    b"x-client-request-id", b"idempotency-key", b"traceparent", b"tracestate", b"cf-ray", b"server-timing",
    b"openai-processing-ms", b"x-envoy-upstream-service-time", b"x-ratelimit-remaining-requests",
    b"x-ratelimit-remaining-tokens", b"x-ratelimit-reset-requests", b"x-ratelimit-reset-tokens",
})  # fmt: skip
STABLE = frozenset({
    b":authority", b":path", b":method", b":scheme", b":status", b":protocol", b"accept", b"accept-encoding",
    b"accept-language", b"user-agent", b"content-type", b"content-encoding", b"cache-control", b"server", b"vary", b"via",
    b"alt-svc", b"te", b"expect", b"origin", b"referer", b"anthropic-version", b"anthropic-beta", b"openai-version",
    b"openai-organization", b"strict-transport-security", b"x-content-type-options", b"access-control-allow-origin",
    b"access-control-expose-headers", b"access-control-allow-credentials", b"x-accel-buffering", b"x-forwarded-for",
    b"x-forwarded-proto", b"x-forwarded-host", b"forwarded", b"sec-websocket-version", b"sec-websocket-extensions",
})  # fmt: skip

_SIGHT_LIMIT = 128  # fields remembered as seen once, and memoised literals, of one encoder
_KEYS_AT_FIRST_SIGHT = 2
_MAX_ENTRY_SHARE = 4  # one entry may take a quarter of the table


def _coded(text: bytes) -> bytes:
    """A string literal in the shorter of its two forms (RFC 7541 5.2)."""
    packed = huffman_encode(text)
    if len(packed) < len(text):
        return prefixed(len(packed), 0x7F, 0x80) + packed
    return prefixed(len(text), 0x7F, 0) + text


_plain_names: dict[tuple[bytes, int], bytes] = {}


def _plain_name(name: bytes, pattern: int) -> bytes:
    """The start of a literal that is not indexed, name included (RFC 7541 6.2.2, 6.2.3)."""
    start = _plain_names.get((name, pattern))
    if start is None:
        index = _STATIC_NAMES.get(name, 0)
        start = prefixed(index, 0x0F, pattern) + (b"" if index else _coded(name))
        make_room(_plain_names, MEMO_LIMIT)
        _plain_names[(name, pattern)] = start
    return start


def plain_literal(name: bytes, value: bytes) -> bytes:
    """A literal for a value that will not come again: Huffman would save a third of its bytes, for 10 us of 60."""
    return _plain_name(name, 0) + (bytes((len(value),)) if len(value) < 0x7F else prefixed(len(value), 0x7F, 0)) + value


_STATIC_FIELDS: dict[Field, bytes] = {field: bytes((0x81 + at,)) for at, field in enumerate(STATIC) if field[1]}
_STATIC_NAMES: dict[bytes, int] = {}
for _at, (_name, _) in enumerate(STATIC):
    _STATIC_NAMES.setdefault(_name, _at + 1)
_INDEXED: list[bytes] = [prefixed(index, 0x7F, 0x80) for index in range(62 + DEFAULT_TABLE_BYTES // ENTRY_OVERHEAD)]


class Encoder:
    """The sending table of one connection; never larger than 4096 bytes, whatever the peer allows."""

    __slots__ = (
        "_at", "_bytes", "_count", "_indexes_keys", "_keys", "_limit", "_literals", "_order", "_resized", "_seen_once",
        "standing",
    )  # fmt: skip

    def __init__(self, *, indexes_keys: bool = False) -> None:
        self._indexes_keys = indexes_keys
        # Apart from the others: the same bytes are looked up in it only when their sender allows it.
        self._keys: dict[Field, int] = {}
        self._at: dict[Field, int] = {}  # field -> how many were inserted before it
        self._order: deque[Field] = deque()  # newest right
        self._count = 0
        self._bytes = 0
        self._limit = DEFAULT_TABLE_BYTES
        self._resized: list[int] = []
        self._seen_once: dict[Field, None] = {}
        self._literals: dict[Field, bytes] = {}
        self.standing: dict[object, bytes] = {}

    def limit_table(self, table_bytes: int) -> None:
        """The peer's SETTINGS_HEADER_TABLE_SIZE; said back at the start of the next block (RFC 7541 4.2)."""
        limit = min(table_bytes, DEFAULT_TABLE_BYTES)
        if limit == self._limit and not self._resized:
            return
        # Two changes between blocks: the smallest must be said too, it is the one that evicted.
        self._resized = [min([*self._resized, limit]), limit] if self._resized else [limit]
        self._limit = limit
        self._evict()

    @property
    def is_resized(self) -> bool:
        """Whether the next block must begin with a table size (RFC 7541 4.2)."""
        return bool(self._resized)

    def encode(self, fields: list[Field]) -> bytes:
        """One header block. Names are in lower case already."""
        pieces = [self._size_updates()] if self._resized else []
        static, dynamic, literals = _STATIC_FIELDS, self._at, self._literals
        for field in fields:
            piece = static.get(field)
            if piece is None:
                inserted = dynamic.get(field)
                if inserted is not None:
                    piece = _INDEXED[61 + self._count - inserted]
                else:
                    piece = literals.get(field)
                    if piece is None:
                        piece = self._literal(field)
            pieces.append(piece)
        return b"".join(pieces)

    def encode_standing(self, key: object, fields: list[Field]) -> bytes:
        """As encode(); `key` stands for the same fields each time, and once the table no longer moves by them the block is
        in `standing` for as long as the table stands."""
        resized, before = bool(self._resized), (self._count, len(self._seen_once))
        block = self.encode(fields)
        # A field that was seen once must be seen for the second time, or it would never come into the table.
        is_settled = not resized and before == (self._count, len(self._seen_once))
        if is_settled and SECRET.isdisjoint(map(NAME, fields)):
            make_room(self.standing, KNOWN_LIMIT)
            self.standing[key] = block
        return block

    def _size_updates(self) -> bytes:
        updates = b"".join(prefixed(size, 0x1F, 0x20) for size in dict.fromkeys(self._resized))
        self._resized = []
        return updates

    def _literal(self, field: Field) -> bytes:
        name, value = field
        if name in SECRET or isinstance(value, NeverIndexed):
            return self._secret(field)
        if self._is_passing(name, value):
            return plain_literal(name, value)
        if name not in STABLE and self._is_first_sight(field):
            return _plain_name(name, 0) + _coded(value)
        return self._inserted(field, self._at)

    def _secret(self, field: Field) -> bytes:
        name, value = field
        literal = _plain_name(name, 0x10) + _coded(value)
        if not (self._indexes_keys and may_be_indexed(name, value)) or self._is_passing(name, value):
            return self._remember(field, literal)
        inserted = self._keys.get(field)
        if inserted is not None:
            return _INDEXED[61 + self._count - inserted]
        # A workstation has a few keys. Where there are many, one must come again before it pushes useful entries out.
        if len(self._keys) >= _KEYS_AT_FIRST_SIGHT and self._is_first_sight(field):
            return literal
        return self._inserted(field, self._keys)

    def _inserted(self, field: Field, table: dict[Field, int]) -> bytes:
        name, value = field
        index = _STATIC_NAMES.get(name, 0)
        self._insert(field, table)
        return prefixed(index, 0x3F, 0x40) + (b"" if index else _coded(name)) + _coded(value)

    def _is_passing(self, name: bytes, value: bytes) -> bool:
        """Never worth an entry: it will not come again, or would take too much of the table."""
        too_large = (len(name) + len(value) + ENTRY_OVERHEAD) * _MAX_ENTRY_SHARE > self._limit
        # A query may carry a key (`?key=`) and seldom repeats.
        return name in VOLATILE or too_large or (name == b":path" and b"?" in value)

    def _is_first_sight(self, field: Field) -> bool:
        if field in self._seen_once:
            del self._seen_once[field]
            return False
        make_room(self._seen_once, _SIGHT_LIMIT)
        self._seen_once[field] = None
        return True

    def _remember(self, field: Field, piece: bytes) -> bytes:
        # An SDK sends one key all day, a server one date a second. The literal names static entries only, so it stays
        # right as the table moves.
        make_room(self._literals, _SIGHT_LIMIT)
        self._literals[field] = piece
        return piece

    def _insert(self, field: Field, table: dict[Field, int]) -> None:
        table[field] = self._count
        self._count += 1
        self._order.append(field)
        self._bytes += len(field[0]) + len(field[1]) + ENTRY_OVERHEAD
        self._evict()

    def _evict(self) -> None:
        self.standing.clear()
        while self._bytes > self._limit:
            field = self._order.popleft()
            if self._at.pop(field, None) is None:
                del self._keys[field]
            self._bytes -= len(field[0]) + len(field[1]) + ENTRY_OVERHEAD


def standing_block(fields: list[Field]) -> bytes:
    """A header block that names no entry of the moving table: the same bytes serve every connection, again and again."""
    pieces = []
    for name, value in fields:
        indexed = _STATIC_FIELDS.get((name, value))
        pieces.append(indexed if indexed is not None else _plain_name(name, 0) + _coded(value))
    return b"".join(pieces)
