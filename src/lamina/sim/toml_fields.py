"""Typed fields of a TOML file; an error names file, line, field and what to do.

A `Field` is a value and where it stands. Its methods give the value as the code wants it (microseconds, MiB, a share) or
raise; tables say which keys they know, and an unknown key is an error with the nearest known one as the hint: a
misspelt option that is silently ignored makes a simulation of something else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from lamina import units
from lamina.errors import BadScenario, BadValue, did_you_mean

Path = tuple[str | int, ...]
"""Of a value in the file: `("load", 1, "rate")`."""

MAX_PER_S = 1_000_000
"""Highest rate: one each microsecond, which is what the clock counts."""

_RATE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*/\s*([a-z]+)\s*")
_HEADER = re.compile(r"\s*\[(\[?)([^\]]+)\]")
_KEY = re.compile(r"""\s*([\w.-]+|"[^"]*"|'[^']*')\s*=""")
_NAMES = {
    str: "a text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "a table",
}


@dataclass(frozen=True, slots=True)
class Field:
    file: str
    lines: dict[Path, int]
    path: Path
    value: Any

    # ------------------------------------------------------------ complaints

    @property
    def name(self) -> str:
        """`load[1].rate`, as people and most tools write it."""
        return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.path).lstrip(".") or "scenario"

    @property
    def line(self) -> int:
        path = self.path
        while path not in self.lines:
            path = path[:-1]
        return self.lines[path]

    def error(self, what: str, hint: str = "") -> BadScenario:
        return BadScenario(f"{self.file}:{self.line}: {self.name}: {what}", hint=hint)

    def unknown_name(self, what: str, known: Iterable[str]) -> BadScenario:
        """`what` names no such thing; the hint is the nearest one, or all of them."""
        known = sorted(known)
        otherwise = f"there is {', '.join(known)}" if known else "leave it out"
        return self.error(what, did_you_mean(str(self.value), known, otherwise))

    # ------------------------------------------------------------- structure

    def table(self, *known: str) -> dict[str, Field]:
        """The fields of a table; with `known`, no others are allowed."""
        self._expect(dict)
        fields = {key: Field(self.file, self.lines, (*self.path, key), value) for key, value in self.value.items()}
        for key, field in fields.items():
            if known and key not in known:
                raise field.error(
                    "there is no such field",
                    did_you_mean(key, known, f"known here: {', '.join(known)}"),
                )
        return fields

    def items(self) -> Iterator[Field]:
        self._expect(list)
        for place, value in enumerate(self.value):
            yield Field(self.file, self.lines, (*self.path, place), value)

    def _expect(self, *types: type) -> Any:
        if not isinstance(self.value, types) or (isinstance(self.value, bool) and bool not in types):
            found = _NAMES.get(type(self.value), type(self.value).__name__)
            raise self.error(f"{self.value!r} is {found}", f"write {_NAMES[types[0]]}")
        return self.value

    # ----------------------------------------------------------------- values

    def text(self) -> str:
        return str(self._expect(str))

    def one_of(self, *allowed: str) -> str:
        if self.text() not in allowed:
            raise self.unknown_name(f"{self.value!r} is none of {', '.join(allowed)}", allowed)
        return self.text()

    def boolean(self) -> bool:
        return bool(self._expect(bool))

    def integer(self, least: int = 0) -> int:
        value = int(self._expect(int))
        if value < least:
            raise self.error(f"{value} is too small", f"at least {least}")
        return value

    def number(self, least: float = 0.0, *, above: bool = False) -> float:
        value = float(self._expect(float, int))
        if not (value > least if above else value >= least) or value == float("inf"):
            raise self.error(f"{self.value!r} is out of range", f"{'above' if above else 'at least'} {least:g}, and finite")
        return value

    def time_us(self, least_us: int = 0) -> int:
        value = self._quantity(units.parse_us, '"50ms" or "2s"')
        if value < least_us:
            raise self.error(f"{self.value!r} is too short", f"at least {units.show_us(least_us)}")
        return value

    def memory_mib(self) -> int:
        return self._quantity(units.parse_mib, '"4GiB" or "512MB"')

    def kib(self) -> int:
        return -(-self._quantity(units.parse_bytes, '"600KiB" or "2MB"') // 1024)

    def share(self) -> float:
        self._expect(float, int, str)
        try:
            return units.parse_share(self.value)
        except BadValue as error:
            raise self.error(error.message.partition(": ")[2], error.hint) from None

    def per_s(self, *, above: bool = False) -> float:
        """A rate: `200` is 200 a second, `"90/min"` is what it says."""
        rate = self._rate(above)
        if rate > MAX_PER_S:
            raise self.error(f"{self.value!r} is out of range", f"at most {MAX_PER_S:,} a second")
        return rate

    def _rate(self, above: bool) -> float:
        if not isinstance(self.value, str):
            return self.number(above=above)
        found = _RATE.fullmatch(self.value)
        spans = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}
        if not found or found[2] not in spans:
            raise self.error(f"{self.value!r} is not a rate", 'write 200 (a second), "200/s", "90/min" or "3.6/h"')
        rate = float(found[1]) / spans[found[2]]
        if above and not rate:
            raise self.error(f"{self.value!r} is out of range", "above 0")
        return rate

    def _quantity(self, parse: Any, example: str) -> int:
        if not isinstance(self.value, str):
            raise self.error(f"{self.value!r} has no unit", f"write a text with a unit, such as {example}")
        try:
            return int(parse(self.value))
        except BadValue as error:
            raise self.error(error.message.partition(": ")[2], error.hint) from None


def read_present(fields: dict[str, Field], **readers: tuple[str, Callable[[Field], Any]]) -> dict[str, Any]:
    """Arguments for what the file says and no others, so that each default has one home: the value's own class."""
    return {slot: read(fields[key]) for key, (slot, read) in readers.items() if key in fields}


def required(row: Field, fields: dict[str, Field], key: str, hint: str = "") -> Field:
    if key not in fields:
        raise row.error(f"{key} is missing", hint or f"add {key} = ...")
    return fields[key]


def find_lines(text: str) -> dict[Path, int]:
    """Lines of tables and of keys that begin a line, counted from 1. Of a value inside a list or an inline table, the line of its
    key is the nearest that is known: the parser of the standard library does not say more."""
    lines: dict[Path, int] = {(): 1}
    lengths: dict[Path, int] = {}  #: of arrays of tables
    table: Path = ()
    for number, row in enumerate(text.split("\n"), 1):
        if header := _HEADER.match(row):
            table = ()
            for key in _split_key(header[2]):
                table = (*table, key)
                lines.setdefault(table, number)
                if table in lengths:  # `[function.profile]` means the last function there is
                    table = (*table, lengths[table] - 1)
            if header[1]:
                array = table[:-1] if isinstance(table[-1], int) else table
                table = (*array, lengths.setdefault(array, 0))
                lengths[array] += 1
                lines[table] = number
        elif found := _KEY.match(row):
            path = table
            for key in _split_key(found[1]):
                path = (*path, key)
                lines.setdefault(path, number)
    return lines


def _split_key(dotted: str) -> list[str]:
    return [part.strip().strip("\"'") for part in dotted.split(".")]
