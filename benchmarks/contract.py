"""Does the server keep what its OpenAPI document says? Generated requests, none of which may be answered with a 5xx.

`python -m benchmarks.contract [CASES]`: 10,000 by default, written to results/bench-contract.json. Needs schemathesis.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import urllib.request
from importlib.metadata import version
from pathlib import Path

from benchmarks.report import Report
from benchmarks.servers import free_port, started, wait_for

APP = """
from typing import Annotated

import numpy as np

import lamina
from lamina import Tensor

app = lamina.App("contract")
ONE = lamina.Scale(min=1, max=1)
Row = Annotated[np.ndarray, Tensor("FP32", [4])]


@app.function(scale=ONE)
def echo(x):
    return x


@app.function(scale=ONE, batch=8)
def double(x: list[Row]) -> list[Row]:
    with np.errstate(over="ignore"):
        return [2 * row for row in x]


@app.function(scale=ONE)
def shout(text: Annotated[list, Tensor("BYTES", [-1])]) -> Annotated[list, Tensor("BYTES", [-1])]:
    return [word.upper() for word in text]


@app.function(scale=ONE)
def flip(mask: Annotated[np.ndarray, Tensor("BOOL", [2])], by: Annotated[np.ndarray, Tensor("INT64", [2])]) -> dict:
    return {"mask": mask, "by": by}


@app.function(scale=ONE)
def repeat(text: str, times: int = 1) -> str:
    return text * max(0, min(times, 3))


@app.workflow()
def twice(x):
    return echo(echo(x))
"""
SEED = 1
SERVER_ERRORS = r"Server error: ([\d,]+)"


def run(cases: int, phases: str = "examples,coverage,fuzzing") -> tuple[int, str]:
    """How many requests were made, and what was said if one was answered with a 5xx. What fails in the tool itself is printed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "contract_app.py"
        file.write_text(APP)
        port = free_port()
        command = [sys.executable, "-m", "lamina", "serve", str(file), "--port", str(port), "--json"]
        command += ["--store", str(Path(folder) / "contract.db")]
        with started(command):
            url = f"http://127.0.0.1:{port}"
            wait_for(f"{url}/readyz", None)
            with urllib.request.urlopen(f"{url}/openapi.json") as answer:
                bodies = answer.read().count(b'"requestBody"')  # the others are soon exhausted
            each = max(1, -(-cases // bodies))
            test = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--seed", str(SEED)]
            test += ["--max-examples", str(each), "--checks", "not_a_server_error", "--phases", phases]
            test += [
                "--mode",
                "all",
                "--suppress-health-check",
                "all",
                "--no-color",
                "--request-timeout",
                "120",
                "--workers",
                "2",
            ]
            said = subprocess.run(test, capture_output=True, text=True, cwd=folder, check=False)
        if own := _count(r"Runtime Error: ([\d,]+)", said.stdout):
            print(f"{own} operations were not tested to the end: the tool failed")
        made = _count(r"([\d,]+) generated", said.stdout)
        fine = made and not _count(SERVER_ERRORS, said.stdout)
        return made, "" if fine else said.stdout[-14000:] + said.stderr[-1000:]


def _count(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1].replace(",", "")) if found else 0


def main() -> None:
    cases = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    made, wrong = run(cases)
    report = Report()
    report.add("requests made from the OpenAPI document", made, "requests", least=cases, seed=SEED, tool=version("schemathesis"))
    report.add("operations answered with a 5xx", _count(SERVER_ERRORS, wrong), "", most=0)
    report.write(Path("results") / "bench-contract.json")
    print(wrong or "no 5xx")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
