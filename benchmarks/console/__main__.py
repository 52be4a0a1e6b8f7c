"""What the console costs: the feed at 5,000 calls/s with none, one and ten viewers; pictures a second with 15 slices x 60 s; the
longest task of the page with ten thousand functions and runs of a thousand steps.

    python -m benchmarks.console [feed] [frames] [much] [--out results/console.json]

The feed is measured inside one process without sockets to clients: the real-time driver, an emulated device, calls submitted at a
fixed rate, and viewers that are exchanges which throw away what they get, so that processor time is the gateway's and the feed's
alone. What the feed takes is timed by itself, on the processor's clock, inside each run: a difference of runs would be lost in
what else the machine does. Writing to the sockets of viewers is not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from benchmarks.console.demo import ROOT

RATE, SECONDS, ROUNDS = 5_000, 4.0, 3


class Sink:
    """An exchange whose client reads everything at once."""

    unsent_bytes = 0
    head_only = False

    def __init__(self) -> None:
        self.bytes = 0

    def when_disconnected(self, callback: Callable[[], None]) -> None: ...

    def start_stream(self, *_: object) -> None: ...

    def end_stream(self) -> None: ...

    def send_chunk(self, piece: bytes) -> None:
        self.bytes += len(piece)


async def _one_round(viewers: int) -> dict[str, float]:
    """Processor seconds of a server at the rate, through HTTP, with so many viewers."""
    from lamina.bootstrap import open_emulated, read_profiles
    from lamina.gateway.bootstrap import ListenConfig, open_gateway
    from lamina.gateway.console.routes import ConsoleRoutes
    from lamina.sdk.app_loader import load_app
    from lamina.server.exchange import Exchange, HttpRequest

    app = load_app(str(ROOT / "benchmarks" / "apps" / "zoo.py"))
    gateway = await open_gateway(open_emulated(app, "h200x4", read_profiles("", ROOT / "profiles" / "h200")), ListenConfig())
    while not gateway.is_ready():
        await asyncio.sleep(0.01)
    console = ConsoleRoutes(gateway)
    sinks = [Sink() for _ in range(viewers)]
    head = HttpRequest("GET", b"/v1/console/feed", b"", {}, b"", True)
    for sink in sinks:
        console.feed.serve(head, cast(Exchange, sink), cast(Any, SimpleNamespace()))
    names = [b"resnet50", b"mobilenet_v3_large", b"distilbert", b"convnext_tiny"]
    body, headers = b"[1]", {b"content-type": b"application/json", b"host": b"localhost"}
    answered = 0

    class Answer(Sink):
        accepts_values = False
        sink = None
        charge = None
        is_streaming = False
        keep_alive = True
        response = None

        def respond(self, status: int, *_: object) -> None:
            nonlocal answered
            answered += status == 200

        def add_headers(self, *_: object) -> None: ...

        def release(self) -> None: ...

    make_frame, in_feed = console.feed._on_timer, 0.0

    def timed() -> None:
        nonlocal in_feed
        at = time.thread_time()
        make_frame()
        in_feed += time.thread_time() - at

    console.feed._on_timer = timed  # type: ignore[method-assign]
    loop = asyncio.get_running_loop()
    begin, sent, cpu = loop.time(), 0, time.process_time()
    while sent < RATE * SECONDS:
        due = min(int((loop.time() - begin) * RATE), int(RATE * SECONDS))
        while sent < due:
            request = HttpRequest("POST", b"/v1/functions/" + names[sent % 4], b"", headers, body, True)
            gateway.router.handle(request, cast(Exchange, Answer()))
            sent += 1
        await asyncio.sleep(0.001)
    wall, cpu = loop.time() - begin, time.process_time() - cpu
    seen = sum(sink.bytes for sink in sinks)
    console.stop()
    await gateway.stop(1)
    return {
        "cpu_s": cpu,
        "feed_s": in_feed,
        "wall_s": wall,
        "answered": answered,
        "kb_per_s": seen / 1024 / wall / max(1, viewers),
    }


def measure_feed() -> dict[str, Any]:
    rounds: dict[int, list[dict[str, float]]] = {0: [], 1: [], 10: []}
    for _ in range(ROUNDS):
        for viewers in rounds:
            rounds[viewers].append(asyncio.run(_one_round(viewers)))
    found: dict[str, Any] = {"rate": RATE, "seconds": SECONDS, "rounds": ROUNDS}
    for viewers, runs in rounds.items():
        found[f"viewers_{viewers}"] = {
            "share_of_cpu": round(statistics.median(one["feed_s"] / one["cpu_s"] for one in runs), 4),
            "shares": [round(one["feed_s"] / one["cpu_s"], 4) for one in runs],
            "cpu_s": round(statistics.median(one["cpu_s"] for one in runs), 3),
            "feed_s": round(statistics.median(one["feed_s"] for one in runs), 4),
            "kb_per_s_each": round(statistics.median(one["kb_per_s"] for one in runs), 1),
        }
    found["calls_per_s"] = round(statistics.median(RATE * SECONDS / one["wall_s"] for one in rounds[1]))
    found["answered_share"] = round(statistics.median(one["answered"] / (RATE * SECONDS) for one in rounds[1]), 3)
    found["feed_cpu"] = measure_feed_itself()
    return found


def measure_feed_itself() -> dict[str, Any]:
    """Processor time of the feed's own work for a second of 5,000 calls in batches of two, timed by itself."""
    from lamina.core.flight_recorder import ArrivalRecord, EndRecord, FinishRecord, FlightRecorder, StartRecord
    from lamina.gateway.console.feed import EventFeed

    recorder = FlightRecorder()
    feed = EventFeed(cast(Any, SimpleNamespace(recorder=recorder, now_us=lambda: 0)), cast(Any, SimpleNamespace()))
    spent, batch = [], 0
    for _ in range(20):
        records: list[Any] = []
        for number in range(500):
            records += [ArrivalRecord(0, f"c{number}", "f", "", 0, 1), EndRecord(0, f"c{number}", "in time")]
            if number % 2:
                batch += 1
                jobs = [("c", "f"), ("d", "f")]
                records += [StartRecord(0, batch, "resnet50", "gpu0", 7, jobs, 900, 0, 0, "", ""), FinishRecord(0, batch, 800)]
        begin = time.process_time_ns()
        feed._encode("frame", feed._frame(records), 1)
        spent.append((time.process_time_ns() - begin) / 1e6)
    return {"ms_per_frame": round(statistics.median(spent), 3), "share_of_a_core": round(statistics.median(spent) * 10 / 1000, 4)}


