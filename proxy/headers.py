"""Rewrite the fields that must change between two hops, and no others.

Theory: hop-by-hop fields never get here (the HTTP/1.1 codec takes them out, the other versions have none). What is left to
do: say who the client was only as far as we know it (RFC 7239 8.1: what an untrusted peer claims is replaced), say that we
were here (Via, RFC 9110 7.6.3), put in the fields that an edge's configuration sets, and keep from the client what is about
our connection to the edge (Alt-Svc, RFC 7838) or would harm every other service on its loopback (HSTS for `localhost`).

Rules for editing: 1. order and repeats of all other fields stay; 2. a field added here counts against the 512 bytes that we
may add to a message.
"""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

from proxy.messages import Fields, RequestHead, ResponseHead, without

FORWARDING = frozenset({
    b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-forwarded-port", b"x-forwarded-server",
    b"x-real-ip", b"via",
})  # fmt: skip
PROXY_ONLY = frozenset({b"proxy-authorization", b"proxy-authenticate", b"proxy-connection"})
NOT_FOR_CLIENTS = frozenset({b"alt-svc", b"proxy-connection", b"proxy-authenticate"})
NOT_FOR_LOOPBACK = NOT_FOR_CLIENTS | {b"strict-transport-security"}
VIA_NAME = b"headrace"
VIA = {"h1": b"1.1 headrace", "h2": b"2.0 headrace", "h3": b"3.0 headrace"}
MAX_VIA_HOPS = 8
"""Passing ourselves more often than this is a loop: workstation and edge are two hops, a fleet may add some."""

Network = IPv4Network | IPv6Network


def networks(texts: tuple[str, ...]) -> tuple[Network, ...]:
    """The trusted proxies as networks; single addresses become networks of one."""
    return tuple(ip_network(text, strict=False) for text in texts)


def is_trusted(peer: str, trusted: tuple[Network, ...]) -> bool:
    """Whether the forwarding fields of this peer are believed."""
    if not trusted or not peer:
        return False
    address = ip_address(peer.partition("%")[0])
    return any(address in network for network in trusted if network.version == address.version)


def is_loop(fields: Fields) -> bool:
    """Whether Via says that the request came through this program too often."""
    return sum(value.count(VIA_NAME) for name, value in fields if name == b"via") >= MAX_VIA_HOPS


def is_last_hop(head: RequestHead) -> bool:
    """Whether the client wants the answer of the first who gets this (RFC 9110 7.6.2)."""
    return head.method == b"OPTIONS" and head.get(b"max-forwards") == b"0"


def _one_hop_less(fields: Fields) -> Fields:
    return [
        (name, b"%d" % (int(value) - 1))
        if name == b"max-forwards" and value.isdigit() and len(value) < 10
        else (name, value)
        for name, value in fields
    ]


def request_fields(
    head: RequestHead, *, peer: str, scheme: bytes, trusted: tuple[Network, ...], version: str, edge_fields: Fields
) -> Fields:
    """The fields to send to an edge. `edge_fields`: lower-case names; they replace what the client sent by that name.

    `scheme`: of the listener. The client's own word (h2's `:scheme`, an absolute target) is no better than a forwarding
    field of its making.
    """
    believed = is_trusted(peer, trusted)
    dropped = PROXY_ONLY if believed else FORWARDING | PROXY_ONLY
    if edge_fields:
        dropped = dropped.union(name for name, _ in edge_fields)
    fields = without(head.fields, dropped)
    if believed:
        fields = _join_forwarding(fields, peer, scheme, trusted, head)
    else:
        fields += (
            (b"x-forwarded-for", peer.encode()),
            (b"x-forwarded-proto", scheme),
            (b"x-forwarded-host", head.authority),
        )
    fields.append((b"via", VIA[version]))
    if head.method == b"OPTIONS":
        fields = _one_hop_less(fields)
    fields += edge_fields
    return fields


def _join_forwarding(
    fields: Fields, peer: str, scheme: bytes, trusted: tuple[Network, ...], head: RequestHead
) -> Fields:
    """A trusted peer's account is kept as far as trusted peers gave it, and the peer itself is added to it."""
    chain = [*_believed_chain(fields, trusted), peer.encode()]
    fields = [field for field in fields if field[0] != b"x-forwarded-for"]
    fields.append((b"x-forwarded-for", b", ".join(chain)))
    present = {name for name, _ in fields}
    if b"x-forwarded-proto" not in present:
        fields.append((b"x-forwarded-proto", scheme))
    if b"x-forwarded-host" not in present:
        fields.append((b"x-forwarded-host", head.authority))
    return fields


def _believed_chain(fields: Fields, trusted: tuple[Network, ...]) -> list[bytes]:
    """The end of X-Forwarded-For that trusted peers wrote: from the first address, counted from the right, that is not one
    of theirs. What stands left of it is what that client claimed (RFC 7239 8.1)."""
    said = b",".join(value for name, value in fields if name == b"x-forwarded-for")
    chain = [part for raw in said.split(b",") if (part := raw.strip(b" \t"))]
    for at in range(len(chain) - 1, -1, -1):
        if not is_trusted(_address(chain[at]), trusted):
            return chain[at:]
    return chain


def _address(word: bytes) -> str:
    """The address in an element of X-Forwarded-For, with or without a port; "" for `unknown` or an obfuscated name."""
    text = word.decode("latin-1")
    if text[:1] == "[":
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        return str(ip_address(text))
    except ValueError:
        return ""


def client_of(peer: str, fields: Fields, trusted: tuple[Network, ...]) -> str:
    """The address of whoever asks: the peer, or behind trusted proxies the one that they speak for."""
    if not is_trusted(peer, trusted):
        return peer
    chain = _believed_chain(fields, trusted)
    return (_address(chain[0]) if chain else "") or peer


LENGTH = frozenset({b"content-length"})
"""Not in a 204 (RFC 9110 8.6): there is no body, and a client that believes the length waits for one."""


def response_fields(head: ResponseHead, *, server_timing: bytes, loopback: bool) -> Fields:
    """The fields to send to a client. An edge's own Server-Timing stays; ours is one more."""
    dropped = NOT_FOR_LOOPBACK if loopback else NOT_FOR_CLIENTS
    fields = without(head.fields, dropped)
    if head.status == 204:
        fields = without(fields, LENGTH)
    if server_timing:
        fields.append((b"server-timing", server_timing))
    return fields
