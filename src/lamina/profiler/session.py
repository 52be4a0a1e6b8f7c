"""Profiling session: one function from its app to its profile file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lamina import encoding
from lamina.errors import BadValue, did_you_mean
from lamina.predict.profile import Profile
from lamina.profiler import build_profile
from lamina.profiler.bench import Bench
from lamina.profiler.measurement import AdaptiveMeasurement, MeasurementOutcome, MeasurementProgress, explain_uncertainty
from lamina.profiler.measurement_log import LogHeader, MeasurementLog, SessionRecord
from lamina.sdk.app import App
from lamina.sdk.app_loader import load_app
from lamina.sdk.binding import bind
from lamina.sdk.function import Function
from lamina.sdk.sample_inputs import samples_of

Inputs = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ProfileTarget:
    """A function to be measured, with its samples."""

    app_path: str  #: as `lamina serve` takes it
    function: Function[..., Any]
    samples: list[Inputs]

    @property
    def file(self) -> Path:
        where = self.app_path.partition(":")[0]
        return Path(where if where.endswith(".py") else str(sys.modules[where].__file__))


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    out: Path | None = None  #: a folder; default: `profiles` beside the app, where a server looks
    target: float = 0.05
    budget_s: float = 60.0
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class ProfileResult:
    profile: Profile
    path: Path
    outcome: MeasurementOutcome
    kept_runs: int  #: from earlier sessions
    dropped: str  #: why earlier runs were not used
    uncertainty_reason: str  #: empty if it is as sure as was asked for
    stopped: bool = False  #: by the user


def find_function(spec: str) -> tuple[Path, Function[..., Any]]:
    """The one that "FILE:function" names, and the file."""
    where, _, name = spec.rpartition(":")
    if not where:
        raise BadValue(f"{spec!r} names no function", hint="write FILE:FUNCTION")
    app = load_app(where)
    if name not in app.functions:
        raise _unknown(app, where, name)
    return ProfileTarget(where, app.functions[name], []).file, app.functions[name]


def find_targets(spec: str, bodies: list[Any]) -> list[ProfileTarget]:
    """From "FILE", "FILE:function" or "FILE:APP:function". Without a function: all that have samples."""
    where, _, rest = spec.partition(":")
    app_name, _, name = rest.rpartition(":")
    app_path = f"{where}:{app_name}" if app_name else where
    app = load_app(app_path)
    samples = samples_of(app, app_path)
    if not name:
        if bodies:
            raise BadValue("--input: for which function?", hint=f"name it: {where}:{next(iter(app.functions), 'NAME')}")
        chosen = [function for function in app.functions.values() if samples.get(function.name)]
        if not chosen:
            raise _no_samples(app, where, next(iter(app.functions.values()), None))
        return [ProfileTarget(app_path, function, samples[function.name]) for function in chosen]
    if name not in app.functions:
        raise _unknown(app, where, name)
    function = app.functions[name]
    found = [bind(function.params, body) for body in bodies] or samples.get(name) or ([] if function.params else [{}])
    if not found:
        raise _no_samples(app, where, function)
    return [ProfileTarget(app_path, function, found)]


def _unknown(app: App, where: str, name: str) -> BadValue:
    hint = did_you_mean(name, app.functions, f"there is {', '.join(app.functions) or 'none'}")
    return BadValue(f"no function {name!r} in {where}", hint=hint)


def _no_samples(app: App, where: str, function: Function[..., Any] | None) -> BadValue:
    if function is None:
        return BadValue(f"no function in {where}")
    return BadValue(
        f"function {function.name!r} has no sample input",
        hint=f'add to {where}: def examples(): return {{"{function.name}": [body]}}, or give one with --input',
    )


def open_bench(target: ProfileTarget, device: Literal["cpu", "gpu"]) -> Bench:
    if device == "gpu":
        from lamina.profiler.gpu_bench import open_gpu

        return open_gpu(target.function, target.samples)
    if target.function.spec.gpu == "must":
        raise BadValue(f"function {target.function.name!r} needs a GPU", hint="profile it with --device gpu")
    from lamina.profiler.cpu_bench import CpuBench

    return CpuBench(target.app_path, target.function.name, target.samples)


def profile_function(
    target: ProfileTarget, bench: Bench, options: ProfileOptions, watch: Callable[[MeasurementProgress], None] | None = None
) -> ProfileResult:
    """Goes on where an earlier session of the same code stopped. The profile is written at the end, and on an interrupt too."""
    function = target.function
    folder = options.out if options.out is not None else target.file.parent / "profiles"
    stem = f"{function.name}.{bench.device.kind}"
    record = MeasurementLog(folder / f"{stem}.runs.jsonl", _head(target, bench), fresh=options.fresh)
    kept_runs = sum(map(len, record.runs.values()))

    def note(progress: MeasurementProgress) -> None:
        record.add(progress.point, progress.runs_us)
        if watch is not None:
            watch(progress)

    measuring = AdaptiveMeasurement(bench, function.spec.max_batch, options.target, options.budget_s, record.runs, note)
    stopped = False
    try:
        record.add_load(bench.load())
        if watch is not None:  # it is loaded, and this is what is known from before
            known = measuring.current_outcome()
            watch(MeasurementProgress(known.least_certain, [], 0.0, len(known.runs), known.uncertainty))
        outcome = measuring.run()
    except KeyboardInterrupt:
        if not record.runs:
            record.close()
            raise
        stopped, outcome = True, measuring.current_outcome()
    except BaseException:
        record.close()
        raise
    record.add_end(SessionRecord(spent_s=outcome.spent_s, memory_mib=bench.memory_mib(), disturbed=outcome.disturbed))
    record.close()
    profile = build_profile.build_profile(function.name, bench, outcome, record, options.target, target.file)
    path = folder / f"{stem}.json"
    build_profile.write_atomically(profile, path)
    why = "you stopped it" if stopped and not outcome.reached else explain_uncertainty(outcome, measuring.sample_cycle)
    return ProfileResult(profile, path, outcome, kept_runs, record.dropped, why, stopped)


def _head(target: ProfileTarget, bench: Bench) -> LogHeader:
    inputs = [encoding.encode(inputs) for inputs in target.samples]
    return LogHeader(
        function=target.function.name,
        device=bench.device.kind,
        machine=f"{bench.device_info()['machine']}, {bench.device.units} units",
        code=build_profile.digest(target.file.read_bytes()),
        max_batch=target.function.spec.max_batch,
        inputs=build_profile.digest(*inputs),
    )
