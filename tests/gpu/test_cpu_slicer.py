"""CPU slicer."""

from __future__ import annotations

import os

from lamina.gpu.slicer import all_masks
from lamina.gpu.slicers.cpu import CpuSlicer
from lamina.worker.cpu_affinity import cpu_device


def test_inside_a_slice_a_thread_runs_on_its_cores_alone():
    slicer = CpuSlicer()
    slice_ = slicer.slice(1)
    with slice_:
        assert os.sched_getaffinity(0) == set(slice_.cores)


def test_slices_of_disjoint_units_share_no_core():
    slicer = CpuSlicer()
    cores = [slicer.slice(mask).cores for mask in all_masks(slicer.device) if mask.bit_count() == 1]
    assert sum(map(len, cores)) == len(frozenset().union(*cores))


def test_soft_slices_have_all_cores_each():
    slicer = CpuSlicer(soft=True)
    everything = slicer.slice((1 << slicer.device.units) - 1).cores
    assert all(slicer.slice(mask).cores == everything for mask in all_masks(slicer.device))


def test_a_process_is_told_how_many_threads_to_start():
    slicer = CpuSlicer()
    everything = (1 << slicer.device.units) - 1
    assert slicer.environment(everything)["OMP_NUM_THREADS"] == str(slicer.device.units)


def test_it_is_another_device_than_the_one_that_has_worker_processes():
    slicer = CpuSlicer()
    assert slicer.device.id != cpu_device().id and slicer.device.family == "gpu"
