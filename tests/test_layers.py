"""Imports go down only, and the root files of `resolver/` and `proxy/` decide without a clock, a socket or a loop."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ["config", "resolver", "proxy", "headrace"]  # lowest first
IMPURE = {
    "asyncio",
    "ssl",
    "socket",
    "selectors",
    "time",
    "random",
    "os",
    "logging",
    "threading",
    "subprocess",
    "uvloop",
    "secrets",
}


def modules(package: str) -> Iterator[Path]:
    yield from sorted((ROOT / package).rglob("*.py"))


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Every absolute module name that a file imports, with its line; relative ones are made absolute."""
    here = path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: -node.level]) if node.level else ""
            yield node.lineno, ".".join(part for part in (base, node.module) if part)


ALL = [pytest.param(path, id=str(path.relative_to(ROOT))) for layer in LAYERS for path in modules(layer)]


@pytest.mark.parametrize("path", ALL)
def test_imports_go_down_only(path: Path) -> None:
    own = LAYERS.index(path.relative_to(ROOT).parts[0])
    for line, name in imported(path):
        top = name.split(".")[0]
        assert top not in LAYERS or LAYERS.index(top) <= own, f"{path}:{line} imports {name}, a higher layer"


PURE = [
    pytest.param(path, id=str(path.relative_to(ROOT)))
    for package in ("resolver", "proxy")
    for path in sorted((ROOT / package).glob("*.py"))
]


@pytest.mark.parametrize("path", PURE)
def test_root_files_are_pure(path: Path) -> None:
    for line, name in imported(path):
        assert name.split(".")[0] not in IMPURE, f"{path}:{line} imports {name}: only io/ may"
        assert ".io" not in name, f"{path}:{line} imports {name}: a decision must not know its rim"


def test_root_files_exist() -> None:
    assert len(PURE) > 4, "the purity rule is checked against nothing"


def test_every_package_file_says_its_reason_first() -> None:
    silent = [
        p
        for layer in LAYERS
        for p in modules(layer)
        if p.read_text().strip() and not ast.get_docstring(ast.parse(p.read_text()))
    ]
    assert not silent, f"no module docstring: {[str(p.relative_to(ROOT)) for p in silent]}"
