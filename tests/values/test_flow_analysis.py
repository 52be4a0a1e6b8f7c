"""Consumers of results: which results may stay on the device where they were made."""

from __future__ import annotations

import pytest

import lamina
from lamina.values.flow_analysis import FlowAnalysis

app = lamina.App("tested")


@app.function()
def see(x):
    return x


@app.function()
def name(x, top=1):
    return x


@app.workflow()
def chain(x):
    return name(see(x))


@app.workflow()
def part(x):
    return name(see(x)["box"])


@app.workflow()
def twice(x):
    seen = see(x)
    return [seen, name(seen)]


@app.workflow()
def choose(x):
    seen = see(x)
    return lamina.when(seen > 1, lambda: name(seen), lambda: x)


@app.workflow()
def spread(x):
    return lamina.each(name, see(x))


def first_step(workflow) -> str:
    return workflow.flow.start[0]


def test_what_one_function_takes_as_a_whole_may_stay():
    assert FlowAnalysis(chain.flow).consumers_of(first_step(chain)) == {"name"}


@pytest.mark.parametrize("workflow", [part, twice, choose, spread], ids=lambda one: one.name)
def test_what_the_gateway_or_the_client_looks_at_may_not(workflow):
    assert FlowAnalysis(workflow.flow).consumers_of(first_step(workflow)) == frozenset()


def test_the_result_of_a_plain_function_goes_to_its_caller():
    flow = app.deployed().flows[0]
    single = type(flow)("see", {"see": flow.nodes[first_step(chain)]}, ("see",))
    assert FlowAnalysis(single).consumers_of("see") == frozenset()
