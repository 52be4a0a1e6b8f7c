from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest

from lamina import encoding
from lamina.values.references import ShmRef
from lamina.values.shm import INLINE_BYTES, ShmPool, ShmReader
from lamina.values.shm_directory import BadSlot, ShmDirectory, remove_stale
from lamina.values.slot_refs import SlotReferences

MIB = 2**20


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ShmPool]:
    pool = ShmPool(str(tmp_path), "gateway", 4 * MIB)
    yield pool
    pool.close()
    assert not list(tmp_path.iterdir())


@pytest.fixture
def reader(tmp_path: Path) -> ShmReader:
    return ShmReader(str(tmp_path))


def put(pool: ShmPool, data: bytes) -> ShmRef:
    ref = pool.put(data)
    assert ref is not None
    return ref


def test_what_is_put_can_be_read_elsewhere(pool: ShmPool, reader: ShmReader) -> None:
    data = os.urandom(100_000)
    assert reader.view(put(pool, data)) == data


def test_a_view_cannot_be_written(pool: ShmPool, reader: ShmReader) -> None:
    assert reader.view(put(pool, b"x")).readonly


@pytest.mark.parametrize(("size", "room"), [(0, 65_536), (65_536, 65_536), (65_537, 131_072), (1_000_000, MIB)])
def test_a_slot_has_the_next_power_of_two(pool: ShmPool, tmp_path: Path, size: int, room: int) -> None:
    put(pool, bytes(size))
    assert (tmp_path / "gateway-0").stat().st_size == room


def test_the_space_of_a_slot_is_reserved_when_it_is_made(pool: ShmPool, tmp_path: Path) -> None:
    put(pool, bytes(1))
    assert (tmp_path / "gateway-0").stat().st_blocks * 512 >= INLINE_BYTES


def test_slots_take_no_file_descriptors(pool: ShmPool, reader: ShmReader) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        reader.view(put(pool, b"x"))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_freed_slot_is_used_again(pool: ShmPool) -> None:
    first = put(pool, bytes(100_000))
    pool.free(first.slot)
    assert put(pool, bytes(70_000)).slot == first.slot


def test_a_used_slot_is_not(pool: ShmPool) -> None:
    assert put(pool, b"a").slot != put(pool, b"b").slot


def test_the_limit_holds(pool: ShmPool) -> None:
    put(pool, bytes(3 * MIB))
    assert pool.put(b"x") is None


def test_room_comes_back_when_a_slot_is_freed(pool: ShmPool) -> None:
    full = put(pool, bytes(3 * MIB))
    pool.free(full.slot)
    assert pool.put(bytes(3 * MIB)) is not None


def test_idle_slots_give_way_to_another_size(pool: ShmPool, tmp_path: Path) -> None:
    full = put(pool, bytes(3 * MIB))
    pool.free(full.slot)
    put(pool, b"x")
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [INLINE_BYTES]


def test_freeing_twice_is_a_mistake(pool: ShmPool) -> None:
    ref = put(pool, b"x")
    pool.free(ref.slot)
    with pytest.raises(BadSlot, match="holds nothing"):
        pool.free(ref.slot)


def test_a_slot_that_is_read_is_not_written_again_when_freed(pool: ShmPool, reader: ShmReader) -> None:
    ref = put(pool, b"first")
    pool.pin(ref.slot)
    pool.free(ref.slot)
    put(pool, b"other")
    assert reader.view(ref) == b"first"


def test_it_is_used_again_after_its_last_reader(pool: ShmPool) -> None:
    ref = put(pool, b"first")
    pool.pin(ref.slot)
    pool.pin(ref.slot)
    pool.free(ref.slot)
    pool.unpin(ref.slot)
    assert put(pool, b"other").slot != ref.slot
    pool.unpin(ref.slot)
    assert put(pool, b"third").slot == ref.slot


def test_a_retired_slot_is_never_written_again(pool: ShmPool, reader: ShmReader) -> None:
    ref = put(pool, b"kept")
    view = reader.view(ref)
    pool.retire(ref.slot)
    pool.free(ref.slot)
    assert put(pool, b"next").slot != ref.slot
    assert view == b"kept"


def test_a_full_memory_is_no_crash(pool: ShmPool, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        assert pool.put(bytes(200_000)) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "ref",
    [
        ShmRef("gateway", 0, INLINE_BYTES + 1),
        ShmRef("gateway", 0, -1),
        ShmRef("gateway", 1, 1),
        ShmRef("gateway", -1, 1),
        ShmRef("nobody", 0, 1),
        ShmRef("../gateway", 0, 1),
        ShmRef("", 0, 1),
    ],
)
def test_a_reference_out_of_bounds_is_refused(pool: ShmPool, reader: ShmReader, ref: ShmRef) -> None:
    put(pool, b"x")
    with pytest.raises(BadSlot):
        reader.view(ref)


