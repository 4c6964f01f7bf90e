"""Turn address and HTTPS records into places to dial, in the order to dial them (RFC 9460, RFC 8305)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a host can be reached.

    `addresses` alternate between IPv6 and IPv4, IPv6 first (RFC 8305 4), never empty. `port` is the one asked for unless
    the HTTPS record names another. `alpn` holds what the record promises, best first, without the default `http/1.1`
    unless listed; empty when there is no usable record. `ttl_s` is the smallest of all that was used.
    """

    addresses: tuple[str, ...]
    port: int
    alpn: tuple[str, ...]
    ttl_s: float
