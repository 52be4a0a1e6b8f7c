from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lamina.cli import _plan_report, main
from lamina.cli.plan import command

GLET = Path(__file__).parents[2] / "data" / "glet"
GOLDEN = json.loads((GLET / "golden_sample.json").read_text())
NAMES = GOLDEN["meta"]["model_ids"]
EXAMPLE = "2\n7,50,108,\n9,50,142,\n"
FIRST = GOLDEN["cases"][0]
POLICIES = {
    "gpulet": "gpulet-int",
    "gpulet-noint": "gpulet-noint",
    "greedy_part": "greedy_part",
    "timesharing": "timesharing_only",
}


@pytest.fixture(autouse=True)
def short_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """How good estimates are is the matter of `test_plan_target.py`."""
    monkeypatch.setattr(_plan_report, "ESTIMATE_CALLS", 300)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.csv"
    path.write_text(EXAMPLE)
    return path


def invoke(tasks: Path, *args: object, code: int = 0, folder: Path = GLET) -> Result:
    policy = [] if "--policy" in args else ["--policy", "gpulet"]  # the original's files, and what they give there
    options = [str(tasks), "--glet-dir", str(folder), *policy, *map(str, args)]
    result = CliRunner().invoke(command, options, catch_exceptions=False, standalone_mode=False)
    assert result.return_value == code, result.output
    return result


def planned(tasks: Path, *args: object, code: int = 0, folder: Path = GLET) -> Any:
    return json.loads(invoke(tasks, "--json", *args, code=code, folder=folder).stdout)


def csv_of(case: dict[str, Any]) -> str:
    return f"{len(case['tasks'])}\n" + "".join(f"{model},{rate},{slo},\n" for model, rate, slo in case["tasks"])


def rows_of(result: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (gpu, part, dedup, NAMES[str(model)], batch, pytest.approx(duty_ms, rel=2e-5))
        for gpu, part, dedup, duty_ms, _, on_it in result.get("gpulets") or []
        for model, batch, _, _ in on_it
    ]


def test_the_shipped_example_gives_the_shipped_output(tasks: Path):
    options = ("--sched-config", GLET / "sched-config.json", "--device-config", GLET / "device-config.json", "--compat")
    rows = [line.split(",") for line in (GLET / "ModelList_example.txt").read_text().split()]
    expected = [row for row in rows if row[3] != "reserved"]
    found = planned(tasks, *options)
    assert found["schedulable"] is True
    assert [list(map(str, row.values())) for row in found["gpulets"]] == expected


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", GOLDEN["cases"][::4], ids=lambda case: case["id"])
def test_compat_prints_what_the_original_does(tmp_path: Path, case: dict[str, Any], policy: str):
    (tmp_path / "tasks.csv").write_text(csv_of(case))
    for gpu_set, counts in GOLDEN["meta"]["gpu_sets"].items():
        result = case["results"][f"{gpu_set}/{POLICIES[policy]}"]
        gpus = ",".join(f"{kind}={count}" for kind, count in counts)
        done = result["status"] == "ok"
        found = planned(tmp_path / "tasks.csv", "--policy", policy, "--gpus", gpus, "--compat", code=0 if done else 1)
        assert found["schedulable"] is done
        assert [tuple(row.values()) for row in found["gpulets"]] == rows_of(result)
        assert found.get("abort", False) is (result["status"] == "abort")


def test_a_scheduler_configuration_overrides_the_policy(tmp_path: Path):
    (tmp_path / "tasks.csv").write_text(csv_of(FIRST))
    file = GLET / "SchedConfigs" / "config-greedy_part.json"
    found = planned(tmp_path / "tasks.csv", "--policy", "gpulet", "--sched-config", file, "--gpus", "2080ti=4", "--compat")
    assert [tuple(row.values()) for row in found["gpulets"]] == rows_of(FIRST["results"]["4x2080ti/greedy_part"])


def test_compat_takes_the_gpus_of_the_configuration(tasks: Path):
    found = planned(tasks, "--sched-config", GLET / "sched-config.json", "--compat")
    assert {row["gpu"] for row in found["gpulets"]} == {0, 1}


def test_without_gpus_as_few_as_possible_are_taken(tasks: Path):
    assert planned(tasks)["gpus"] == ["2080ti"]


@pytest.mark.parametrize(
    "text",
    [
        "2\n7,50,108,\n9,50,142,\n",
        "7,50,108\n9,50,142\n",
        "model,rate,slo\nresnet50,50,108\nvgg16,50,142\n",
        "rate,SLO,id\n50,108,7\n50,142,9\n",
        "# a comment\n\n resnet50 , 50 , 108 \nvgg16,50.0,142\n6,0,66\n",
    ],
    ids=["counted", "bare", "named", "in any order", "with comments"],
)
def test_tasks_may_be_written_in_several_ways(tasks: Path, text: str):
    expected = planned(tasks, "--compat")
    tasks.write_text(text)
    assert planned(tasks, "--compat") == expected


