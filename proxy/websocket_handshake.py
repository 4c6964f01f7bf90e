"""The key and its answer in the opening handshake of HTTP/1.1 (RFC 6455 4), which HTTP/2 and HTTP/3 do without (RFC 8441 5).

Theory: the key proves nothing but that both ends mean WebSocket. Where both legs speak h1 it passes through, and the edge's
own answer with it. Where only one does, the rim on that side plays the missing part.
"""

from __future__ import annotations

import binascii
import hashlib
from base64 import b64decode, b64encode
from dataclasses import replace

from proxy.messages import RequestHead, ResponseHead

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


def accept_of(key: bytes) -> bytes:
    """The Sec-WebSocket-Accept that answers a key."""
    return b64encode(hashlib.sha1(key + GUID, usedforsecurity=False).digest())


def is_key(value: bytes | None) -> bool:
    """Whether a value is 16 bytes in base64."""
    try:
        return value is not None and len(b64decode(value, validate=True)) == 16
    except binascii.Error:
        return False


def with_key(head: RequestHead, nonce: bytes) -> RequestHead:
    """The request of a client that has no key, with one; `nonce`: 16 bytes that nobody can foresee."""
    return replace(head, fields=[*head.fields, (b"sec-websocket-key", b64encode(nonce))])


def accepted(head: ResponseHead, key: bytes) -> ResponseHead:
    """An edge's acceptance for an h1 client that sent `key`. An h1 edge's has an Upgrade field and is the edge's own, right or
    wrong; an h2 edge's has none of this."""
    if head.get(b"upgrade") is not None:
        return head
    return replace(head, fields=[(b"upgrade", b"websocket"), (b"sec-websocket-accept", accept_of(key)), *head.fields])
