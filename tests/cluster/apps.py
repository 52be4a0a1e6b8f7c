"""The app that clusters of tests serve."""

from __future__ import annotations

from pathlib import Path

APP = """
import os
import time

import lamina

app = lamina.App("spread")


@app.function(scale=lamina.Scale(min=1, max=4), batch=4)
def echo(x):
    return x


@app.function(scale=lamina.Scale(min=2, max=4))
def where(x):
    "Which process it ran in, after a while."
    time.sleep(x)
    return os.getpid()


@app.function(scale=lamina.Scale(min=2, max=4), idempotent=False)
def once(x):
    time.sleep(x)
    return os.getpid()


@app.function(scale=lamina.Scale(max=4))
def zeros(n: int) -> bytes:
    return bytes(n)


@app.function(scale=lamina.Scale(max=4))
def length(blob: bytes) -> int:
    return len(blob)


@app.function(scale=lamina.Scale(max=4))
def flipped(blob: bytes) -> bytes:
    return blob[::-1]


@app.function(scale=lamina.Scale(max=1))
def numbers(n: int):
    for i in range(n):
        yield i


@app.function(scale=lamina.Scale(max=2))
def counted(key: str) -> int:
    app.state[key] = app.state.get(key, 0) + 1
    return app.state[key]


@app.function(scale=lamina.Scale(max=1))
def kept(n: int) -> bytes:
    app.state["kept"] = n
    return bytes(n)


@app.function(batch=4, slo="20s", scale=lamina.Scale(max=1))
def tallied(key):
    sums = []
    for request, one in zip(lamina.context().requests, key):
        with request:
            app.state[one] = app.state.get(one, 0) + 1
            sums.append(app.state[one])
    return sums


@app.function(scale=lamina.Scale(max=1))
def broken(x):
    raise ValueError(f"cannot take {x}")


@app.function(scale=lamina.Scale(max=4))
def sizes(blob: bytes, pid: int) -> list[int]:
    return [len(blob), pid]


@app.function(scale=lamina.Scale(max=4), idempotent=False)
def zeros_once(n: int) -> bytes:
    return bytes(n)


@app.workflow()
def waited_once(n, seconds):
    return sizes(zeros_once(n), where(seconds))


@app.workflow()
def measured(n):
    return length(flipped(zeros(n)))


@app.workflow()
def waited(n, seconds):
    return sizes(zeros(n), where(seconds))
"""


def write(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "app.py"
    path.write_text(APP)
    return path