def test_an_empty_file_is_no_slot(tmp_path: Path, reader: ShmReader) -> None:
    (tmp_path / "w1-0").touch()
    with pytest.raises(BadSlot):
        reader.view(ShmRef("w1", 0, 0))


def test_a_link_is_not_followed(tmp_path: Path, reader: ShmReader) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "w1-0").symlink_to(tmp_path / "secret")
    with pytest.raises(BadSlot):
        reader.view(ShmRef("w1", 0, 6))


def test_an_array_made_from_a_view_counts_as_a_look(pool: ShmPool, reader: ShmReader) -> None:
    ref = put(pool, encoding.encode({"image": numpy.arange(20_000)}))
    array = encoding.decode(reader.view(ref))["image"][5:]
    assert reader.is_viewed(ref)
    del array
    assert not reader.is_viewed(ref)


def test_the_oldest_mapping_goes_first(pool: ShmPool, tmp_path: Path) -> None:
    reader = ShmReader(str(tmp_path), keep=2)
    refs = [put(pool, bytes([n])) for n in range(3)]
    for ref in refs:
        reader.view(ref)
    assert [reader.is_viewed(ref) for ref in refs] == [True, False, False]  # what is let go cannot be asked


@pytest.mark.parametrize(
    ("ref", "is_there"),
    [
        (ShmRef("w1", 0, INLINE_BYTES), True),
        (ShmRef("w1", 0, INLINE_BYTES + 1), False),
        (ShmRef("w1", 1, 1), False),
        (ShmRef("../w1", 0, 1), False),
    ],
)
def test_a_folder_knows_its_slots(tmp_path: Path, ref: ShmRef, is_there: bool) -> None:
    folder = ShmDirectory(str(tmp_path))
    put(ShmPool(folder.path, "w1", MIB), b"x")
    assert folder.has_slot(ref) == is_there
    folder.close()


def test_a_folder_is_private_and_goes_when_closed(tmp_path: Path) -> None:
    folder = ShmDirectory(str(tmp_path))
    assert Path(folder.path).stat().st_mode & 0o777 == 0o700
    folder.close()
    assert not list(tmp_path.iterdir())


def test_cleaning_leaves_a_living_folder_alone(tmp_path: Path) -> None:
    folder = ShmDirectory(str(tmp_path))
    assert remove_stale(str(tmp_path)) == 0
    folder.close()


def test_cleaning_leaves_what_is_not_ours_alone(tmp_path: Path) -> None:
    (tmp_path / "lamina-notes").mkdir()
    (tmp_path / "lamina-link").symlink_to(tmp_path)
    assert remove_stale(str(tmp_path)) == 0


@pytest.mark.live
def test_the_folder_of_a_dead_process_is_removed_by_the_next(tmp_path: Path) -> None:
    code = (
        "import os, sys; from lamina.values.shm_directory import ShmDirectory; from lamina.values.shm import ShmPool;"
        "ShmPool(ShmDirectory(sys.argv[1]).path, 'w1', 2**20).put(b'x'); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert len(list(tmp_path.glob("lamina-*/w1-0"))) == 1
    ShmDirectory(str(tmp_path)).close()
    assert not list(tmp_path.iterdir())


def test_only_unreferenced_slots_of_a_dead_owner_are_removed(tmp_path: Path) -> None:
    folder = ShmDirectory(str(tmp_path))
    for owner in ("w1", "w11"):
        pool = ShmPool(folder.path, owner, MIB)
        put(pool, b"a")
        put(pool, b"b")
    folder.unlink_all("w1", but={1})
    assert sorted(os.listdir(folder.path)) == ["lock", "w1-1", "w11-0", "w11-1"]
    folder.close()


def test_an_owner_that_ended_in_order_has_taken_its_slots_with_it(tmp_path: Path) -> None:
    """An ingress process removes its files when it ends; a batch that still had one of its bodies must end all the same."""
    references = SlotReferences(MIB, str(tmp_path))
    slots = references.add_worker()
    pool = ShmPool(references.directory.path, slots.owner, MIB)
    ref = put(pool, b"a body")
    slots.held.add(ref.slot)
    reads: list[ShmRef] = []
    references.pin(ref, reads)
    references.release(ref)
    pool.close()
    references.on_worker_lost(slots)
    references.unpin(reads)
    assert not slots.held
    references.directory.close()
