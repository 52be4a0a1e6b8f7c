"""The executor on a real GPU."""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np
import pytest

from lamina.gpu.driver import NoGpu
from lamina.gpu.executor import FinishedBatch, SliceExecutor, open_executor
from lamina.gpu.slicers.green import GreenSlicer
from lamina.gpu.weight_cache import NoDeviceMemory

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def slicer() -> GreenSlicer:
    try:
        made = GreenSlicer()
    except NoGpu as error:
        pytest.skip(str(error))
    return made


@pytest.fixture
def executor(slicer: GreenSlicer) -> SliceExecutor:
    return open_executor(slicer, weights_mib=4096)


def net(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    layers = [
        torch.nn.Conv2d(3, 32, 3),
        torch.nn.BatchNorm2d(32),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(28800, 10),
    ]
    return torch.nn.Sequential(*layers).eval().requires_grad_(False)


EXAMPLE = torch.zeros(1, 3, 32, 32)


def drain(executor: SliceExecutor, count: int) -> dict[int, FinishedBatch]:
    found: dict[int, FinishedBatch] = {}
    ends_s = time.monotonic() + 20
    while len(found) < count:
        assert time.monotonic() < ends_s, "a batch never came back"
        found |= {done.ticket: done for done in executor.poll()}
    return found


def images(count: int) -> list[Any]:
    return list(torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(count)).numpy())


def close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(expected), rtol=2e-2, atol=2e-2)


def test_results_are_those_of_the_module_eager_and_captured_on_several_slices(executor: SliceExecutor):
    expected = net()(torch.tensor(np.stack(images(5))))
    executor.load("net", net(), EXAMPLE)
    for mask in (0b1, 0b110, 0x7FFF):
        for turn in range(4):
            if turn == 2:
                executor.prepare("net", [mask], [8])
            ticket = executor.submit("net", images(5), mask)
            done = drain(executor, 1)[ticket]
            assert done.error is None and done.device_us > 0
            close(np.stack(done.outputs), expected)
        assert executor.models["net"].plans[8, mask].is_captured


def test_two_batches_booked_on_one_slice_do_not_mix(executor: SliceExecutor):
    executor.load("net", net(), EXAMPLE)
    executor.prepare("net", [0b11], [8])
    module = net()
    first, second = images(7), images(8)
    tickets = [executor.submit("net", batch, 0b11) for batch in (first, second, first)]
    found = drain(executor, 3)
    for ticket, batch in zip(tickets, (first, second, first), strict=True):
        close(np.stack(found[ticket].outputs), module(torch.tensor(np.stack(batch))))


def test_weights_come_back_to_the_same_address_so_graphs_stay_valid(executor: SliceExecutor):
    executor.load("net", net(), EXAMPLE)
    executor.prepare("net", [0b1], [1])
    before = drain(executor, 1) if executor.submit("net", images(1), 0b1) else {}
    block = executor.models["net"].block
    executor.models._weights.evict(block)
    ticket = executor.submit("net", images(1), 0b1)
    after = drain(executor, 1)[ticket]
    close(after.outputs[0], next(iter(before.values())).outputs[0])


def test_equal_weights_are_on_the_device_once(executor: SliceExecutor):
    executor.load("one", net(), EXAMPLE)
    used = executor.models._weights.cache.used
    executor.load("same", net(), EXAMPLE)
    executor.load("other", net(1), EXAMPLE)
    assert executor.models["one"].block is executor.models["same"].block
    assert executor.models._weights.cache.used == 2 * used


def test_a_full_device_evicts_the_least_used_and_every_model_is_served(slicer: GreenSlicer):
    executor = open_executor(slicer, weights_mib=5)
    for seed in range(4):
        executor.load(f"net{seed}", net(seed), EXAMPLE, buckets=(1,))
    for seed in (0, 1, 2, 3, 0, 3):
        ticket = executor.submit(f"net{seed}", images(1), 0b1)
        close(drain(executor, 1)[ticket].outputs[0], net(seed)(torch.tensor(images(1)[0])[None])[0])
    assert executor.models._weights.cache.evictions > 0


def filled(but_mib: int) -> Any:
    """All of the device but so much."""
    free, _ = torch.cuda.mem_get_info()
    return torch.empty(free - (but_mib << 20), dtype=torch.uint8, device="cuda")


