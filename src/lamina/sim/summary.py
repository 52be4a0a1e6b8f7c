"""Summary of a simulation as plain values: one row per target, function and device, and the total."""

from __future__ import annotations

from msgspec import Struct


class TargetRow(Struct, frozen=True, kw_only=True, tag="target", tag_field="row"):
    target: str
    slo_ms: float
    offered: int
    answered: int
    in_time: int
    refused: dict[str, int]
    failed: dict[str, int]
    attainment: float
    goodput_per_s: float
    mean_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float
    batch_mean: float  #: over answers: the largest batch each was in
    queue_mean_ms: float
    cold_answers: int  #: answers that had to wait for a load
    cost: float  #: of device time under its answers


class FunctionRow(Struct, frozen=True, kw_only=True, tag="function", tag_field="row"):
    function: str
    batches: int
    jobs: int
    batch_mean: float
    batch_max: int
    cold_starts: int


class DeviceRow(Struct, frozen=True, kw_only=True, tag="device", tag_field="row"):
    device: str
    kind: str
    units: int
    present_s: float
    utilisation: float  #: leased unit-time over all there was
    held: float  #: leased or standing, over all there was
    cost: float


class TotalRow(Struct, frozen=True, kw_only=True, tag="total", tag_field="row"):
    scenario: str
    policy: str
    seed: int
    offered: int
    answered: int
    in_time: int
    refused: dict[str, int]
    failed: dict[str, int]
    attainment: float
    goodput_per_s: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    p999_ms: float
    cold_starts: int
    utilisation: float
    cost: float  #: of everything held, wasted work and idle standing slices included
    cost_per_1000: float  #: of answers in time
    rent: float  #: of the devices as wholes, for as long as they were there
    offered_s: float
    ended_s: float


class Curves(Struct, frozen=True, kw_only=True):
    """Time series and latency distributions, for plots."""

    width_us: int
    offered_per_s: list[float]
    goodput_per_s: list[float]
    utilisation: dict[str, list[float]]
    latency: dict[str, list[tuple[float, float]]]  #: target -> (ms, share of answers at or below)


class Summary(Struct, frozen=True, kw_only=True):
    total: TotalRow
    targets: list[TargetRow]
    functions: list[FunctionRow]
    devices: list[DeviceRow]
    curves: Curves
