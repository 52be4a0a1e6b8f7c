"""Resources and SLOs of functions and workflows (SLO, CPU, GPU, Scale, Quota). Each value checks itself when it is made."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

from lamina import types
from lamina.errors import BadValue
from lamina.units import parse_mib, parse_share, parse_us


def _memory_mib(value: Any, field: str) -> int:
    return 0 if value is None else parse_mib(value, field)


def _share(value: Any, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadValue(f"{field}: {value!r} is not a share", hint='write 0.25, "1/4" or "25%"')
    return parse_share(value, field)


def checked_int(value: Any, field: str, least: int) -> int:
    hint = f"write a whole number, at least {least}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadValue(f"{field}: {value!r} is not a whole number", hint=hint)
    if value < least:
        raise BadValue(f"{field}: {value!r} is out of range", hint=hint)
    return value


def checked_objective(value: Any, field: str = "objective") -> types.Objective:
    for known in types.OBJECTIVES:
        if value == known:
            return known
    if value == "":
        return ""
    shown = repr(value)[:40]
    raise BadValue(
        f"{field}: {shown} is no objective", hint=f"one of {', '.join(types.OBJECTIVES)}; leave it out for the default"
    )


def checked_bool(value: Any, field: str) -> bool:
    if not isinstance(value, bool):
        raise BadValue(f"{field}: {value!r} is neither True nor False", hint=f"write {field}=True or {field}=False")
    return value


@dataclass(frozen=True, slots=True)
class SLO:
    """Latency from arrival to answer that is promised, for a share `target` of the calls.

    `on_miss` says what a late answer is worth: "shed" nothing, so it is refused or dropped as soon as that is known;
    "serve" still something, so it is served until `timeout`.
    """

    latency: str | None = None
    _: KW_ONLY
    target: float = 0.99
    on_miss: types.OnMiss = "shed"
    timeout: str | None = None  #: 60 seconds, or twice `latency` where that is longer

    def __post_init__(self) -> None:
        self.spec()

    def spec(self) -> types.Slo:
        latency_us = 0 if self.latency is None else parse_us(self.latency, "slo.latency")
        if self.latency is not None and latency_us < 1:
            raise BadValue(f"slo.latency: {self.latency!r} is no time at all", hint="leave it out for a function without an SLO")
        if self.on_miss not in ("shed", "serve"):
            raise BadValue(f"slo.on_miss: {self.on_miss!r} is unknown", hint='write "shed" or "serve"')
        usual_us = max(types.Slo().timeout_us, 2 * latency_us)
        timeout_us = usual_us if self.timeout is None else parse_us(self.timeout, "slo.timeout")
        if timeout_us < max(1, latency_us):
            raise BadValue(
                f"slo.timeout: {self.timeout!r} is shorter than slo.latency, {self.latency!r}",
                hint="the timeout is the last resort: make it longer than slo.latency",
            )
        target = _share(self.target, "slo.target")
        return types.Slo(latency_us=latency_us, target=target, on_miss=self.on_miss, timeout_us=timeout_us)


@dataclass(frozen=True, slots=True)
class CPU:
    """Cores one batch wants on a CPU device, and the memory an instance needs there. A part of one core (0.25) is for light
    functions, which share it."""

    cores: int | float = 1
    _: KW_ONLY
    memory: str | None = None

    def __post_init__(self) -> None:
        _ = self.whole_cores, self.part, self.memory_mib

    @property
    def whole_cores(self) -> int:
        return 1 if self.part < 1 else checked_int(self.cores, "cpu.cores", 1)

    @property
    def part(self) -> float:
        """Part of its cores that it takes."""
        if isinstance(self.cores, float) and self.cores != 1 and not 0.001 <= self.cores < 1:
            hint = "write a whole number, at least 1, or a part of one core such as 0.25"
            raise BadValue(f"cpu.cores: {self.cores!r} is out of range", hint=hint)
        return self.cores if isinstance(self.cores, float) else 1.0

    @property
    def memory_mib(self) -> int:
        return _memory_mib(self.memory, "cpu.memory")


@dataclass(frozen=True, slots=True)
class GPU:
    """Part of a GPU one batch wants. Unless `required`, the function may run on a CPU where there is no GPU.

    `share` is how wide the slice is, `limit` how much of the time it may be used, `memory` what an instance needs.
    `isolated` code gets a process of its own there, with its share and memory fixed for its life: for what may crash.
    """

    share: str | float = 1.0
    _: KW_ONLY
    limit: str | float | None = None
    memory: str | None = None
    required: bool = False
    isolated: bool = False

    def __post_init__(self) -> None:
        _ = self.part, self.time_limit, self.memory_mib

    @property
    def part(self) -> float:
        return _share(self.share, "gpu.share")

    @property
    def time_limit(self) -> float:
        return 1.0 if self.limit is None else _share(self.limit, "gpu.limit")

    @property
    def memory_mib(self) -> int:
        return _memory_mib(self.memory, "gpu.memory")


@dataclass(frozen=True, slots=True)
class Scale:
    """Number of instances. With `min=0` an idle function costs nothing and its first call has a cold start."""

    _: KW_ONLY
    min: int = 0
    max: int = 8
    idle: str = "60s"

    def __post_init__(self) -> None:
        self.spec()

    def spec(self) -> types.ScaleSpec:
        low, high = checked_int(self.min, "scale.min", 0), checked_int(self.max, "scale.max", 1)
        if low > high:
            raise BadValue(f"scale.min: {low} is above scale.max, {high}", hint="raise scale.max or lower scale.min")
        return types.ScaleSpec(min=low, max=high, idle_us=parse_us(self.idle, "scale.idle"))


@dataclass(frozen=True, slots=True)
class Quota:
    """Share of time inside its slice: at least `request` when it asks for it, never more than `limit`."""

    _: KW_ONLY
    request: str | float = 0.0
    limit: str | float = 1.0
    window: str = "40ms"

    def __post_init__(self) -> None:
        self.spec()

    def spec(self) -> types.QuotaSpec:
        request = 0.0 if self.request == 0 else _share(self.request, "quota.request")
        limit = _share(self.limit, "quota.limit")
        if request > limit:
            raise BadValue(f"quota.request: {self.request!r} is above quota.limit, {self.limit!r}", hint="raise quota.limit")
        window_us = parse_us(self.window, "quota.window")
        if window_us < 1_000:
            raise BadValue(f"quota.window: {self.window!r} is too short", hint="a window is 1ms or longer")
        return types.QuotaSpec(request=request, limit=limit, window_us=window_us)
