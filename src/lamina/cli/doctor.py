"""`lamina doctor`: what this machine offers, what is missing, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import click

_EXTRAS = {
    "uvloop": "faster event loop",
    "numpy": "tensors",
    "onnxruntime": "ONNX models (extra: onnx)",
    "torch": "torch models (extra: torch)",
    "matplotlib": "plots (extra: plots)",
}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a list.")
def command(as_json: bool) -> int:
    """Check this machine: devices, drivers, packages. Exit code 1 if a requirement is missing."""
    checks = [*_machine(), *_packages(), *_slicers()]
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode({"ok": all(c["ok"] or not c["needed"] for c in checks), "checks": checks}).decode())
    else:
        for check in checks:
            mark = "ok  " if check["ok"] else ("FAIL" if check["needed"] else "no  ")
            click.echo(f"{mark} {check['what']:16} {check['found']}" + (f"   -> {check['hint']}" if check["hint"] else ""))
    return 0 if all(check["ok"] or not check["needed"] for check in checks) else 1


def _check(what: str, ok: bool, found: str, hint: str = "", *, needed: bool = False) -> dict[str, Any]:
    return {"what": what, "ok": ok, "found": found, "hint": "" if ok else hint, "needed": needed}


def _machine() -> list[dict[str, Any]]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    checks = [
        _check("python", sys.version_info >= (3, 11), platform.python_version(), "3.11 or later is needed", needed=True),
        _check("system", sys.platform == "linux", platform.platform(terse=True), "workers are only tried on Linux"),
        _check("cores", cores >= 2, str(cores), "the gateway and a worker want a core each"),
    ]
    memory = Path("/proc/meminfo")
    if memory.exists():
        fields = dict(line.split(":", 1) for line in memory.read_text().splitlines() if ":" in line)
        free_gib = int(fields["MemAvailable"].split()[0]) / 2**20
        checks.append(_check("memory", free_gib >= 1, f"{free_gib:.1f} GiB free", "workers may not fit"))
    shared = Path("/dev/shm")
    room_mib = shutil.disk_usage(shared).free / 2**20 if shared.is_dir() else 0
    checks.append(
        _check(
            "shared memory",
            room_mib >= 64,
            f"{room_mib:.0f} MiB free",
            "large values go through the socket instead, slower",
        )
    )
    return checks


def _packages() -> list[dict[str, Any]]:
    checks = []
    for name, purpose in _EXTRAS.items():
        try:
            checks.append(_check(name, True, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            checks.append(_check(name, False, "not installed", f"for {purpose}: pip install {name}"))
    return checks


def _slicers() -> list[dict[str, Any]]:
    """Which kinds of slices can be cut here."""
    from lamina.gpu import discovery

    return [
        *(_check(f"{found.name} slices", found.works, found.what, found.hint) for found in discovery.check_slicers()),
        _check("emulated", True, "any number of make-believe devices, from profiles"),
    ]