def test_weights_find_room_where_torch_holds_all_of_it_in_case(executor: SliceExecutor):
    filled(but_mib=64)  # and nobody keeps it
    assert torch.cuda.mem_get_info()[0] < 128 << 20, "torch holds nothing, so this test shows nothing"
    executor.load("wide", torch.nn.Linear(8192, 8192), torch.zeros(1, 8192), buckets=(1,))  # 256 MiB
    ticket = executor.submit("wide", [torch.zeros(8192)], 0b1)
    assert drain(executor, 1)[ticket].error is None


def test_unused_weights_are_evicted_where_the_device_is_full_and_the_cache_is_not(executor: SliceExecutor):
    executor.load("first", torch.nn.Linear(8192, 8192), torch.zeros(1, 8192), buckets=(1,))
    torch.cuda.empty_cache()
    others = filled(but_mib=100)
    executor.load("second", torch.nn.Linear(8192, 8192), torch.zeros(1, 8192), buckets=(1,))
    assert not executor.models["first"].block.pages and executor.models["second"].block.pages
    executor.models.pin("second")
    with pytest.raises(NoDeviceMemory, match="full"):
        executor.models.pin("first")
    executor.models.unpin("second")
    del others
    torch.cuda.empty_cache()


def test_what_comings_and_goings_leave_behind_goes_back(executor: SliceExecutor):
    def come_and_go() -> int:
        executor.load("net", net(), EXAMPLE, buckets=(16,))
        executor.prepare("net", [0b1, 0b11, 0b1111])
        while executor.models.reap_warmups():
            pass
        executor.unload("net")
        gc.collect()
        executor.models.trim()
        return int(torch.cuda.memory_reserved())

    first = come_and_go()
    assert [come_and_go() for _ in range(5)] == [first] * 5


def test_results_can_stay_on_the_device_for_the_next_step_on_another_slice(executor: SliceExecutor):
    executor.load("net", net(), EXAMPLE)
    executor.load("sum", lambda rows: rows.sum(1), torch.zeros(1, 10, device="cuda"), graphs=False)
    first = executor.submit("net", images(3), 0b1, keep=True)
    kept = drain(executor, 1)[first].outputs
    second = executor.submit("sum", kept, 0b10)
    expected = net()(torch.tensor(np.stack(images(3)))).sum(1)
    close(np.array(drain(executor, 1)[second].outputs), expected)


def test_out_of_memory_in_one_batch_halves_it_and_harms_no_other(executor: SliceExecutor):
    def hungry(rows: Any) -> Any:
        if len(rows) > 2:
            torch.empty(1 << 40, device="cuda")
        return rows * 2

    executor.load("hungry", hungry, torch.zeros(1, 4, device="cuda"), graphs=False)
    executor.load("net", net(), EXAMPLE)
    big, small = executor.submit("hungry", list(torch.ones(8, 4).numpy()), 0b1), executor.submit("net", images(2), 0b10)
    found = drain(executor, 2)
    assert found[big].error is None and len(found[big].outputs) == 8 and found[small].error is None


def test_a_function_that_cannot_be_captured_is_served_all_the_same(executor: SliceExecutor):
    def waits(rows: Any) -> Any:
        return rows * float(rows.sum().item() * 0 + 2)

    executor.load("waits", waits, torch.zeros(1, 4, device="cuda"))
    executor.prepare("waits", [0b1], [1])
    assert executor.models.is_eager_only("waits")
    for _ in range(5):
        ticket = executor.submit("waits", list(torch.ones(1, 4).numpy()), 0b1)
        assert drain(executor, 1)[ticket].error is None


