"""Tables of keys: how a whole configuration is read into frozen dataclasses, and shown again.

Theory: a `Table` is a list of `Key`s, each with a kind, and makes a dataclass of `config.model`. Defaults are an instance
of that dataclass, so they stand in one place. Rules between keys are a function of the table, called with the instance.
Rules for editing: nothing here knows a certain key; `config/schema.py` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from config.kinds import BAD, Around, Bad, Kind, Leaf, type_name
from config.reading import Spot, did_you_mean, quoted
from config.values import Wrong


@dataclass(eq=False, repr=False)
class Listed:
    """An array of leaves. A source gives its elements separated by commas. `most` bounds it."""

    item: Leaf
    most: int = 4096
    unique: bool = True

    def read(self, raw: object, spot: Spot, default: Any, around: Around) -> Any:
        if not isinstance(raw, list):
            raw = self._from_source(raw, spot)
            if isinstance(raw, Bad):
                return BAD
        else:
            spot.came_from("", raw)
        if len(raw) > self.most:
            spot.problem(f"has {len(raw)} elements; use at most {self.most}")
        read = [self.item.read(element, spot.at(index), None, around) for index, element in enumerate(raw)]
        kept = [element for element in read if element is not BAD]
        for index, element in enumerate(read):
            if self.unique and element is not BAD and element in read[:index]:
                first = read.index(element)
                spot.at(index).problem(f"{quoted(raw[index])} is already [{first}] of this array; remove one of them")
        return tuple(kept)

    def _from_source(self, raw: object, spot: Spot) -> list[object] | Bad:
        try:
            fetched = spot.reading.sources.fetch(raw)
        except Wrong as exc:
            spot.problem(f"the value {exc.what}; {exc.remedy}")
            return BAD
        if fetched.origin and isinstance(fetched.value, str):
            spot.came_from(fetched.origin, raw)
            return [part.strip() for part in fetched.value.split(",") if part.strip()]
        spot.problem(f"{quoted(raw)} is {type_name(raw)}; write an array, as in [{quoted(raw)}]")
        return BAD

    def show(self, value: Sequence[Any]) -> list[Any]:
        return [self.item.show(element) for element in value]


@dataclass(eq=False, repr=False)
class Named:
    """A table of free names to leaves, as a read-only mapping. `check` judges each name."""

    item: Leaf
    check: Callable[[str], str]
    most: int = 64

    def read(self, raw: object, spot: Spot, default: Any, around: Around) -> Any:
        if not isinstance(raw, dict):
            spot.problem(f'is {type_name(raw)}; write a table, as in {{ name = "value" }}')
            return BAD
        if len(raw) > self.most:
            spot.problem(f"has {len(raw)} entries; use at most {self.most}")
        found = {}
        for name, element in raw.items():
            value = self.item.read(element, spot.at(name), None, around)
            try:
                usual = self.check(name)
            except Wrong as exc:
                spot.at(name).problem(f"the name {quoted(name)} {exc.what}; {exc.remedy}", on_key=True)
                continue
            if value is not BAD:
                found[usual] = value
        return MappingProxyType(found)

    def show(self, value: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.item.show(element) for name, element in value.items()}


@dataclass(eq=False, repr=False)
class Key:
    """A key of the file and the field, or fields, that it fills. `needed`: the table means nothing without it."""

    name: str
    kind: Kind
    fields: tuple[str, ...] = ()
    needed: bool = False

    def value_in(self, instance: object) -> Any:
        found = tuple(getattr(instance, field) for field in self.targets)
        return found if len(self.targets) > 1 else found[0]

    @property
    def targets(self) -> tuple[str, ...]:
        return self.fields or (self.name,)


def nothing_to_verify(value: Any, spot: Spot, around: Around) -> None:
    """For tables whose keys do not depend on each other."""


@dataclass(eq=False, repr=False)
class Table:
    """The keys of a table, the instance that holds their defaults, and the rules between them.

    `blank` gives that instance, or for an array of tables one that stands for "not yet filled".
    """

    blank: Any
    keys: tuple[Key, ...]
    verify: Callable[[Any, Spot, Around], None] = nothing_to_verify

    def read(self, raw: object, spot: Spot, default: Any, around: Around) -> Any:
        if not isinstance(raw, dict):
            spot.problem(f"is {type_name(raw)}; write a table")
            return BAD
        self._refuse_unknown(raw, spot)
        found: dict[str, Any] = {}
        whole = True
        for key in self.keys:
            if key.name in raw:
                value = key.kind.read(raw[key.name], spot.at(key.name), key.value_in(default), found)
            else:
                value = self._left_out(key, spot, default)
            whole = whole and not (value is BAD and key.needed)
            if value is not BAD:
                found |= dict(zip(key.targets, value, strict=True)) if len(key.targets) > 1 else {key.targets[0]: value}
        if not whole:
            return BAD
        instance = replace(default, **found)
        self.verify(instance, spot, around)
        return instance

    def _left_out(self, key: Key, spot: Spot, default: Any) -> Any:
        if key.needed:
            spot.problem(f"{key.name} is missing; add it", on_key=True)
            return BAD
        return key.value_in(default)

    def _refuse_unknown(self, raw: Mapping[str, object], spot: Spot) -> None:
        known = [key.name for key in self.keys]
        for name in raw:
            if name not in known:
                near = did_you_mean(name, known)
                remedy = f"did you mean {near}?" if near else f"known here: {', '.join(known)}"
                spot.at(name).problem(f"unknown key; {remedy}", on_key=True)

    def show(self, value: Any) -> dict[str, Any]:
        return {key.name: key.kind.show(key.value_in(value)) for key in self.keys}


@dataclass(eq=False, repr=False)
class Tables:
    """An array of tables, as a tuple. `inherits`: fields that each element takes from around it as its default."""

    table: Table
    inherits: tuple[str, ...] = ()
    most: int = 1024

    def read(self, raw: object, spot: Spot, default: Any, around: Around) -> Any:
        if not isinstance(raw, list):
            spot.problem(f"is {type_name(raw)}; write it as [[{spot.path[-1]}]]", on_key=True)
            return BAD
        if len(raw) > self.most:
            spot.problem(f"has {len(raw)} elements; use at most {self.most}")
        blank = replace(self.table.blank, **{field: around[field] for field in self.inherits if field in around})
        read = [self.table.read(element, spot.at(index), blank, around) for index, element in enumerate(raw)]
        return tuple(element for element in read if element is not BAD)

    def show(self, value: Sequence[Any]) -> list[dict[str, Any]]:
        return [self.table.show(element) for element in value]
