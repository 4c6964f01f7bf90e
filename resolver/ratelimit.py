"""Hold each client address to its rate of queries: a bucket that fills with time."""

from __future__ import annotations

from collections import OrderedDict
from ipaddress import IPv6Address

MOST_CLIENTS = 8192


class RateLimit:
    """`per_s` queries a second for each address, a second's worth at once; the client longest silent is forgotten first.

    An IPv6 host has its /64 to itself and can change address for each query, so the /64 is the client (RFC 6177).
    """

    def __init__(self, per_s: int) -> None:
        self._per_s = float(per_s)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens left, when

    def __len__(self) -> int:
        return len(self._buckets)

    def admits(self, client: str, now: float) -> bool:
        """Whether one more query of this address is within its rate; it is counted when it is."""
        key = client if "." in client else IPv6Address(client.partition("%")[0]).packed[:8].hex()
        tokens, at = self._buckets.get(key, (self._per_s, now))
        tokens = min(self._per_s, tokens + (now - at) * self._per_s)
        admitted = tokens >= 1
        self._buckets[key] = (tokens - 1 if admitted else tokens, now)
        self._buckets.move_to_end(key)
        if len(self._buckets) > MOST_CLIENTS:
            self._buckets.popitem(last=False)
        return admitted
