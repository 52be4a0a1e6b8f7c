"""The list of mutants fits the code as it is. That the tests kill them is tried by `make mutants`."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache

import pytest

from tests.mutants import ROOT, SOURCE, Mutant, read_mutants

MUTANTS = read_mutants()


@cache
def dump_of(file: str) -> str:
    return ast.dump(ast.parse((SOURCE / file).read_text()))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place_and_is_still_a_program(mutant: Mutant):
    broken = mutant.applied((SOURCE / mutant.file).read_text())
    assert ast.dump(ast.parse(broken)) != dump_of(mutant.file), "it changes nothing"
    assert mutant.tests and all((ROOT / test.partition("::")[0]).exists() for test in mutant.tests)


def test_there_are_sixty_and_each_has_a_name_of_its_own():
    assert len(MUTANTS) >= 60
    assert max(Counter(mutant.name for mutant in MUTANTS).values()) == 1


@pytest.mark.parametrize(
    ("package", "least"),
    [("core", 20), ("planner", 8), ("policies", 8), ("store", 3), ("gateway", 4), ("durable", 3), ("server", 4)],
)
def test_every_part_has_some(package: str, least: int):
    assert sum(mutant.file.startswith(f"{package}/") for mutant in MUTANTS) >= least


def test_a_text_that_is_no_longer_there_is_told():
    gone = Mutant("m", "core/controller.py", "no such text", "x", "nothing", ["tests"])
    with pytest.raises(ValueError, match=r"is 0 times in core/controller\.py"):
        gone.applied("text")
