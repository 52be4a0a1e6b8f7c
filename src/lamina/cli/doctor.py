"""`lamina doctor`: what this machine offers, what is missing, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lamina.errors import LaminaError
from lamina.units import show_count, show_us

if TYPE_CHECKING:
    from lamina.sdk.function import Function

_EXTRAS = {
    "uvloop": "faster event loop",
    "numpy": "tensors",
    "onnxruntime": "ONNX models (extra: onnx)",
    "torch": "torch models (extra: torch)",
    "matplotlib": "plots (extra: plots)",
}


_INSTALL = {"onnxruntime": "'lamina[onnx]'", "torch": "'lamina[torch]'", "matplotlib": "'lamina[plots]'"}
TIMED_RUNS = 5


@click.command()
@click.argument("file", metavar="[FILE[:APP]]", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a list.")
def command(file: str | None, as_json: bool) -> int:
    """Check this machine: devices, drivers, packages; or an app: can each of its functions be loaded, placed, and keep its SLO?

    Exit code 1 if a requirement is missing.

    \b
    Examples:
      lamina doctor
      lamina doctor app.py
    """
    checks = _app(file) if file is not None else [*_machine(), *_packages(), *_slicers()]
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
            checks.append(_check(name, False, "not installed", f"for {purpose}: pip install {_INSTALL.get(name, name)}"))
    return checks


def _slicers() -> list[dict[str, Any]]:
    """Which kinds of slices can be cut here."""
    from lamina.gpu import discovery

    return [
        *(_check(f"{found.name} slices", found.works, found.what, found.hint) for found in discovery.check_slicers()),
        _check("emulated", True, "any number of make-believe devices, from profiles"),
    ]


def _app(file: str) -> list[dict[str, Any]]:
    """Checks of an app. Its functions are loaded one after another, in this process, and run on their `examples()`."""
    from lamina.cli._serve_command import unplaceable
    from lamina.planner.slo_check import slo_shortfalls
    from lamina.sdk.app_loader import load_app
    from lamina.sdk.sample_inputs import samples_of
    from lamina.worker.cpu_affinity import cpu_device

    app = load_app(file)  # what is wrong with the file is an error of its own
    app.deployed()
    size = f"{show_count(len(app.functions), 'function')}, {show_count(len(app.workflows), 'workflow')}"
    checks = [_check("app", True, f"{app.name}: {size}")]
    samples = samples_of(app, file)
    devices = [cpu_device()]
    measured: list[tuple[str, int, float]] = []
    for name, function in app.functions.items():
        if function.spec.gpu == "must":
            checks.append(_check(name, True, "needs a GPU: not loaded here"))
            continue
        lines = unplaceable([function.spec], devices)
        checks += [_check(name, False, line, "lower what it asks for", needed=True) for line in lines]
        try:
            takes_us = _first_times(function, samples.get(name, []))
        except LaminaError as error:
            checks.append(_check(name, False, str(error.message), error.hint or "see the error above", needed=True))
            continue
        measured.append((name, function.spec.cores, takes_us))
        found = slo_shortfalls([function.spec], measured)
        if found:
            checks.append(_check(name, False, str(found[0]), found[0].hint, needed=found[0].is_impossible))
        elif takes_us:
            goal = f", SLO {show_us(function.spec.slo.latency_us)}" if function.spec.slo.latency_us else ""
            checks.append(_check(name, True, f"loads; one request takes {show_us(takes_us)}{goal}"))
        else:
            checks.append(_check(name, True, "loads; not timed: the file has no examples() for it"))
    late = slo_shortfalls([], measured, [workflow.flow for workflow in app.workflows.values()])
    return checks + [_check(one.target, False, str(one), one.hint, needed=one.is_impossible) for one in late]


def _first_times(function: Function[..., Any], samples: list[dict[str, Any]]) -> float:
    """Best time of one request, in microseconds; 0 without a sample."""
    import time

    from lamina.errors import LoadFailed

    runner = function.open()
    best = 0.0
    try:
        for _ in range(TIMED_RUNS if samples else 0):
            began = time.perf_counter()
            result = runner.run([dict(samples[0])])[0]
            took = (time.perf_counter() - began) * 1e6
            if isinstance(result, Exception):
                raise LoadFailed(
                    f"its example fails: {type(result).__name__}: {result}", hint="does examples() fit its parameters?"
                )
            best = min(best or took, took)
    finally:
        runner.close()
    return best
