"""Give whole HTTP/2 answers for DNS over HTTPS by GET, known by the coded bytes of their `:path` (RFC 8484 4.1).

Theory: of a stub's request only the path changes, and of our answer only body, length and max-age. So head and body are
prepared once a name and second; what is left for each request is one look-up by bytes. The header block is written
without the moving table, and therefore serves every connection.
Owner: the gateway, which makes a new one for each configuration; `retire` ends one that connections still hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from proxy.hpack import CompressionError, read_string
from proxy.hpack_encoder import standing_block

if TYPE_CHECKING:
    from resolver.io.doh_server import DohService, Ready

MOST = 16_384
"""Answers kept, a kilobyte each at most: 16 MiB."""
LARGEST = 512


class _Prepared(NamedTuple):
    target: bytes
    ready: Ready
    whole: tuple[bytes, bytes]


class DnsShortcut:
    """`find` is what `proxy.h2_shapes` asks."""

    def __init__(self, doh: DohService | None) -> None:
        self._doh = doh
        self._prepared: dict[bytes, _Prepared] = {}

    def retire(self) -> None:
        self._doh = None
        self._prepared.clear()

    def find(self, coded_path: bytes) -> tuple[bytes, bytes] | None:
        """Header block and body, counted as served; None when it is not known, or somebody must be asked."""
        doh, prepared = self._doh, self._prepared.get(coded_path)
        if doh is None:
            return None
        if prepared is None or not doh.is_true(prepared.ready):
            prepared = self._prepare(doh, coded_path, prepared)
            if prepared is None or not doh.is_true(prepared.ready):
                return None
        return prepared.whole

    def _prepare(self, doh: DohService, coded_path: bytes, before: _Prepared | None) -> _Prepared | None:
        try:
            target = before.target if before is not None else read_string(coded_path)
        except CompressionError:
            return None
        ready = doh.ready(target)
        if ready is None or len(ready.reply.body) > LARGEST:
            return None
        reply = ready.reply
        fields = [(b":status", b"%d" % reply.status), *reply.fields, (b"content-length", b"%d" % len(reply.body))]
        if len(self._prepared) >= MOST:
            self._prepared.clear()
        prepared = _Prepared(target, ready, (standing_block(fields), reply.body))
        self._prepared[coded_path] = prepared
        return prepared
