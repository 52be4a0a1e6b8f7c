"""An app with markup and marks of direction in all that it says, runs of a thousand steps, and one that takes long."""

from __future__ import annotations

import time
from itertools import pairwise

import lamina
from lamina.sdk.workflow import Workflow

app = lamina.App("hostile")
MARKUP = "<img src=x onerror='window.pwned=1'><script>window.pwned=1</script>"
TURNED = "\u202egnp.exe"
"""Shown as "exe.png" by a page that does not look."""

STEPS = 1_000
ONE = lamina.Scale(min=1, max=1)


@app.function(scale=ONE)
def echo(x: str) -> str:
    "<b>Bold</b> <img src=x onerror='window.pwned=1'>"
    print(f"echo {MARKUP} {TURNED} {'long ' * 2000}")
    return x


@app.function(scale=ONE)
def fail(x):
    raise ValueError(f"cannot take {MARKUP} {TURNED} {'x' * 10_000}")


@app.function(scale=ONE)
def linger(x):
    time.sleep(60)


@app.function(scale=ONE)
def picture():
    import base64

    return base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==")


@app.workflow()
def slow(x):
    return linger(echo(x))


@app.workflow()
def thousand(items):
    return lamina.each(echo, items)


@app.function(scale=ONE)
def size_of(image: bytes) -> int:
    return len(image)


@app.function(scale=ONE)
def tone() -> bytes:
    import io
    import wave

    out = io.BytesIO()
    with wave.open(out, "wb") as sound:
        sound.setparams((1, 2, 8_000, 0, "NONE", ""))
        sound.writeframes(bytes(1_600))
    return out.getvalue()


@app.function(scale=ONE)
def talk(messages: list):
    """Says what it hears, word by word."""
    for word in messages[-1]["content"].split():
        yield f"{word} "


def _long_machine() -> dict:
    """A thousand states, named in markup."""
    names = [f"<b onclick=window.pwned=1>{number} {TURNED}" for number in range(STEPS)]
    states: dict = {name: {"Type": "Pass", "Next": after} for name, after in pairwise(names)}
    states[names[0]] = {"Type": "Task", "Resource": "echo", "Next": names[1]}
    states[names[-1]] = {"Type": "Task", "Resource": "echo", "End": True}
    return {"StartAt": names[0], "States": states}


Workflow.from_asl(_long_machine(), app=app, name="machine")
