"""The log: redaction, both forms, and a reader that does not read."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator

import pytest

from config.model import Log
from headrace.logs import (
    CHATTY_LIBRARIES,
    PIPE_BUF,
    JsonFormatter,
    LogOutput,
    TextFormatter,
    redact,
    set_up_logging,
    wants_json,
)

CANARY = "sk-canary0123456789"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    yield reader, writer
    for fd in (reader, writer):
        os.close(fd)


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {CANARY}",
        f"('authorization', b'{CANARY}')".replace("', b'", "': b'"),
        f"x-api-key={CANARY}",
        f"api_key: '{CANARY}'",
        f"https://user:{CANARY}@host/path",
        f"GET /v1/realtime?model=x&key={CANARY} failed",
        f"token = {CANARY}",
        f"cookie: session={CANARY}",
        f"the key {CANARY} was refused",
        f"openai-insecure-api-key.{CANARY}",
    ],
)
def test_what_looks_like_a_credential_is_hidden(text: str) -> None:
    assert "canary" not in redact(text)
    assert "***" in redact(text)


@pytest.mark.parametrize("text", ["edge a1: connection refused", "/v1/chat/completions 200", "https://api.test/v1", ""])
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert redact(text) == text


def record(message: str, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("headrace.edges", logging.WARNING, __file__, 1, message, (), None)
    made.fields = fields
    return made


def test_json_lines_hold_the_fields_and_no_secret() -> None:
    line = json.loads(JsonFormatter().format(record("edge down", edge="a", seconds=1.5, key=f"Bearer {CANARY}")))
    assert (line["level"], line["logger"], line["message"]) == ("warning", "edges", "edge down")
    assert (line["edge"], line["seconds"], line["key"]) == ("a", 1.5, "Bearer ***")


def test_a_traceback_is_logged_without_secrets() -> None:
    made = record("failed")
    exc = ValueError(f"x-api-key: {CANARY}")
    made.exc_info = (ValueError, exc, exc.__traceback__)
    for formatter in (JsonFormatter(), TextFormatter()):
        line = formatter.format(made)
        assert "ValueError" in line
        assert "canary" not in line


def test_text_lines_quote_what_has_spaces() -> None:
    assert 'warning edges: edge down why="a b" n=1.5' in TextFormatter().format(record("edge down", why="a b", n=1.5))


def test_a_reader_that_does_not_read_costs_lines_and_no_time(pipe: tuple[int, int]) -> None:
    # given a pipe that is full
    reader, writer = pipe
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BUF)
    os.write(writer, b"x" * PIPE_BUF)
    output = LogOutput(writer)
    # when two lines are written, they are dropped at once
    output.write("one\ntwo\n")
    assert output.dropped == 2
    # then, once the reader reads, the next line says so
    assert len(os.read(reader, 65536)) == PIPE_BUF
    output.write("three\n")
    assert os.read(reader, 65536).endswith(
        b"2 log lines were dropped: the reader of the log was too slow\nthree\n",
    )


def test_a_reader_that_is_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    output = LogOutput(writer)
    output.write("lost\n")
    assert output.dropped == 1
    os.close(writer)


def test_auto_is_json_when_nobody_looks(pipe: tuple[int, int]) -> None:
    assert wants_json(Log(), pipe[1])
    assert not wants_json(Log(format="text"), pipe[1])


def test_libraries_that_print_header_values_stay_quiet_at_debug(pipe: tuple[int, int]) -> None:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        set_up_logging(Log("debug", "json"), pipe[1])
        set_up_logging(Log("debug", "json"), pipe[1])
        logging.getLogger("hpack.hpack").debug("Decoded (b'authorization', b'%s')", CANARY)
        logging.getLogger("headrace.edges").debug("here")
        lines = os.read(pipe[0], 65536).splitlines()
        assert [json.loads(line)["message"] for line in lines] == ["here"]
        assert "hpack" in CHATTY_LIBRARIES
    finally:
        root.handlers[:], _ = handlers, root.setLevel(level)