def test_the_table_shows_slices_models_and_latency_against_the_slo(tasks: Path):
    lines = [line.split() for line in invoke(tasks, "--gpus", 1).stdout.splitlines()]
    assert ["0", "2080ti", "20%", "resnet50", "5", "73.5", "ms", "68", "106.2", "ms", "108", "ms"] in lines
    assert ["80%", "vgg16", "8", "110.7", "ms", "68", "142.0", "ms", "142", "ms"] in lines


def test_what_does_not_fit_is_told_with_the_best_that_does(tasks: Path):
    tasks.write_text("resnet50,600,108\nvgg16,600,142\n")
    text = invoke(tasks, "--gpus", 1, code=1).stdout
    assert "NOT everything fits" in text
    assert "unserved" in text
    assert "would fit" in text


def test_programs_learn_what_does_not_fit_too(tasks: Path):
    tasks.write_text("resnet50,600,108\nvgg16,600,142\n")
    found = planned(tasks, "--gpus", 1, code=1)
    assert 0 < found["largest_scale"] < 1
    assert 0 < sum(found["unserved"].values()) < sum(found["planned"].values())


def test_a_plan_at_the_largest_scale_fits(tasks: Path):
    tasks.write_text("resnet50,600,108\nvgg16,600,142\n")
    scale = planned(tasks, "--gpus", 1, code=1)["largest_scale"]
    tasks.write_text(f"resnet50,{600 * scale},108\nvgg16,{600 * scale},142\n")
    assert planned(tasks, "--gpus", 1)["schedulable"]


def test_a_network_limit_in_gbits_is_kept(tasks: Path):
    tasks.write_text("googlenet,600,66\n")
    assert planned(tasks, "--gpus", 1)["schedulable"]
    assert not planned(tasks, "--gpus", 1, "--network", 1, code=1)["schedulable"]


def test_rates_the_original_never_ends_for_are_marked(tasks: Path):
    tasks.write_text("7,3,108\n")
    found = planned(tasks, "--compat", code=1)
    assert (found["schedulable"], found["abort"]) == (False, True)
    assert "never ends" in found["reason"]


def test_frontier_takes_no_more_gpus_than_the_others(tasks: Path):
    tasks.write_text("resnet50,400,108\nvgg16,400,142\nssd-mobilenetv1,200,202\n")
    fewest = {policy: len(planned(tasks, "--policy", policy)["gpus"]) for policy in ("frontier", "gpulet", "timesharing")}
    assert fewest["frontier"] == min(fewest.values())


def test_a_plan_says_what_it_costs_and_how_much_is_in_time(tasks: Path):
    found = planned(tasks, "--gpus", 2)
    parts = {(row["gpu"], row["part"], row["dedup"]) for row in found["gpulets"]}
    assert found["cost_per_s"] == pytest.approx(sum(part for _, part, _ in parts) / 100)
    assert found["rent_per_s"] == 2
    assert 0.9 < found["attainment"] <= 1


def test_what_does_not_fit_is_told_with_the_gpus_that_would_do(tasks: Path):
    tasks.write_text("resnet50,600,108\nvgg16,600,142\n")
    found = planned(tasks, "--gpus", 1, code=1)
    needed = len(found["gpus_needed"])
    assert planned(tasks, "--gpus", needed)["schedulable"]
    assert "would be enough" in invoke(tasks, "--gpus", 1, code=1).stdout


@pytest.mark.parametrize("policy", ["gpulet", "frontier", "timesharing", "greedy_part"])
def test_a_plan_that_is_played_is_in_time(tasks: Path, policy: str):
    found = planned(tasks, "--policy", policy, "--check", "--seed", 3)
    assert found["check"]["attainment"] > 0.97
    assert found["check"]["seed"] == 3
    assert set(found["check"]["functions"]) == {"resnet50", "vgg16"}


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_plot_is_a_picture(tasks: Path, tmp_path: Path, ending: str):
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / f"plan.{ending}"
    invoke(tasks, "--gpus", "2080ti=2,3080=3", "--plot", path)
    assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


