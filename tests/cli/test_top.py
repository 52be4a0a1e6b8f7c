"""`lamina top`: tables of a server's status."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from lamina.cli.top import page, unit_map

DEVICE: dict[str, Any] = {
    "id": "gpu0",
    "kind": "h200",
    "family": "gpu",
    "soft": False,
    "units": 8,
    "leased": 2,
    "slices": [{"slice": "gpu0/2-3", "mask": 0b1100, "function": "name", "jobs": 3, "for_ms": 1.0}],
    "homes": [{"mask": 0b110000, "function": "see", "lent": True, "time": 1.0}],
    "memory_mib": 1000,
    "memory_used_mib": 10,
    "bandwidth": 0.42,
    "bandwidth_from": "profiles",
    "executor": {"pid": 7, "restarts": 2, "weights_mib": 99, "device_used_mib": 640, "graphs": 4, "evictions": 0},
}
STATUS: dict[str, Any] = {
    "calls": 3,
    "window_s": 10.0,
    "devices": [DEVICE],
    "functions": [
        {"name": "see", "queue": 0, "held": 0.0, "used": 0.0, "batches_per_s": 0.0, "jobs_per_s": 0.0, "instances": []},
        {
            "name": "name",
            "queue": 5,
            "held": 0.25,
            "used": 0.2,
            "batches_per_s": 4.0,
            "jobs_per_s": 12.0,
            "instances": [{"id": "name-1", "device": "gpu0", "phase": "warm", "batches": 1, "quota": 1.0}],
        },
    ],
    "targets": [
        {
            "name": "see",
            "kind": "function",
            "slo_ms": 20.0,
            "answers": 0,
            "per_s": 0.0,
            "met": None,
            "p50_ms": None,
            "p99_ms": None,
        },
        {
            "name": "name",
            "kind": "function",
            "slo_ms": 20.0,
            "answers": 9,
            "per_s": 1.0,
            "met": 0.9,
            "p50_ms": 5.0,
            "p99_ms": 30.0,
        },
    ],
}


def shown(status: dict[str, Any]) -> str:
    console = Console(width=140, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(page(status))
    console.file.close()
    return console.export_text()


def test_every_unit_shows_its_function_a_reservation_or_that_it_is_free():
    assert unit_map(DEVICE, {"see": "A", "name": "B"}) == "--BB..--"


def test_a_function_shows_what_it_holds_against_what_it_uses():
    line = next(line for line in shown(STATUS).splitlines() if " name " in line and "gpu0:warm" in line)
    assert "25.0 %" in line and "20.0 %" in line and "3.0" in line


def test_a_goal_that_is_missed_is_said():
    assert "p99 over SLO" in shown(STATUS)


def test_memory_bandwidth_and_restarts_are_the_executors_own():
    line = next(line for line in shown(STATUS).splitlines() if "gpu0" in line and "h200" in line)
    assert "640/1000" in line and "42 % profiles" in line and line.rstrip().endswith("2")
