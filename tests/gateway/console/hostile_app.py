"""An app with markup in all that it says, a run of a thousand steps, and one that takes long; for the console in a browser."""

from __future__ import annotations

import time

import lamina

app = lamina.App("hostile")
MARKUP = "<img src=x onerror='window.pwned=1'><script>window.pwned=1</script>"
ONE = lamina.Scale(min=1, max=1)


@app.function(scale=ONE)
def echo(x: str) -> str:
    "<b>Bold</b> <img src=x onerror='window.pwned=1'>"
    print(f"echo {MARKUP}")
    return x


@app.function(scale=ONE)
def fail(x):
    raise ValueError(f"cannot take {MARKUP}")


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
