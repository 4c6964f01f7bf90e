"""Write a line for each query, where somebody turned that on: a diary of what people look at, so it is off by default.

Theory: everything in a line but the client's address is read from the reply, so the quick paths need not keep the query.
`domains` names only the last two labels and the client's network, which tells what is wrong with a service and little of
who reads what. Names are escaped as in a zone file: no byte of a query reaches a terminal or breaks a line.
"""

from __future__ import annotations

import logging
from ipaddress import ip_address, ip_network

from resolver import wire as w

log = logging.getLogger("headrace.queries")

FROM_MEMORY = "memory"


class QueryLog:
    """`detail`: `names` or `domains`."""

    def __init__(self, detail: str) -> None:
        self._whole = detail == "names"

    def __call__(self, transport: str, client: str, reply: bytes, source: str = "") -> None:
        """One answered query. `source` empty: from memory, by a path that does not say more."""
        if len(reply) < w.HEADER + 5 or reply[4:6] != b"\0\1":
            return  # a query that could not be read has no name
        name = w.name_at(reply, w.HEADER)
        rdtype = int.from_bytes(reply[w.HEADER + len(name) :][:2])
        fields = {
            "transport": transport,
            "client": client if self._whole else _network(client),
            "name": w.name_to_text(name) if self._whole else _domain(name),
            "type": w.type_to_text(rdtype),
            "rcode": w.rcode_to_text(reply[3] & 15),
            "source": source or FROM_MEMORY,
            "bytes": len(reply),
        }
        log.info("query", extra={"fields": fields})


def _domain(name: bytes) -> str:
    """The last two labels, with a star for what stood before them."""
    parents = list(w.suffixes(name))
    if len(parents) <= 3:  # at most two labels and the root
        return w.name_to_text(name)
    return "*." + w.name_to_text(parents[-3])


def _network(client: str) -> str:
    try:
        address = ip_address(client.split("%", 1)[0])
    except ValueError:
        return ""
    if address.is_loopback:
        return str(address)
    return str(ip_network(f"{address}/{24 if address.version == 4 else 48}", strict=False))
