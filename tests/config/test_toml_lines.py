"""Positions of keys and values in a TOML text."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.show import plain
from config.toml_lines import KeyPath, Position, find_positions, path_text

TEXT = '''
# a comment = "with a value"
top = 1   # and after it
dotted.one."two.three" = true

[table]
text = """
[not.a.header]
key = "no" """
raw = \'\'\'it's # here\'\'\'
list = [
  "a", # first
  { x = 1, y = [2, 3] },
]

[[pool]]
name = "first"
[pool.llm]
cache = "off"
  [[pool.edge]]
  url = 'https://[::1]:1'
  [[pool.edge]]
  url = "with \\" = # quote"
  after = { }
[[pool]]
  hedge = { after = "0s", budget = 0.1 }
  [[pool.edge]]
  id = "x"
'''

CASES: list[tuple[KeyPath, tuple[int, int], tuple[int, int] | None]] = [
    (("top",), (3, 1), (3, 7)),
    (("dotted",), (4, 1), None),
    (("dotted", "one", "two.three"), (4, 12), (4, 26)),
    (("table",), (6, 1), None),
    (("table", "text"), (7, 1), (7, 8)),
    (("table", "raw"), (10, 1), (10, 7)),
    (("table", "list", 0), (12, 3), (12, 3)),
    (("table", "list", 1, "y"), (13, 12), (13, 16)),
    (("table", "list", 1, "y", 1), (13, 20), (13, 20)),
    (("pool", 0), (16, 1), None),
    (("pool", 0, "llm", "cache"), (19, 1), (19, 9)),
    (("pool", 0, "edge", 0, "url"), (21, 3), (21, 9)),
    (("pool", 0, "edge", 1, "url"), (23, 3), (23, 9)),
    (("pool", 0, "edge", 1, "after"), (24, 3), (24, 11)),
    (("pool", 1), (25, 1), None),
    (("pool", 1, "hedge", "after"), (26, 13), (26, 21)),
    (("pool", 1, "edge", 0, "id"), (28, 3), (28, 8)),
]


@pytest.mark.parametrize(("path", "key", "value"), CASES, ids=lambda case: path_text(case) if case else None)
def test_key_and_value_are_found(path: KeyPath, key: tuple[int, int], value: tuple[int, int] | None) -> None:
    positions = find_positions(TEXT)
    assert positions.keys[path] == Position(*key)
    if value:
        assert positions.values[path] == Position(*value)


def test_a_path_without_a_place_has_that_of_the_table_around_it() -> None:
    positions = find_positions("[a]\nb = 1\n\n[a.c]\nd = 2\n")
    assert positions.of_value(("a", "c", "missing", "deeper")) == Position(4, 1)
    assert positions.of_key(("nowhere",)) == Position(1, 1)


def test_windows_line_ends_do_not_shift_columns() -> None:
    assert find_positions("a = 1\r\nbc = 2\r\n").values[("bc",)] == Position(2, 6)


@pytest.mark.parametrize("text", ['a = """"x"""""', "a = ''''x'''''", 'a = """\\""" x"""', 'a = """"""', "a = ''"])
def test_what_follows_a_string_with_quotes_at_its_ends_is_found(text: str) -> None:
    tomllib.loads(text)
    assert find_positions(text + "\nb = 1").values[("b",)] == Position(2, 5)


def paths_in(value: object, path: KeyPath = ()) -> list[KeyPath]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [p for key, element in inner for p in [(*path, key), *paths_in(element, (*path, key))]]


SCALARS = st.one_of(st.integers(-9, 9), st.booleans(), st.text("a\"'[]{}#=,.\\\n é", max_size=6))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("a.b-\"'", max_size=4), inner, max_size=3),
)


@given(st.dictionaries(st.text("xyz.\" '", max_size=4), VALUES, max_size=5))
def test_every_key_that_tomllib_reads_has_a_position_in_order(document: dict[str, object]) -> None:
    text = "\n".join(f"{plain({name: value})[2:-2]}" for name, value in document.items())
    parsed = tomllib.loads(text)
    positions = find_positions(text)
    places = [positions.values[path] for path in paths_in(parsed)]
    assert places == sorted(places)


@given(st.text("ab=[]{}\"'\\#,.\n ", max_size=40))
def test_any_text_ends_the_scan(text: str) -> None:
    find_positions(text)
