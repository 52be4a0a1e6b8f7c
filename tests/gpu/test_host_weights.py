"""Weights in the host's memory as files that an executor and its standby share. Pinning is a stand-in's."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lamina.gpu.weights import HostWeights

torch = pytest.importorskip("torch", reason="torch is not installed")

SIZE = 8192


class Cudart:
    def __init__(self, code: int = 0) -> None:
        self.code, self.pinned = code, dict[int, int]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.pinned[address] = size
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


def stand_in(cudart: Cudart) -> Any:
    def empty(size: int, *, dtype: Any, pin_memory: bool) -> Any:
        return torch.empty(size, dtype=dtype)

    return SimpleNamespace(
        frombuffer=torch.frombuffer, uint8=torch.uint8, empty=empty, cuda=SimpleNamespace(cudart=lambda: cudart)
    )


def staged(cudart: Cudart, folder: Path | str, key: str, fill: int) -> HostWeights:
    made = HostWeights(stand_in(cudart), SIZE, str(folder))
    made.tensor.fill_(fill)
    made.publish(key)
    return made


def test_equal_weights_of_two_processes_are_one_file(tmp_path: Path) -> None:
    ours, theirs = staged(Cudart(), tmp_path, "a", 7), staged(Cudart(), tmp_path, "a", 7)
    ours.tensor[0] = 9
    assert int(theirs.tensor[0]) == 9 and len(os.listdir(tmp_path)) == 1


def test_other_weights_have_another(tmp_path: Path) -> None:
    kept = [staged(Cudart(), tmp_path, key, fill) for key, fill in (("a", 1), ("b", 2))]
    assert [int(one.tensor[0]) for one in kept] == [1, 2] and len(os.listdir(tmp_path)) == 2


def test_what_is_removed_by_one_stays_with_the_other(tmp_path: Path) -> None:
    ours, theirs = staged(Cudart(), tmp_path, "a", 7), staged(Cudart(), tmp_path, "a", 7)
    ours.remove()
    del ours
    assert int(theirs.tensor[-1]) == 7 and not os.listdir(tmp_path)
    theirs.remove()


def test_memory_is_pinned_as_long_as_it_is_held(tmp_path: Path) -> None:
    cudart = Cudart()
    made = staged(cudart, tmp_path, "a", 7)
    assert list(cudart.pinned.values()) == [SIZE]
    del made
    assert not cudart.pinned


@pytest.mark.parametrize("folder", ["", "no such folder"])
def test_without_a_folder_the_memory_is_private(folder: str) -> None:
    assert int(staged(Cudart(), folder, "a", 7).tensor[0]) == 7


def test_a_full_file_system_makes_it_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert int(staged(Cudart(), tmp_path, "a", 7).tensor[0]) == 7 and not os.listdir(tmp_path)


def test_memory_that_cannot_be_pinned_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MemoryError, match="pinned"):
        staged(Cudart(code=2), tmp_path, "a", 7)
