"""Parts of the default policy: batching feedback, choice of device kinds, cost of a step."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from lamina.core.lifecycle import InstancePhase
from lamina.core.scheduling.leases import Device
from lamina.core.scheduling.state import Instance
from lamina.lab.experiments import admission
from lamina.lab.experiments.admission import CPU, GPU, TIMES
from lamina.policies.frontier.batch_planner import MAX_SKIPPED, BatchingFeedback
from lamina.policies.frontier.candidate_slots import CandidateSlot
from lamina.policies.frontier.config_table import BatchConfig, ConfigTable, usual_cost
from lamina.types import DeviceSpec, SliceLimits

GOAL_US = 40_000


def batches_until_trusted(feedback: BatchingFeedback) -> int:
    count = 0
    while not feedback.should_wait("f"):
        feedback.batch_started("f", 4, silent=True)
        count += 1
    return count


def wait_in_vain(feedback: BatchingFeedback) -> int:
    feedback.wait_began("f", 1)
    feedback.batch_started("f", 8, silent=True)
    return batches_until_trusted(feedback)


def test_a_wait_that_ends_in_silence_is_put_off_for_twice_as_long_each_time():
    feedback = BatchingFeedback()
    assert [wait_in_vain(feedback) for _ in range(8)] == [2, 4, 8, 16, 32, MAX_SKIPPED, MAX_SKIPPED, MAX_SKIPPED]


def test_a_wait_that_was_joined_makes_the_next_penalty_smaller():
    feedback = BatchingFeedback()
    wait_in_vain(feedback)
    wait_in_vain(feedback)
    feedback.wait_began("f", 1)
    feedback.batch_started("f", 8, silent=False)
    assert wait_in_vain(feedback) == 4


def test_no_batch_is_delayed_after_delays_that_no_call_joined():
    feedback = BatchingFeedback()
    for _ in range(3):
        feedback.wait_began("f", 1)
        feedback.batch_started("f", 1, silent=False)
    assert not feedback.should_wait("f")


def table(kind: str) -> ConfigTable:
    cores, times = TIMES["small"]
    fixed_ms, job_ms = times[kind]
    usual_units = cores if kind == "cpu" else 1

    def latency_us(batch: int, units: int, _: int) -> int:
        return int(1_000 * (fixed_ms + job_ms * batch) * 1.6 ** -math.log2(units / usual_units))

    sizes = (1, 2, 4, 8, 16) if kind == "cpu" else (1, 2, 4)
    return ConfigTable(latency_us, 16, sizes, (0,), CPU if kind == "cpu" else GPU)


@pytest.mark.parametrize(("gap_us", "cheaper"), [(20_000, "cpu"), (1_000, "gpu")])
def test_lone_jobs_are_cheapest_on_cores_and_crowds_on_the_gpu(gap_us: int, cheaper: str):
    costs = {kind: usual_cost(table(kind), gap_us, GOAL_US // 2, None)[0] for kind in ("cpu", "gpu")}
    assert min(costs, key=lambda kind: costs[kind]) == cheaper


def test_where_five_units_cannot_start_a_batch_has_the_six_there_is_room_for():
    """Slices start at a multiple of their size: units 6 to 11 have no place for five."""
    limits = SliceLimits(aligned=True, batches_per_instance=0)
    device = Device(DeviceSpec(id="gpu0", kind="gpu", units=15, memory_mib=1, limits=limits))
    instance = Instance("f-1", "f", "gpu0", InstancePhase.WARM, 0)
    sizes = ConfigTable(lambda batch, units, cores: 1_000, 1, (5, 6, 15), (0,), device.spec)
    slot = CandidateSlot(instance, device, sizes, 0b111111 << 6, 6, 0, False, 0)
    assert slot.slot_for(BatchConfig(1.0, 1_000, 1, 5, 0)).mask == 0b111111 << 6


def test_on_what_others_can_spare_a_batch_takes_no_longer_than_they_can_bear():
    limits = SliceLimits(batches_per_instance=0)
    device = Device(DeviceSpec(id="gpu0", kind="gpu", units=8, memory_mib=1, limits=limits))
    instance = Instance("f-1", "f", "gpu0", InstancePhase.WARM, 0)
    sizes = ConfigTable(lambda batch, units, cores: 1_000 + 500 * batch, 16, (4,), (0,), device.spec)
    slot = CandidateSlot(instance, device, sizes, 0b1111, 4, 0, False, 0)
    whole, spared = slot.cheapest_within(16, 60_000), replace(slot, longest_us=3_000).cheapest_within(16, 60_000)
    assert whole is not None and whole.batch == 16
    assert spared is not None and (spared.batch, spared.time_us) == (4, 3_000)


def attainment(flow: str, latency_ms: int, cost: str, name: str) -> float:
    cells = [cell for cell in admission.cells(1, quick=False) if cell["part"] == "grid" and cell["flow"] == flow]
    own = next(c for c in cells if (c["latency_ms"], c["cost_slo"], c["name"]) == (latency_ms, cost, name))
    return float(admission.run(own | {"seeds": 1, "span_us": 400_000})["attainment"])


@pytest.mark.parametrize("flow", ["ensemble", "cascade"])
def test_a_limit_on_cost_is_kept_by_waiting_for_company(flow: str):
    assert attainment(flow, 60, "tight", "frontier") > 0.98
