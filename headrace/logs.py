"""Write the log: text for a terminal, JSON elsewhere, never a secret, and never in the way of traffic.

Theory: one `LogOutput` owns the stream. It writes only what the stream takes at once: a reader of stderr that stalls (a
stopped pager, a full pipe) costs lines, which are counted and said later, and not the event loop. Every line passes
`redact` as a second fence; the first is that nobody logs header values, queries or bodies.
Rules for editing: libraries that log what they parse (hpack prints header values) stay above debug.
"""

from __future__ import annotations

import json
import logging
import os
import re
import select
import time
import traceback
from collections.abc import Mapping
from functools import lru_cache

from config.model import Log

PIPE_BUF = 4096
"""A writable pipe takes this many bytes without blocking (POSIX)."""
CHATTY_LIBRARIES = ("asyncio", "aioquic", "quic", "http3", "h2", "hpack", "hypercorn", "hypercorn.error", "concurrent")
_SECRETS = re.compile(
    r"(?i)(?P<scheme>\b(?:bearer|basic|digest|negotiate)\s+)[^\s\"',;]+"
    r"|(?P<name>\b(?:(?:proxy-)?authorization|(?:set-)?cookie|x-api-key|api[-_]key|password|token|secret)"
    r"['\"]?\s*[:=]\s*b?['\"]?)[^\s\"',;]+"
    r"|(?P<key>\b(?:sk|pk|rk|xai|gsk|hf|ghp|AIza)[-_])[A-Za-z0-9_-]{6,}"
    r"|(?P<url>\b[a-z][a-z0-9+.-]*://)[^\s/@\"']+@"
    r"|(?P<query>\?)[^\s\"']*=[^\s\"']*"
)


# Every alternative of _SECRETS has one of these; most lines have none, and are spared 7 us (measured on a path).
_HINT = re.compile(
    r"[?=:@]|[bB]earer|[bB]asic|[dD]igest|[nN]egotiate|(?:sk|pk|rk|xai|gsk|hf|ghp|AIza)[-_]|BEARER|BASIC"
)


def redact(text: str) -> str:
    """The text with what looks like a credential replaced: auth schemes, key-like words, userinfo and queries of URLs."""
    return _SECRETS.sub(_starred, text) if _HINT.search(text) else text


def _starred(match: re.Match[str]) -> str:
    kept = next(group for group in match.groups() if group is not None)
    return kept + ("***@" if match.lastgroup == "url" else "***")


class LogOutput:
    """Writes whole lines to a file descriptor without ever waiting for it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self.dropped = 0

    def write(self, lines: str) -> None:
        """Lines that the stream does not take now are dropped and counted; the next that fits says how many."""
        if self.dropped and self._is_writable():
            lines = f"{self.dropped} log lines were dropped: the reader of the log was too slow\n" + lines
            self.dropped = 0
        rest = memoryview(lines.encode("utf-8", "backslashreplace"))
        while rest:
            if not self._is_writable():
                self.dropped += bytes(rest).count(b"\n")
                return
            try:
                rest = rest[os.write(self._fd, rest[:PIPE_BUF]) :]
            except OSError:  # the reader is gone, or its disk is full: traffic goes on
                self.dropped += bytes(rest).count(b"\n")
                return

    def _is_writable(self) -> bool:
        return any(events & select.POLLOUT for _, events in self._poll.poll(0))


class OutputHandler(logging.Handler):
    """Puts records through a formatter into a LogOutput."""

    def __init__(self, output: LogOutput, formatter: logging.Formatter) -> None:
        super().__init__()
        self.output = output
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.output.write(self.format(record) + "\n")
        except Exception:  # noqa: BLE001 - a log line that cannot be formatted must not end a request
            self.output.dropped += 1


class TextFormatter(logging.Formatter):
    """`12:30:01.123 warning edges: what happened key=value`; tracebacks below."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={_word(value)}" for name, value in fields_of(record).items())
        stamp = f"{time.strftime('%H:%M:%S', time.localtime(record.created))}.{int(record.msecs):03d}"
        line = f"{stamp} {record.levelname.lower():7} {short_name(record.name)}: {record.getMessage()}{fields}"
        return redact(line + _trace(record, "\n"))


class JsonFormatter(logging.Formatter):
    """One object a line: time (RFC 3339, UTC), level, logger, message, then the record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": rfc3339(record.created),
            "level": record.levelname.lower(),
            "logger": short_name(record.name),
            "message": redact(record.getMessage()),
        }
        line |= {name: redact(value) if isinstance(value, str) else value for name, value in fields_of(record).items()}
        if trace := _trace(record, ""):
            line["traceback"] = redact(trace)
        return json.dumps(line, default=lambda value: redact(str(value)), ensure_ascii=False)


def fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    """What the caller gave as `extra={"fields": {...}}`."""
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, Mapping) else {}


def short_name(name: str) -> str:
    return name.rpartition(".")[2]


def rfc3339(seconds: float) -> str:
    whole = int(seconds)
    return f"{_to_the_second(whole)}.{int((seconds - whole) * 1000):03d}Z"


@lru_cache(maxsize=4)
def _to_the_second(whole: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole))


def _word(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return json.dumps(text) if re.search(r"[\s\"=]", text) or not text else text


def _trace(record: logging.LogRecord, before: str) -> str:
    if not record.exc_info or record.exc_info[1] is None:
        return ""
    return before + "".join(traceback.format_exception(record.exc_info[1])).rstrip()


def wants_json(log: Log, fd: int) -> bool:
    return log.format == "json" or (log.format == "auto" and not os.isatty(fd))


def set_up_logging(log: Log, fd: int = 2) -> LogOutput:
    """Point the root logger at `fd`. Called again on reload: the new level and format replace the old."""
    output = LogOutput(fd)
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, OutputHandler)]:
        root.removeHandler(handler)
    root.addHandler(OutputHandler(output, JsonFormatter() if wants_json(log, fd) else TextFormatter()))
    root.setLevel(log.level.upper())
    for name in CHATTY_LIBRARIES:
        logging.getLogger(name).setLevel(logging.WARNING)
    return output
