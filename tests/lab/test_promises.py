"""Experiments on what a policy promises, in the small: their worlds are what they say, their rows are whole."""

from __future__ import annotations

import json
import random
from types import ModuleType
from typing import Any

import pytest

from lamina.lab import data, experiment
from lamina.lab.experiments import ablation, beside, fairness, fewest, fleets, patience, worlds
from lamina.sim import scenario
from lamina.sim.run import run as simulate

NEW = (beside, patience, worlds, fleets, fairness, fewest, ablation)
Rows = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def rows() -> Rows:
    made = {module.__name__: [{**module.run(cell), **cell} for cell in module.cells(2, True)] for module in NEW}
    return json.loads(json.dumps(made))  # type: ignore[no-any-return]


@pytest.mark.parametrize("module", NEW, ids=lambda module: module.__name__.rpartition(".")[2])
def test_quick_rows_make_figures_and_sections(module: ModuleType, rows: Rows):
    mine = rows[module.__name__]
    assert json.dumps(module.figures(mine))
    assert any(section.headline for section in module.sections(mine))


@pytest.mark.parametrize("module", NEW, ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_full_run_has_ten_seeds_a_cell_of_one_parity(module: ModuleType):
    cells = module.cells(2, False)
    seeds = {cell["seed"] for cell in cells}
    assert len(seeds) >= 10 and not any(seed % 2 for seed in seeds)
    assert all(seed % 2 for seed in {cell["seed"] for cell in module.cells(1, False)})


@pytest.mark.parametrize("module", [beside, patience, worlds, fleets, fairness, fewest])
def test_a_full_run_has_all_policies(module: ModuleType):
    assert len({cell["policy"] for cell in module.cells(2, False)}) >= 23


@pytest.mark.parametrize("module", [beside, patience, worlds, fleets, fairness, fewest])
def test_every_row_has_the_three_bills(module: ModuleType, rows: Rows):
    for row in rows[module.__name__]:
        assert row["used"] <= row["held"] * 1.0001
        assert row["rent"] > 0


def test_worlds_are_two_hundred_and_differ():
    assert len({cell["world"] for cell in worlds.cells(2, False)}) == 200
    assert len({worlds.world(number) for number in range(2, 40, 2)}) == 19


def test_fleets_are_a_hundred_that_can_be_read_and_have_all_that_they_say():
    numbers = [cell["fleet"] for cell in fleets.cells(2, False) if cell["policy"] == "frontier"]
    assert len(numbers) == 100
    texts = [fleets.fleet(number) for number in numbers]
    assert len(set(texts)) == 100 and all(scenario.parse(text) for text in texts)
    said = (
        "[[workflow]]",
        "each =",
        "choice =",
        "[[tenant]]",
        "home = true",
        "quota =",
        "way =",
        'shape = "closed"',
        "aligned",
        'kind = "dev1"',
    )
    assert all(any(one in text for text in texts) for one in said)


def test_the_same_cell_gives_the_same_row(rows: Rows):
    cell = worlds.cells(2, True)[1]
    assert {**worlds.run(cell), **cell} == rows[worlds.__name__][1]


def test_what_long_work_gets_done_alone_is_that_of_the_units_that_are_left():
    cell = {"loop": "closed", "goal_ms": 25, "long_ms": 100, "devices": 1, "variant": "plain", "seed": 2}
    assert 120 <= beside.alone(cell) <= 160  # seven seconds, two at a time on six units each


@pytest.mark.parametrize("variant", ["plain", "home", "tenants"])
@pytest.mark.parametrize("devices", [1, 4])
def test_worlds_beside_long_work_can_be_read(variant: str, devices: int):
    cell = {"loop": "closed", "goal_ms": 10, "long_ms": 300, "devices": devices, "variant": variant, "seed": 2}
    made = scenario.parse(beside.world(cell))
    assert len(made.devices) == devices
    assert made.functions[0].home == (variant == "home")
    assert bool(made.tenants) == (variant == "tenants")


def test_the_fair_share_is_what_fits_before_the_last_deadline():
    assert patience.fair_share({"kind": "twins", "goal": 1, "load": 2.0, "seconds": 6}) == pytest.approx(0.5, abs=0.01)
    assert patience.fair_share({"kind": "twins", "goal": 1_000, "load": 2.0, "seconds": 6}) == 1.0


def test_load_one_is_what_the_device_can_do_at_most():
    made = scenario.parse(patience.world({"kind": "twins", "goal": 1_000, "load": 1.0, "seconds": 6, "seed": 2}))
    total = simulate(made, "fifo").total
    assert total.utilisation > 0.8


def test_jains_index_is_one_for_equals_and_one_over_n_for_one_of_n():
    assert fairness.jain([3.0, 3.0, 3.0]) == pytest.approx(1)
    assert fairness.jain([0.0, 0.0, 0.0, 7.0]) == pytest.approx(1 / 4)


def test_mlfq_by_run_time_shares_more_evenly_than_shortest_first(rows: Rows):
    score = {(row["policy"], row["tenants"]): row["score"] for row in rows[fairness.__name__]}
    assert score["kaas_mlfq(run time)", False] > score["kaas_srtf", False] + 0.2


def test_tenants_make_every_policy_fair(rows: Rows):
    assert all(row["score"] > 0.95 for row in rows[fairness.__name__] if row["tenants"])


@pytest.mark.parametrize("needed", range(1, 15))
def test_bisection_finds_the_least_number_that_suffices(needed: int):
    assert fewest.least(lambda gpus: gpus >= needed, 12) == min(needed, 13)


def test_recorded_arrivals_have_the_rate_asked_for():
    times = data.recorded_arrivals(50.0, 200_000_000, random.Random(1))
    assert list(times) == sorted(times)
    assert 5_000 <= len(times) <= 20_000


@pytest.mark.parametrize("mechanism", ablation.MECHANISMS)
def test_every_mechanism_of_the_table_is_one_of_the_policy_and_comes_back_afterwards(mechanism: str):
    from lamina import policies
    from lamina.policies import frontier

    before = frontier.Policy.admit
    with ablation.without(mechanism) as options:
        policies.build("frontier", options)
        assert (frontier.Policy.admit is before) == (mechanism != "admission")
    assert frontier.Policy.admit is before


def test_an_ablation_names_what_moves_nothing():
    whole = [{"cell": "a", "policy": "frontier", "seed": seed, "score": 0.9, "used": 1.0} for seed in (2, 4, 6)]
    idle = [row | {"policy": "x"} for row in whole]
    active = [row | {"policy": "y", "score": 0.8 + row["seed"] / 1e3} for row in whole]
    found = ablation.figures([*whole, *idle, *active])
    assert found["moves_nothing"] == ["x"]
    assert found["mean_change"]["y"] == pytest.approx(-0.096)


def test_every_new_experiment_is_found_by_its_name():
    assert {"ablation", "beside", "fairness", "fewest", "patience", "worlds"} <= set(experiment.names())
