"""`lamina plan --target`: the attainment that is planned for, estimated and checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lamina.cli import root
from lamina.cli.plan import command
from lamina.errors import BadValue

ROOT = Path(__file__).parents[2]

H200 = (
    ("frontier", "resnet50,60,25 bert_base,30,40 vit_b_16,20,60"),
    ("frontier", "resnet18,150,8"),
    ("frontier", "gpt2,10,60 vgg16,40,30"),
    ("frontier", "mobilenet_v3_large,120,6 densenet121,20,40 swin_t,10,50 t5_small_encoder,40,20"),
    ("frontier", "resnet50,3,200 bert_base,1,500"),
    ("gpulet", "resnet50,60,25 bert_base,30,40 vit_b_16,20,60"),
    ("gpulet", "efficientnet_b0,100,12 inception_v3,50,20"),
    ("timesharing", "resnet50,80,30 distilbert,80,30"),
)
V100 = (
    ("frontier", "resnet50,40,60 vgg16,20,80"),
    ("frontier", "bert_qa,15,400 mobilenet_v2,60,80 shufflenet_v2_x0_5,60,80"),
    ("gpulet", "resnet101,20,100 convnext_base,10,150"),
    ("greedy_part", "resnet50,60,50 mobilenet_v3_large,60,50"),
)
MIXES = [("h200", *mix) for mix in H200] + [("v100", *mix) for mix in V100]


def plan(folder: Path, mix: str, *options: object, kind: str = "h200", code: int = 0) -> Any:
    tasks = folder / "tasks.csv"
    tasks.write_text("\n".join(mix.split()) + "\n")
    words = [str(tasks), "--profiles", str(ROOT / "profiles" / kind), "--json", *map(str, options)]
    found = CliRunner().invoke(command, words, catch_exceptions=False, standalone_mode=False)
    assert found.return_value == code, found.output
    return json.loads(found.stdout)


@pytest.mark.parametrize(
    ("kind", "policy", "mix"), [*MIXES[:2], *(pytest.param(*mix, marks=pytest.mark.slow) for mix in MIXES[2:])]
)
def test_the_estimate_agrees_with_the_check_within_a_point(tmp_path: Path, kind: str, policy: str, mix: str):
    """Twelve mixes, four planners, two kinds of GPU."""
    found = plan(tmp_path, mix, "--policy", policy, "--check", "--seed", 7, kind=kind)
    assert found["attainment"] == pytest.approx(found["check"]["attainment"], abs=0.01)
    assert found["worst"] >= found["target"] == 0.99
    assert min(found["check"]["functions"].values()) >= 0.98


@pytest.mark.slow
def test_a_higher_target_takes_more_of_the_gpu_and_is_met(tmp_path: Path):
    """A plan for these rates is late for one call in eighty: bursts come in a row."""
    units = []
    for target in (0.9, 0.999):
        found = plan(tmp_path, "resnet50,1500,9 bert_base,500,12", "--policy", "frontier", "--target", target)
        assert found["worst"] >= target
        units.append(sum({(cut["gpu"], cut["dedup"], cut["part"]): cut["units"] for cut in found["gpulets"]}.values()))
    assert units[0] < units[1]


def test_a_target_that_is_missed_is_an_error_and_says_by_what(tmp_path: Path):
    options = ("--policy", "frontier", "--gpus", 1, "--target", 1)
    found = plan(tmp_path, "vgg16,8,40", *options, kind="v100", code=1)
    assert found["schedulable"] and 0.9 < found["worst"] < 1
    words = ["plan", str(tmp_path / "tasks.csv"), "--profiles", str(ROOT / "profiles/v100"), *map(str, options)]
    assert "MISSED by vgg16" in CliRunner().invoke(root, words).output


def test_the_original_knows_no_target(tmp_path: Path):
    (tmp_path / "tasks.csv").write_text("1,10,100\n")
    words = ["plan", str(tmp_path / "tasks.csv"), "--glet-dir", str(ROOT / "data/glet"), "--compat", "--target", "0.9"]
    with pytest.raises(BadValue, match="--target: the original plans for no attainment"):
        CliRunner().invoke(root, words, catch_exceptions=False)


@pytest.mark.parametrize("target", ["0", "1.1", "nan", "-1"])
def test_a_target_is_a_share(tmp_path: Path, target: str):
    (tmp_path / "tasks.csv").write_text("resnet50,10,100\n")
    assert CliRunner().invoke(root, ["plan", str(tmp_path / "tasks.csv"), "--target", target]).exit_code == 2
