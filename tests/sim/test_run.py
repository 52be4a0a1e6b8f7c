from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from lamina.core.actions import Action, FailCall, Reject, Reply
from lamina.core.eventlog import EventLogWriter, read_log, replay_log
from lamina.core.events import CallArrived, DeviceJoined, DeviceLost, Event, InstanceLost
from lamina.errors import BadValue
from lamina.policies import fifo
from lamina.sim.run import build_controller, generate_calls, run
from lamina.sim.scenario import Scenario, parse
from lamina.sim.scenario import read as read_scenario
from lamina.sim.summary import json_lines
from tests.properties import examples

from .conftest import PAGES, SCENARIOS, SMALL

POLICIES = ["fifo", "edf"]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_bytes(pages: Scenario, policy: str):
    assert json_lines(run(pages, policy)) == json_lines(run(pages, policy))


def test_another_seed_gives_another_run(pages: Scenario):
    assert json_lines(run(pages, seed=1)) != json_lines(run(pages, seed=2))


def test_every_policy_is_offered_the_same_calls(pages: Scenario):
    offered = [[(row.target, row.offered) for row in run(pages, policy).targets] for policy in POLICIES]
    assert offered[0] == offered[1]


def test_a_load_keeps_its_arrivals_when_another_one_changes(small: Scenario):
    faster = replace(small, loads=(small.loads[0], replace(small.loads[1], cv=1.0)))
    arrivals = [[call.arrived_us for call in generate_calls(each) if call.target == "a"] for each in (small, faster)]
    assert arrivals[0] == arrivals[1]


class Tally:
    """What was offered, and how often each call was told how it ended."""

    def __init__(self) -> None:
        self.offered: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()

    def watch(self, now_us: int, event: Event, actions: list[Action]) -> None:
        if isinstance(event, CallArrived):
            self.offered[event.call.id] += 1
        self.ended.update(action.call_id for action in actions if isinstance(action, Reply | FailCall | Reject))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_call_is_answered_exactly_once(pages: Scenario, policy: str):
    tally = Tally()
    summary = run(pages, policy, watch=tally.watch, check=True)
    assert tally.ended == tally.offered
    assert set(tally.offered.values()) == {1}
    assert summary.total.offered == len(tally.offered) > 900


FAULTS = st.lists(
    st.tuples(
        st.integers(0, 400_000),
        st.sampled_from(
            [
                InstanceLost("a-1"),
                InstanceLost("b-1"),
                InstanceLost("a-2"),
                DeviceLost("h200-0"),
                DeviceJoined(parse(SMALL).devices[0]),
            ]
        ),
    ),
    max_size=6,
)


@examples(25)
@given(FAULTS, st.integers(0, 1000), st.sampled_from(POLICIES))
def test_every_call_is_answered_exactly_once_whatever_breaks(faults: list[tuple[int, Event]], seed: int, policy: str):
    scenario = replace(parse(SMALL + PAGES), duration_us=300_000)
    tally = Tally()
    run(scenario, policy, seed=seed, faults=faults, watch=tally.watch, check=True)
    assert tally.ended == tally.offered


@pytest.mark.parametrize("file", SCENARIOS, ids=lambda file: file.stem)
def test_every_scenario_of_the_repository_runs(file: Path):
    scenario = read_scenario(file)
    offered = run(scenario, calls=300, check=True).total.offered
    assert offered >= 300 if any(load.clients for load in scenario.loads) else offered == 300  # their first calls count


def test_a_run_stops_after_so_many_calls(small: Scenario):
    assert run(small, calls=100).total.offered == 100


def test_no_call_arrives_after_the_duration(small: Scenario):
    assert all(call.arrived_us < 2_000_000 for call in generate_calls(small))
    assert run(small).total.offered_s == 2.0


