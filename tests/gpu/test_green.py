"""Green contexts on a real GPU: the hardware is asked which SMs ran."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.gpu.slicer import all_masks
from lamina.gpu.slicers.green import GreenSlicer, kind_of

on_gpu = pytest.mark.gpu


def probe() -> Any:
    from tests.gpu.sm_probe import SmProbe

    return SmProbe()


@pytest.mark.parametrize(
    ("name", "kind"),
    [("NVIDIA H200", "h200"), ("Tesla V100-SXM2-16GB", "v100"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA", "gpu")],
)
def test_profiles_are_found_by_the_short_name_of_the_card(name: str, kind: str):
    assert kind_of(name) == kind


@on_gpu
@pytest.mark.timeout(120)
def test_every_slice_of_the_catalogue_runs_on_as_many_sms_as_it_says_eager_and_as_a_graph(green: GreenSlicer):
    import torch

    sms = probe()
    for mask in all_masks(green.device):
        slice_ = green.slice(mask)
        eager = sms.run(slice_.stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=slice_.torch_stream, capture_error_mode="thread_local"):
            sms.launch(slice_.stream)
        plain = torch.cuda.Stream()
        sms.ids.fill_(-1)
        torch.cuda.current_stream().synchronize()
        with torch.cuda.stream(plain):
            graph.replay()
        assert len(eager) == slice_.sms, f"slice {mask:#x} ran on {len(eager)} SMs"
        assert sms.read(plain) == eager, f"a graph of slice {mask:#x} left it"


@on_gpu
@pytest.mark.timeout(120)
def test_what_a_maker_captures_on_its_own_stream_stays_in_the_slice(green: GreenSlicer):
    """Graphs that serve are captured on an extra stream of the slice, by the thread of their function."""
    import torch

    sms = probe()
    plain = torch.cuda.Stream()
    for mask in all_masks(green.device):
        slice_ = green.slice(mask)
        own = torch.cuda.ExternalStream(slice_.extra_stream())
        eager = sms.run(own.cuda_stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=own, capture_error_mode="thread_local"):
            sms.launch(own.cuda_stream)
        sms.ids.fill_(-1)
        torch.cuda.current_stream().synchronize()
        with torch.cuda.stream(plain):
            graph.replay()
        assert eager == sms.read(plain) == sms.run(slice_.stream), f"a maker's stream left slice {mask:#x}"


@on_gpu
def test_units_share_no_sm(green: GreenSlicer):
    sms = probe()
    seen = [sms.run(green.slice(1 << unit).stream) for unit in range(green.device.units)]
    assert len(frozenset().union(*seen)) == sum(map(len, seen))


@on_gpu
def test_a_soft_slice_runs_on_every_sm_eager_and_as_a_graph(soft_green: GreenSlicer):
    import torch

    sms = probe()
    slice_ = soft_green.slice(0b111)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=slice_.torch_stream, capture_error_mode="thread_local"):
        sms.launch(slice_.stream)
    eager = sms.run(slice_.stream)
    sms.ids.fill_(-1)
    torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(slice_.torch_stream):
        graph.replay()
    assert sms.read(slice_.torch_stream) == eager and len(eager) == slice_.sms == soft_green.driver.whole().sms


@on_gpu
def test_soft_slices_run_at_the_same_time(soft_green: GreenSlicer):
    """Each with half of the thread blocks the device has room for: in turns they would take twice as long as one alone."""
    import torch

    one, two = (soft_green.slice(mask).torch_stream for mask in (1, 2))
    begin, ends = torch.cuda.Event(enable_timing=True), [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    cycles = 20_000_000
    torch.cuda.synchronize()
    begin.record(one)
    two.wait_event(begin)
    for stream, end in zip((one, two), ends, strict=True):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
        end.record(stream)
    torch.cuda.synchronize()
    first_ms, second_ms = (begin.elapsed_time(end) for end in ends)
    assert second_ms < 1.5 * first_ms


@on_gpu
def test_a_block_is_the_union_of_its_units(green: GreenSlicer):
    sms = probe()
    units = [sms.run(green.slice(1 << unit).stream) for unit in range(3, 7)]
    assert sms.run(green.slice(0b1111 << 3).stream) == frozenset().union(*units)


@on_gpu
def test_the_whole_device_is_all_its_sms(green: GreenSlicer):
    import torch

    whole = green.slice((1 << green.device.units) - 1)
    assert whole.sms == torch.cuda.get_device_properties(0).multi_processor_count


@on_gpu
def test_a_stream_knows_the_slice_it_belongs_to(green: GreenSlicer):
    one, other = green.slice(1), green.slice(2)
    assert one.owns(one.extra_stream()) and not one.owns(other.stream)


@on_gpu
def test_results_in_a_slice_are_those_of_the_whole_device_within_the_bounds_of_the_type(green: GreenSlicer):
    import torch

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 3), torch.nn.ReLU(), torch.nn.Conv2d(64, 64, 3), torch.nn.Flatten())
    net = net.cuda().half().eval()
    images = torch.randn(8, 3, 32, 32, device="cuda", dtype=torch.half)
    with torch.inference_mode():
        expected = net(images)
        torch.cuda.current_stream().synchronize()
        for mask in (1, 0b11, (1 << green.device.units) - 1):
            with green.slice(mask):
                got = net(images)
            green.slice(mask).torch_stream.synchronize()
            torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)
