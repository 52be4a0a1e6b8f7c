"""A function that waits for thirty milliseconds and takes little of a core, so that three machines of it fit on one."""

import time

import lamina

app = lamina.App("demo-cluster")


@app.function(slo="2s", batch=4, scale=lamina.Scale(min=3, max=6))
def square(x):
    time.sleep(0.03)
    return [one * one for one in x]


@app.workflow(slo="20s")
def norm(a, b):
    return total(square(a), square(b))


@app.function(scale=lamina.Scale(min=2, max=3))
def total(a, b):
    return a + b