def test_all_steps_of_a_workflow_are_run(pages: Scenario):
    only_pages = replace(pages, loads=pages.loads[-1:], noise=0.0)
    summary = run(only_pages)
    jobs = {row.function: row.jobs for row in summary.functions}
    count = summary.total.answered
    assert summary.total.attainment > 0.9
    assert jobs["b"] / count == pytest.approx(3.0, rel=0.15)  # three parts a page
    assert jobs["a"] / count == pytest.approx(1 + 3 * 0.3, rel=0.15)  # each page once, and three parts in ten again


def test_a_workflow_takes_at_least_as_long_as_its_steps_in_a_row(pages: Scenario):
    quiet = replace(pages, loads=pages.loads[-1:], noise=0.0)
    ended: list[int] = []

    def watch(now_us: int, event: Event, actions: list[Action]) -> None:
        ended.extend(action.latency_us for action in actions if isinstance(action, Reply))

    run(quiet, watch=watch)
    assert min(ended) >= 2_000 + 4_000


def test_a_busy_device_is_as_busy_as_its_work_demands(small: Scenario):
    alone = replace(small, loads=small.loads[:1], noise=0.0, functions=(replace(small.functions[0], max_batch=1),))
    summary = run(alone)
    expected = summary.targets[0].answered * 2_667 * 3 / (alone.devices[0].units * summary.total.ended_s * 1e6)
    assert summary.devices[0].utilisation == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("predictor", ["table", "online"])
def test_replaying_the_log_repeats_every_action(pages: Scenario, tmp_path: Path, policy: str, predictor: str):
    scenario = replace(pages, policy=policy, predictor=predictor, duration_us=500_000)
    writer = EventLogWriter(tmp_path / "events.jsonl")
    run(scenario, watch=writer.write)
    writer.close()
    entries = sum(1 for _ in read_log(tmp_path / "events.jsonl"))
    assert replay_log(tmp_path / "events.jsonl", build_controller(scenario)) == entries > 500


def test_a_log_of_a_device_with_a_hundred_units_can_be_replayed(tmp_path: Path):
    text = SMALL.replace('kind = "h200"', 'kind = "v100"').replace("profile.h200", "profile.v100")
    scenario = replace(parse(text), duration_us=200_000)
    writer = EventLogWriter(tmp_path / "events.jsonl")
    run(scenario, watch=writer.write)
    writer.close()
    entries = sum(1 for _ in read_log(tmp_path / "events.jsonl"))
    assert replay_log(tmp_path / "events.jsonl", build_controller(scenario)) == entries


def test_another_policy_does_not_inherit_the_options_of_the_first(small: Scenario):
    with_options = replace(small, policy="edf", options={"margin": 0.3})
    assert run(with_options, "fifo", calls=10).total.policy == "fifo"


def test_an_option_given_by_hand_is_checked(small: Scenario):
    with pytest.raises(BadValue, match="led_us: fifo has no such option"):
        run(small, options={"led_us": 5})


def test_a_policy_in_a_file_of_ones_own_can_be_used(small: Scenario, tmp_path: Path):
    (tmp_path / "mine.py").write_text(Path(fifo.__file__).read_text())
    summary = run(small, str(tmp_path / "mine.py"), {"lead_us": "1ms"}, calls=50)
    assert (summary.total.policy, summary.total.offered) == ("mine", 50)


def test_progress_is_reported_on_the_way(small: Scenario):
    seen: list[tuple[int, int]] = []
    busy = replace(small, duration_us=20_000_000)
    run(busy, progress=lambda number, now_us: seen.append((number, now_us)))
    assert [number for number, _ in seen] == [4096, 8192]
    assert seen == sorted(seen, key=lambda pair: pair[1])


def test_two_loads_alike_do_not_keep_in_step(small: Scenario):
    twins = replace(small, loads=(small.loads[0], replace(small.loads[0], target="b")))
    arrivals = {target: {call.arrived_us for call in generate_calls(twins) if call.target == target} for target in "ab"}
    assert len(arrivals["a"] & arrivals["b"]) < 0.01 * len(arrivals["a"])
