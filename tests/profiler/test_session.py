"""From an app to a profile, through a real worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from lamina.errors import BadValue, FunctionFailed, LoadFailed
from lamina.predict import profile as profiles
from lamina.profiler import session
from lamina.profiler.bench import TimedRun
from tests.profiler.fake_bench import FakeBench, straight

APP = """
import lamina

app = lamina.App("profiled")

@app.function(batch=4)
def work(x):
    return [sum(range(2_000 * value)) for value in x]

@app.function()
def fussy(x):
    return 1 / x

@app.function()
def nothing():
    return None

@app.function(gpu=lamina.GPU(required=True))
def heavy(x):
    return x

@app.function()
class Broken:
    def load(self):
        raise ValueError("no weights")
    def __call__(self, x):
        return x
"""
EXAMPLES = """
def examples():
    return {"work": [1, 2], "fussy": [0]}
"""


@pytest.fixture
def app(tmp_path: Path) -> str:
    path = tmp_path / "profiled_app.py"
    path.write_text(APP + EXAMPLES)
    return str(path)


@pytest.fixture
def bare_app(tmp_path: Path) -> str:
    path = tmp_path / "bare_app.py"
    path.write_text(APP)
    return str(path)


def test_examples_of_the_app_are_the_samples(app: str) -> None:
    found = session.find_targets(app, [])
    assert {target.function.name: target.samples for target in found} == {"work": [{"x": 1}, {"x": 2}], "fussy": [{"x": 0}]}


def test_a_body_given_by_hand_comes_first(app: str) -> None:
    (target,) = session.find_targets(f"{app}:work", [7])
    assert target.samples == [{"x": 7}]


def test_the_app_may_be_named_too(app: str) -> None:
    (target,) = session.find_targets(f"{app}:app:work", [])
    assert target.function.name == "work"


def test_a_function_without_inputs_needs_no_samples(bare_app: str) -> None:
    (target,) = session.find_targets(f"{bare_app}:nothing", [])
    assert target.samples == [{}]


@pytest.mark.parametrize("name", ["", ":work"])
def test_without_samples_it_says_what_to_add(bare_app: str, name: str) -> None:
    with pytest.raises(BadValue, match="no sample input") as caught:
        session.find_targets(bare_app + name, [])
    assert 'def examples(): return {"work": [body]}' in caught.value.hint


@pytest.mark.parametrize(
    ("examples", "says"),
    [
        ("return []", "gave list"),
        ("return {'walk': [1]}", "'walk', which is no function"),
        ("return {'work': 5}", "no list of bodies"),
        ("return {'work': 'abc'}", "no list of bodies"),
        ("return {'nothing': [5]}", "takes no input"),
    ],
)
def test_examples_that_make_no_sense_are_refused(tmp_path: Path, examples: str, says: str) -> None:
    path = tmp_path / "odd_app.py"
    path.write_text(f"{APP}\ndef examples():\n    {examples}\n")
    with pytest.raises(BadValue, match=says):
        session.find_targets(str(path), [])


def test_examples_that_raise_are_the_users_error(tmp_path: Path) -> None:
    path = tmp_path / "odd_app.py"
    path.write_text(f"{APP}\ndef examples():\n    return {{}}[1]\n")
    with pytest.raises(LoadFailed, match="KeyError"):
        session.find_targets(str(path), [])


def test_an_unknown_function_is_answered_with_those_there_are(app: str) -> None:
    with pytest.raises(BadValue, match="no function 'walk'") as caught:
        session.find_targets(f"{app}:walk", [])
    assert "work" in caught.value.hint


def test_what_needs_a_gpu_is_not_measured_without(app: str) -> None:
    (target,) = session.find_targets(f"{app}:heavy", [1])
    with pytest.raises(BadValue, match="needs a GPU"):
        session.open_bench(target, "cpu")


@pytest.mark.live
def test_a_function_is_measured_in_a_worker_and_the_next_session_goes_on(app: str, tmp_path: Path) -> None:
    (target,) = session.find_targets(f"{app}:work", [])
    options = session.ProfileOptions(out=tmp_path / "profiles", budget_s=60.0, target=0.9)
    results = []
    for _ in range(2):
        bench = session.open_bench(target, "cpu")
        try:
            results.append(session.profile_function(target, bench, options))
        finally:
            bench.close()
    first, second = results
    assert first.outcome.reached and second.outcome.reached
    assert (first.kept_runs, second.kept_runs) == (0, sum(map(len, first.outcome.runs.values())))
    profile = profiles.read(tmp_path / "profiles" / "work.cpu.json")
    assert {(1, 1), (4, 1)} <= {(point.batch, point.units) for point in profile.points}
    assert all(0 < point.p50_us <= point.p99_us for point in profile.points)
    assert profile.load_us > 10_000 and profile.memory_mib > 10
    assert profile.meta["machine"] and profile.meta["date"]
    assert profiles.read_all(tmp_path / "profiles") == [profile]  # the runs beside it are not taken for one


@pytest.mark.live
@pytest.mark.parametrize(
    ("name", "kind", "says"), [("fussy", FunctionFailed, "sample 0: ZeroDiv"), ("broken", LoadFailed, "weights")]
)
def test_a_function_that_fails_says_so(app: str, tmp_path: Path, name: str, kind: type[Exception], says: str) -> None:
    (target,) = session.find_targets(f"{app}:{name}", [0])
    bench = session.open_bench(target, "cpu")
    try:
        with pytest.raises(kind, match=says):
            session.profile_function(target, bench, session.ProfileOptions(out=tmp_path / "profiles"))
    finally:
        bench.close()


@pytest.mark.live
def test_every_sample_has_its_turn_in_batches_of_one(tmp_path: Path) -> None:
    path = tmp_path / "turns_app.py"
    seen = tmp_path / "seen"
    path.write_text(
        f"import lamina\napp = lamina.App('turns')\n@app.function()\ndef note(x):\n    open({str(seen)!r}, 'a').write(x)\n"
    )
    (target,) = session.find_targets(f"{path}:note", ["a", "b", "c"])
    bench = session.open_bench(target, "cpu")
    try:
        bench.load()
        for _ in range(4):
            bench.run(1, 1)
    finally:
        bench.close()
    assert seen.read_text() == "abca"


class Stopped(FakeBench):
    """Somebody loses patience."""

    def run(self, batch: int, units: int) -> TimedRun:
        if len(self.asked) == 100:
            raise KeyboardInterrupt
        return super().run(batch, units)


@pytest.mark.live
def test_what_was_measured_until_it_was_stopped_is_a_profile(app: str, tmp_path: Path) -> None:
    (target,) = session.find_targets(f"{app}:work", [])
    result = session.profile_function(target, Stopped(straight, noise=0.3), session.ProfileOptions(out=tmp_path, target=0.01))
    assert result.stopped and result.uncertainty_reason == "you stopped it"
    assert profiles.read(result.path).points
