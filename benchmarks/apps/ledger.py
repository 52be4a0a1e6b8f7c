"""Steps that leave a line in a file each time they are done: who runs twice is seen to."""

import os
import time

import lamina

app = lamina.App("ledger")
once = lamina.Scale(min=1, max=1)


def record(step: str, keys: list[str]) -> None:
    """One write, at the very end of the step: a line that is there was done."""
    time.sleep(float(os.environ.get("LEDGER_STEP_S", "0")))
    lines = "".join(f"{os.environ['LEDGER_GENERATION']} {step} {key}\n" for key in keys)
    handle = os.open(os.environ["LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(handle, lines.encode())
    os.close(handle)


@app.function(batch=16, scale=once)
def plain(key: list[str]) -> list[str]:
    record("plain", key)
    return key


@app.function(batch=16, scale=once)
def split(key: list[str]) -> list[list[str]]:
    record("split", key)
    return [[f"{one}.{part}" for part in range(3)] for one in key]


@app.function(batch=16, scale=once)
def work(key: list[str]) -> list[str]:
    record("work", key)
    return key


@app.function(batch=16, scale=once)
def join(keys: list[list[str]]) -> list[str]:
    record("join", [one[0].partition(".")[0] for one in keys])
    return [one[0].partition(".")[0] for one in keys]


@app.workflow()
def flow(key: str) -> str:
    return join(lamina.each(work, split(key)))
