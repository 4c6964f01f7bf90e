"""Trust anchors in zone-file form, read at `check` so that nothing is started on a file that holds none."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.anchors import ROOT, by_owner, parse
from config.load import ConfigError, load

DS = "20326 8 2 " + "ab" * 32


def test_an_owner_is_followed_by_ttl_and_class_in_any_order_or_none() -> None:
    for middle in ("", "IN", "3600", "3600 IN", "IN 3600"):
        assert parse(f"Corp.Example. {middle} DS {DS}") == [("corp.example.", "DS", DS)]


def test_comments_and_empty_lines_are_no_anchors() -> None:
    assert len(parse(f"; mine\n\n. DS {DS} ; the root's\n")) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no DS"),
        (". A 192.0.2.1", "line 1 is no DS or DNSKEY"),
        (f". DS {DS}\n. DS 1 2", "line 2 is no ds record"),
        (f"{'a' * 64}. DS {DS}", "line 1"),
    ],
)
def test_what_is_no_anchor_is_told_with_its_line(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(text)


def test_the_root_keeps_the_shipped_anchors_until_the_file_has_its_own() -> None:
    island = parse(f"corp.example. DS {DS}")
    assert sorted(by_owner(island)) == [".", "corp.example."]
    assert [tag.split()[0] for _, tag in by_owner(island)["."]] == ["20326", "38696"]
    assert by_owner(parse(f". DS {DS}"))["."] == [("DS", DS)]
    assert len(parse(ROOT)) == 2


def test_a_file_without_anchors_is_a_problem_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "anchors").write_text("nothing\n")
    (tmp_path / "headrace.toml").write_text('[resolver]\ntrust_anchors = "anchors"\n')
    with pytest.raises(ConfigError, match=r"trust_anchors.*line 1 is no DS or DNSKEY"):
        load(tmp_path / "headrace.toml", {"HOME": "/home/u"})
