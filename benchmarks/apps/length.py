"""A function that costs nothing beside what it takes to bring its input to it."""

import os

import lamina

app = lamina.App("bench-length")
COPIES = min(3, len(os.sched_getaffinity(0)))


@app.function(scale=lamina.Scale(min=COPIES, max=COPIES), batch=64)
def length(x):
    return [len(one) for one in x]
