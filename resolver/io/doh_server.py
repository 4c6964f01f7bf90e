"""Answer DNS over HTTPS without knowing which HTTP carries it (RFC 8484)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DohReply:
    """An HTTP answer: the rim adds `content-length`, and leaves the body out for HEAD."""

    status: int
    fields: list[tuple[bytes, bytes]]
    body: bytes
