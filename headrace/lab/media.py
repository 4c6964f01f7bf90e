"""Files, pictures and sounds of the OpenAI API, made from what was sent alone, so that every edge answers the same.

Theory: an id or a reply holds the digest of the bytes that came, and what is downloaded follows from the id. Nothing is kept.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.lab.asgi import Exchange, compact
from headrace.lab.prompt import Refused

CREATED = 1_700_000_000
PIECE = 32 * 1024
_BOUNDARY = re.compile(r'multipart/form-data; *boundary="?([^";]+)')
_NAME = re.compile(rb'\bname="([^"]*)"')
_FILENAME = re.compile(rb'\bfilename="([^"]*)"')
_FILE_ID = re.compile(r"/v1/files/(file-([0-9a-f]{16})-(\d{1,9}))(/content)?")
_PNG = bytes.fromhex("89504e470d0a1a0a")


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a form. `filename` "" for a plain value."""

    filename: str
    content: bytes

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.content).hexdigest()[:16]


def form(exchange: Exchange) -> dict[str, Part]:
    """The parts of a multipart/form-data body by name (RFC 7578); raises Refused."""
    boundary = _BOUNDARY.match(exchange.headers.get("content-type", ""))
    if boundary is None:
        raise Refused(400, "invalid_request_error", "expected multipart/form-data")
    mark = b"--" + boundary[1].encode()
    pieces = (b"\r\n" + exchange.body).split(b"\r\n" + mark)
    if len(pieces) < 3 or not pieces[-1].startswith(b"--"):
        raise Refused(400, "invalid_request_error", "the form does not end")
    return dict(_parts(pieces[1:-1]))


def _parts(pieces: list[bytes]) -> Iterator[tuple[str, Part]]:
    for piece in pieces:
        head, _, content = piece.partition(b"\r\n\r\n")
        name, filename = _NAME.search(head), _FILENAME.search(head)
        if name is None:
            raise Refused(400, "invalid_request_error", "a part of the form has no name")
        yield name[1].decode(), Part(filename[1].decode() if filename else "", content)


def pattern(seed: str, size: int) -> bytes:
    """`size` bytes that follow from the seed."""
    block = b"".join(hashlib.sha256(f"{seed} {number}".encode()).digest() for number in range(128))
    return (block * (size // len(block) + 1))[:size]


async def answer(exchange: Exchange) -> bool:
    """Answer a call of this family; False for any other. Raises Refused."""
    call = _CALLS.get((exchange.method, exchange.path))
    if call is not None:
        await call(exchange)
        return True
    found = _FILE_ID.fullmatch(exchange.path)
    if found is None:
        return False
    await _on_file(exchange, found[1], int(found[3]), is_content=bool(found[4]))
    return True


async def _on_file(exchange: Exchange, file_id: str, size: int, *, is_content: bool) -> None:
    if exchange.method == "DELETE":
        await exchange.respond(200, compact({"id": file_id, "object": "file", "deleted": True}))
    elif is_content:
        await exchange.respond(200, pattern(file_id, size), "application/octet-stream")
    else:
        await exchange.respond(200, compact(_file(file_id, size, "sent.bin", "assistants")))


def _file(file_id: str, size: int, name: str, purpose: str) -> dict[str, object]:
    about = {"id": file_id, "object": "file", "bytes": size, "created_at": CREATED, "status": "processed"}
    return about | {"filename": name, "purpose": purpose}


async def _upload(exchange: Exchange) -> None:
    parts = form(exchange)
    if "file" not in parts or "purpose" not in parts:
        raise Refused(400, "invalid_request_error", "a file and its purpose are needed")
    sent = parts["file"]
    size = len(sent.content)
    made = _file(f"file-{sent.digest}-{size}", size, sent.filename, parts["purpose"].content.decode())
    await exchange.respond(200, compact(made))


async def _draw(exchange: Exchange) -> None:
    prompt = str(json.loads(exchange.body).get("prompt", ""))
    await _pictures(exchange, prompt)


async def _redraw(exchange: Exchange) -> None:
    parts = form(exchange)
    await _pictures(exchange, "".join(part.digest for _, part in sorted(parts.items())))


async def _pictures(exchange: Exchange, seed: str) -> None:
    picture = base64.b64encode(_PNG + pattern(seed, 300_000)).decode()
    await exchange.respond(200, compact({"created": CREATED, "data": [{"b64_json": picture}]}))


async def _speak(exchange: Exchange) -> None:
    """A sound in pieces, as it is made: no length is known at its start."""
    sound = pattern(str(json.loads(exchange.body).get("input", "")), 8 * PIECE)
    await exchange.begin_bytes("audio/mpeg")
    for at in range(0, len(sound), PIECE):
        await exchange.event(sound[at : at + PIECE])
    await exchange.end_stream()


async def _hear(exchange: Exchange) -> None:
    sound = form(exchange)["file"]
    await exchange.respond(
        200, compact({"text": f"{sound.filename} of {len(sound.content)} bytes sounds {sound.digest}"})
    )


_CALLS = {
    ("POST", "/v1/files"): _upload,
    ("POST", "/v1/images/generations"): _draw,
    ("POST", "/v1/images/edits"): _redraw,
    ("POST", "/v1/audio/speech"): _speak,
    ("POST", "/v1/audio/transcriptions"): _hear,
}
