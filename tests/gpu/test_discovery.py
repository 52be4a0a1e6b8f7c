"""GPU discovery: what the doctor says about slicers."""

from __future__ import annotations

import pytest

from lamina.gpu import discovery
from lamina.gpu.driver import NoGpu, open_driver


def test_cores_can_be_cut_everywhere():
    assert {found.name for found in discovery.check_slicers() if found.works} >= {"cpu"}


def test_what_does_not_work_says_why():
    assert all(found.what for found in discovery.check_slicers())


def test_without_a_driver_no_gpu_slicer_claims_to_work():
    try:
        open_driver()
    except NoGpu as error:
        reason = error.message
    else:
        pytest.skip("there is a GPU here")
    green = next(found for found in discovery.check_slicers() if found.name == "green")
    assert not green.works and green.what == reason
