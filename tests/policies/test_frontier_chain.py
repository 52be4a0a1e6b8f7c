"""Step by step through a workflow, `frontier` spends what the best plan for all of it would."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from lamina.policies import frontier
from lamina.policies.frontier.config_table import unit_counts_on
from lamina.policies.frontier.workflow_plans import PRECISION
from lamina.types import DeviceSpec, SliceLimits, Slo
from tests.policies.test_frontier import MS, chain, scales, units_of
from tests.properties import examples
from tests.script import Script, a_function

GPU = DeviceSpec(id="gpu0", kind="gpu", units=8, memory_mib=1_000, limits=SliceLimits(batches_per_instance=0))


@examples(40)
@given(
    works=st.lists(st.integers(2, 30), min_size=2, max_size=3),
    powers=st.lists(st.sampled_from([0.3, 0.6, 0.9]), min_size=3, max_size=3),
    part=st.floats(0.0, 1.0),
)
def test_a_run_alone_on_an_idle_device_costs_what_brute_force_would_spend(works, powers, part):
    """Nothing spare, nobody to wait for: of all sizes for all steps the cheapest that is in time, but for the thinning."""
    names = "abc"[: len(works)]
    takes = {name: scales(0, work, power) for name, work, power in zip(names, works, powers, strict=False)}
    sizes = unit_counts_on(a_function("a", share=0.125), GPU)
    plans = [
        (sum(units * takes[name](1, units) for name, units in zip(names, plan, strict=True)), plan)
        for plan in product(sizes, repeat=len(names))
    ]

    def time_us(plan: tuple[int, ...]) -> int:
        return sum(takes[name](1, units) for name, units in zip(names, plan, strict=True))

    fastest_us, slowest_us = min(time_us(plan) for _, plan in plans), max(time_us(plan) for _, plan in plans)
    goal_us = fastest_us + int(part * (slowest_us - fastest_us)) + 1
    flow = chain(*names, slo_ms=goal_us // MS + 1)
    script = Script().given(
        *[a_function(name, share=0.125, slo=Slo()) for name in names],
        flows=[flow],
        devices=[GPU],
        policy=frontier.Policy(spare=0.0, patience=0.0, margin=0.0),
        takes=takes,
        engine=True,
    )
    script.at(0).arrives("c", target="chain", within_us=goal_us)
    script.at(10 * slowest_us)
    spent = sum(units_of(batch) * takes[batch.function](1, units_of(batch)) for batch in script.batches)
    best = min(cost for cost, plan in plans if time_us(plan) <= goal_us)
    assert len(script.batches) == len(names) and script.endings["c"].latency_us <= goal_us
    assert spent <= best * (1 + PRECISION.eps) ** len(names)
