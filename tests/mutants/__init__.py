"""Mutation tests: small defects made by hand, each with the tests that must notice it. `make mutants` tries them all.

A suite that passes says little about the code it passes over. Each mutant in `mutants.toml` breaks one promise of the product; if
the tests named beside it still pass, they do not check that promise. Survivors are failures.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
from msgspec import Struct

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "lamina"


class Mutant(Struct, frozen=True, forbid_unknown_fields=True):
    """One defect: in `file`, below `src/lamina/`, `old` becomes `new`. `tests` are files, or tests in them, that must fail."""

    name: str
    file: str
    old: str
    new: str
    breaks: str  #: the promise
    tests: list[str]

    def applied(self, text: str) -> str:
        """The mutated file. `old` must be there exactly once: else the code has moved on, and the mutant must follow."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: {self.old!r} is {count} times in {self.file}")
        return text.replace(self.old, self.new)


def read_mutants(path: Path = Path(__file__).parent / "mutants.toml") -> list[Mutant]:
    return msgspec.convert(tomllib.loads(path.read_text())["mutant"], list[Mutant])
