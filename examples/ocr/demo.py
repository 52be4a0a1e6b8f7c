"""Serves the OCR pipeline, reads a page with it, then loads it at a rising rate and shows what happens.

python examples/ocr/demo.py
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

import lamina
from lamina.units import parse_us, show_us
from sample import accuracy, invoice
from steps import STAGES, Ending, Load, StageCount, Step, get

APP = Path(__file__).with_name("app.py")
LOW, HIGH = 0.3, 1.5  # times the capacity
PATIENCE = 4.0  # the deadline, in times of what a page takes alone
COLOURS: dict[Ending, str] = {
    "in time": "#0072b2",
    "late": "#e69f00",
    "dropped": "#cc79a7",
    "failed": "#d55e00",
    "refused": "#999999",
}
START_S = 60.0
OFF_S = 15.0


@contextmanager
def serving(policy: str, log: Path) -> Iterator[str]:
    """The address of a server of its own, which is gone afterwards."""
    command = [str(Path(sys.executable).with_name("lamina")), "serve", str(APP), "--port", "0", "--json", "--policy", policy]
    with log.open("wb") as errors:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
    try:
        assert server.stdout is not None
        said = server.stdout.readline()
        if not said:
            raise SystemExit(f"the server did not start:\n{log.read_text()}")
        url = str(msgspec.json.decode(said)["url"])
        ends_s = time.monotonic() + START_S
        while not get(url.removeprefix("http://"), "/readyz"):
            if server.poll() is not None or time.monotonic() > ends_s:
                raise SystemExit(f"the server did not get ready:\n{log.read_text()}")
            time.sleep(0.05)
        yield url
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(OFF_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        if server.stdout is not None:
            server.stdout.close()


async def read_one(client: lamina.AsyncClient, console: Console) -> float:
    """A page whose text is known, and what was read. Returns how long a page takes that has the server to itself."""
    page, truth = invoice(seed=0)
    answers = [await client.call_detailed("read_page", {"image": page}, deadline="30s") for _ in range(4)]
    answer = sorted(answers[1:], key=lambda one: one.latency_ms)[1]  # the first one warms things up
    table = _table("One page")
    for name in ("written", "read", "score"):
        table.add_column(name, justify="right" if name == "score" else "left")
    read = [line["text"] for line in answer.value]
    for index in range(max(len(truth), len(read))):
        score = f"{answer.value[index]['score']:.3f}" if index < len(read) else ""
        table.add_row(truth[index] if index < len(truth) else "", read[index] if index < len(read) else "", score)
    console.print(table)
    console.print(
        f"{accuracy(read, truth):.1%} of the characters are right; {answer.latency_ms:.0f} ms, "
        f"of which {answer.queue_ms:.0f} ms waiting; cost {answer.cost:.2g}\n"
    )
    return answer.latency_ms


async def demonstrate(url: str, options: argparse.Namespace, console: Console) -> tuple[list[Step], float, float]:
    pages = [invoice(seed)[0] for seed in range(16)]
    async with lamina.AsyncClient(url) as client:
        alone_ms = await read_one(client, console)
        deadline_ms = parse_us(options.deadline, "--deadline") / 1000 if options.deadline else round(PATIENCE * alone_ms, -2)
        load = Load(client, url, pages, deadline_ms, options.seed)
        with console.status("measuring the capacity"):
            measured_hz = await load.capacity_hz(options.seconds * 0.7, at_once=2 * (os.cpu_count() or 1))
        capacity_hz = max(measured_hz, 1000 / alone_ms)
        console.print(f"capacity: {capacity_hz:.2f} pages a second; deadline {show_us(deadline_ms * 1000)}\n")
        last = max(1, options.steps - 1)
        factors = [LOW + (HIGH - LOW) * index / last for index in range(options.steps)]
        steps = [Step(factor * capacity_hz, options.seconds) for factor in factors]
        progress = Progress(
            TextColumn("{task.fields[rate]:5.2f}/s"),
            BarColumn(bar_width=30),
            TextColumn("sent {task.fields[sent]:3d}  in time {task.fields[good]:3d}  refused {task.fields[refused]:3d}"),
            TextColumn("median {task.fields[median]:5.0f} ms"),
            console=console,
        )
        with progress:
            bars = [
                progress.add_task("", total=step.rate_hz * step.seconds, rate=step.rate_hz, sent=0, good=0, refused=0, median=0)
                for step in steps
            ]

            def show(index: int, step: Step) -> None:
                progress.update(
                    bars[index],
                    completed=len(step.outcomes),
                    total=max(step.sent, step.rate_hz * step.seconds) if not step.stages else step.sent,
                    sent=step.sent,
                    good=step.count("in time"),
                    refused=step.count("refused"),
                    median=step.latency_ms(0.5),
                )

            await load.run(steps, show)
    return steps, capacity_hz, deadline_ms


def tables(steps: list[Step]) -> list[Table]:
    """Per step what was asked and answered; per stage where the time went."""
    by_step = _table("Load step by step")
    for name in ("rate/s", "sent", "in time", "refused", "lost", "p50 ms", "p99 ms", "cores busy", "mean batches"):
        by_step.add_column(name.replace(" ", "\n"), justify="right")
    for step in steps:
        by_step.add_row(
            f"{step.rate_hz:.2f}",
            str(step.sent),
            str(step.count("in time")),
            str(step.count("refused")),
            str(step.count("late") + step.count("dropped") + step.count("failed")),
            f"{step.latency_ms(0.5):.0f}",
            f"{step.latency_ms(0.99):.0f}",
            f"{sum(count.busy_s for count in step.stages.values()) / step.seconds:.2f}",
            "  ".join(f"{step.stages[stage].mean_batch:.1f}" for stage in STAGES),
        )
    by_stage = _table("Stage by stage, time on a core")
    for name in ("stage", "jobs", "batches", "mean batch", "ms per batch", "ms per job", "share"):
        by_stage.add_column(name, justify="left" if name == "stage" else "right")
    totals = {stage: _total(steps, stage) for stage in STAGES}
    busy_s = sum(total.busy_s for total in totals.values()) or 1.0
    for stage, total in totals.items():
        figures = (f"{total.mean_batch:.1f}", f"{total.batch_ms:.1f}", f"{total.job_ms:.1f}", f"{total.busy_s / busy_s:.0%}")
        by_stage.add_row(stage, f"{total.jobs:.0f}", f"{total.batches:.0f}", *figures)
    return [by_step, by_stage]


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD)


def _total(steps: list[Step], stage: str) -> StageCount:
    counts = [step.stages[stage] for step in steps]
    return StageCount(sum(c.batches for c in counts), sum(c.jobs for c in counts), sum(c.busy_s for c in counts))


def summary(steps: list[Step]) -> str:
    sent, good = sum(step.sent for step in steps), sum(step.count("in time") for step in steps)
    refused = sum(step.count("refused") for step in steps)
    accepted = max(1, sent - refused)
    return (
        f"{good} of {sent} pages in time ({good / max(1, sent):.1%}); "
        f"of the {accepted} that were accepted {good / accepted:.1%}; {refused} refused at once"
    )


def plot(steps: list[Step], capacity_hz: float, deadline_ms: float, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (rates, times) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    offered = [step.sent / step.seconds for step in steps]
    places = range(len(steps))
    bottom = [0.0] * len(steps)
    for ending, colour in COLOURS.items():
        heights = [step.count(ending) / step.seconds for step in steps]
        if any(heights):
            rates.bar(places, heights, bottom=bottom, color=colour, label=ending)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    rates.axhline(capacity_hz, color="black", linestyle="--", linewidth=1, label="capacity")
    rates.set_xticks(list(places), [f"{rate:.1f}" for rate in offered])
    rates.set(xlabel="offered, pages a second", ylabel="pages a second", title="What became of the pages")
    rates.legend(loc="upper left", framealpha=0.9, edgecolor="none")
    for ending, colour in COLOURS.items():
        dots = [outcome for step in steps for outcome in step.outcomes if outcome.ending == ending]
        if dots:
            times.scatter([dot.sent_s for dot in dots], [dot.latency_ms for dot in dots], s=9, color=colour, label=ending)
    times.axhline(deadline_ms, color="black", linestyle="--", linewidth=1, label="deadline")
    for index in range(1, len(steps)):
        times.axvline(index * steps[0].seconds, color="#dddddd", linewidth=1, zorder=0)
    times.set(xlabel="sent at, s", ylabel="latency, ms", ylim=(-0.03 * deadline_ms, None), title="Each page")
    times.legend(loc="center left", framealpha=0.9, edgecolor="none")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="The OCR pipeline under rising load.")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=7.0, help="length of a step")
    parser.add_argument("--deadline", help="for each page, such as 2s; default: four times what a page takes alone")
    parser.add_argument("--policy", default="frontier")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/demo.png"), help="where the plot goes")
    options = parser.parse_args(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    console = Console()
    with (
        console.status("starting lamina serve examples/ocr/app.py") as status,
        serving(options.policy, options.out.with_suffix(".log")) as url,
    ):
        status.stop()
        console.print(f"serving examples/ocr/app.py on {url} with policy {options.policy}\n")
        steps, capacity_hz, deadline_ms = asyncio.run(demonstrate(url, options, console))
    for table in tables(steps):
        console.print(table)
    console.print(summary(steps))
    plot(steps, capacity_hz, deadline_ms, options.out)
    console.print(f"plot: {options.out}")


if __name__ == "__main__":
    main(sys.argv[1:])
