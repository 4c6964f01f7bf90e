"""The README and docs/ tell the truth: commands, files and links exist; the first screen shows how to begin."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace import cli
from headrace.lab.tries import TRIES, Try

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
MAKEFILE = (ROOT / "Makefile").read_text()


def test_the_first_screen_shows_the_picture_and_the_two_commands() -> None:
    screen = "\n".join(README.splitlines()[:30])
    assert "┌" in screen
    assert "make demo" in screen
    assert "make test" in screen


def found(pattern: str) -> list[tuple[str, str]]:
    """What matches, with the page that it stands on."""
    return sorted({(page, match) for page, text in PAGES.items() for match in re.findall(pattern, text, re.MULTILINE)})


@pytest.mark.parametrize(("page", "target"), found(r"(?:`|^    )make ([a-z]+)\b"))
def test_every_make_target_exists(page: str, target: str) -> None:
    assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)


@pytest.mark.parametrize(("page", "command"), found(r"(?:`|^    |^)headrace ([a-z]+)\b"))
def test_every_command_exists(page: str, command: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0


@pytest.mark.parametrize(("page", "module"), found(r"python -m (bench \w+)"))
def test_every_bench_exists(page: str, module: str) -> None:
    name = module.split()[1]
    assert (ROOT / "bench" / f"{name}.py").exists()


@pytest.mark.parametrize("each", TRIES, ids=lambda each: each.name)
def test_the_lines_of_a_kept_demo_are_shown_word_for_word(each: Try) -> None:
    assert f"\n# {each.name}\n{each.command}\n" in README


@pytest.mark.parametrize(
    ("page", "path"), found(r"`((?:tests|config|bench|systemd|docs|proxy|resolver|headrace)/[\w./*-]+)`")
)
def test_every_file_named_exists(page: str, path: str) -> None:
    assert list(ROOT.glob(path))


@pytest.mark.parametrize(("page", "link"), found(r"\]\((?!https?:)([^)]+)\)"))
def test_every_link_leads_somewhere(page: str, link: str) -> None:
    base = ROOT if page == "README.md" else ROOT / "docs"
    path, _, heading = link.partition("#")
    text = (base / path).read_text() if (base / path).is_file() else ""
    assert (base / path).exists()
    assert not heading or heading in {anchor(line) for line in text.splitlines() if line.startswith("#")}


def anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lstrip("#").strip().lower()).replace(" ", "-")


def test_every_dependency_has_its_reason() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    block = project.split("\ndependencies = [", 1)[1].split("]", 1)[0]
    for name in re.findall(r'"([a-z0-9-]+)[>=]', block):
        assert re.search(rf"^\| [^|]*\b{name}\b", README, re.MULTILINE), f"{name} is not in the README's table"
