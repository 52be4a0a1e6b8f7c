"""Annotations of the steps of a flow: time, slack, and the batch they have or could have.

From profiles: a step's slack is what is left of the goal on the longest path through it, and the batch the largest whose
extra time fits into that. From a run: what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any

from msgspec import Struct

from lamina.asl.timeline import show_duration
from lamina.core.workflow.flow import Flow, inner_flows, successors

Time = Callable[[str, int], int]
"""Of a batch of a function, in microseconds; 0: unknown."""


class StepNote(Struct, frozen=True):
    """Annotation of a step. `critical`: it is on the critical path."""

    text: str
    critical: bool = False


def planned_notes(flow: Flow, time_us: Time, batches: Mapping[str, int]) -> dict[str, StepNote]:
    """Planned annotations per step, inner flows included. `batches` are the largest the functions take."""
    goal_us = flow.slo.latency_us
    through = _path_through_us(flow, lambda function: time_us(function, 1))
    longest_us = max(through.values(), default=0)
    found: dict[str, StepNote] = {}
    for task in flow.tasks():
        alone_us = time_us(task.function, 1)
        if not alone_us:
            found[task.name] = StepNote("no profile")
            continue
        slack_us = goal_us - through[task.name]
        most = batches.get(task.function, 1)
        sizes = sorted({most, *(2**n for n in range(most.bit_length()) if 2**n <= most)})
        fitting = [size for size in sizes if not goal_us or time_us(task.function, size) - alone_us <= max(0, slack_us)]
        parts = [show_duration(alone_us)]
        if goal_us:
            parts.append(f"slack {show_duration(slack_us)}" if slack_us >= 0 else f"late by {show_duration(-slack_us)}")
        parts.append(f"batch {max(fitting, default=1)}")
        found[task.name] = StepNote(" · ".join(parts), through[task.name] >= longest_us)
    return found


def _path_through_us(flow: Flow, task_us: Callable[[str], int], before_us: int = 0, after_us: int = 0) -> dict[str, int]:
    """Longest path through each step, from the start of everything to its end."""
    heads, tails = _start_us(flow, task_us), flow.remaining_path_us(task_us)
    found: dict[str, int] = {}
    for name, node in flow.nodes.items():
        span_us = flow.path_us(name, task_us) - tails[name]
        found[name] = before_us + heads[name] + span_us + tails[name] + after_us
        for inner in inner_flows(node):
            below = _path_through_us(inner, task_us, before_us + heads[name], tails[name] + after_us)
            found |= {step: min(us, found[name]) for step, us in below.items()}  # a quorum does not wait for its slowest
    return found


def _start_us(flow: Flow, task_us: Callable[[str], int]) -> dict[str, int]:
    """Longest time from the start of the flow to each node; a loop counts once, and errors only where nothing else leads."""
    order: list[str] = []
    state: dict[str, int] = {}
    closing: set[tuple[str, str]] = set()
    for root in flow.start:
        stack = [(root, iter(successors(flow.nodes[root])))] if root not in state else []
        state.setdefault(root, 1)
        while stack:
            name, rest = stack[-1]
            for later in rest:
                if state.get(later) == 1:
                    closing.add((name, later))
                elif later not in state:
                    state[later] = 1
                    stack.append((later, iter(successors(flow.nodes[later]))))
                    break
            else:
                state[name] = 2
                order.append(name)
                stack.pop()
    tails = flow.remaining_path_us(task_us)
    usual, todo = set(flow.start), list(flow.start)
    while todo:
        fresh = [later for later in flow.nodes[todo.pop()].next if later not in usual]
        usual.update(fresh)
        todo += fresh
    heads = dict.fromkeys(flow.nodes, 0)
    for name in reversed(order):
        end_us = heads[name] + flow.path_us(name, task_us) - tails[name]
        for later in successors(flow.nodes[name]):
            if (name, later) not in closing and (later in flow.nodes[name].next or later not in usual):
                heads[later] = max(heads[later], end_us)
    return heads


def measured_notes(flow: Flow, events: Iterable[Mapping[str, Any]], deadline_us: int = 0) -> dict[str, StepNote]:
    """Measured annotations per step, from the history of a run: median of its calls, slack after the last, usual batch."""
    known = list(events)
    tasks = {task.name for task in flow.tasks()}
    by_step: dict[str, list[Mapping[str, Any]]] = {}
    for event in known:
        if event["kind"] == "step" and event["step"] in tasks:
            by_step.setdefault(event["step"], []).append(event)
    found: dict[str, StepNote] = {}
    for name, calls in by_step.items():
        ran = [call["ended_us"] - (call.get("began_us") or call["ended_us"]) for call in calls]
        parts = [(f"{len(calls)} x " if len(calls) > 1 else "") + show_duration(round(median(ran)))]
        waited = median((call.get("began_us") or call["ended_us"]) - call["queued_us"] for call in calls)
        if waited >= 1_000:
            parts.append(f"queued {show_duration(round(waited))}")
        if deadline_us:
            slack_us = deadline_us - max(call["ended_us"] for call in calls)
            parts.append(f"slack {show_duration(slack_us)}" if slack_us >= 0 else f"late by {show_duration(-slack_us)}")
        parts.append(f"batch {median(call.get('batch') or 1 for call in calls):g}")
        found[name] = StepNote(" · ".join(parts), any(not call.get("ok") for call in calls))
    for task in flow.tasks():
        found.setdefault(task.name, StepNote("not run"))
    return found
