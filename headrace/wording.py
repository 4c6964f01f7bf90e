"""Numbers as people read them: ages, times, sizes."""

from __future__ import annotations


def ago(seconds: float) -> str:
    """`3 s`, `12 min`, `5.2 h`, `3.1 d`; `-` below zero."""
    if seconds < 0:
        return "-"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} d"


def span(seconds: float) -> str:
    """`0.4 ms`, `12 ms`, `1.24 s`."""
    milliseconds = seconds * 1000
    if milliseconds < 10:
        return f"{milliseconds:.1f} ms"
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else f"{seconds:.2f} s"


def counted(count: int, one: str, many: str = "") -> str:
    """`1 retry`, `2 retries`; `many` is `one` with an s unless it is given."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def size(count: int) -> str:
    """`812 B`, `1.2 KiB`, `3.4 MiB`."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    raise AssertionError("the loop returns")
