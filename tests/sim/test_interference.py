"""Batches beside each other in the simulator."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from lamina.errors import BadScenario
from lamina.predict.interference import BandwidthInterference, LinearInterference
from lamina.sim.run import run
from lamina.sim.scenario import Scenario, parse

TEXT = """
[scenario]
duration = "2s"
noise = 0.0

[[device]]
kind = "gpu"
units = 4
memory = "8GiB"
batches_per_instance = 0

[[function]]
name = "a"
share = "1/2"
max_batch = 4
slo = { latency = "1s", on_miss = "serve" }
scale = { min = 1 }
[function.profile.gpu]
bandwidth = 0.8
batch = [1, 4]
p50_ms.2 = [10, 20]

[[function]]
name = "b"
share = "1/2"
slo = { latency = "1s", on_miss = "serve" }
scale = { min = 1 }
[function.profile.gpu]
bandwidth = 0.9
batch = [1]
p50_ms.2 = [10]

[[load]]
target = "a"
rate = 60

[[load]]
target = "b"
rate = 60
"""
LINEAR = """
[interference]
model = "linear"
weights.gpu = { own_l2 = 0.1, other_l2 = 0.7, other_dram = 0.1, base = 0.9 }
use.a.gpu = { batch = [1, 4], l2 = [0.5, 0.9], dram = [0.2, 0.2] }
use.b.gpu = { batch = [1], l2 = [0.9], dram = [0.9] }
"""


def p50_ms(scenario: Scenario) -> float:
    return run(scenario).total.p50_ms


def test_without_a_model_batches_do_not_feel_each_other():
    assert parse(TEXT).interference is None
    assert run(parse(TEXT)) == run(replace(parse(TEXT), interference=BandwidthInterference({})))


def test_bandwidth_comes_from_the_profiles():
    scenario = parse(TEXT + "\n[interference]\n")
    assert scenario.interference == BandwidthInterference({("a", "gpu"): 0.8, ("b", "gpu"): 0.9})


def test_batches_beside_each_other_take_longer():
    plain = parse(TEXT)
    crowded = parse(TEXT + "\n[interference]\nlimit = 0.5\n")
    assert p50_ms(crowded) > p50_ms(plain)


def test_the_linear_model_can_be_written_down():
    scenario = parse(TEXT + LINEAR)
    assert isinstance(scenario.interference, LinearInterference)
    assert p50_ms(scenario) > p50_ms(parse(TEXT))


def test_the_same_seed_gives_the_same_summary():
    scenario = replace(parse(TEXT + LINEAR), noise=0.1)
    assert run(scenario, check=True) == run(scenario)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[interference]\nmodel = "magic"\n', "magic"),
        ("[interference]\nlimit = 2\n", "limit"),
        ("[interference]\nuse = {}\n", "use: means nothing for bandwidth"),
        ('[interference]\nmodel = "linear"\nlimit = 0.5\n', "limit: means nothing for linear"),
        ('[interference]\nmodel = "linear"\n', "weights"),
        (LINEAR.replace("use.a", "use.z"), "there is no function 'z'"),
        (LINEAR.replace("l2 = [0.5, 0.9]", "l2 = [0.5]"), "1 numbers for 2 batch sizes"),
        (LINEAR.replace("batch = [1, 4]", "batch = [4, 1]"), "batch sizes do not grow"),
        (LINEAR.replace("own_l2 = 0.1", 'own_l2 = "x"'), "is not a number"),
    ],
)
def test_a_mistake_is_told_with_its_line(text: str, says: str):
    with pytest.raises(BadScenario) as caught:
        parse(TEXT + text)
    assert says in str(caught.value)
    assert "scenario.toml:" in str(caught.value)
