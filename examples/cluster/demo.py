"""A machine dies under load: one server, three agents as processes of this machine, and nothing is lost.

python examples/cluster/demo.py

Calls and durable runs arrive all the time. A quarter of the way through, one agent is killed with SIGKILL; half of the way
through it comes back; at three quarters another one is drained. Every call is checked against its right answer, and every
accepted run must end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

import lamina
from lamina.errors import DeadlineExceeded, LaminaError, Refused

APP = Path(__file__).with_name("app.py")
NODES = ("red", "green", "blue")
COLOURS = {"red": "#d55e00", "green": "#009e73", "blue": "#0072b2"}
STATES = {"live": "green", "suspect": "yellow", "draining": "cyan", "lost": "red", "away": "red"}
DEADLINE = "2s"
START_S, END_S = 60.0, 30.0


@dataclass(slots=True)
class Outcome:
    sent_s: float
    ended_s: float
    ending: str  #: in time, late, refused, wrong, failed
    node: str = ""


@dataclass(slots=True)
class Story:
    """What has happened so far."""

    began_s: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)
    sent: int = 0
    accepted: int = 0  #: runs
    ended: int = 0
    wrong: int = 0
    marks: list[tuple[float, str]] = field(default_factory=list)

    def now_s(self) -> float:
        return time.monotonic() - self.began_s

    def mark(self, what: str) -> None:
        self.marks.append((self.now_s(), what))

    def count(self) -> Counter[str]:
        return Counter(one.ending for one in self.outcomes)


# ------------------------------------------------------------------------------------------------- processes


class Machines:
    """Agents as processes, by the name of their node."""

    def __init__(self, join: str, folder: Path) -> None:
        self._join = join
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, node: str) -> None:
        command = [sys.executable, "-m", "lamina", "agent", "--join", self._join, "--name", node, "--gpu", "no"]
        command += ["--folder", str(self._folder / node), "--grace", "1s"]  # at the end, when everything has been answered
        with open(self._folder / f"{node}.log", "ab") as log:
            self._processes[node] = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def kill(self, node: str) -> None:
        self._processes[node].kill()
        self._processes[node].wait()

    def end(self) -> None:
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def serving(folder: Path) -> Iterator[dict[str, Any]]:
    """What a server with a port for agents says of itself; it is gone afterwards."""
    command = [sys.executable, "-m", "lamina", "serve", str(APP), "--port", "0", "--admin-port", "0", "--json", "--no-devices"]
    command += ["--agents", "127.0.0.1:0", "--store", str(folder / "runs.db"), "--no-probe", "--console"]
    with open(folder / "server.log", "wb") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    try:
        assert server.stdout is not None
        said = server.stdout.readline()
        if not said:
            raise SystemExit(f"the server did not start:\n{(folder / 'server.log').read_text()}")
        yield json.loads(said)
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(END_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        if server.stdout is not None:
            server.stdout.close()


def list_nodes(admin_url: str) -> dict[str, dict[str, Any]]:
    with urllib.request.urlopen(f"{admin_url}/v1/nodes", timeout=5) as answer:
        return {one["name"]: one for one in json.load(answer)}


def drain(admin_url: str, node: str) -> None:
    asked = urllib.request.Request(f"{admin_url}/v1/nodes/{node}/drain", data=b"{}", method="POST")
    with urllib.request.urlopen(asked, timeout=5):
        pass


# ------------------------------------------------------------------------------------------------------ load


async def call(client: lamina.AsyncClient, story: Story, number: int) -> None:
    sent_s, node = story.now_s(), ""
    story.sent += 1
    try:
        answer = await client.call_detailed("square", {"x": number}, deadline=DEADLINE)
        node = answer.slice.partition(".")[0]
        ending = "wrong" if answer.value != number * number else "in time"
    except Refused:
        ending = "refused"
    except DeadlineExceeded:
        ending = "late"
    except LaminaError:
        ending = "failed"
    story.outcomes.append(Outcome(sent_s, story.now_s(), ending, node))


async def durable(client: lamina.AsyncClient, story: Story, number: int) -> None:
    run = await client.start("norm", {"a": number, "b": 1})
    story.accepted += 1
    found = await run.result("60s")
    story.ended += 1
    story.wrong += found != number * number + 1


async def offer(client: lamina.AsyncClient, story: Story, rate_hz: float, seconds: float, seed: int) -> None:
    """Open loop: a call is sent when its time has come, and each twentieth is a durable run."""
    dice, tasks, at_s, number = random.Random(seed), [], 0.0, 0
    async with asyncio.TaskGroup() as group:
        while at_s < seconds:
            at_s += dice.expovariate(rate_hz)
            await asyncio.sleep(max(0.0, at_s - story.now_s()))
            number += 1
            tasks.append(group.create_task((durable if number % 20 == 0 else call)(client, story, number)))


async def play(machines: Machines, admin_url: str, story: Story, seconds: float) -> None:
    """The plot of the story."""
    await asyncio.sleep(0.25 * seconds)
    story.mark("red is killed")
    await asyncio.to_thread(machines.kill, "red")
    await asyncio.sleep(0.25 * seconds)
    story.mark("red is back")
    await asyncio.to_thread(machines.start, "red")
    await asyncio.sleep(0.25 * seconds)
    story.mark("green is drained")
    await asyncio.to_thread(drain, admin_url, "green")


# ---------------------------------------------------------------------------------------------------- screen


def screen(story: Story, nodes: dict[str, dict[str, Any]], seconds: float) -> Group:
    now_s = story.now_s()
    table = Table(title=f"{min(now_s, seconds):4.1f} of {seconds:g} s", title_justify="left", box=None, padding=(0, 2))
    for name in ("node", "state", "instances", "last beat", "answers in the last second"):
        table.add_column(name)
    recent = Counter(one.node for one in story.outcomes[-400:] if one.ended_s > now_s - 1.0)
    for name in NODES:
        node = nodes.get(name)
        state = node["state"] if node is not None else "away"
        beat = f"{node['silent_ms']} ms" if node is not None else ""
        stands = str(len(node["instances"])) if node is not None else ""
        bar = Text("█" * min(60, recent[name]), style=COLOURS[name])
        table.add_row(Text(name, style=COLOURS[name]), Text(state, style=STATES.get(state, "")), stands, beat, bar)
    count = story.count()
    told = "   ".join(f"{ending} {count[ending]}" for ending in ("in time", "late", "refused", "wrong", "failed"))
    lines = [Text(f"{at_s:5.1f} s  {what}", style="bold") for at_s, what in story.marks]
    return Group(
        table,
        Text(f"\ncalls: sent {story.sent}   {told}"),
        Text(f"runs: accepted {story.accepted}   ended {story.ended}\n"),
        *lines,
    )


async def watch(live: Live, story: Story, admin_url: str, seconds: float) -> None:
    while True:
        nodes = await asyncio.to_thread(list_nodes, admin_url)
        live.update(screen(story, nodes, seconds))
        await asyncio.sleep(0.2)


async def demonstrate(said: dict[str, Any], options: argparse.Namespace, console: Console) -> Story:
    machines, story = Machines(f"127.0.0.1:{said['agents_port']}", options.folder), Story()
    try:
        for node in NODES:
            machines.start(node)
        ends_s = time.monotonic() + START_S
        while sum(len(one["instances"]) for one in list_nodes(said["admin_url"]).values()) < 5:
            if time.monotonic() > ends_s:
                raise SystemExit(f"the agents did not get ready: see {options.folder}")
            await asyncio.sleep(0.1)
        async with lamina.AsyncClient(said["url"]) as client:
            for number in range(20):  # how long things take is learnt
                await client.call("square", {"x": number})
            story.began_s = time.monotonic()
            with Live(console=console, refresh_per_second=8) as live:
                watching = asyncio.create_task(watch(live, story, said["admin_url"], options.seconds))
                async with asyncio.TaskGroup() as group:
                    group.create_task(offer(client, story, options.rate, options.seconds, options.seed))
                    group.create_task(play(machines, said["admin_url"], story, options.seconds))
                watching.cancel()
                live.update(screen(story, list_nodes(said["admin_url"]), options.seconds))
    finally:
        await asyncio.to_thread(machines.end)
    return story


# ---------------------------------------------------------------------------------------------------- result


def summary(story: Story) -> str:
    count = story.count()
    lost = story.sent - len(story.outcomes)
    after = [
        one for one in story.outcomes if story.marks and one.sent_s >= story.marks[0][0] - 0.1 and one.sent_s < story.marks[0][0]
    ]
    slowest_ms = max((1000 * (one.ended_s - one.sent_s) for one in after), default=0.0)
    return (
        f"{story.sent} calls: {count['in time']} in time, {count['refused']} refused, {count['late']} late, "
        f"{count['failed']} failed, {count['wrong']} wrong, {lost} lost\n"
        f"{story.accepted} durable runs accepted: {story.ended} ended, {story.wrong} with a wrong result\n"
        f"calls on their way when the machine was killed: {len(after)}, the slowest answered after {slowest_ms:.0f} ms"
    )


def plot(story: Story, seconds: float, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (rates, times) = plt.subplots(2, 1, figsize=(9, 6), sharex=True, layout="constrained")
    width_s = seconds / 60
    edges = [index * width_s for index in range(61)]
    good = [one for one in story.outcomes if one.ending == "in time"]
    ended = [[one.ended_s for one in good if one.node == node] for node in NODES]
    weights = [[1 / width_s] * len(those) for those in ended]
    rates.hist(ended, bins=edges, weights=weights, stacked=True, color=[COLOURS[node] for node in NODES], label=list(NODES))
    rates.set(ylabel="answers a second", title="Answers by machine")
    rates.legend(loc="upper left", bbox_to_anchor=(1, 1), edgecolor="none")
    for node in NODES:
        dots = [one for one in good if one.node == node]
        times.scatter([one.sent_s for one in dots], [1000 * (one.ended_s - one.sent_s) for one in dots], s=6, color=COLOURS[node])
    bad = [one for one in story.outcomes if one.ending != "in time"]
    times.scatter(
        [one.sent_s for one in bad], [1000 * (one.ended_s - one.sent_s) for one in bad], s=14, color="black", marker="x"
    )
    times.set(xlabel="s", ylabel="latency, ms", title=f"Each call; crosses: not in time ({len(bad)})")
    rates.set_ylim(0, 1.12 * rates.get_ylim()[1])  # room for what happened
    for at_s, what in story.marks:
        for axes in (rates, times):
            axes.axvline(at_s, color="black", linestyle="--", linewidth=1)
        rates.annotate(what, (at_s, rates.get_ylim()[1]), xytext=(3, -10), textcoords="offset points", fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="A machine dies under load.")
    parser.add_argument("--seconds", type=float, default=24.0)
    parser.add_argument("--rate", type=float, default=60.0, help="calls a second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/demo-cluster.png"), help="where the plot goes")
    options = parser.parse_args(arguments)
    options.folder = options.out.with_suffix("")
    options.folder.mkdir(parents=True, exist_ok=True)
    for left in options.folder.glob("runs.db*"):
        left.unlink()
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    console = Console(soft_wrap=True)
    with serving(options.folder) as said:
        console.print(f"serving examples/cluster/app.py on {said['url']}; agents join on port {said['agents_port']}")
        console.print(f"in a browser: {said['admin_url']}/console\n")
        story = asyncio.run(demonstrate(said, options, console))
    console.print(f"\n{summary(story)}")
    plot(story, options.seconds, options.out)
    console.print(f"plot: {options.out}")
    count = story.count()
    is_whole = story.sent == len(story.outcomes) and story.accepted == story.ended
    return 0 if is_whole and not (count["failed"] or count["wrong"] or story.wrong) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
