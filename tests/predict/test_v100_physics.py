"""What the operators of a model say about a V100 before anything is measured (`benchmarks/prediction/physics.py`)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks.prediction.physics import grouped, more_launches, slice_ms
from benchmarks.prediction.unseen import committee

BATCHES, SHARES = (1, 2, 4, 8), (5, 10, 30, 60, 100)
OPERATORS = {
    row["model"]: row["operators"]
    for row in map(json.loads, Path("data/operators.jsonl").read_text(encoding="utf-8").splitlines())
}


@pytest.mark.parametrize("name", ["resnet50", "vgg16", "mobilenet_v2"])
def test_a_larger_batch_is_never_quicker_and_a_larger_slice_never_slower(name):
    made_ms = slice_ms(OPERATORS[name], BATCHES, SHARES)
    assert (np.diff(made_ms, axis=0) >= 0).all() and (np.diff(made_ms, axis=1) <= 0).all()


def test_a_large_product_takes_the_time_of_its_arithmetic():
    product = [["matmul", 1, 8.6e12, 1000, 1000, 80 * 1024]]
    assert slice_ms(product, (1,), (100, 50))[0].tolist() == pytest.approx([1000.0, 2000.0])


def test_groups_of_four_channels_are_few_and_of_a_hundred_and_twelve_are_many():
    assert grouped(OPERATORS["resnext101_64x4d"]) == (30, 3)
    assert grouped(OPERATORS["regnet_y_16gf"]) == (0, 18)


def test_only_grouped_convolutions_are_launched_as_more_kernels():
    assert more_launches(OPERATORS["vgg16_bn"]) == [0.0, 0.0, 0.0, 0.0]


def test_wide_groups_are_launched_as_more_kernels_from_batch_two_on():
    one, two, *rest = more_launches(OPERATORS["regnet_y_16gf"])
    assert one > 0 and two == 0 and rest == [0.0, 0.0]


def test_a_committee_knows_a_straight_line_from_the_others():
    seen = np.linspace(-1, 1, 30)[:, None]
    wanted = np.column_stack([2 * seen[:, 0], -seen[:, 0]])
    out = np.array([7, 20])
    made = committee(np.zeros((30, 1)), [seen], wanted, np.setdiff1d(np.arange(30), out), out)
    assert np.abs(made - wanted)[out].max() < 0.1