def test_the_same_plan_draws_the_same_picture(tasks: Path, tmp_path: Path):
    pytest.importorskip("matplotlib")
    for name in ("one.svg", "two.svg"):
        invoke(tasks, "--plot", tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_the_latency_table_the_configuration_names_comes_first(tasks: Path, tmp_path: Path):
    folder = tmp_path / "glet"
    shutil.copytree(GLET, folder)
    slower = [line.split(",") for line in (GLET / "surrogate_latency" / "2080ti.csv").read_text().split()]
    (folder / "2080ti" / "latency.csv").write_text("".join(f"{m},{p},{b},{2 * float(ms)}\n" for m, p, b, ms in slower))
    assert planned(tasks, "--compat", folder=folder) != planned(tasks, "--compat")


def test_a_policy_needs_no_configuration_file(tasks: Path, tmp_path: Path):
    folder = tmp_path / "glet"
    shutil.copytree(GLET, folder, ignore=shutil.ignore_patterns("SchedConfigs"))
    for policy in POLICIES:
        options = ("--policy", policy, "--gpus", "2080ti=2", "--compat")
        assert planned(tasks, *options, folder=folder) == planned(tasks, *options)


@pytest.mark.parametrize(
    ("text", "args", "says"),
    [
        (EXAMPLE, ("--policy", "gpulets"), "did you mean 'gpulet'?"),
        (EXAMPLE, ("--policy", "frontier", "--compat"), "--compat: the original has no 'frontier'"),
        (EXAMPLE, ("--gpus", "a100=2"), "--gpus 'a100=2': no kind 'a100'"),
        (EXAMPLE, ("--gpus", "2080ti=x"), "'x' is not a number of GPUs"),
        (EXAMPLE, ("--gpus", "0"), "no GPU at all"),
        (EXAMPLE, ("--plot", "x.gif"), "end the name in .png or .svg"),
        (EXAMPLE, ("--sched-config", "/none.json"), "no file '/none.json'"),
        ("3\n7,50,108,\n", (), "tasks.csv:1: 3 tasks announced, 1 follow"),
        ("resnet5,50,108\n", (), "tasks.csv:1: model 'resnet5' is not known\n  hint: did you mean 'resnet50'?"),
        ("7,50,108\n7,60,108\n", (), "tasks.csv:2: model 'resnet50' is there twice"),
        ("7,-5,108\n", (), "tasks.csv:1: rate '-5' cannot be"),
        ("7,50,0\n", (), "tasks.csv:1: SLO '0' cannot be"),
        ("7,50\n", (), "tasks.csv:1: '7,50' has too few fields"),
        ("id,rate,deadline\n7,50,3\n", (), "tasks.csv:1: no column 'slo'"),
        ("", (), "tasks.csv: no tasks"),
    ],
)
def test_a_mistake_is_told_on_stderr_with_exit_code_two(
    tasks: Path, capsys: pytest.CaptureFixture[str], text: str, args: tuple[str, ...], says: str
):
    tasks.write_text(text)
    with pytest.raises(SystemExit) as caught:
        main(["plan", str(tasks), "--glet-dir", str(GLET), *args])
    out, err = capsys.readouterr()
    assert caught.value.code == 2
    assert says in err
    assert out == ""


def test_profiles_are_asked_for(tasks: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["plan", str(tasks)])
    assert "--profiles: profiles are needed" in capsys.readouterr().err


def test_compat_needs_the_original_files(tasks: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["plan", str(tasks), "--compat"])
    assert "--compat: the original reads its own files only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("mem-config.json", '{"models": []}', "no memory for model 'lenet1'"),
        ("device-config.json", '{"device_specs": [{"type": "x"}]}', "missing required field `mem_mb`"),
        ("surrogate_latency/3080.csv", "vgg16,20,1,5.0\n", "vgg16: no latency for batch 32 at 20 %"),
        ("surrogate_latency/2080ti.csv", "vgg16,20,one,5.0\n", "'one' is not a whole number"),
        ("2080ti/INT_MODEL_CONSTANT.CSV", "a,b\n", "no five weights"),
        ("batching_overhead/3_224_224.txt", "1,0.5,\n", "batches are missing"),
    ],
)
def test_a_broken_input_file_is_named(
    tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, text: str, says: str
):
    folder = tmp_path / "glet"
    shutil.copytree(GLET, folder)
    (folder / file).write_text(text)
    with pytest.raises(SystemExit) as caught:
        main(["plan", str(tasks), "--glet-dir", str(folder)])
    err = capsys.readouterr().err
    assert caught.value.code == 2
    assert says in err
    assert Path(file).name in err


# -------------------------------------------------------------------- scenarios

