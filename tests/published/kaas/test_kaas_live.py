"""The thesis's traces on kernel graphs in the product's executor: the same order as in print, and as in the simulator."""

from __future__ import annotations

import pytest
from benchmarks import kaas_live

from lamina.lab.experiments import kaas


@pytest.mark.parametrize("params", ["trace-i", "trace-ii"])
@pytest.mark.parametrize("policy", [name for name in kaas.PUBLISHED if name != "kaas_mlfq"])
def test_kernel_graphs_run_in_the_printed_order(policy: str, params: str):
    starts, gpus = kaas_live.replay(policy, params)
    assert starts == kaas.PUBLISHED[policy] == kaas_live.simulated(policy, params)
    assert gpus.results == {call: (3 ** kaas_live.launches_of(call, params) - 1) // 2 for call in ("R0", "B1", "R2", "R3")}


def test_the_policy_that_draws_draws_the_same_live_and_simulated_and_the_printed_trace_among_others():
    live = [kaas_live.replay("kaas_mlfq", seed=seed)[0] for seed in range(24)]
    assert live == [kaas_live.simulated("kaas_mlfq", seed=seed) for seed in range(24)]
    assert kaas.PUBLISHED["kaas_mlfq"] in live


@pytest.mark.parametrize("policy", ["kaas_affinity", "frontier"])
def test_other_policies_serve_the_same_requests(policy: str):
    starts, gpus = kaas_live.replay(policy)
    assert {call for call, _, _ in starts} == set(gpus.results) == {"R0", "B1", "R2", "R3"}
