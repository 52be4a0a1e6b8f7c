"""Flows on their own: what is refused when deployed, how long is left, and where tokens go."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.workflow.flow import Choice, Each, Flow, Node, Pass, Task, function_flow
from lamina.core.workflow.runs import ROOT, WorkflowRun
from lamina.errors import BadFlow
from lamina.types import Call, Slo


def flow(*nodes: Node, start: tuple[str, ...]) -> Flow:
    return Flow("w", {node.name: node for node in nodes}, start)


BODY = flow(Task("x", "f"), start=("x",))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (flow(Task("a", "f"), start=()), "has no first step"),
        (flow(Task("a", "f"), start=("b",)), "starts at 'b'"),
        (flow(Task("a", "f", ("b",)), start=("a",)), "followed by 'b'"),
        (Flow("w", {"b": Task("a", "f")}, ("b",)), "filed under 'b'"),
        (flow(Task("a", "f"), Task("b", "f"), start=("a",)), "waits for 1 of 0"),
        (flow(Task("a", "f", ("b",)), Task("b", "f", tokens_needed=2), start=("a",)), "waits for 2 of 1"),
        (flow(Task("a", "f", tokens_needed=0), start=("a",)), "waits for 0 of 1"),
        (flow(Choice("c", ()), start=("c",)), "has no branch"),
        (flow(Choice("c", ((), ()), odds=(1.0,)), start=("c",)), "are no odds"),
        (flow(Choice("c", ((), ()), odds=(2.0, -1.0)), start=("c",)), "are no odds"),
        (flow(Choice("c", ((), ()), odds=(0.0, 0.0)), start=("c",)), "are no odds"),
        (flow(Task("a", "f"), Task("b", "f", ("c",)), Task("c", "f", ("b",)), start=("a",)), "no way leads to b, c"),
        (flow(Each("e", flow(Task("x", "f"), start=())), start=("e",)), "has no first step"),
        (flow(Pass("a", ("b",)), Pass("b", ("a",)), start=("a",)), "without doing a step"),
        (flow(Pass("a", ("a",)), start=("a",)), "without doing a step"),
        (flow(Choice("a", (("a",), ())), start=("a",)), "without doing a step"),
        (flow(Each("e", BODY, ("c",)), Choice("c", (("e",), ())), start=("e",)), "without doing a step"),
    ],
)
def test_a_flow_that_cannot_run_to_its_end_is_refused(bad: Flow, says: str):
    with pytest.raises(BadFlow, match=says):
        bad.check()


@pytest.mark.parametrize(
    "good",
    [
        function_flow("f", Slo()),
        flow(Task("a", "f", ("c",)), Choice("c", (("a",), ())), start=("a",)),
        flow(Pass("p"), start=("p",)),
        flow(Each("e", BODY), start=("e",)),
        flow(Task("a", "f", ("j",)), Task("b", "f", ("j",)), Pass("j", tokens_needed=2), start=("a", "b")),
    ],
)
def test_a_flow_that_can_is_not(good: Flow):
    good.check()


def test_a_workflow_longer_than_the_stack_of_the_interpreter_is_fine():
    count = 3_000
    long = flow(*[Task(f"n{i}", "f", (f"n{i + 1}",)) for i in range(count)], Task(f"n{count}", "f"), start=("n0",))
    long.check()
    assert long.remaining_path_us(lambda name: 1)["n0"] == count


def test_a_plain_function_is_a_single_task():
    assert function_flow("f", Slo()).sole_task == Task("f", "f")
    assert flow(Task("a", "f", ("b",)), Task("b", "g"), start=("a",)).sole_task is None


def test_the_functions_of_a_flow_are_named_once_with_those_of_its_bodies():
    both = flow(Task("a", "g", ("e",)), Each("e", BODY, ("z",)), Task("z", "f"), start=("a",))
    assert both.functions == ("g", "f")


# ----------------------------------------------------------------------------------------------------- time that is left


@st.composite
def nets(draw: st.DrawFn, depth: int = 1) -> Flow:
    """A random flow without loops; joins wait for some or all of what can reach them."""
    count = draw(st.integers(1, 6))
    nodes: list[Node] = []
    reached = [1] + [0] * (count - 1)  # the first starts
    for i in range(count):
        later = list(range(i + 1, count))
        next_ = draw(st.lists(st.sampled_from(later), max_size=3, unique=True)) if later else []
        if i + 1 < count and not reached[i + 1] and i + 1 not in next_:
            next_.append(i + 1)
        for j in next_:
            reached[j] += 1
        names = tuple(f"n{j}" for j in next_)
        needs = draw(st.integers(1, reached[i])) if i else 1
        kind = draw(st.sampled_from(("task", "task", "pass", "choice", "each") if depth else ("task", "pass", "choice")))
        if kind == "task":
            nodes.append(Task(f"n{i}", draw(st.sampled_from("fgh")), names, needs))
        elif kind == "pass":
            nodes.append(Pass(f"n{i}", names, needs))
        elif kind == "choice":
            cut = draw(st.integers(0, len(names)))
            nodes.append(Choice(f"n{i}", (names[:cut], names[cut:]), needs))
        else:
            nodes.append(Each(f"n{i}", draw(nets(depth=depth - 1)), names, needs))
    return flow(*nodes, start=("n0",))


TIMES = {"f": 3, "g": 5, "h": 7}


def longest_us(net: Flow, name: str) -> int:
    """From the start of a node to the end of its flow, by walking every way there is."""
    node = net.nodes[name]
    own_us = TIMES[node.function] if isinstance(node, Task) else 0
    if isinstance(node, Each):
        own_us = max(longest_us(node.body, first) for first in node.body.start)
    return own_us + max((longest_us(net, later) for later in node.next), default=0)


@given(nets(depth=2))
def test_the_time_left_after_a_node_is_that_of_the_longest_way(net: Flow):
    net.check()
    tails = net.remaining_path_us(TIMES.__getitem__)
    for name, node in net.nodes.items():
        assert tails[name] == max((longest_us(net, later) for later in node.next), default=0)
        assert net.path_us(name, TIMES.__getitem__) == longest_us(net, name)


def test_a_loop_counts_once():
    loop = flow(Task("a", "f", ("b",)), Task("b", "g", ("c",)), Choice("c", (("a",), ("z",))), Task("z", "h"), start=("a",))
    assert loop.remaining_path_us(TIMES.__getitem__)["a"] == 5 + 7


# ----------------------------------------------------------------------------------------------------------- tokens


class Model:
    """What a run does, the slow and plain way: a bag of tokens, moved one at a time until none can move."""

    def __init__(self, net: Flow, rng: random.Random) -> None:
        self.rng = rng
        self.done: list[str] = []
        self.walk(net, "")

    def walk(self, net: Flow, path: str) -> None:
        bag = dict.fromkeys(net.nodes, 0)
        for name in net.start:
            bag[name] += 1
        while ready := [name for name, node in net.nodes.items() if bag[name] >= node.tokens_needed]:
            name = self.rng.choice(ready)
            node = net.nodes[name]
            bag[name] -= node.tokens_needed
            self.done.append(path + name)
            to = node.next
            if isinstance(node, Each):
                for _ in range(len(name + path) % 3):
                    self.walk(node.body, f"{path}{name}/")
            elif isinstance(node, Choice):
                to = node.branches[len(path + name) % len(node.branches)]
            for later in to:
                bag[later] += 1


def run_all(net: Flow, rng: random.Random) -> list[str]:
    """The same through `Run`, with everything that may go on ending in random order."""
    run = WorkflowRun(Call("c", "w", 0), net, None)
    paths = {ROOT: ""}
    done: list[str] = []
    live = run.begin()
    while live:
        scope, node = live.pop(rng.randrange(len(live)))
        path = paths[scope.id]
        done.append(path + node.name)
        if isinstance(node, Each):
            count = len(node.name + path) % 3
            paths.update(dict.fromkeys(range(run.next_scope, run.next_scope + count), f"{path}{node.name}/"))
            live += run.fan_out(scope.id, node.name, count)
        elif isinstance(node, Choice):
            live += run.finish(scope.id, node.name, node.branches[len(path + node.name) % len(node.branches)])
        else:
            live += run.finish(scope.id, node.name)
    assert run.is_complete, "nothing is live, and the run has not ended"
    assert not run.scopes
    return done


def without_passes(net: Flow, names: list[str]) -> list[str]:
    def kind(path: str) -> Node:
        at, *rest = path.split("/")
        node = net.nodes[at]
        inner = net
        for part in rest:
            assert isinstance(node, Each)
            inner = node.body
            node = inner.nodes[part]
        return node

    return sorted(name for name in names if not isinstance(kind(name), Pass))


@given(nets(depth=2), st.integers(0, 10**6))
def test_a_run_starts_every_node_as_often_as_its_tokens_say_in_whatever_order_things_end(net: Flow, seed: int):
    expected = Model(net, random.Random(seed)).done
    assert sorted(run_all(net, random.Random(seed + 1))) == without_passes(net, expected)


def test_a_flow_is_written_with_the_names_it_always_had():
    """Durable runs keep the flow they began with: a renamed field must not change what is on disk."""
    task = Task("a", "f", tokens_needed=2, resolves_data=True, potential_next=("b",))
    fields = msgspec.to_builtins(task)
    assert (fields["type"], fields["needs"], fields["asks"], fields["may"]) == ("Task", 2, True, ("b",))
    old = {
        "type": "Each",
        "name": "e",
        "body": {"name": "i", "nodes": {}, "start": []},
        "expect": 2.0,
        "at_once": 3,
        "tolerate": 1,
    }
    each = msgspec.convert(old, Each)
    assert (each.expected_items, each.max_concurrency, each.tolerated_failures) == (2.0, 3, 1)
