"""Fuzzed requests over all protocols: HTTP/1, the V2 protocol, HTTP/2 frames, gRPC messages, state machines and packages.

Request number N is drawn from the seed and N alone, so that any of them can be sent again. HTTP and gRPC go over sockets to a
server of its own, a hundred at a time; state machines and packages are linted, run and unpacked in this process, by the code that
a server uses. Counted are answers by status, crashes (a traceback in the server's log, an error that is none of ours), hangs (no
answer within ten seconds when sent again alone) and how the server's memory grows.

`python -m benchmarks.attacks.fuzz [COUNT]` goes on where the last run ended, and adds to `results/attacks/fuzz.json`;
`... fuzz --only N` sends number N again.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import random
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import hostile
from benchmarks.report import machine
from benchmarks.servers import free_port, started, wait_for
from lamina.asl.compile import compile_flow
from lamina.asl_local_run import LocalStateMachine
from lamina.core.workflow import engine
from lamina.errors import LaminaError
from lamina.gateway.deploy.app_package import unpack
from lamina.gateway.oip.schema import load_schema
from lamina.server.http2.frames import DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE, SETTINGS, frame
from lamina.server.http2.hpack import encode

RESULTS = Path(__file__).parents[2] / "results" / "attacks" / "fuzz.json"
SEED = 20261116
WAVE = 100
KINDS = ("http1",) * 7 + ("v2",) * 4 + ("http2",) * 3 + ("grpc",) * 3 + ("asl",) * 2 + ("deploy",)
"""Request N is of kind N modulo their number."""

HANG_S = 10.0
SILENCE_S = 0.02
METHODS = ("ModelInfer", "ModelStreamInfer", "ServerLive", "ModelMetadata", "RepositoryIndex", "ModelStatistics", "Nothing")
ASL_LOOP = 500  #: questions of one run, instead of 25,000: a loop is as good after five hundred turns


@dataclass
class Found:
    """What became of all requests so far."""

    next: int = 0
    outcomes: dict[str, dict[str, int]] = field(default_factory=dict)  #: by kind
    crashes: list[str] = field(default_factory=list)
    hangs: list[int] = field(default_factory=list)
    growth_mib: list[float] = field(default_factory=list)  #: of each run, after its first tenth
    seconds: float = 0.0

    def add(self, kind: str, outcome: str) -> None:
        table = self.outcomes.setdefault(kind, {})
        table[outcome] = table.get(outcome, 0) + 1


def drawn(number: int) -> random.Random:
    return random.Random(f"{SEED}/{number}")


# ------------------------------------------------------------------------------------------------ requests


def http1(rng: random.Random) -> bytes:
    return hostile.valid(rng) if rng.random() < 0.05 else hostile.mutated(rng)


def v2(rng: random.Random) -> bytes:
    """A request of the V2 protocol whose document is damaged, under a head that fits."""
    tensor: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [rng.random() for _ in range(4)]}
    document: Any = {"inputs": [tensor]}
    for _ in range(rng.randint(0, 3)):
        at = rng.choice([document, tensor])
        at[rng.choice(["name", "datatype", "shape", "data", "inputs", "outputs", "parameters", "id"])] = value(rng)
    body = json.dumps(document).encode()
    if rng.random() < 0.5:
        body = hostile.damaged(rng, body)
    size = {} if rng.random() < 0.7 else {"Inference_Header_Content_Length": str(rng.randint(-1, 2 * len(body)))}
    more = {} if rng.random() < 0.9 else {"Content_Encoding": rng.choice(["gzip", "deflate", "br"])}
    where = rng.choice(["infer", "infer", "infer", "versions/1/infer", "generate", "ready", "config", "x"])
    path = f"/v2/models/{rng.choice(['double', 'echo', 'none', '%00'])}/{where}"
    return hostile.request(rng.choice(["POST", "POST", "POST", "GET"]), path, body, **size, **more)


def value(rng: random.Random, depth: int = 0) -> Any:
    simple = [None, True, -1, 0, 2**63, 1e308, "", "x" * 50, "FP32", "\ud800", 10**25, -0.0]
    if depth > 3 or rng.random() < 0.6:
        return rng.choice(simple)
    inner = [value(rng, depth + 1) for _ in range(rng.randint(0, 4))]
    return inner if rng.random() < 0.5 else {rng.choice(["a", "b", "", "$"]): one for one in inner}


def http2(rng: random.Random) -> bytes:
    """Frames of a call, with others among them, damaged or not."""
    frames = [frame(SETTINGS, 0, 0), *call_frames(rng, 1, grpc_message(rng))]
    for _ in range(rng.randint(0, 6)):
        payload = rng.randbytes(rng.choice([0, 4, 5, 8, 6, 100]))
        frames.insert(
            rng.randint(0, len(frames)),
            frame(rng.randrange(12), rng.randrange(256), rng.choice([0, 1, 3, 2, 2**31 - 1]), payload),
        )
    data = b"".join(frames)
    if rng.random() < 0.5:
        data = hostile.damaged(rng, data)
    return (PREFACE if rng.random() < 0.95 else PREFACE[: rng.randint(0, 24)]) + data


def grpc(rng: random.Random) -> bytes:
    """Calls with damaged messages in sound frames."""
    frames = [frame(SETTINGS, 0, 0)]
    for number in range(rng.randint(1, 3)):
        message = grpc_message(rng)
        if rng.random() < 0.7:
            message = hostile.damaged(rng, message)
        frames += call_frames(rng, 2 * number + 1, message)
    return PREFACE + b"".join(frames)


def grpc_message(rng: random.Random) -> bytes:
    message = load_schema()["ModelInferRequest"](model_name=rng.choice(["double", "echo", "none"]), id="7")
    given = message.inputs.add(
        name="x", datatype=rng.choice(["FP32", "BYTES", "INT8", ""]), shape=[1, rng.choice([4, 1, -1, 2**40])]
    )
    if rng.random() < 0.5:
        message.raw_input_contents.append(rng.randbytes(rng.choice([0, 16, 17])))
    else:
        given.contents.fp32_contents.extend([1.0] * rng.choice([0, 4, 5]))
    data: bytes = message.SerializeToString()
    return data


def call_frames(rng: random.Random, stream: int, message: bytes) -> list[bytes]:
    path = f"/inference.GRPCInferenceService/{rng.choice(METHODS)}".encode()
    headers = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b"content-type", b"application/grpc")]
    if rng.random() < 0.3:
        headers.append(
            (rng.choice([b"grpc-timeout", b"lamina-x", b"grpc-encoding", b":path"]), rng.choice([b"1S", b"gzip", b"", b"\x00"]))
        )
    size = len(message) if rng.random() < 0.8 else rng.choice([0, 2**31, len(message) + 1])
    body = bytes([rng.choice([0, 0, 0, 1, 7])]) + size.to_bytes(4, "big") + message
    return [
        frame(HEADERS, END_HEADERS, stream, encode(headers)),
        frame(DATA, END_STREAM if rng.random() < 0.9 else 0, stream, body),
    ]


# ------------------------------------------------------------------------------------------ state machines

PATHS = (
    "$",
    "$.a",
    "$.a[0]",
    "$..*",
    "$..a..b",
    "$.a[?(@ > 1)]",
    "$$.Execution.Input",
    "$$.Map.Item.Value",
    "$[",
    "$.x.y.z",
    "$['a','b']",
)
CALLS = (
    "States.Format('{}{}', $.a, $.b)",
    "States.Array($, $)",
    "States.ArrayPartition($.a, 2)",
    "States.ArrayRange(0, $.b, 1)",
    "States.StringSplit($.s, ',')",
    "States.JsonToString($)",
    "States.StringToJson($.s)",
    "States.MathAdd($.b, 1)",
    "States.JsonMerge($, $, false)",
    "States.ArrayUnique($.a)",
    "States.Hash($, 'MD5')",
    "States.Nothing(1)",
)
TYPES = ("Pass", "Pass", "Choice", "Task", "Wait", "Map", "Parallel", "Succeed", "Fail")


def state_machine(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """States one after another, some of which lead back; one in ten has something that is wrong."""
    names = [f"{'abcdefgh'[number]}{rng.randrange(10**9)}" for number in range(rng.randint(1, 4))]
    after = [*names[1:], ""]
    return {"StartAt": names[0], "States": {name: state(rng, names, to, depth) for name, to in zip(names, after, strict=True)}}


def state(rng: random.Random, names: list[str], after: str, depth: int) -> dict[str, Any]:
    kinds = TYPES[:-4] if depth > 1 else TYPES[:-2] if after else TYPES
    kind = rng.choice(kinds if after else [one for one in kinds if one != "Choice"])
    made: dict[str, Any] = {"Type": kind}
    if kind not in ("Choice", "Succeed", "Fail"):
        made |= {"Next": after} if after else {"End": True}
    paths = PATHS if rng.random() < 0.1 else PATHS[:-3]
    if kind == "Choice":
        name, wanted = rng.choice([("IsPresent", True), ("IsNull", False), ("NumericGreaterThan", 1), ("StringMatches", "*a*")])
        rule = {"Variable": rng.choice(paths), name: wanted, "Next": rng.choice(names)}
        made |= {"Choices": [rule], "Default": after}
    elif kind == "Task":
        made["Resource"] = "f"
    elif kind == "Wait":
        made |= rng.choice([{"Seconds": 1}, {"SecondsPath": "$.b"}, {"TimestampPath": "$.s"}])
    elif kind == "Map":
        made |= {"ItemProcessor": state_machine(rng, depth + 1), "ItemsPath": rng.choice(("$", "$.a", "$$.Execution.Input"))}
    elif kind == "Parallel":
        made["Branches"] = [state_machine(rng, depth + 1) for _ in range(rng.randint(1, 2))]
    if kind in ("Pass", "Task", "Parallel") and rng.random() < 0.6:
        calls = CALLS if rng.random() < 0.1 else CALLS[:-1]
        made["Parameters"] = {f"{key}.$": rng.choice(paths + calls) for key in rng.sample("abs", rng.randint(1, 3))}
    for name in ("InputPath", "OutputPath", "ResultPath"):
        if kind != "Fail" and rng.random() < 0.15 and (name != "ResultPath" or kind in ("Pass", "Task")):
            made[name] = rng.choice(["$", "$.a", None] if name == "ResultPath" else [*paths, None])
    return made


def run_state_machine(rng: random.Random) -> str:
    document = state_machine(rng)
    given = {"a": value(rng), "b": rng.choice([0, 3, -1, 1e9]), "s": rng.choice(["a,b", "{}", "[1]", "x" * 300_000])}
    try:
        flow = compile_flow(document, "machine", lambda resource: (resource, None))
        ended = LocalStateMachine(flow, {"f": lambda given: given}, seed=1, began_us=0).run(json.loads(json.dumps(given)))
    except (LaminaError, UnicodeEncodeError) as error:
        return type(error).__name__
    return ended.error or "ok"


def unpack_package(rng: random.Random) -> str:
    out = io.BytesIO()
    warnings.simplefilter("ignore", UserWarning)  # names that are there twice are meant
    with zipfile.ZipFile(out, "w", rng.choice([zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])) as archive:
        for _ in range(rng.randint(0, 4)):
            plain = ["app.py", "a/b.py", "a/c.py", "model.bin", "d/"]
            name = rng.choice(["a", "../x", "/x", "a\\b", "App.py", "x" * 120, "app.py"] if rng.random() < 0.2 else plain)
            info = zipfile.ZipInfo(name)
            info.external_attr = (0o644 if rng.random() < 0.8 else rng.choice([0, 0o120777, 0o10644])) << 16
            archive.writestr(info, rng.choice([b"", b"x = 1\n", bytes(100_000), rng.randbytes(50)]))
    body = out.getvalue()
    if rng.random() < 0.5:
        body = hostile.damaged(rng, body)
    with tempfile.TemporaryDirectory() as folder:
        inside = Path(folder) / "in" / "package"
        inside.parent.mkdir()
        try:
            unpack(body, inside)
            outcome = "ok"
        except LaminaError as error:
            outcome = type(error).__name__
        if any(path.name != "in" for path in Path(folder).iterdir()):
            return "escaped"
    return outcome


# ------------------------------------------------------------------------------------------------- sending


async def send(port: int, data: bytes, hang_s: float) -> bytes:
    """All of what is said before the server hangs up or falls silent; raises TimeoutError if it does neither."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    said = b""
    try:
        writer.write(data)
        with contextlib.suppress(TimeoutError):
            said = await asyncio.wait_for(reader.read(4096), SILENCE_S)
        if not said:
            with contextlib.suppress(OSError):  # cut off an instant ago
                writer.write_eof()
            said = await asyncio.wait_for(reader.read(4096), hang_s)
    except ConnectionError:
        pass
    finally:
        writer.transport.abort()
    return said


