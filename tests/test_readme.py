"""The README tells the truth: its commands exist, its files exist, its first screen shows how to begin."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace import cli
from headrace.lab.tries import TRIES, Try

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def test_the_first_screen_shows_the_picture_and_the_two_commands() -> None:
    screen = "\n".join(README.splitlines()[:30])
    assert "┌" in screen
    assert "make demo" in screen
    assert "make test" in screen


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\bmake ([a-z]+)\b", README)) - {"it"}))
def test_every_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)


@pytest.mark.parametrize(
    "command", sorted(set(re.findall(r"\bheadrace ([a-z]+)\b", README)) - {"again", "is", "costs"})
)
def test_every_command_exists(command: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0


@pytest.mark.parametrize("each", TRIES, ids=lambda each: each.name)
def test_the_lines_of_a_kept_demo_are_shown_word_for_word(each: Try) -> None:
    assert f"\n# {each.name}\n{each.command}\n" in README


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:tests|config|bench|systemd|docs)/[\w./-]+)`", README))))
def test_every_file_named_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([\w./-]+)\)", README))))
def test_every_link_leads_somewhere(path: str) -> None:
    assert (ROOT / path).exists()


def test_every_dependency_has_its_reason() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    block = project.split("\ndependencies = [", 1)[1].split("]", 1)[0]
    for name in re.findall(r'"([a-z0-9-]+)[>=]', block):
        assert re.search(rf"^\| [^|]*\b{name}\b", README, re.MULTILINE), f"{name} is not in the README's table"
