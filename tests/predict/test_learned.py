"""Learned latency of functions that were not measured."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.prediction.fit_model import fit_model
from benchmarks.train_predictor import Times, records, times
from hypothesis import given
from hypothesis import strategies as st

from lamina.errors import BadValue
from lamina.predict import learned, model_features
from lamina.predict.learned import LatencyModel, monotone, shipped_model
from tests.properties import examples

LEFT_OUT = ("resnet50", "bert_base", "efficientnet_b0", "vit_b_16", "vgg16", "shufflenet_v2_x1_0")


@cache
def known() -> dict[str, dict[str, Any]]:
    return records()


@cache
def measured() -> Times:
    return times()


@cache
def without_some() -> LatencyModel:
    """Learnt from every other function and none of `LEFT_OUT`: seconds matter here more than the last percent."""
    chosen = [name for number, name in enumerate(sorted(measured())) if number % 2 and name not in LEFT_OUT]
    return fit_model("h200", known(), {name: measured()[name] for name in chosen})


def mean_error(model: LatencyModel, count: int) -> float:
    errors = []
    for name in LEFT_OUT:
        probes = {place: measured()[name][place] for place in model.probes(count)}
        grid = model.predict(known()[name], probes)
        truth = np.array([[measured()[name][batch, units] for units in grid.units] for batch in grid.batches])
        errors.append(np.abs(grid.mid / truth - 1).mean())
    return float(np.mean(errors))


@pytest.mark.parametrize(("count", "limit"), [(0, 0.1), (3, 0.05), (5, 0.04)])
def test_functions_it_has_not_seen_are_predicted_as_well_as_before(count: int, limit: float):
    assert mean_error(without_some(), count) < limit


def test_nine_in_ten_measurements_lie_in_the_interval():
    model, inside, wide = without_some(), [], []
    for name in LEFT_OUT:
        grid = model.predict(known()[name])
        truth = np.array([[measured()[name][batch, units] for units in grid.units] for batch in grid.batches])
        inside.append(((grid.low <= truth) & (truth <= grid.high)).mean())
        wide.append(np.log(grid.high / grid.low).mean() / 2)
    assert np.mean(inside) >= 0.8  # of six functions; over all of them see docs/explanation/prediction.md
    assert np.mean(wide) <= 0.3  # not by being so wide that nothing can be outside


@examples(40)
@given(
    st.sampled_from(LEFT_OUT),
    st.dictionaries(
        st.tuples(st.sampled_from((1, 2, 4, 8, 16, 32, 64)), st.sampled_from((1, 2, 3, 4, 6, 8, 12, 15))),
        st.floats(1.0, 1e7),
        max_size=6,
    ),
)
def test_whatever_the_probes_say_answers_are_monotone_and_quantiles_ordered(name: str, probes: dict[tuple[int, int], float]):
    grid = shipped_model("h200").predict(known()[name], probes)
    assert (grid.low <= grid.mid).all() and (grid.mid <= grid.high).all()
    for times_us in (grid.low, grid.mid, grid.high):
        assert (np.diff(times_us, axis=0) >= -1e-9 * times_us[1:]).all()  # a bigger batch is never faster
        assert (np.diff(times_us, axis=1) <= 1e-9 * times_us[:, 1:]).all()  # a bigger slice never slower


@given(st.lists(st.lists(st.floats(0.1, 1e6), min_size=5, max_size=5), min_size=4, max_size=4))
def test_a_monotone_grid_stays_as_it_is(rows: list[list[float]]):
    once = monotone(np.array(rows))
    np.testing.assert_allclose(monotone(once), once)


def test_a_probe_is_believed():
    measured_us = 3 * measured()["resnet50"][8, 3]
    grid = shipped_model("h200").predict(known()["resnet50"], {(8, 3): measured_us})
    assert grid.mid[grid.batches.index(8), grid.units.index(3)] == pytest.approx(measured_us, rel=0.05)


def test_probes_narrow_the_interval():
    model = shipped_model("h200")
    probes = {place: measured()["resnet50"][place] for place in model.probes(5)}
    wide, narrow = model.predict(known()["resnet50"]), model.predict(known()["resnet50"], probes)
    assert (np.log(narrow.high / narrow.low)).mean() < 0.6 * np.log(wide.high / wide.low).mean()


def test_answers_are_the_same_after_writing_and_reading(tmp_path: Path):
    model = shipped_model("h200")
    learned.write_model(model, tmp_path / "m.json")
    before, after = (m.predict(known()["gpt2"], {(8, 3): 900.0}) for m in (model, learned.read_model(tmp_path / "m.json")))
    np.testing.assert_array_equal(before.mid, after.mid)
    np.testing.assert_array_equal(before.high, after.high)


def test_a_model_file_is_plain_text_and_small():
    path = learned.SHIPPED_MODELS / "h200.json"
    assert path.stat().st_size < 1_000_000
    assert set(json.loads(path.read_text())) >= {"device", "features", "logs", "probes"}


@pytest.mark.parametrize("count", [1, 3, 5])
def test_it_says_where_to_probe(count: int):
    places = shipped_model("h200").probes(count)
    assert len(set(places)) == count and set(places) <= set(measured()["resnet50"])


def test_more_probes_than_it_has_places_for_are_refused():
    with pytest.raises(BadValue, match="99 probes"):
        shipped_model("h200").probes(99)


def test_an_older_model_file_is_named(tmp_path: Path):
    (tmp_path / "m.json").write_text('{"version": 1, "device": "h200"}')
    with pytest.raises(BadValue, match="version 1"):
        learned.read_model(tmp_path / "m.json")


def test_a_function_counts_its_kernels_not_the_operators_it_was_traced_as():
    lstm = known()["lstm_512x2"]
    assert sum(row[1] for row in model_features.count_as_kernels(lstm)) == pytest.approx(lstm["kernels_b1"])


@pytest.mark.parametrize("name", ["resnet50", "densenet121", "efficientnet_b0", "mobilenet_v3_large", "lstm_512x2"])
def test_kernels_are_counted_from_a_trace(name: str):
    row = known()[name]
    assert model_features.estimate_kernels(row)["kernels_b1"] == pytest.approx(row["kernels_b1"], rel=0.1)


def test_of_a_trace_alone_it_is_less_sure():
    row = {key: value for key, value in known()["swin_t"].items() if key != "kernels_b1"}
    wide, narrow = without_some().predict(row), without_some().predict(known()["swin_t"])
    assert np.log(wide.high / wide.low).mean() > np.log(narrow.high / narrow.low).mean()


def test_missing_features_are_named():
    row = {key: value for key, value in known()["resnet50"].items() if key not in ("operators", "ops_b1")}
    with pytest.raises(BadValue, match=r"resnet50.*ops_b1, operators"):
        shipped_model("h200").predict(row)


def test_an_unknown_kind_of_operator_is_named():
    with pytest.raises(BadValue, match="'fft'"):
        model_features.check_record(known()["resnet50"] | {"operators": [["fft", 1, 1, 1, 1, 1]]})


@pytest.mark.parametrize(("probes", "message"), [({(3, 3): 1.0}, "batch 3"), ({(8, 3): 0.0}, "0.0 us")])
def test_a_probe_that_cannot_be_is_refused(probes: dict[tuple[int, int], float], message: str):
    with pytest.raises(BadValue, match=message):
        shipped_model("h200").predict(known()["resnet50"], probes)


def test_a_broken_model_file_is_named(tmp_path: Path):
    (tmp_path / "m.json").write_text('{"version": 2, "device": 3}')
    with pytest.raises(BadValue, match=r"m\.json"):
        learned.read_model(tmp_path / "m.json")


def test_a_device_without_a_model_says_which_have_one():
    with pytest.raises(BadValue, match="h200"):
        shipped_model("v100")


def test_too_few_functions_are_refused():
    with pytest.raises(BadValue, match="too few"):
        fit_model("h200", known(), {name: measured()[name] for name in LEFT_OUT})


def test_a_predicted_function_answers_like_a_profiled_one():
    table = learned.predicted_table(shipped_model("h200"), {"f": (known()["resnet50"], {})})
    assert 0 < table.median_us("f", "h200", 8, 4) < table.latency_us("f", "h200", 8, 4)
    assert table.latency_us("f", "h200", 8, 5) <= table.latency_us("f", "h200", 8, 4)