def test_buffers_are_clear_before_the_first_run_reads_them(executor: SliceExecutor):
    """Rows without inputs are read by the first run of a bucket; what a table is asked for must be in it."""
    table = torch.nn.Embedding(8, 4)
    dirt = [torch.full((1 << 20,), 1 << 40, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    del dirt
    executor.load("table", table.requires_grad_(False), torch.zeros(1, 256, dtype=torch.long, device="cuda"))
    for mask in (0b1, 0b10, 0b1100):
        executor.prepare("table", [mask])
        ticket = executor.submit("table", [np.full(256, 3)], mask)
        close(drain(executor, 1)[ticket].outputs[0][0], table.weight[3].cpu())


def test_a_model_loaded_after_the_last_one_of_a_slice_has_left_gets_a_graph_too(executor: SliceExecutor):
    """The memory that graphs of a slice share goes with the last of them."""
    for seed in range(3):
        executor.load("net", net(seed), EXAMPLE, buckets=(1,))
        executor.prepare("net", [0b11])
        assert executor.models["net"].plans[1, 0b11].is_captured
        ticket = executor.submit("net", images(1), 0b11)
        close(drain(executor, 1)[ticket].outputs[0], net(seed)(torch.tensor(images(1)[0])[None])[0])
        while executor.has_work:
            executor.poll()
        executor.unload("net")
        torch.randn(4, device="cuda")  # a capture that broke off would have left the generator unusable


# ------------------------------------------------------------------------------------------------------------ segments


def deep(layers: int = 400) -> Any:
    """A module that takes long enough on one unit to be cut: some tens of milliseconds."""
    torch.manual_seed(3)
    steps: list[Any] = []
    for _ in range(layers):
        steps += [torch.nn.Linear(1024, 1024), torch.nn.Tanh()]
    return torch.nn.Sequential(*steps).eval().requires_grad_(False)


VECTOR = torch.zeros(1, 1024)


@pytest.fixture
def cutting(slicer: GreenSlicer) -> SliceExecutor:
    """An executor that cuts long graphs."""
    from lamina.gpu.cuda_runtime import CudaRuntime
    from lamina.gpu.weights import WeightStore

    return SliceExecutor(slicer, CudaRuntime(slicer.driver), WeightStore(slicer.driver, 4096 << 20))


def vectors(count: int) -> list[Any]:
    return list(torch.randn(count, 1024, generator=torch.Generator().manual_seed(count)).numpy())


def test_a_segmented_graph_answers_bit_for_bit_what_the_whole_does(slicer: GreenSlicer, cutting: SliceExecutor):
    executor, module = cutting, deep()
    executor.load("deep", module, VECTOR, buckets=(64,))
    executor.load("net", net(), EXAMPLE, buckets=(8,))  # which could preempt it: else it runs whole
    executor.prepare("deep", [1])
    drain_warmups(executor)
    plan = executor.models["deep"].plans[64, 1]
    assert plan.is_cut and len(plan.segments) > 4 and 0 < plan.longest_segment_us < 3_000
    ticket = executor.submit("deep", vectors(64), 1)
    found = drain(executor, 1)[ticket]
    with slicer.slice(1), torch.inference_mode():
        whole = torch.cuda.CUDAGraph()
        inputs = torch.as_tensor(np.stack(vectors(64))).cuda()
        moved = executor.models["deep"].work
        for _ in range(2):
            moved(inputs)
        slicer.slice(1).synchronize()
        with torch.cuda.graph(whole, stream=slicer.slice(1).torch_stream):
            expected = moved(inputs)
        whole.replay()
        slicer.slice(1).synchronize()
    assert np.array_equal(np.stack(found.outputs), expected.cpu().numpy())


def test_a_paused_graph_goes_on_bit_equal_after_others_ran_on_its_slice(cutting: SliceExecutor):
    executor = cutting
    executor.load("deep", deep(), VECTOR, buckets=(64,))
    executor.load("net", net(), EXAMPLE, buckets=(8,))
    executor.prepare("deep", [1])
    executor.prepare("net", [1])
    drain_warmups(executor)
    alone = drain(executor, 1) if executor.submit("deep", vectors(64), 1) else {}
    want = np.stack(next(iter(alone.values())).outputs)
    quick_alone = drain(executor, 1) if executor.submit("net", images(8), 1) else {}
    want_quick = np.stack(next(iter(quick_alone.values())).outputs)
    for pauses in (1, 3):
        long = executor.submit("deep", vectors(64), 1)
        ended: dict[int, FinishedBatch] = {}
        for _ in range(pauses):
            quick = executor.submit("net", images(8), 1, preempts=[long])
            while quick not in ended:
                ended |= {done.ticket: done for done in executor.poll()}
            assert long not in ended, "it was to be preempted, and had ended"
            assert np.array_equal(np.stack(ended[quick].outputs), want_quick)
        while long not in ended:
            ended |= {done.ticket: done for done in executor.poll()}
        assert np.array_equal(np.stack(ended[long].outputs), want)
        own_us, with_us = next(iter(alone.values())).device_us, ended[long].device_us
        assert with_us < 1.5 * own_us, "pauses are no time of its own"


def drain_warmups(executor: SliceExecutor) -> None:
    ends_s = time.monotonic() + 20
    while executor.has_work:
        assert time.monotonic() < ends_s
        executor.poll()
