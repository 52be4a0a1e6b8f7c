"""Competing bodies in the simulator: a scenario says which functions are bodies of one."""

from __future__ import annotations

import pytest

from lamina.errors import BadScenario
from lamina.sim.run import run
from lamina.sim.scenario import Scenario, parse
from lamina.sim.scenario_writer import to_toml

SCENARIO = """
[scenario]
seed = 3
duration = "10s"
policy = "{policy}"
noise = {noise}

[[device]]
kind = "cpu"
family = "cpu"
units = 2
price = "0.01/s"

[[device]]
kind = "h200"
units = 4

[[function]]
name = "on_cpu"
load = "100ms"
scale = {{ min = 1, max = 2 }}
profile.cpu = {{ batch = [1], p50_ms = {{ 1 = [30] }} }}

[[function]]
name = "on_gpu"
share = "1/4"
load = "100ms"
memory = "1GiB"
scale = {{ min = 1, max = 1 }}
profile.h200 = {{ batch = [1], p50_ms = {{ 1 = [5] }} }}

[[workflow]]
name = "tag"
slo = "60ms"
compete = ["on_cpu", "on_gpu"]

[[load]]
target = "{target}"
rate = {rate}
start = "1s"
"""


def scenario(policy: str = "frontier", target: str = "tag", rate: int = 40, noise: float = 0.0) -> Scenario:
    return parse(SCENARIO.format(policy=policy, target=target, rate=rate, noise=noise))


@pytest.mark.parametrize("policy", ["frontier", "edf", "fifo"])
def test_two_bodies_serve_what_neither_could_alone(policy: str) -> None:
    """120 calls/s: two cores do 66 a second, a quarter of the GPU 200; the cheap cores are used first."""
    (tag,) = run(scenario(policy, rate=120), check=True).targets
    assert tag.attainment > 0.97


def test_the_cheaper_body_is_used_while_it_suffices() -> None:
    alone = run(scenario(target="on_gpu", rate=40))
    both = run(scenario(rate=40))
    assert both.total.attainment > 0.99
    assert both.total.used < 0.5 * alone.total.used


def test_a_scenario_with_bodies_is_written_and_read_again() -> None:
    first = scenario()
    again = parse(to_toml(first))
    assert [flow for flow in again.flows if flow.competing] == list(first.flows)


@pytest.mark.parametrize(
    ("compete", "said"),
    [('["on_cpu"]', "at least two different functions"), ('["on_cpu", "on_gqu"]', "there is no function 'on_gqu'")],
)
def test_bodies_that_are_not_there_are_named(compete: str, said: str) -> None:
    text = SCENARIO.format(policy="edf", target="tag", rate=1, noise=0)
    with pytest.raises(BadScenario, match=said):
        parse(text.replace('["on_cpu", "on_gpu"]', compete))
