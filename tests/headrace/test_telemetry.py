"""Records, counters and histograms: bounded, exact, and without queries or secrets."""

from __future__ import annotations

import json
import os

from hypothesis import given
from hypothesis import strategies as st

from headrace.logs import LogOutput
from headrace.telemetry import (
    MAX_POOLS,
    MAX_SERIES_OF_POOL,
    PENDING,
    Telemetry,
    json_line,
    label_text,
    record_fields,
    text_line,
)
from proxy.waterfall import RequestRecord, Waterfall


def fall(wall_s: float) -> Waterfall:
    """queue 0.1 s, first byte after another 0.5 s, then the answer."""
    made = Waterfall(10.0)
    made.opened = made.sent = made.head = 10.1
    made.first, made.ended = 10.6, 10.0 + wall_s
    return made


def request(number: int = 1, **changes: object) -> RequestRecord:
    made = RequestRecord(
        id=f"r{number}",
        started_at=1_700_000_000.25,
        method="POST",
        host="openai.localhost",
        path="/v1/chat/completions",
        pool="openai",
        edge="direct",
        client_version="h1",
        edge_version="h2",
        status=200,
        fall=fall(0.8),
        bytes_in=100,
        bytes_out=2000,
        attempts=2,
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def metrics(telemetry: Telemetry) -> dict[str, float]:
    samples = (line.rpartition(" ") for line in telemetry.prometheus() if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


def test_the_ring_keeps_the_newest_and_gives_them_first() -> None:
    telemetry = Telemetry(ring=3)
    for number in range(5):
        telemetry.record(request(number))
    assert [record.id for record in telemetry.last(2)] == ["r4", "r3"]
    assert len(telemetry.last(100)) == 3


def test_counters_and_histograms_add_up() -> None:
    telemetry = Telemetry()
    telemetry.record(request())
    telemetry.record(request(fall=fall(700.0)))
    found = metrics(telemetry)
    assert found['headrace_requests_total{pool="openai",edge="direct",outcome="ok",status="2xx"}'] == 2
    assert found['headrace_retries_total{pool="openai"}'] == 2
    assert found['headrace_bytes_out_total{pool="openai"}'] == 4000
    assert found['headrace_request_seconds_bucket{pool="openai",le="1"}'] == 1
    assert found['headrace_request_seconds_bucket{pool="openai",le="300"}'] == 1
    assert found['headrace_request_seconds_bucket{pool="openai",le="+Inf"}'] == 2
    assert found['headrace_request_seconds_count{pool="openai"}'] == 2
    assert found['headrace_first_byte_seconds_bucket{pool="openai",le="0.5"}'] == 0
    assert found['headrace_first_byte_seconds_bucket{pool="openai",le="1"}'] == 2


def test_the_number_of_series_is_bounded() -> None:
    telemetry = Telemetry()
    for number in range(MAX_SERIES_OF_POOL + 50):
        telemetry.record(request(edge=f"e{number}"))
    found = metrics(telemetry)
    series = [name for name in found if name.startswith("headrace_requests_total")]
    assert len(series) == MAX_SERIES_OF_POOL + 1
    assert found['headrace_requests_total{pool="openai",edge="other",outcome="ok",status="2xx"}'] == 50


def test_the_number_of_pools_is_bounded() -> None:
    telemetry = Telemetry()
    for number in range(MAX_POOLS + 5):
        telemetry.record(request(pool=f"p{number}"))
    found = metrics(telemetry)
    assert found['headrace_requests_total{pool="other",edge="direct",outcome="ok",status="2xx"}'] == 5


def test_labels_are_escaped() -> None:
    assert label_text((("a", 'x"y\\z\n'),)) == '{a="x\\"y\\\\z\\n"}'


def test_a_request_is_shown_with_parts_that_sum_to_the_whole() -> None:
    fields = record_fields(request())
    assert fields["time"] == "2023-11-14T22:13:20.250Z"
    parts = fields["parts"]
    assert isinstance(parts, dict)
    assert abs(sum(parts.values()) - float(str(fields["wall_s"]))) < 1e-9


def test_both_forms_of_a_line_say_what_happened_and_hide_keys() -> None:
    record = request(outcome="edge lost", detail="Bearer sk-canary123456 refused")
    assert json.loads(json_line(record))["level"] == "warning"
    assert "canary" not in json_line(record) + text_line(record)
    assert "POST openai/direct /v1/chat/completions 200 edge lost 800 ms" in text_line(record)
    assert text_line(record).endswith("h1>h2 retries=1 (Bearer *** refused)")


def test_pending_lines_are_announced_once_written_together_and_bounded() -> None:
    telemetry = Telemetry()
    announced: list[int] = []
    telemetry.on_pending = lambda: announced.append(1)
    for number in range(PENDING + 7):
        telemetry.record(request(number))
    assert announced == [1]
    assert telemetry.unlogged == 7
    reader, writer = os.pipe()
    telemetry._pending[:] = telemetry._pending[:2]
    telemetry.flush_log(LogOutput(writer), as_json=True)
    os.close(writer)
    with os.fdopen(reader) as lines:
        assert [json.loads(line)["id"] for line in lines] == ["r0", "r1"]
    telemetry.record(request())
    assert announced == [1, 1]


def test_nothing_waits_for_the_log_when_requests_are_not_logged() -> None:
    telemetry = Telemetry()
    telemetry.log_requests = False
    telemetry.record(request())
    assert not telemetry._pending


@given(st.text(), st.text(), st.sampled_from(["ok", "edge lost"]))
def test_a_line_is_one_line_of_json_whatever_the_client_sent(path: str, detail: str, outcome: str) -> None:
    record = request(path=path, host=path, detail=detail, outcome=outcome, usage={"output_tokens": 3})
    fields = json.loads(json_line(record))
    expected = record_fields(record)
    assert {name: fields[name] for name in fields.keys() & expected.keys()} == {
        name: expected[name] for name in fields.keys() & expected.keys()
    }
    assert "\n" not in json_line(record) + text_line(request(path=path))