def status_of(kind: str, said: bytes) -> str:
    if kind in ("http2", "grpc"):
        return "answered" if said else "cut off"
    return said.split(b" ", 2)[1].decode("latin-1")[:3] if said.startswith(b"HTTP/1.") else "cut off"


BUILDERS = {"http1": http1, "v2": v2, "http2": http2, "grpc": grpc}
LOCAL = {"asl": run_state_machine, "deploy": unpack_package}
ALLOWED = {"cut off", "answered", *(str(status) for status in (*hostile.ALLOWED, 100, 202, 505))}


class Campaign:
    """Requests from one number on, against one server."""

    def __init__(self, port: int, grpc_port: int, found: Found) -> None:
        self._ports = {"http1": port, "v2": port, "http2": grpc_port, "grpc": grpc_port}
        self._found = found

    async def one(self, number: int, hang_s: float = 2.0) -> bool:
        """Send one request; False: it seems to hang."""
        kind, rng, found = KINDS[number % len(KINDS)], drawn(number), self._found
        try:
            if kind in LOCAL:
                outcome = LOCAL[kind](rng)
                is_right = outcome != "escaped"
            else:
                outcome = status_of(kind, await send(self._ports[kind], BUILDERS[kind](rng), hang_s))
                is_right = outcome in ALLOWED
        except TimeoutError:
            return False
        except Exception:
            outcome, is_right = "crash", False
            found.crashes.append(f"{number} {kind}: {traceback.format_exc()[-600:]}")
        found.add(kind, outcome)
        if not is_right and outcome != "crash":
            found.crashes.append(f"{number} {kind}: {outcome}")
        return True

    async def wave(self, numbers: range) -> None:
        done = await asyncio.gather(*(self.one(number) for number in numbers))
        for number, is_done in zip(numbers, done, strict=True):  # again, alone: then it is known whose fault it was
            if not is_done and not await self.one(number, HANG_S):
                self._found.hangs.append(number)
                self._found.add(KINDS[number % len(KINDS)], "hang")
        self._found.next = numbers.stop


