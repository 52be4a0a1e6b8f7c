"""Load plan: what to send and when, as one value that can be handed to the generator process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import SplitResult

from msgspec import Struct

from lamina.errors import BadValue
from lamina.sdk.client_codec import parse_url
from lamina.sim import workload

MAX_RATE_PER_S = 1e6
"""Calls a second: arrivals are counted in microseconds."""
SHAPES = ("poisson", "gamma", "even", "steps", "ramp", "trace")


class LoadPlan(Struct, frozen=True, kw_only=True):
    url: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    method: str = "POST"
    shape: str = "poisson"
    stages: tuple[tuple[float, float], ...]  #: seconds, calls a second
    cv: float = 1.0
    trace: str = ""
    speedup: float = 1.0
    slo_us: int = 0
    seed: int = 1
    connections: int = 256
    patience_s: float = 10.0  #: how long after the last call answers are waited for
    check_tls: bool = True

    @property
    def seconds(self) -> float:
        return sum(span_s for span_s, _ in self.stages)

    def arrivals(self) -> Iterator[int]:
        """Microseconds from the start."""
        stages = [(round(span_s * 1e6), rate) for span_s, rate in self.stages]
        until_us = sum(span_us for span_us, _ in stages)
        if self.shape == "trace":
            times = workload.replay_trace(self.trace, self.speedup)
        else:
            pieces = workload.ramp(stages, stages[0][1]) if self.shape == "ramp" else workload.steps(stages)
            times = workload.arrivals_along(pieces, 0.0 if self.shape == "even" else self.cv, random.Random(self.seed))
        for at_us in times:
            if at_us >= until_us:
                return
            yield at_us

    def endpoint(self) -> tuple[str, int, bool]:
        """Host, port and whether it is TLS."""
        parts = _split(self.url)
        assert parts.hostname
        return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80), parts.scheme == "https"

    def request_bytes(self) -> bytes:
        parts = _split(self.url)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        lines = [f"{self.method} {path} HTTP/1.1", f"host: {parts.netloc}"]
        lines += [f"{name.lower()}: {value}" for name, value in self.headers]
        lines += [f"content-length: {len(self.body)}"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + self.body


def _split(url: str) -> SplitResult:
    parts = parse_url(url)
    if parts is None or parts.port == 0:
        raise BadValue(f"url: {url!r} is not an address", hint="write http://HOST:PORT/v1/functions/NAME")
    return parts


def parse_stages(text: str, seconds: float) -> tuple[tuple[float, float], ...]:
    """`200` for the whole run, or stages such as `100x10s,400x30s`."""
    from lamina.units import parse_us

    stages: tuple[tuple[float, float], ...] = ()
    try:
        if "x" not in text:
            stages = ((seconds, float(text)),)
        else:
            pairs = [part.split("x", 1) for part in text.split(",")]
            stages = tuple((parse_us(span, "--rate") / 1e6, float(rate)) for rate, span in pairs)
    except ValueError:
        pass  # said below
    fine = all(0 <= rate <= MAX_RATE_PER_S and span_s > 0 for span_s, rate in stages)
    if not fine or not any(rate for _, rate in stages):
        raise BadValue(f"--rate {text!r}: no rate", hint="write calls a second, 200, or stages, 100x10s,400x30s")
    return stages


def check_trace(path: Path | None) -> str:
    if path is None:
        raise BadValue("--shape trace: no trace", hint="name a CSV file with a column t_us: --trace FILE")
    if next(workload.replay_trace(path), None) is None:
        raise BadValue(f"{path}: no calls in it")
    return str(path)
