"""MIG slicer: which instance was given."""

from __future__ import annotations

import pytest

from lamina.gpu.driver import NoGpu, given_mig_instance
from lamina.gpu.slicers.mig import MigSlicer


@pytest.mark.parametrize(
    ("visible", "instance"),
    [
        ("MIG-6d5b9a1c-0c1e-5d0a-9f55-8d1c2b7a4e10", "MIG-6d5b9a1c-0c1e-5d0a-9f55-8d1c2b7a4e10"),
        ("MIG-GPU-11/2/0", "MIG-GPU-11/2/0"),
        ("0", ""),
        ("MIG-a,MIG-b", ""),
        ("", ""),
    ],
)
def test_an_instance_counts_only_if_it_is_the_only_one(visible: str, instance: str):
    assert given_mig_instance({"CUDA_VISIBLE_DEVICES": visible}) == instance


def test_without_an_instance_it_says_how_to_give_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(NoGpu, match="no MIG instance"):
        MigSlicer()