async def fuzz(campaign: Campaign, found: Found, count: int, pid: int | str) -> None:
    began_s, first = time.monotonic(), found.next
    base_mib = 0.0
    while found.next < first + count:
        await campaign.wave(range(found.next, min(found.next + WAVE, first + count)))
        if not base_mib and found.next - first >= count / 10:
            base_mib = hostile.rss_mib(pid)
    found.growth_mib.append(round(hostile.rss_mib(pid) - base_mib, 1))
    found.seconds = round(found.seconds + time.monotonic() - began_s, 1)


def run(found: Found, count: int, only: int | None = None) -> Found:
    """Fuzz a server of its own."""
    engine.MAX_DATA_REQUESTS = ASL_LOOP
    port, grpc_port = free_port(), free_port()
    with tempfile.TemporaryDirectory() as folder:
        app, log = Path(folder) / "app.py", Path(folder) / "log"
        app.write_text(hostile.APP)
        options = ["--port", str(port), "--grpc-port", str(grpc_port), "--json"]
        command = [sys.executable, "-m", "lamina", "serve", str(app), *options]
        with log.open("wb") as out, started(command, log=out) as server:
            wait_for(f"http://127.0.0.1:{port}/readyz", None)
            campaign = Campaign(port, grpc_port, found)
            if only is not None:
                asyncio.run(campaign.one(only, HANG_S))
            else:
                asyncio.run(fuzz(campaign, found, count, server.pid))
            if server.poll() is not None:
                found.crashes.append(f"the server has ended before {found.next}")
            wait_for(f"http://127.0.0.1:{port}/v1/functions/echo", b"1")
        tracebacks = log.read_text(errors="replace").split("Traceback (most recent call last)")[1:]
        found.crashes += [f"before {found.next}: {text[-600:]}" for text in tracebacks[:5]]
    return found


def main() -> None:
    if sys.argv[1:2] == ["--only"]:
        print(json.dumps(asdict(run(Found(), 0, int(sys.argv[2]))), indent=1))
        return
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    kept.pop("machine", None)
    found, left = Found(**kept), int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    while left > 0:
        count = min(left, 20_000)
        run(found, count)
        left -= count
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({"machine": machine(), **asdict(found)}, indent=1) + "\n")
        totals = Counter({kind: sum(table.values()) for kind, table in found.outcomes.items()})
        said = f"{found.next} sent, {len(found.crashes)} crashes, {len(found.hangs)} hangs, grown {found.growth_mib[-1]} MiB"
        print(said, dict(totals), flush=True)


if __name__ == "__main__":
    main()
