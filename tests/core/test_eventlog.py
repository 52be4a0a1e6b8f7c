"""A log of everything that happened repeats every decision."""

from __future__ import annotations

from pathlib import Path

import pytest

from lamina.core.eventlog import EventLogWriter, read_log, replay_log
from lamina.core.events import Tick
from lamina.errors import BadValue
from tests.core.chaos import POLICIES, Chaos, play


def written(chaos: Chaos, path: Path) -> Path:
    writer = EventLogWriter(path)
    for (now_us, event), actions in zip(chaos.log, chaos.said, strict=True):
        writer.write(now_us, event, actions)
    writer.close()
    return path


@pytest.mark.parametrize("policy", POLICIES)
def test_a_written_log_replays_to_its_end(tmp_path: Path, policy: str):
    chaos = play(5, policy, 80)
    assert replay_log(written(chaos, tmp_path / "log.jsonl"), chaos.fresh()) == len(chaos.log)


def test_a_log_reads_as_it_was_written(tmp_path: Path):
    chaos = play(6, "fifo", 40)
    entries = list(read_log(written(chaos, tmp_path / "log.jsonl")))
    assert [(entry.now_us, entry.event) for entry in entries] == chaos.log
    assert [entry.actions for entry in entries] == chaos.said


def test_the_first_event_that_was_decided_otherwise_is_found(tmp_path: Path):
    chaos = play(5, "fifo", 40)
    different = next(i for i, actions in enumerate(chaos.said) if actions and i > 10)
    chaos.said[different] = []
    assert replay_log(written(chaos, tmp_path / "log.jsonl"), chaos.fresh()) == different


@pytest.mark.parametrize("line", [b"{}\n", b"nonsense\n", b'{"now_us": 1, "event": {"type": "Boom"}, "actions": []}\n'])
def test_a_line_that_is_no_entry_is_named(tmp_path: Path, line: bytes):
    path = tmp_path / "log.jsonl"
    writer = EventLogWriter(path)
    writer.write(0, Tick(), [])
    writer.close()
    path.write_bytes(path.read_bytes() + line)
    with pytest.raises(BadValue, match=r"log\.jsonl:2: not an entry"):
        list(read_log(path))
