"""What is admitted is done: whatever keeps a batch from starting is part of the estimate."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from msgspec.structs import replace

from lamina.core.actions import Reject
from lamina.core.policy import Admitted
from lamina.lab.experiments import patience
from lamina.policies import edf, frontier
from lamina.policies.frontier.config_table import ConfigTables
from lamina.sim.run import run
from lamina.sim.scenario import parse
from lamina.sim.summary import TargetRow
from lamina.types import SliceLimits, Slo
from tests.script import GPU, Script, a_function

MS = 1_000
GOAL = Slo(latency_us=100 * MS)


def is_rejected(actions: list[object]) -> bool:
    return any(isinstance(action, Reject) for action in actions)


# --------------------------------------------------------------------------------------------- quotas

QUOTA = """
[scenario]
seed = 1
duration = "2s"
noise = 0.0
[[device]]
kind = "gpu"
units = 1
family = "gpu"
memory = "8GiB"
batches_per_instance = 0
[[function]]
name = "f"
memory = "1GiB"
quota = 0.5
share = "100%"
slo = "{slo}"
scale = {{ min = 1 }}
profile.gpu = {{ batch = [1], p50_ms = {{ 1 = [10] }} }}
{more}
[[load]]
target = "{target}"
{shape}
"""
TWICE = """[[workflow]]
name = "w"
slo = "300ms"
step = [{ name = "a", function = "f" }, { name = "b", function = "f", after = ["a"] }]
"""
CLOSED, OPEN = 'shape = "closed"\nclients = 1\nthink = "0ms"', "rate = 80"


def under_a_quota(policy: str, target: str, slo: str, shape: str) -> TargetRow:
    text = QUOTA.format(slo=slo, target=target, shape=shape, more=TWICE if target == "w" else "")
    [row] = run(parse(text), policy).targets
    return row


@pytest.mark.parametrize("policy", ["frontier", "edf"])
@pytest.mark.parametrize(("slo", "shape"), [("15ms", CLOSED), ("100ms", OPEN)])
def test_what_a_quota_does_not_pay_for_in_time_is_not_admitted(policy: str, slo: str, shape: str):
    """Half of the time is a hundredth of a second for every two: of what is admitted nothing waits in vain."""
    row = under_a_quota(policy, "f", slo, shape)
    admitted = row.offered - sum(row.refused.values())
    assert row.in_time >= 0.98 * admitted
    assert row.in_time >= 90  # of 100 that the quota pays for


def test_a_quota_counts_for_every_step_of_a_workflow():
    row = under_a_quota("frontier", "w", "1s", OPEN)
    admitted = row.offered - sum(row.refused.values())
    assert row.in_time >= 40  # of 50 that it pays for
    assert row.in_time >= 0.9 * admitted


# --------------------------------------------------------------------------------------------- margins


@pytest.mark.parametrize(("within_us", "rejected"), [(10_300, False), (9_900, True)])
def test_on_an_idle_device_a_call_needs_no_margin(script: Script, within_us: int, rejected: bool):
    """What a batch takes is planned with its spread: a margin is for what comes before it."""
    script.given(a_function(slo=GOAL), policy=frontier.Policy(), takes={"f": 10 * MS})
    assert is_rejected(script.arrives("c", within_us=within_us)) is rejected


@pytest.mark.parametrize(("within_us", "rejected"), [(20_600, False), (20_400, True)])
def test_what_comes_before_it_does(script: Script, within_us: int, rejected: bool):
    script.given(a_function(slo=GOAL), policy=frontier.Policy(), takes={"f": 10 * MS}).arrives("first", within_us=100 * MS)
    assert is_rejected(script.arrives("c", within_us=within_us)) is rejected


@pytest.mark.parametrize(("within_ms", "rejected"), [(145, False), (120, True)])
def test_a_load_may_take_longer_than_usual(script: Script, within_ms: int, rejected: bool):
    script.given(a_function(slo=GOAL), policy=edf.Policy(), takes={"f": 10 * MS}, loads={"f": 100 * MS}, warm=False)
    assert is_rejected(script.arrives("c", within_us=within_ms * MS)) is rejected


# --------------------------------------------------------------------------------------------- predictions that have moved


def test_a_table_that_lost_a_call_is_compared_with_predictions_at_once(script: Script):
    takes = {"f": 10 * MS}
    script.given(a_function(slo=GOAL), takes=takes)
    view, tables = script.controller.view, ConfigTables()

    def fastest_us() -> int:
        config = tables.table_for(view, view.functions["f"], view.devices["gpu0"]).fastest
        return config.time_us if config is not None else 0

    assert fastest_us() == 10 * MS
    script.predictor.takes["f"] = 5 * MS
    assert fastest_us() == 10 * MS
    tables.doubt("f")
    assert fastest_us() == 5 * MS


# --------------------------------------------------------------------------------------------- the usual time


@pytest.mark.parametrize("load", [2.0, 3.0])
def test_in_overload_hardly_any_call_with_twice_its_time_is_late_or_dropped(load: float):
    """Two functions of 10 ms and goals of 20, one thing at a time. What is admitted behind a batch that takes longer than usual
    may be too late if it takes long itself: it is started all the same, and most are not."""
    total = run(parse(patience.world({"kind": "twins", "goal": 2, "load": load, "seconds": 4, "seed": 3})), "frontier").total
    admitted = total.offered - sum(total.refused.values())
    assert admitted - total.in_time <= 0.006 * admitted


@pytest.mark.parametrize(("units", "is_started"), [(1, True), (8, False)])
def test_a_call_is_started_in_hope_only_where_it_needs_no_dearer_slice(script: Script, units: int, is_started: bool):
    """It has 9 ms left. A batch seldom takes more than 10 on the largest slice, and has taken 8 so far."""
    script.given(
        a_function(slo=GOAL),
        devices=[replace(GPU, units=units, limits=SliceLimits(batches_per_instance=0))],
        policy=frontier.Policy(),
        takes={"f": lambda batch, on: int(10 * MS * (units / on) ** 0.5)},
    )
    for number in range(30):
        script.arrives(f"{number}", within_us=100 * MS)
        script.finishes(took_us=int(0.8 * script.running[0].predicted_us))
    with patch("lamina.policies.frontier.Policy.admit", lambda *_: Admitted(0)):
        script.arrives("c", within_us=9 * MS)
    assert script.ending("c") == ("open" if is_started else "deadline")
