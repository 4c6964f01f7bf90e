"""The small parts of HTTP/3 on the wire: integers, frames, settings, and the QPACK lines that we write or count ourselves.

Rules for editing: 1. pure functions of bytes; 2. each has its oracle in `tests/proxy/h3/test_h3_frames.py`.
"""

from __future__ import annotations

from aioquic.buffer import encode_uint_var

from proxy.hpack import prefixed
from proxy.io.quic_codes import FRAME_ERROR, SETTINGS_ERROR, ConnectionFault
from proxy.messages import Fields, NeverIndexed
from proxy.secret_fields import SECRET, may_be_indexed

SETTING_TABLE_CAPACITY, SETTING_SECTION_SIZE, SETTING_BLOCKED, SETTING_CONNECT = 0x1, 0x6, 0x7, 0x8
HTTP2_SETTINGS = frozenset({0x0, 0x2, 0x3, 0x4, 0x5})  # RFC 9114 7.2.4.1

LONGEST_STRING = 65_535
"""What the decoder holds in one name or value; Huffman coding packs eight characters into five bytes at best."""
LITERAL_ABOVE = 4096
"""Longer values are written as plain literals: they would flush the table, and the encoder takes none of 64 KiB."""


def frame(kind: int, payload: bytes) -> bytes:
    """One frame; kinds and lengths below 64 take one byte each."""
    size = len(payload)
    if size < 64 and kind < 64:
        return bytes((kind, size)) + payload
    return encode_uint_var(kind) + encode_uint_var(size) + payload


def read_varint(block: bytes, at: int) -> tuple[int, int] | None:
    """(value, next position) of the integer of RFC 9000 16 at a position, None when it is not whole yet."""
    if at >= len(block):
        return None
    first = block[at]
    size = 1 << (first >> 6)
    if at + size > len(block):
        return None
    if size == 1:
        return first, at + 1
    return int.from_bytes(block[at : at + size], "big") & ((1 << (8 * size - 2)) - 1), at + size


def count_lines(section: bytes) -> int:
    """How many field lines a section holds (RFC 9204 4.5), without decoding one; IndexError when it is cut short."""

    def skip_integer(at: int, prefix: int) -> tuple[int, int]:
        top = (1 << prefix) - 1
        value = section[at] & top
        at += 1
        if value < top:
            return value, at
        shift = 0
        while True:
            byte = section[at]
            value += (byte & 0x7F) << shift
            shift += 7
            at += 1
            if byte < 0x80 or shift > 62:
                return value, at

    def skip_string(at: int, prefix: int) -> int:
        size, at = skip_integer(at, prefix)
        return at + size

    at = skip_integer(skip_integer(0, 8)[1], 7)[1]
    lines = 0
    while at < len(section):
        kind = section[at]
        if kind & 0x80:
            at = skip_integer(at, 6)[1]
        elif kind & 0x40:
            at = skip_string(skip_integer(at, 4)[1], 7)
        elif kind & 0x20:
            at = skip_string(skip_string(at, 3), 7)
        elif kind & 0x10:
            at = skip_integer(at, 4)[1]
        else:
            at = skip_string(skip_integer(at, 3)[1], 7)
        lines += 1
    return lines


STATIC_NAMES = {b"authorization": 84, b"cookie": 5, b"set-cookie": 14}  # RFC 9204 appendix A


def never_indexed(fields: Fields) -> bytes:
    """Literal lines with the N bit (RFC 9204 4.5.4, 4.5.6): no table, here or at a hop behind, may keep these."""
    out = bytearray()
    for name, value in fields:
        index = STATIC_NAMES.get(name)
        out += prefixed(len(name), 0x07, 0x30) + name if index is None else prefixed(index, 0x0F, 0x70)
        out += prefixed(len(value), 0x7F, 0) + value
    return bytes(out)


def is_literal(field: tuple[bytes, bytes], *, indexes_keys: bool) -> bool:
    """Whether a field is kept away from the encoder. Pseudo-fields are not: they must come first."""
    name, value = field
    if name in SECRET or isinstance(value, NeverIndexed):
        return not (indexes_keys and may_be_indexed(name, value))
    return len(value) > LITERAL_ABOVE and name[:1] != b":"


def parse_settings(payload: bytes) -> dict[int, int]:
    """SETTINGS as a mapping; raises ConnectionFault (RFC 9114 7.2.4)."""
    settings: dict[int, int] = {}
    at = 0
    while at < len(payload):
        key = read_varint(payload, at)
        value = read_varint(payload, key[1]) if key is not None else None
        if key is None or value is None:
            raise ConnectionFault(FRAME_ERROR, "SETTINGS is cut short")
        if key[0] in HTTP2_SETTINGS or key[0] in settings:
            raise ConnectionFault(SETTINGS_ERROR, f"setting {key[0]:#x} is reserved or repeated")
        settings[key[0]], at = value
    if settings.get(SETTING_CONNECT, 0) > 1:
        raise ConnectionFault(SETTINGS_ERROR, "SETTINGS_ENABLE_CONNECT_PROTOCOL is neither 0 nor 1")
    return settings
