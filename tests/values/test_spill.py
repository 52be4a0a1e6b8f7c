"""Large values: encoded in parts without copies, and spilled to disk when memory is full."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy
import pytest

from lamina import encoding
from lamina.errors import BadValue
from lamina.ipc.protocol import ShmRef
from lamina.units import MIB
from lamina.values.shm import ShmPool, ShmReader
from lamina.values.shm_directory import BadSlot, ShmDirectory
from lamina.worker.zero_copy import encode_chunks


@pytest.mark.parametrize(
    "value",
    [
        1,
        "text",
        b"y" * 100_000,
        numpy.arange(50_000),
        numpy.arange(50_000)[::2],
        numpy.arange(50_000, dtype=">i4"),
        numpy.zeros((0, 3)),
        numpy.ones(40_000, dtype=bool),
        numpy.ones(40_000, dtype="complex64"),
        numpy.float32(3),
        {"a": numpy.ones((3, 40_000)), "b": [1, b"z" * 40_000]},
        {"ä" * 100: b"q" * 70_000},
        [[[b"x" * 40_000]]],
        list(range(100)),
        (1, b"x" * 40_000),
        {1: b"x" * 40_000},
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_pieces_of_a_value_are_the_value(value: Any):
    assert b"".join(encode_chunks(value)) == encoding.encode(value)


def test_an_array_is_not_copied_to_be_taken_apart():
    array = numpy.arange(100_000)
    assert numpy.shares_memory(numpy.frombuffer(encode_chunks({"x": array})[-1], dtype=array.dtype), array)


@pytest.mark.parametrize("value", [object(), {"x": object()}, [b"x" * 40_000, object()]])
def test_what_cannot_travel_is_refused(value: Any):
    with pytest.raises(BadValue, match="cannot send"):
        encode_chunks(value)


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    for name in ("memory", "disk"):
        (tmp_path / name).mkdir()
    made = ShmDirectory(str(tmp_path / "memory"), str(tmp_path / "disk"))
    yield made
    made.close()
    assert os.listdir(tmp_path / "memory") == os.listdir(tmp_path / "disk") == []


def put(pool: ShmPool, data: bytes) -> ShmRef:
    ref = pool.put(data)
    assert ref is not None
    return ref


def test_what_finds_no_room_in_memory_goes_to_disk(folder: ShmDirectory):
    pool = ShmPool(folder.path, "w1", MIB, 4 * MIB)
    first, second = put(pool, b"a" * MIB), put(pool, b"b" * MIB)
    assert (pool.used_bytes, pool.spilled_bytes) == (MIB, MIB)
    reader = ShmReader(folder.path)
    assert [bytes(reader.view(ref)) for ref in (first, second)] == [b"a" * MIB, b"b" * MIB]
    assert folder.has_slot(second)


def test_the_disk_has_a_bound_too(folder: ShmDirectory):
    pool = ShmPool(folder.path, "w1", 0, 2 * MIB)
    put(pool, bytes(MIB))
    put(pool, bytes(MIB))
    assert pool.put(b"x" * 100_000) is None


def test_what_is_free_on_disk_is_gone_at_once(folder: ShmDirectory):
    pool = ShmPool(folder.path, "w1", 0, 2 * MIB)
    ref = put(pool, bytes(2 * MIB))
    pool.free(ref.slot)
    assert pool.spilled_bytes == 0
    with pytest.raises(BadSlot):
        ShmReader(folder.path).view(ref)
    put(pool, bytes(2 * MIB))


def test_what_is_being_read_on_disk_stays_until_it_is_not(folder: ShmDirectory):
    pool = ShmPool(folder.path, "w1", 0, 2 * MIB)
    ref = put(pool, b"x" * MIB)
    pool.pin(ref.slot)
    pool.free(ref.slot)
    assert bytes(ShmReader(folder.path).view(ref)) == b"x" * MIB
    pool.unpin(ref.slot)
    assert pool.spilled_bytes == 0


def test_the_slots_of_a_worker_that_is_gone_go_from_the_disk_too(folder: ShmDirectory):
    pool = ShmPool(folder.path, "w1", 0, 2 * MIB)
    kept, other = put(pool, bytes(MIB)), put(pool, bytes(MIB))
    folder.unlink_all("w1", but={kept.slot})
    assert (folder.has_slot(kept), folder.has_slot(other)) == (True, False)
    folder.unlink("w1", kept.slot)


def test_without_a_place_on_disk_nothing_is_spilled(tmp_path: Path):
    folder = ShmDirectory(str(tmp_path))
    assert ShmPool(folder.path, "w1", 0, 2 * MIB).put(b"x" * MIB) is None
    folder.close()
