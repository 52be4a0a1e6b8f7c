"""One core, no threads: a function that computes, and one that takes as long by the clock on any core."""

import hashlib
import time

import lamina

app = lamina.App("bench-digest")
MIB = bytes(1 << 20)


@app.function(batch=8, slo=lamina.SLO("360ms"), scale=lamina.Scale(min=1, max=1))
def digest(x):
    """A few milliseconds for a batch, and a few more for each item."""
    _hash(12)
    return [_hash(12) + value for value in x]


@app.function(batch=8, slo=lamina.SLO("200ms"), scale=lamina.Scale(min=1, max=1))
def clocked(x):
    """Ten milliseconds for a batch, and five for each item: busy all the while."""
    ends_s = time.perf_counter() + 0.010 + 0.005 * len(x)
    while time.perf_counter() < ends_s:
        pass
    return x


def _hash(times):
    found = hashlib.sha256()
    for _ in range(times):
        found.update(MIB)
    return found.digest()[0]


def examples():
    return {"digest": [1, 2], "clocked": [1, 2]}
