"""Kernel graphs: what is sound, in which order it runs, and what a graph that is not sound is told."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina import kernels
from lamina.errors import BadValue, LoadFailed
from lamina.kernels.graph import Argument, Buffer, GraphSpec, KernelGraph, Launch, parse_spec
from lamina.kernels.host_run import HostGraph
from lamina.kernels.validation import ALIGN, check_graph
from tests.properties import examples


@kernels.numpy_kernel
def add(a, b, total):
    total[...] = a + b


@kernels.numpy_kernel
def double(a, twice):
    twice[...] = a * 2


@kernels.numpy_kernel
def scale(a, by, scaled):
    scaled[...] = a * by


KERNELS = {"add": add, "double": double, "scale": scale}


def sample() -> dict:
    """(x + y) * 2, by way of two temporaries."""
    f4 = {"dtype": "float32", "shape": [4]}
    return {
        "buffers": [
            {"name": "x", "kind": "input", **f4},
            {"name": "y", "kind": "input", **f4},
            {"name": "t", "kind": "temporary", **f4},
            {"name": "u", "kind": "temporary", **f4},
            {"name": "z", "kind": "output", **f4},
        ],
        "launches": [
            {"name": "sum", "kernel": "add", "args": [arg("x"), arg("y"), arg("t", "out")]},
            {"name": "twice", "kernel": "double", "args": [arg("t"), arg("u", "out")]},
            {"name": "last", "kernel": "scale", "args": [arg("u"), 1.0, arg("z", "out")]},
        ],
    }


def arg(buffer: str, role: str = "in") -> dict:
    return {"buffer": buffer, "role": role}


def graph_of(document: dict) -> KernelGraph:
    return KernelGraph(parse_spec(msgspec.json.encode(document)), KERNELS, {})


def rows(*values: float) -> np.ndarray:
    return np.array([[value] * 4 for value in values], np.float32)


def test_a_graph_runs_its_kernels_over_a_batch():
    (found,) = HostGraph(graph_of(sample()))(rows(1, 2), rows(10, 20))
    assert found.tolist() == rows(22, 44).tolist()


def test_the_order_follows_from_the_buffers_not_from_the_list():
    document = sample()
    document["launches"].reverse()
    graph = graph_of(document)
    assert [graph.spec.launches[place].name for place in check_graph(graph).order] == ["sum", "twice", "last"]
    assert HostGraph(graph)(rows(1), rows(2))[0].tolist() == rows(6).tolist()


def test_a_buffer_that_is_written_again_is_read_in_the_order_of_the_list():
    document = sample()
    document["launches"] = [
        {"name": "a", "kernel": "add", "args": [arg("x"), arg("y"), arg("t", "out")]},
        {"name": "b", "kernel": "double", "args": [arg("t"), arg("z", "out")]},
        {"name": "c", "kernel": "double", "args": [arg("x"), arg("t", "out")]},
        {"name": "d", "kernel": "double", "args": [arg("t"), arg("u", "out")]},
    ]
    graph = graph_of(document)
    assert [graph.spec.launches[place].name for place in check_graph(graph).order] == ["a", "b", "c", "d"]
    assert HostGraph(graph)(rows(1), rows(2))[0].tolist() == rows(6).tolist()


def test_iterations_repeat_all_launches_on_what_the_last_one_left():
    g = kernels.GraphBuilder()
    x = g.input("x", "float32", (4,))
    y, t = g.output("y", "float32", (4,), start=x), g.temporary("t", "float32", (4,))
    g.launch(double, y, kernels.out(t))
    g.launch(double, t, kernels.out(y))
    assert HostGraph(g.build(iterations=3))(rows(1))[0].tolist() == rows(64).tolist()


def test_the_hash_is_that_of_the_contents():
    same = graph_of(sample()).digest
    assert graph_of(sample()).digest == same
    other = sample()
    other["launches"][2]["args"][1] = 2.0
    assert graph_of(other).digest != same
    text = 'extern "C" __global__ void k(float* a) {{ a[0] = {}; }}'
    digests = set()
    for number in (1, 2):
        g = kernels.GraphBuilder()
        g.launch(kernels.cuda_kernel(text.format(number), "k"), kernels.out(g.output("a", "float32", (1,))))
        digests.add(g.build().digest)
    assert len(digests) == 2


def built(declare: Callable[[kernels.GraphBuilder], object]) -> KernelGraph:
    """A sound graph, and what is declared besides."""
    g = kernels.GraphBuilder()
    x = g.input("x", "float32", (4,))
    g.launch(double, x, kernels.out(g.output("y", "float32", (4,))))
    declare(g)
    return g.build()


@pytest.mark.parametrize(
    "declare",
    [
        lambda g: g.input("n", np.float32, np.int64(4)),
        lambda g: g.input("n", np.dtype("float32"), [np.int32(4)]),
        lambda g: g.input("n", np.ones(4, np.float32).dtype, np.array([4])),
    ],
)
def test_what_numpy_calls_its_dtypes_and_numbers_is_taken(declare):
    assert built(declare).buffer("n") == Buffer(name="n", kind="input", dtype="float32", shape=(4,))


def test_numbers_of_numpy_are_arguments_and_sizes():
    def declare(g: kernels.GraphBuilder) -> None:
        z = g.output("z", "float32", 4)
        g.launch(scale, g.input("n", "float32", 4), np.float32(2), kernels.out(z), grid=np.int64(1), block=(np.int32(32),))

    graph = built(declare)
    assert graph.spec.launches[1].args[1] == 2.0 and graph.spec.launches[1].block == (32, 1, 1)
    assert graph.digest


X = kernels.GraphBuilder().input("x", "float32", (4,))


@pytest.mark.parametrize(
    ("declare", "said"),
    [
        (lambda g: g.input(3, "float32", (4,)), "buffer: name is int"),
        (lambda g: g.input("n", None, (4,)), "buffer 'n': dtype is NoneType"),
        (lambda g: g.input("n", 4, (4,)), "buffer 'n': dtype is int"),
        (lambda g: g.input("n", "float32", None), "buffer 'n': shape is None"),
        (lambda g: g.input("n", "float32", (4.0,)), r"buffer 'n': shape is \(4.0,\)"),
        (lambda g: g.input("n", "float32", "4"), "buffer 'n': shape is 4"),
        (lambda g: g.input("n", "float32", (True,)), r"buffer 'n': shape is \(True,\)"),
        (lambda g: g.output("n", "float32", (4,), start="x"), "str where a buffer is needed"),
        (lambda g: g.constant("n", "float32", (4,), value=np.ones(4)), "constant 'n': value is ndarray"),
        (lambda g: g.constant("n", "float32", (4,), key=3), "buffer 'n': key is int"),
        (lambda g: g.launch(double, X, kernels.out(X), name=7), "launch: name is int"),
        (lambda g: g.launch(double, X, np.ones(4)), "launch 'double-1': argument 1 is ndarray"),
        (lambda g: g.launch(double, X, None), "launch 'double-1': argument 1 is NoneType"),
        (lambda g: g.launch(double, X, "x"), "launch 'double-1': argument 1 is str"),
        (lambda g: g.launch(double, X, kernels.out(X), grid=1.5), "launch 'double-1': grid is 1.5"),
        (lambda g: g.launch(double, X, kernels.out(X), block="1"), "launch 'double-1': block is 1"),
        (lambda g: g.launch(double, X, kernels.out(X), shared_bytes=1.5), "launch 'double-1': shared_bytes is 1.5"),
    ],
)
def test_what_is_of_another_type_is_told_where_it_is_written(declare, said: str):
    with pytest.raises(BadValue, match=said) as caught:
        built(declare)
    assert caught.value.hint


def scaled_by(factor: float) -> kernels.Kernel:
    @kernels.numpy_kernel
    def scaled(a, out):
        out[...] = a * factor

    return scaled


def filled_with(value: float):
    return lambda: np.full(4, value, np.float32)


def one_launch(kernel: kernels.Kernel, value: Callable[[], object]) -> str:
    g = kernels.GraphBuilder()
    x, c = g.input("x", "float32", (4,)), g.constant("c", "float32", (4,), value=value)
    t = g.temporary("t", "float32", (4,))
    g.launch(add, x, c, kernels.out(t))
    g.launch(kernel, t, kernels.out(g.output("y", "float32", (4,))))
    return g.build().digest


def test_the_hash_tells_graphs_apart_that_compute_different_things_by_the_same_text():
    same = one_launch(scaled_by(2.0), filled_with(1.0))
    assert one_launch(scaled_by(2.0), filled_with(1.0)) == same
    others = [
        one_launch(scaled_by(3.0), filled_with(1.0)),
        one_launch(scaled_by(2.0), filled_with(5.0)),
        one_launch(scaled_by(2.0), partial(np.full, 4, 1.0, np.float32)),
        one_launch(scaled_by(2.0), partial(np.full, 4, 2.0, np.float32)),
        one_launch(scaled_by(2.0), np.full(4, 1.0, np.float32).copy),
    ]
    assert len({same, *others}) == 6


@pytest.mark.live
def test_the_hash_is_the_same_in_every_process():
    """Nothing of an address in memory, nor of the order of a set."""
    script = (
        "from functools import partial\n"
        "from lamina.kernels.sources import text_of\n"
        "class Own:\n"
        "    def __init__(self): self.names = {'a', 'b', 'c'}\n"
        "    def make(self): return (lambda: [x for x in self.names])()\n"
        "own = Own()\n"
        "def deep(): return lambda: own\n"
        "print([text_of(one) for one in (own.make, deep(), partial(deep, own), exec, Own, text_of)])\n"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (1, 2)
    ]
    assert said[0] == said[1] and " at 0x" not in said[0]


def test_a_kernel_cannot_write_what_it_only_reads_and_sees_nothing_of_another_request():
    @kernels.numpy_kernel
    def meddle(a, z):
        a[...] = 0

    @kernels.numpy_kernel
    def half(a, z):
        z[..., :2] = a[..., :2]

    for kernel, check in ((meddle, None), (half, [[7, 7, 0, 0]])):
        g = kernels.GraphBuilder()
        g.launch(kernel, g.input("a", "float32", (4,)), kernels.out(g.output("z", "float32", (4,))))
        loaded = HostGraph(g.build())
        if check is None:
            with pytest.raises(ValueError, match="read-only"):
                loaded(rows(1))
        else:
            loaded(rows(9))
            assert loaded(rows(7))[0].tolist() == check


def test_a_kernel_for_a_device_without_a_twin_says_so_on_the_host():
    g = kernels.GraphBuilder()
    kernel = kernels.cuda_kernel('extern "C" __global__ void k(float* x, float* a) {}', "k")
    g.launch(kernel, g.input("x", "float32", (1,)), kernels.out(g.output("a", "float32", (1,))))
    with pytest.raises(LoadFailed, match="no twin") as caught:
        HostGraph(g.build())
    assert "twin=" in caught.value.hint


Change = Callable[[dict], None]


def put(path: str, value: object) -> Change:
    def change(document: dict) -> None:
        *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        for part in way:
            document = document[part]
        if isinstance(last, int) and last == len(document):
            document.append(value)
        else:
            document[last] = value

    return change


def no_inputs(document: dict) -> None:
    for place in (0, 1):
        document["buffers"][place]["kind"] = "temporary"


EXTRA = {"name": "k", "kind": "temporary", "dtype": "int8", "shape": [1]}

BAD: dict[str, tuple[Change, str]] = {
    "a dtype": (put("buffers.0.dtype", "float31"), "dtype 'float31'"),
    "an empty axis": (put("buffers.0.shape", [4, 0]), "shape [4, 0]"),
    "a rank": (put("buffers.0.shape", [1] * 9), "shape"),
    "a size": (put("buffers.2.shape", [2**30, 2**10]), "bytes"),
    "a name": (put("buffers.0.name", "X y"), "'X y'"),
    "a name twice": (put("buffers.1.name", "x"), "declared twice"),
    "an unknown kernel": (put("launches.1.kernel", "dubble"), "kernel 'dubble'"),
    "an unknown buffer": (put("launches.1.args.0", arg("tt")), "buffer 'tt'"),
    "an input that is written": (put("launches.1.args.1", arg("x", "out")), "writes input 'x'"),
    "one buffer twice, written": (put("launches.1.args.0", arg("u", "inout")), "buffer 'u' is argument 2 times"),
    "no input": (no_inputs, "no input"),
    "no output": (put("buffers.4.kind", "temporary"), "no output"),
    "a read before a write": (put("launches.0.args.0", arg("z", "inout")), "cycle"),
    "a cycle": (put("launches.0.args.0", arg("u")), "a cycle: 'sum' waits for 'u', 'twice' waits for 't'"),
    "a launch that writes nothing": (put("launches.2.args.2", arg("u")), "writes no buffer"),
    "a block": (put("launches.0.block", [1024, 2, 1]), "2048 threads"),
    "a block's axis": (put("launches.0.block", [1, 1, 65]), "block.z is 65"),
    "a grid": (put("launches.0.grid", [0, 1]), "grid.x is 0"),
    "a grid's y": (put("launches.0.grid", [1, 65_536]), "grid.y is 65536"),
    "shared memory": (put("launches.0.shared_bytes", 2**20), "shared_bytes 1048576"),
    "no iterations": (put("iterations", 0), "iterations: 0"),
    "many iterations": (put("iterations", 10_001), "iterations: 10001"),
    "a number that is none": (put("launches.2.args.1", 2**70), "argument 1"),
    "a constant without contents": (put("buffers.0.kind", "constant"), "without contents"),
    "a key on an input": (put("buffers.0.key", "k"), "key 'k' on an input"),
    "a key that is none": (put("buffers.5", {**EXTRA, "kind": "constant", "key": "../k"}), "no key"),
    "a start that is none": (put("buffers.2.start", "z"), "no input or constant"),
    "a start of another shape": (put("buffers.2", {**sample()["buffers"][2], "shape": [3], "start": "x"}), "[3]"),
    "a buffer without a use": (put("buffers.5", EXTRA), "no launch"),
    "two launches of one name": (put("launches.1.name", "sum"), "two have this name"),
    "an unknown field": (put("launches.0.gird", [1, 1]), "gird"),
    "a wrong type": (put("launches.0.grid", "1"), "Expected"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_an_unsound_graph_is_told_field_value_and_what_to_do(what: str):
    change, said = BAD[what]
    document = sample()
    change(document)
    with pytest.raises(BadValue) as caught:
        check_graph(graph_of(document))
    assert said in caught.value.message and caught.value.hint


def test_a_read_of_what_is_never_written_is_refused():
    document = sample()
    document["buffers"].append({"name": "n", "kind": "temporary", "dtype": "float32", "shape": [4]})
    document["launches"][1]["args"][0] = arg("n")
    with pytest.raises(BadValue, match="reads 'n' before anything has written it"):
        check_graph(graph_of(document))


@st.composite
def chains(draw: st.DrawFn) -> KernelGraph:
    """Graphs whose launches read what earlier ones wrote, with temporaries of many sizes."""
    count = draw(st.integers(1, 12))
    made = [Buffer(name="x", kind="input", dtype="float32", shape=(8,))]
    launches = []
    for place in range(count):
        is_last = place == count - 1
        a, b = draw(st.sampled_from(made)), draw(st.sampled_from(made))
        new = Buffer(name=f"t{place}", kind="output" if is_last else "temporary", dtype="float32", shape=(8,))
        launches.append(
            Launch(name=f"l{place}", kernel="add", args=(Argument(a.name), Argument(b.name), Argument(new.name, "out")))
        )
        made.append(new)
    order = draw(st.permutations(launches))
    return KernelGraph(GraphSpec(buffers=tuple(made), launches=tuple(order)), KERNELS, {})


@examples(60)
@given(chains())
def test_shared_memory_of_temporaries_changes_no_result(graph: KernelGraph):
    plan = check_graph(graph)
    by_name = {"x": np.arange(8, dtype=np.float32)[None]}
    names = {launch.writes[0]: launch for launch in graph.spec.launches}

    def value(name: str) -> np.ndarray:
        if name not in by_name:
            by_name[name] = value(names[name].reads[0]) + value(names[name].reads[1])
        return by_name[name]

    last = graph.of_kind("output")[0].name
    assert HostGraph(graph)(by_name["x"])[0].tolist() == value(last).tolist()
    used = [plan.offsets[name] for name in plan.offsets]
    assert plan.temporary_bytes <= ALIGN * len(used)
