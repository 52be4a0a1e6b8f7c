"""Interference models: how much longer a batch takes beside others."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.lab.experiments._glet_world import catalogue, golden
from lamina.planner.interference import ColocatedBatch
from lamina.predict.interference import BandwidthInterference, MemoryUse, bandwidth_interference
from lamina.predict.profile import Profile
from lamina.published.gpulet.world import linear_interference

NAMES = {int(number): name for number, name in golden()["meta"]["model_ids"].items()}
LINEAR = linear_interference(catalogue(), set(NAMES.values()) - {"bert"}, ("2080ti", "3080"))
HALF = BandwidthInterference({("a", "d"): 0.5, ("b", "d"): 0.5})


@pytest.mark.parametrize("row", [row for row in golden()["unit"]["interference"] if 13 not in (row[1], row[4])], ids=str)
def test_the_linear_model_gives_the_published_slowdowns(row: list[Any]):
    kind, model, batch, part, other, other_batch, other_part, _, slowdown = row
    mine = ColocatedBatch(NAMES[model], batch, part / 100)
    theirs = ColocatedBatch(NAMES[other], other_batch, other_part / 100)
    assert LINEAR.slowdown(mine, [theirs], kind) == pytest.approx(slowdown, rel=1e-5)


def test_of_several_neighbours_the_worst_counts_in_the_linear_model():
    mine, light, heavy = (ColocatedBatch(name, 16, 0.4) for name in ("resnet50", "lenet1", "vgg16"))
    alone = [LINEAR.slowdown(mine, [other], "2080ti") for other in (light, heavy)]
    assert LINEAR.slowdown(mine, [light, heavy], "2080ti") == max(alone)


def test_no_neighbour_means_no_slowdown():
    assert LINEAR.slowdown(ColocatedBatch("vgg16", 32, 1.0), [], "2080ti") == 1.0
    assert HALF.slowdown(ColocatedBatch("a", 1, 1.0), [], "d") == 1.0


def test_bandwidth_hurts_only_above_the_limit():
    assert HALF.slowdown(ColocatedBatch("a", 1, 0.5), [ColocatedBatch("b", 1, 0.5)], "d") == 1.0
    assert HALF.slowdown(ColocatedBatch("a", 1, 1.0), [ColocatedBatch("b", 1, 0.8)], "d") == pytest.approx(0.9 / 0.7)


def test_what_a_batch_asks_for_alone_is_in_its_profile_already():
    greedy = BandwidthInterference({("a", "d"): 0.9, ("b", "d"): 0.1})
    assert greedy.slowdown(ColocatedBatch("a", 1, 1.0), [ColocatedBatch("b", 1, 1.0)], "d") == pytest.approx(1.0 / 0.9)


def test_a_profile_without_bandwidth_has_no_part_in_it():
    profiles = [Profile(function="a", device="d", points=[], bandwidth=0.9), Profile(function="b", device="d", points=[])]
    model = bandwidth_interference(profiles)
    assert model.slowdown(ColocatedBatch("b", 1, 1.0), [ColocatedBatch("b", 1, 1.0)], "d") == 1.0
    assert model.slowdown(ColocatedBatch("a", 1, 1.0), [ColocatedBatch("a", 1, 1.0)], "d") == pytest.approx(2.0)


def test_use_is_read_off_between_the_sizes_that_were_measured():
    use = MemoryUse((1, 4, 8), (0.1, 0.4, 0.6), (0.0, 0.2, 0.2))
    assert use.interpolate(6) == (pytest.approx(0.5), pytest.approx(0.2))
    assert use.interpolate(1) == (0.1, 0.0)
    assert use.interpolate(99) == (0.6, 0.2)
