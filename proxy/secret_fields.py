"""Say which fields carry secrets, and which of these a header compression table may keep all the same.

Theory: what is in a table answers guesses (RFC 7541 7.1, RFC 9204 7.1): whoever can send requests over the same connection
and see the size of what leaves learns whether a value was guessed whole. So secrets are never-indexed literals, which also
binds every hop behind us (RFC 7541 6.2.3), and a value that came to us as one leaves as one: `NeverIndexed`.

One kind is let in, towards edges only. An API key is most of a request's head (58 characters of `Bearer` take 46 bytes in
Huffman code, a project key of 171 takes 135) and goes out with each request of an SDK. A guess has to hit the whole of it: with
32 characters drawn at random that is hopeless, and RFC 7541 7.1.3 asks for the literal where a value is "not protected by
its entropy" or its sender wants it. So a key may be indexed when it is long, looks drawn at random, and its client did not ask
otherwise: HTTP/1.1 cannot ask, and our own configuration does not. Basic credentials hold a password that somebody chose,
cookies may hold anything: neither is ever indexed. Measured with it: the six fields of a
second chat request (host, accept, user-agent, a 79-character authorization, content-type, content-length) take 12 bytes over
h2 and h3 alike, of 143 the first time.

Rules for editing: a new secret name goes into SECRET; nothing is let in by name alone.
"""

from __future__ import annotations

from proxy.messages import NeverIndexed

SECRET = frozenset({
    b"authorization", b"proxy-authorization", b"cookie", b"set-cookie", b"api-key", b"x-api-key", b"x-goog-api-key",
    b"sec-websocket-protocol", b"x-amz-security-token", b"x-csrf-token",
})  # fmt: skip
KEYS = frozenset({b"authorization", b"api-key", b"x-api-key", b"x-goog-api-key"})
BEARER = b"bearer "
SHORTEST_KEY = 32
"""Characters: 128 bits even when they are hexadecimal."""
FEWEST_DIFFERENT = 12
"""Of them; 32 random hexadecimal digits have fewer in one case of 100 and stay literals then."""


def may_be_indexed(name: bytes, value: bytes) -> bool:
    """Whether the table of a connection to an edge may keep this secret; see the module's argument."""
    if name not in KEYS or isinstance(value, NeverIndexed):
        return False
    if name == b"authorization":
        if value[: len(BEARER)].lower() != BEARER:
            return False
        value = value[len(BEARER) :]
    return len(value) >= SHORTEST_KEY and b" " not in value and len(set(value)) >= FEWEST_DIFFERENT
