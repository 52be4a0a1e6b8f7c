"""The runtime of a GPU where there is none: what it does with streams and buffers, on stand-ins for them."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from lamina.gpu.cuda_runtime import CudaFlight, CudaRuntime, DeviceTensor, PinnedBuffers
from lamina.gpu.runtime import CaptureBusy, CaptureLock

torch = pytest.importorskip("torch", reason="torch is not installed")


class Stream:
    """Remembers what it was asked for."""

    def __init__(self, handle: int = 0, device: Any = None) -> None:
        self.handle, self.device, self.said = handle, device, list[str]()

    def wait_event(self, event: Any) -> None:
        self.said.append(f"wait for {event}")


class Cuda:
    Stream = ExternalStream = Stream

    def __init__(self) -> None:
        self.current: Any = Stream()

    def set_device(self, device: Any) -> None:
        pass

    @contextmanager
    def stream(self, stream: Any) -> Any:
        before, self.current = self.current, stream
        yield
        self.current = before


class Slice:
    mask, torch_stream = 0b11, Stream(1)

    def __init__(self) -> None:
        self.extra = 0

    def extra_stream(self) -> int:
        self.extra += 1
        return self.extra + 1


def standing() -> tuple[CudaRuntime, Cuda]:
    cuda = Cuda()
    parts = {name: getattr(torch, name) for name in ("as_tensor", "bfloat16", "Tensor", "_foreach_copy_")}
    runtime = CudaRuntime.__new__(CudaRuntime)
    runtime._torch = SimpleNamespace(cuda=cuda, **parts)
    runtime._for_runs, runtime._for_captures, runtime._host_copy_stream, runtime.events = {}, {}, None, []
    return runtime, cuda


def test_streams_are_reused_across_threads():
    runtime, _ = standing()
    slice_: Any = Slice()
    for _ in range(100):  # functions that come and go
        with runtime._own_stream(runtime._for_captures, slice_):
            pass
    assert slice_.extra == 1


def test_two_at_a_time_have_two():
    runtime, _ = standing()
    slice_: Any = Slice()
    with runtime._own_stream(runtime._for_runs, slice_) as one, runtime._own_stream(runtime._for_runs, slice_) as other:
        assert one is not other


def test_no_first_run_is_on_a_stream_that_graphs_are_captured_on():
    runtime, _ = standing()
    slice_: Any = Slice()
    with runtime._own_stream(runtime._for_captures, slice_) as captured:
        pass
    with runtime._own_stream(runtime._for_runs, slice_) as run:
        assert run is not captured


class OnDevice(torch.Tensor):  # type: ignore[misc]
    def record_stream(self, stream: Any) -> None:
        pass


def kept(runtime: CudaRuntime, *numbers: float) -> DeviceTensor:
    return DeviceTensor(torch.tensor(numbers).as_subclass(OnDevice), "it", runtime)


def test_rows_of_the_host_beside_rows_of_the_device_go_by_a_pinned_buffer():
    """An event without waiters."""
    runtime, _ = standing()
    inputs, pinned = torch.zeros(4, 2), torch.zeros(4, 2)
    plan: Any = SimpleNamespace(
        rows=[list(inputs.unbind(0))], inputs=[inputs], bucket=4, staging=PinnedBuffers(lambda: ((pinned, pinned.numpy()),))
    )
    flight: Any = SimpleNamespace(_staging=None)
    runtime._fill(plan, [([1.0, 1.0],), (kept(runtime, 2.0, 2.0),), ([3.0, 3.0],)], flight, Stream())
    assert inputs.tolist() == [[1, 1], [2, 2], [3, 3], [0, 0]] and flight._staging is not None


def test_what_was_kept_comes_to_the_host_on_a_stream_that_runs_no_batches():
    runtime, cuda = standing()
    seen = []

    class There(OnDevice):
        def cpu(self) -> Any:
            seen.append((cuda.current, list(cuda.current.said)))
            return torch.tensor([5.0])

    value = DeviceTensor(torch.zeros(1).as_subclass(There), "it", runtime)
    assert value.on_host().tolist() == [5.0]
    ((stream, said),) = seen
    assert stream is runtime._host_copy_stream and said == ["wait for it"]


def test_a_warmup_run_gives_its_buffers_back():
    runtime, _ = standing()
    plan: Any = SimpleNamespace(landing=PinnedBuffers(lambda: ("new",)))
    flight = CudaFlight(runtime, plan, 1, "begin", "end", False, ())
    flight._landing = ("pinned",)
    flight.free()
    assert [plan.landing.take(), plan.landing.take()] == [("pinned",), ("new",)] and runtime.events == ["begin", "end"]


# ---------------------------------------------------------------------------------------------------- whose turn it is


def test_a_thread_with_batches_to_run_does_not_wait_until_other_code_is_open():
    captures = CaptureLock()
    with captures.no_capture(), pytest.raises(CaptureBusy), captures.capturing(waits=False):
        pass


def test_nor_for_a_capture_without_end():
    captures = CaptureLock()
    with captures.capturing(), pytest.raises(CaptureBusy), captures.capturing(waits=False):
        pass


def test_afterwards_any_thread_may_have_its_turn():
    captures = CaptureLock()
    with captures.no_capture():
        pass
    with captures.capturing(waits=False):
        pass


# ------------------------------------------------------------------------------------------------ inputs of graphs


def input_views(runtime: CudaRuntime, example: Any, bucket: int, *, is_cut: bool = False) -> Any:
    return runtime._input_views((example,), bucket, 0b11, is_cut)[0]


@pytest.fixture
def shared() -> CudaRuntime:
    runtime, _ = standing()

    def zeros(size: int, *, dtype: Any, device: str) -> Any:
        assert device == "cuda"
        return torch.zeros(size, dtype=dtype)

    runtime._torch.zeros, runtime._torch.uint8, runtime._torch.channels_last = zeros, torch.uint8, torch.channels_last
    runtime._input_memory = {}
    return runtime


def test_graphs_of_one_slice_have_their_inputs_in_one_place_but_for_those_in_segments(shared: CudaRuntime):
    image, words = torch.zeros(1, 3, 4, 4), torch.zeros(1, 5, dtype=torch.int64)
    large, small, cut = input_views(shared, image, 8), input_views(shared, words, 2), input_views(shared, words, 2, is_cut=True)
    assert large.shape == (8, 3, 4, 4) and small.shape == (2, 5) and small.dtype is torch.int64
    assert large.data_ptr() == small.data_ptr() != cut.data_ptr()


def test_what_was_captured_before_keeps_its_place_when_a_larger_one_comes(shared: CudaRuntime):
    before = input_views(shared, torch.zeros(1, 4), 1)
    after = input_views(shared, torch.zeros(1, 4_000), 1)
    before.fill_(7)
    assert not after.any() and before.data_ptr() != after.data_ptr()


def test_inputs_have_the_layout_of_the_example(shared: CudaRuntime):
    last = torch.zeros(1, 3, 4, 4).to(memory_format=torch.channels_last)
    found = input_views(shared, last, 2)
    assert found.shape == (2, 3, 4, 4) and found.is_contiguous(memory_format=torch.channels_last)


def test_parts_of_an_input_do_not_overlap(shared: CudaRuntime):
    parts = shared._input_views((torch.zeros(1, 3), torch.zeros(1, 7, dtype=torch.float16), torch.zeros(1)), 3, 1, False)
    for number, part in enumerate(parts, 1):
        part.fill_(number)
    assert [float(part.flatten()[-1]) for part in parts] == [1, 2, 3]
