from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from lamina.errors import BadValue
from lamina.profiler.measurement_log import LogHeader, MeasurementLog

HEAD = LogHeader(function="f", device="cpu", machine="m", code="c1", max_batch=8, inputs="i1")


def written(path: Path) -> MeasurementLog:
    record = MeasurementLog(path, HEAD)
    record.add_load(1000)
    record.add((1, 2), [10.0, 11.0])
    record.add((1, 2), [12.0])
    record.close()
    return record


def opened(path: Path, head: LogHeader = HEAD, *, fresh: bool = False) -> MeasurementLog:
    record = MeasurementLog(path, head, fresh=fresh)
    record.close()
    return record


def test_what_was_written_is_there_again(tmp_path: Path) -> None:
    written(tmp_path / "r")
    again = opened(tmp_path / "r")
    assert (again.runs, again.loads_us, again.dropped) == ({(1, 2): [10.0, 11.0, 12.0]}, [1000], "")


def test_a_line_cut_short_is_forgotten_and_the_next_one_is_whole(tmp_path: Path) -> None:
    written(tmp_path / "r")
    with (tmp_path / "r").open("ab") as file:
        file.write(b'{"line":"visit","bat')
    record = MeasurementLog(tmp_path / "r", HEAD)
    record.add((2, 2), [5.0])
    record.close()
    assert opened(tmp_path / "r").runs == {(1, 2): [10.0, 11.0, 12.0], (2, 2): [5.0]}


def test_runs_of_other_code_are_not_used_and_the_reason_is_given(tmp_path: Path) -> None:
    written(tmp_path / "r")
    changed = opened(tmp_path / "r", msgspec.structs.replace(HEAD, code="c2"))
    assert (changed.runs, changed.dropped) == ({}, "code changed")


def test_fresh_forgets(tmp_path: Path) -> None:
    written(tmp_path / "r")
    assert opened(tmp_path / "r", fresh=True).runs == {}
    assert opened(tmp_path / "r").runs == {}


def test_a_file_of_something_else_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("poem\n")
    assert opened(tmp_path / "r").dropped == "it cannot be read"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadValue, match="file"):
        MeasurementLog(tmp_path / "file" / "r", HEAD)
