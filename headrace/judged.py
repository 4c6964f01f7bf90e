"""Remember that the local certificate was judged good, so that a start need not load what reads certificates.

Theory: loading X.509 takes a fifth of a start (45 ms), and finds nearly always what it found the time before. So `trust`
writes its judgement down beside the files: for which bytes it holds, for which names, and from when to when. Any other
byte, mode, name, time or list of system roots makes it void, and `trust` judges anew. A judgement is believed no more
than the files themselves: it lies in the same folder, and must be as private.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.state import write_private

FILE = "judged.json"
KEYS = ("ca-key.pem", "server.pem")
MAX_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Judgement:
    """`asked`: the hosts and addresses that were asked for; `names`: the host names in the certificate.

    Times are seconds of the epoch; `good_until` leaves the time that a renewal wants.
    """

    asked: tuple[str, ...]
    names: tuple[str, ...]
    good_from: float
    good_until: float


def recall(folder: Path, asked: Sequence[str], *, now: float) -> Judgement | None:
    """What was judged of the files in `folder` (the CA's), if it holds now and for the names that are asked for."""
    try:
        kept = json.loads(_private_bytes(folder / FILE))
        roots = Path(kept.pop("roots"))
        seal = kept.pop("seal")
        found = Judgement(tuple(kept.pop("asked")), tuple(kept.pop("names")), **kept)
        holds = found.asked == tuple(asked) and found.good_from <= now < found.good_until
        return found if holds and seal == _seal(folder, roots) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def remember(folder: Path, judgement: Judgement, *, roots: Path) -> None:
    """Write it down for the files as they are: call it with the folder's lock held. A full disk costs time only."""
    with suppress(OSError):
        kept = {**asdict(judgement), "roots": str(roots), "seal": _seal(folder, roots)}
        write_private(folder / FILE, json.dumps(kept))


def _seal(folder: Path, roots: Path) -> str:
    """A digest of every file that was judged. The long lists of roots count by size and time. Raises OSError."""
    digest = hashlib.sha256()
    for content in (*(_private_bytes(folder / name) for name in KEYS), (folder / "ca.pem").read_bytes()):
        digest.update(hashlib.sha256(content).digest())
    for listed in (folder / "bundle.pem", roots):
        seen = listed.stat()
        digest.update(f"{seen.st_size} {seen.st_mtime_ns} ".encode())
    return digest.hexdigest()


def _private_bytes(path: Path) -> bytes:
    """Raises OSError, also when others could read the file or have written it."""
    if path.stat().st_mode & 0o077:
        raise PermissionError(f"{path} is not for its owner alone")
    with path.open("rb") as file:
        return file.read(MAX_BYTES)
