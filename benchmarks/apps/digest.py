"""One core, no threads, no surprises: what it takes is what it computes."""

import hashlib

import lamina

app = lamina.App("bench-digest")
MIB = bytes(1 << 20)


@app.function(batch=8, slo=lamina.SLO("360ms"), scale=lamina.Scale(min=1, max=1))
def digest(x):
    """A few milliseconds for a batch, and a few more for each item."""
    _hash(12)
    return [_hash(12) + value for value in x]


def _hash(times):
    found = hashlib.sha256()
    for _ in range(times):
        found.update(MIB)
    return found.digest()[0]


def examples():
    return {"digest": [1, 2]}