SCENARIO = """
[scenario]
name = "two"
duration = "10s"

[[device]]
kind = "h200"
price = "3.60/h"

[[function]]
name = "detect"
share = "1/4"
max_batch = 8
memory = "2GiB"
[function.profile.h200]
bandwidth = 0.3
batch = [1, 8]
p50_ms.1 = [8.0, 30.0]
p50_ms.4 = [3.0, 10.0]
p50_ms.16 = [2.0, 5.0]

[[function]]
name = "read"
share = "1/8"
max_batch = 16
memory = "1GiB"
slo = "60ms"
[function.profile.h200]
bandwidth = 0.2
batch = [1, 16]
p50_ms.1 = [2.0, 16.0]
p50_ms.4 = [1.0, 6.0]
p50_ms.16 = [0.8, 3.0]

[[workflow]]
name = "page"
slo = "120ms"
[[workflow.step]]
function = "detect"
[[workflow.step]]
name = "lines"
after = ["detect"]
each = { expect = 4, steps = [{ function = "read" }] }

[[load]]
target = "page"
shape = "steps"
stages = [["5s", 40], ["5s", 100]]

[[load]]
target = "read"
rate = 50
"""
POLICY_NAMES = ["gpulet", "gpulet-noint", "timesharing", "greedy_part", "frontier"]


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "two.toml"
    path.write_text(SCENARIO)
    return path


def from_scenario(path: Path, *args: object, code: int = 0) -> Any:
    policy = [] if "--policy" in args else ["--policy", "gpulet"]
    options = [str(path), "--json", *policy, *map(str, args)]
    result = CliRunner().invoke(command, options, catch_exceptions=False, standalone_mode=False)
    assert result.return_value == code, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_scenario_is_planned_for_with_every_policy(scenario: Path, policy: str):
    found = from_scenario(scenario, "--policy", policy)
    assert found["schedulable"]
    assert found["gpus"] == ["h200"] * len(found["gpus"])
    assert {row["model"] for row in found["gpulets"]} == {"detect", "read"}
    assert all(row["latency_ms"] <= row["slo_ms"] * (1 + 1e-6) for row in found["gpulets"])


def test_rates_are_those_of_the_peak_and_of_every_item(scenario: Path):
    planned_for = from_scenario(scenario)["planned"]
    assert planned_for["detect"] > 100
    assert planned_for["read"] > 4 * 100 + 50


def test_frontier_holds_no_more_than_gpulet(scenario: Path):
    ours, theirs = (from_scenario(scenario, "--policy", policy) for policy in ("frontier", "gpulet"))
    assert len(ours["gpus"]) <= len(theirs["gpus"])
    assert ours["cost_per_s"] <= theirs["cost_per_s"]


def test_prices_of_the_scenario_count(scenario: Path):
    found = from_scenario(scenario, "--gpus", 2)
    assert found["rent_per_s"] == pytest.approx(2 * 3.60 / 3600)
    assert 0 < found["cost_per_s"] <= found["rent_per_s"]


def test_a_scenario_is_played_with_its_own_loads(scenario: Path):
    found = from_scenario(scenario, "--policy", "frontier", "--check")
    assert found["check"]["attainment"] > 0.95
    assert set(found["check"]["functions"]) == {"page", "read"}


def test_the_same_plan_is_played_the_same_way(scenario: Path):
    assert from_scenario(scenario, "--check") == from_scenario(scenario, "--check")


def test_interference_of_a_scenario_makes_its_plans_larger_or_slower(scenario: Path):
    alone = from_scenario(scenario, "--gpus", 1)
    scenario.write_text(SCENARIO + "\n[interference]\nlimit = 0.05\n")
    beside = from_scenario(scenario, "--gpus", 1, code=1 if not alone["schedulable"] else 0)
    assert beside["gpulets"] != alone["gpulets"]


def test_too_many_calls_for_the_devices_are_told(scenario: Path):
    scenario.write_text(SCENARIO.replace('["5s", 100]', '["5s", 5000]'))
    found = from_scenario(scenario, "--policy", "frontier", "--gpus", 1, code=1)
    assert 0 < found["largest_scale"] < 1
    assert found["unserved"]


def test_a_scenario_that_is_not_there_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(["plan", str(tmp_path / "none.toml")])
    assert caught.value.code == 2
    assert "none.toml'\n  hint: give a scenario" in capsys.readouterr().err


def test_a_list_of_names_is_planned_for_with_the_profilers_files(tmp_path: Path):
    from lamina.predict.profile import Point, Profile, write

    folder = tmp_path / "profiles"
    folder.mkdir()
    for name in ("a", "b"):
        points = [Point(batch=b, units=u, p50_us=1000.0 * b / u + 500) for b in (1, 8) for u in (1, 4, 16)]
        write(Profile(function=name, device="h200", points=points, memory_mib=1000), folder / f"{name}.json")
    (tmp_path / "tasks.csv").write_text("a,100,50\nb,40,30\n")
    found = from_scenario(tmp_path / "tasks.csv", "--profiles", folder, "--policy", "frontier", "--check")
    assert found["gpus"] == ["h200"]
    assert found["check"]["attainment"] > 0.97