def measure_frames() -> dict[str, Any]:
    """Pictures a second of the Devices view with 60 s of batches on 15 slices: 100 batches a second on each."""
    import shutil

    from playwright.sync_api import sync_playwright

    from benchmarks.console.demo import ZOO, served

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with served(*ZOO, emulate="h200") as told, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
        page.goto(told["console_url"])
        page.wait_for_timeout(3_000)
        page.get_by_role("button", name="60 s", exact=True).click()
        result: dict[str, Any] = page.evaluate(
            """async () => {
                const { onFrame, live, serverNow } = await import('/console/feed.js');
                const device = live.pulse.devices[0].id;
                let id = 1e9;
                const tell = (from, to) => {
                    const started = [], finished = [];
                    for (let at = from; at < to; at += 10000) for (let unit = 0; unit < 15; unit += 1) {
                        id += 1;
                        started.push([id, device, unit, 1, 'f' + (id % 8), at, 9000, 4, 0]);
                        finished.push([id, at + 8000 + (id % 5) * 500, 8000, '']);
                    }
                    onFrame({ now: live.pulse.now, started, finished, left_out: 0 });
                };
                const now = serverNow();
                for (let at = now - 60e6; at < now; at += 1e6) tell(at, at + 1e6);
                await new Promise((done) => setTimeout(done, 1500));
                const map = [...window.laminaMaps.values()][0], before = map.pictures, begin = performance.now();
                let told = serverNow(), longest = 0, last = performance.now();
                while (performance.now() - begin < 5000) {
                    await new Promise((done) => requestAnimationFrame(done));
                    longest = Math.max(longest, performance.now() - last);
                    last = performance.now();
                    if (serverNow() - told > 100000) { tell(told, told + 100000); told += 100000; }
                }
                const seconds = (performance.now() - begin) / 1000, kept = live.batches.get(device).length;
                return { pictures_per_s: (map.pictures - before) / seconds, longest_ms: longest, batches_kept: kept };
            }"""
        )
        browser.close()
    return {name: round(value, 1) for name, value in result.items()} | {"slices": 15, "seconds": 60, "batches_per_s": 1500}


WATCH_TASKS = """window.longest = 0;
new PerformanceObserver(seen => { for (const one of seen.getEntries()) window.longest = Math.max(window.longest, one.duration); })
    .observe({ type: 'longtask', buffered: true })"""
"""Tasks of the page of more than 50 ms; 0: none was so long."""


def measure_much() -> dict[str, Any]:
    """Longest task while each page is loaded, turned and typed into, and the number of elements in it."""
    import shutil
    import tempfile
    import urllib.request

    from playwright.sync_api import sync_playwright

    from benchmarks.console.demo import served

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        many = Path(folder) / "many.py"
        many.write_text(
            "import lamina\napp = lamina.App('many')\nfor number in range(10_000):\n"
            "    app.function(name=f'f{number:05}')(lambda x: x)\n"
        )
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])

        def look(told: dict[str, Any], name: str, view: str, wanted: str, act: Callable[[Any], None] = lambda page: None) -> None:
            context = browser.new_context(viewport={"width": 1280, "height": 900})
            context.add_init_script(WATCH_TASKS)
            page = context.new_page()
            page.goto(f"{told['console_url']}/{view}")
            page.get_by_text(wanted).first.wait_for(timeout=120_000)
            act(page)
            page.wait_for_timeout(2_000)
            elements = page.evaluate("document.querySelectorAll('*').length")
            found[name] = {"longest_task_ms": round(page.evaluate("window.longest")), "elements": elements}
            context.close()

        with served(str(many), "--no-probe", emulate="") as told:
            look(told, "functions_10000", "functions", "of 10,000", lambda page: page.get_by_label("Search").fill("f0999"))
            look(told, "playground_10000", "playground/f09999", "Answer")
        hostile = ROOT / "tests" / "gateway" / "console" / "hostile_app.py"
        with served(str(hostile), "--trust-deployers", emulate="") as told:
            for workflow, given in (("thousand", ["x"] * 1000), ("machine", "x")):
                headers = {"content-type": "application/json", "prefer": "respond-async"}
                asked = urllib.request.Request(f"{told['url']}/v1/workflows/{workflow}", json.dumps(given).encode(), headers)
                run = json.load(urllib.request.urlopen(asked))["id"]
                look(told, f"run_{workflow}", f"runs/{run}", "succeeded")
        browser.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=["feed", "frames", "much"])
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "console.json")
    given = parser.parse_args()
    found = json.loads(given.out.read_text()) if given.out.exists() else {}
    found["setup"] = {
        "machine": f"{platform.machine()}, shared with other work",
        "python": platform.python_version(),
        "engine": "emulated",
    }
    for what in given.what:
        found[what] = {"feed": measure_feed, "frames": measure_frames, "much": measure_much}[what]()
        print(what, json.dumps(found[what], indent=1))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
