"""The simulator runs workflows made of states as the server does; only their data is made up."""

from __future__ import annotations

from msgspec.structs import replace

from lamina.asl.compile import compile_flow
from lamina.core.actions import Action, Reply
from lamina.core.events import Event
from lamina.sim.run import run
from lamina.sim.scenario import Scenario
from lamina.types import Slo

DOCUMENT = {
    "StartAt": "A",
    "States": {
        "A": {"Type": "Task", "Resource": "a", "Next": "P", "Retry": [{"ErrorEquals": ["States.ALL"]}]},
        "P": {
            "Type": "Parallel",
            "Branches": [
                {"StartAt": "B", "States": {"B": {"Type": "Task", "Resource": "b", "End": True}}},
                {"StartAt": "W", "States": {"W": {"Type": "Wait", "Seconds": 1, "End": True}}},
            ],
            "WaitForNumBranches": 1,
            "Next": "M",
        },
        "M": {
            "Type": "Map",
            "MaxConcurrency": 2,
            "ItemProcessor": {"StartAt": "I", "States": {"I": {"Type": "Task", "Resource": "a", "End": True}}},
            "Next": "C",
        },
        "C": {"Type": "Choice", "Choices": [{"Variable": "$.x", "IsPresent": True, "Next": "S"}], "Default": "S"},
        "S": {"Type": "Succeed"},
    },
}


def test_states_are_simulated_with_every_invariant_checked(pages: Scenario):
    slo = Slo(latency_us=500_000, timeout_us=10_000_000, on_miss="serve")
    flow = compile_flow(DOCUMENT, "page", lambda resource: (resource, None), dialect="extended", slo=slo)
    replies: list[Reply] = []

    def watch(now_us: int, event: Event, actions: list[Action]) -> None:
        replies.extend(action for action in actions if isinstance(action, Reply) and action.latency_us >= 0)

    scenario = replace(pages, flows=(flow,), loads=tuple(load for load in pages.loads if load.target == "page"))
    run(scenario, calls=30, check=True, watch=watch)
    assert len(replies) == 30
    assert all(reply.latency_us < 1_000_000 for reply in replies)  # the branch that waits a second was cancelled
