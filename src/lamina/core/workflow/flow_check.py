"""Validation of flows at deployment: can it run to its end?"""

from __future__ import annotations

from collections.abc import Collection
from graphlib import CycleError, TopologicalSorter

from lamina.core.events import Deployed
from lamina.core.workflow.flow import Choice, Each, FallibleNode, Flow, Node, Parallel, Task, Wait, inner_flows, successors
from lamina.errors import BadFlow


def check_deployment(event: Deployed, functions: Collection[str], flows: Collection[str]) -> None:
    """Raise what is wrong with a deployment before anything is changed: all of it is deployed, or nothing."""
    known = {*functions, *(spec.name for spec in event.functions)}
    for flow in event.flows:
        check_flow(flow)
        if flow.competing and any(task.next or task.data is not None for task in flow.bodies):
            raise BadFlow(f"{flow.name!r}: bodies of a competing function have no steps after them")
        if flow.name in known:
            raise BadFlow(f"{flow.name!r} is a function and a workflow", hint="give one of them another name")
        for name in flow.functions:
            if name not in known:
                raise BadFlow(f"workflow {flow.name!r} calls {name!r}, which is not deployed")
    for spec in event.functions:
        if spec.name in flows and spec.name not in functions:
            raise BadFlow(f"{spec.name!r} is a workflow already", hint="give the function another name")


def check_flow(flow: Flow) -> None:
    where = f"workflow {flow.name!r}"
    tokens = dict.fromkeys(flow.nodes, 0)
    for name in flow.start:
        if name not in flow.nodes:
            raise BadFlow(f"{where} starts at {name!r}, which is not there")
        tokens[name] += 1
    if not flow.start:
        raise BadFlow(f"{where} has no first step")
    for key, node in flow.nodes.items():
        if key != node.name:
            raise BadFlow(f"{where}: node {node.name!r} is filed under {key!r}")
        for name in successors(node):
            if name not in flow.nodes:
                raise BadFlow(f"{where}: {key!r} is followed by {name!r}, which is not there")
            tokens[name] += 1
        _check_node(where, node)
        for inner in inner_flows(node):
            check_flow(inner)
    for key, node in flow.nodes.items():
        if not 1 <= node.tokens_needed <= tokens[key]:
            raise BadFlow(
                f"{where}: {key!r} waits for {node.tokens_needed} of {tokens[key]} tokens",
                hint="every step must be reached by what it waits for",
            )
    _check_reach(where, flow)
    _check_loops(where, flow)


def _check_node(where: str, node: Node) -> None:
    key = node.name
    if isinstance(node, Choice):
        if not node.branches:
            raise BadFlow(f"{where}: choice {key!r} has no branch")
        if node.odds and (len(node.odds) != len(node.branches) or min(node.odds) < 0 or not sum(node.odds)):
            raise BadFlow(f"{where}: {node.odds} are no odds for the branches of {key!r}")
    if isinstance(node, Parallel):
        if not node.branches:
            raise BadFlow(f"{where}: parallel {key!r} has no branch")
        if not 0 <= node.wait_for <= len(node.branches):
            raise BadFlow(f"{where}: {key!r} waits for {node.wait_for} of {len(node.branches)} branches")
    if isinstance(node, Each) and (
        node.max_concurrency < 0 or (node.tolerated_failures or 0) < 0 or not 0 <= (node.tolerated_failure_share or 0.0) <= 1
    ):
        raise BadFlow(f"{where}: {key!r} has a limit that cannot be", hint="counts from 0 on, parts from 0 to 1")
    if isinstance(node, Wait) and node.duration_us < 0:
        raise BadFlow(f"{where}: {key!r} waits for {node.duration_us} us")
    if isinstance(node, FallibleNode) and node.error_policy is not None:
        for retrier in node.error_policy.retry:
            if retrier.interval_us < 0 or retrier.attempts < 0 or retrier.backoff < 0 or retrier.max_delay_us < 0:
                raise BadFlow(f"{where}: a retrier of {key!r} has a limit below zero")


def _check_reach(where: str, flow: Flow) -> None:
    reached = set(flow.start)
    frontier = list(flow.start)
    while frontier:
        for name in successors(flow.nodes[frontier.pop()]):
            if name not in reached:
                reached.add(name)
                frontier.append(name)
    if lost := sorted(flow.nodes.keys() - reached):
        raise BadFlow(f"{where}: no way leads to {', '.join(lost)}")


def _check_loops(where: str, flow: Flow) -> None:
    """Reject loops that would spin: those without a step, which takes time, or a data request, which is counted."""
    idle = {
        name: successors(node)
        for name, node in flow.nodes.items()
        if not isinstance(node, Task | Wait) and (isinstance(node, Choice) or not node.resolves_data)
    }
    try:
        TopologicalSorter(idle).prepare()
    except CycleError as error:
        raise BadFlow(
            f"{where}: {' -> '.join(reversed(error.args[1]))} goes round without doing a step",
            hint="put a task into the loop: without one it would spin for ever",
        ) from None
