from __future__ import annotations

import math
import time

import lamina
from lamina.sdk.context import BatchContext, active_context


def test_outside_of_a_batch_there_is_one_unit_and_no_deadline():
    here = lamina.context()
    assert (here.units, here.batch, here.remaining_ms()) == (1, 1, math.inf)


def test_inside_a_batch_the_worker_says_what_it_holds():
    with active_context(BatchContext(units=4, batch=2, call_ids=("a", "b"))):
        here = lamina.context()
    assert (here.units, here.cores, here.batch, here.call_ids) == (4, 4, 2, ("a", "b"))


def test_the_context_ends_with_its_batch():
    with active_context(BatchContext(units=4)):
        pass
    assert lamina.context().units == 1


def test_time_left_counts_down_from_what_the_worker_set():
    left_ms = BatchContext(ends_s=time.monotonic() + 600).remaining_ms()
    assert 300_000 < left_ms <= 600_000


def test_a_gpu_slice_has_cores_of_its_own():
    assert BatchContext(units=16, host_cores=2).cores == 2
