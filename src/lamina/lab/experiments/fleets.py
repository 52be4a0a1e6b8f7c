"""Random fleets: how far is each policy from the best where devices, tenants and loads differ, and functions are cold?"""

from __future__ import annotations

import random
from math import exp, log
from typing import Any

from lamina.lab.comparison import NO_FIGURE, RIVALS, Comparison, run_policy, scores
from lamina.lab.experiment import Cell, Reported, Row, Section
from lamina.sim import scenario

TITLE = "Random fleets: regret where nothing is like the world before"
ABOUT = """
Each fleet is drawn from its number, and unlike `worlds`: one or two kinds of devices, one to four of each, of 1 to 16 units, of
any or of fixed sizes, rented or owned, at ways of 0 to 3 ms, with memory for all functions or for a few; one to six functions
of 0.5 to 900 ms a call, batches of 1 to 32, goals of 1.2 to 2,000 times that (an eighth have none), some of them with a home,
a quota, another objective, late answers wanted, or loaded nowhere at first; every third has workflows (chains, forks, choices,
maps), and tenants. Loads of 0.2 to 3 times the capacity come as Poisson, in bursts, on and off, evenly, or from clients that
wait for their answers. Runs are as long as an autoscaler's period or two: what is lost until it looks counts.

A policy's figure is that of `worlds`. Constants and mechanisms of `frontier` may be tuned on odd fleets; the tables show even
ones. Simulated, 1.5 to 3 s or 2,500 calls a fleet. A policy that refuses to deploy one, or takes more than 8 s of processor
time, has no figure there.
"""
REPORTED: list[Reported] = []

FULL, QUICK = 100, 2
QUICK_POLICIES = ("fifo", "edf", "has", "frontier")
CALLS, LIMIT_S = 2_500, 8.0
MOST_PER_S = 700.0
SHARES = {"1/15": 1 / 15, "1/8": 1 / 8, "1/4": 1 / 4, "1/3": 1 / 3, "1/2": 1 / 2, "100%": 1.0}


class _Kind:
    """Devices of one kind."""

    def __init__(self, dice: random.Random, place: int, count: int) -> None:
        self.name, self.count, self.units = f"dev{place}", count, dice.choice((1, 2, 4, 7, 8, 15, 16))
        self.speed = 1.0 if not place else _between(dice, 0.3, 3)
        self.gib = dice.choice((4, 8, 80))
        limits = "batches_per_instance = 0\n" if dice.random() < 0.88 else ""
        if self.units >= 4 and dice.random() < 0.4:
            sizes = sorted({*dice.sample(range(1, self.units + 1), dice.randint(2, 4)), self.units})
            limits += f"sizes = {sizes}\naligned = {str(dice.random() < 0.5).lower()}\n"
        way = dice.choice(("0.2ms", "1ms", "3ms")) if dice.random() < 0.3 else ""
        self.text = (
            f'[[device]]\nkind = "{self.name}"\nunits = {self.units}\nmemory = "{self.gib}GiB"\nfamily = "gpu"\ncount = {count}\n'
            f'price = "{3 * self.units / 8 * self.speed:.2f}/h"\nowned = {str(dice.random() < 0.7).lower()}\n{limits}'
            + (f'way = "{way}"\n' if way else "")
        )


class _Function:
    """A function with its profile on all kinds, and what all devices together could do of it in a second."""

    def __init__(self, dice: random.Random, place: int, kinds: list[_Kind], alone_ms: float) -> None:
        self.name, self.alone_ms = f"f{place}", alone_ms
        most, share = dice.choice((1, 1, 2, 4, 8, 16, 32)), dice.choice(list(SHARES))
        serial, fixed = dice.uniform(0, 0.8), dice.uniform(0.05, 0.9)  # parts that neither units nor batches shorten
        sizes, profile, self.per_s = sorted({1, max(1, most // 2), most}), "", 0.0
        for kind in kinds:
            wish, best = max(1, int(kind.units * SHARES[share])), 0.0
            profile += f"[function.profile.{kind.name}]\nbatch = {sizes}\n"
            for units in sorted({1, 2, 3, 4, 7, 8, 15, 16, kind.units, wish}):
                if units <= kind.units:
                    pace = (serial + (1 - serial) * wish / units) / kind.speed
                    row = [round(alone_ms * (fixed + (1 - fixed) * size) * pace, 4) for size in sizes]
                    profile += f"p50_ms.{units} = {row}\n"
                    best = max([best, *(size * (kind.units // units) * 1e3 / ms for size, ms in zip(sizes, row, strict=True))])
            self.per_s += kind.count * best
        goal_ms = alone_ms * (_between(dice, 1.2, 5) if dice.random() < 0.35 else _between(dice, 1.5, 2_000))
        goals = [f'"{goal_ms:.3f}ms"'] * 6 + [f'{{ latency = "{goal_ms:.3f}ms", {rest} }}' for rest in _GOALS]
        lines = [f"slo = {dice.choice(goals)}"] if dice.random() < 0.88 else []
        lines += [dice.choice(_RARE)] if dice.random() < 0.25 else []
        memory_mib = int(1024 * min(dice.choice((0.1, 0.5, 1, 2, 3)), 0.9 * min(kind.gib for kind in kinds)))
        idle = dice.choice(("", ', idle = "500ms"'))
        self.text = (
            f'[[function]]\nname = "{self.name}"\nmax_batch = {most}\nshare = "{share}"\nmemory = "{memory_mib}MiB"\n'
            f"scale = {{ min = {dice.choice((0, 1, 1, 1))}{idle} }}\n"
            f'load = "{dice.choice(("5ms", "50ms", "300ms", "1s"))}"\n' + "".join(f"{line}\n" for line in lines) + profile
        )


_GOALS = ('on_miss = "serve"', "target = 0.9", "target = 0.999")
_RARE = (
    "home = true",
    "quota = 0.5",
    "quota = { request = 0.4, limit = 1.0 }",
    "max_queue = 50",
    *(f'objective = "{objective}"' for objective in ("latency", "cost", "throughput")),
)


def _between(dice: random.Random, least: float, most: float) -> float:
    """Evenly by its logarithm."""
    return exp(dice.uniform(log(least), log(most)))


def _steps(dice: random.Random, some: list[str]) -> list[str]:
    """Steps of a workflow over these functions: a chain, a fork, a choice or a map."""
    first, *rest = some
    head = f'{{ name = "s0", function = "{first}" }}'
    kind = dice.choice(("chain", "fork", "choice", "each"))
    if kind == "chain":
        return [head] + [f'{{ name = "s{i}", function = "{one}", after = ["s{i - 1}"] }}' for i, one in enumerate(rest, 1)]
    if kind == "fork":
        sides = [f'{{ name = "s{i}", function = "{one}", after = ["s0"] }}' for i, one in enumerate(rest, 1)]
        after = ", ".join(f'"s{i}"' for i in range(1, len(some)))
        return [head, *sides, f'{{ name = "end", function = "{first}", after = [{after}] }}']
    if kind == "choice":
        odds = (round(dice.uniform(0.1, 1), 2) for _ in rest)
        ways = ", ".join(
            f'{{ odds = {odd}, steps = [{{ name = "b{i}", function = "{one}" }}] }}'
            for i, (odd, one) in enumerate(zip(odds, rest, strict=True))
        )
        last = f'{{ name = "end", function = "{some[-1]}", after = ["way"] }}'
        return [head, f'{{ name = "way", choice = [{ways}], after = ["s0"] }}', last]
    inner = f'each = {{ expect = {dice.choice((2, 4, 8))}, steps = [{{ name = "item", function = "{rest[0]}" }}] }}'
    return [head, f'{{ name = "all", {inner}, after = ["s0"] }}']


def _load(dice: random.Random, target: str, alone_ms: float, rate: float, seconds: float, tenants: bool) -> str:
    shape = dice.choices(("poisson", "gamma", "steps", "constant", "closed"), (45, 15, 15, 10, 15))[0]
    lines = [f"rate = {rate:.3f}"]
    if shape == "gamma":
        lines.append(f"cv = {dice.choice((3, 6))}")
    elif shape == "steps":
        on_s, off_s = _between(dice, 0.02, 0.5), _between(dice, 0.02, 0.7)
        busy = min(4_000.0, rate * (on_s + off_s) / on_s)
        stages = f'["{1e3 * on_s:.1f}ms", {busy:.2f}], ["{1e3 * off_s:.1f}ms", 0], ' * (int(seconds / (on_s + off_s)) + 1)
        lines = [f"stages = [{stages}]", "cv = 1"]
    elif shape == "closed":
        lines = [f"clients = {dice.choice((1, 2, 4, 10, 30))}", f'think = "{dice.choice((0, 0, 1, 10, 100))}ms"']
    if tenants:
        lines.append(f'tenant = "t{dice.randrange(3)}"')
    if dice.random() < 0.08:
        lines.append(f"priority = {dice.choice((-5, 5))}")
    if dice.random() < 0.06:
        lines.append(f'slo = "{alone_ms * _between(dice, 1.5, 50):.3f}ms"')
    start = dice.choice(("0s", "0.2s", "0.5s", "0.5s"))
    return f'[[load]]\ntarget = "{target}"\nshape = "{shape}"\nstart = "{start}"\n' + "".join(f"{line}\n" for line in lines)


def fleet(number: int) -> str:
    """A scenario, as its file would say it."""
    dice = random.Random(f"fleets/{number}")
    seconds = dice.choice((1.5, 2.0, 3.0))
    counts = (dice.choice((1, 1, 1, 2, 3, 4)),) if dice.random() < 0.75 else (dice.choice((1, 2)), dice.choice((1, 2)))
    kinds = [_Kind(dice, place, count) for place, count in enumerate(counts)]
    middle_ms, style = _between(dice, 1, 60), dice.choice(("mixed", "mixed", "alike", "apart"))
    draws = {
        "mixed": lambda: _between(dice, 0.5, 400),
        "alike": lambda: middle_ms * dice.uniform(0.5, 2),
        "apart": lambda: dice.choice((_between(dice, 0.5, 3), _between(dice, 100, 900))),
    }
    functions = [_Function(dice, place, kinds, draws[style]()) for place in range(dice.randint(1, 6))]
    targets = [(one.name, one.alone_ms, one.per_s) for one in functions]
    workflows = ""
    if len(functions) > 1 and dice.random() < 0.35:
        for place in range(dice.choice((1, 1, 2))):
            some = dice.sample(functions, min(len(functions), dice.randint(2, 4)))
            path_ms, steps = sum(one.alone_ms for one in some), _steps(dice, [one.name for one in some])
            slo = f'slo = "{path_ms * _between(dice, 1.5, 100):.3f}ms"'
            workflows += f'[[workflow]]\nname = "w{place}"\n{slo}\nstep = [\n  ' + ",\n  ".join(steps) + "\n]\n"
            targets.append((f"w{place}", path_ms, min(one.per_s for one in some) / 2))
    if workflows and dice.random() < 0.4:
        targets = [target for target in targets if target[0].startswith("w")]
    tenants = dice.random() < 0.3
    load, parts = dice.uniform(0.2, 3), [dice.choice((0.2, 1, 1, 1, 3)) for _ in targets]
    loads = [
        _load(dice, name, alone_ms, min(MOST_PER_S, max(0.7, load * per_s * part / sum(parts))), seconds, tenants)
        for (name, alone_ms, per_s), part in zip(targets, parts, strict=True)
    ]
    weights = "".join(f'[[tenant]]\nname = "t{one}"\nweight = {dice.choice((1, 2, 5))}\n' for one in range(3)) if tenants else ""
    noise, predictor = dice.choice((0.0, 0.03, 0.05, 0.1, 0.2)), dice.choice(("table", "table", "online"))
    head = f'[scenario]\nseed = {number}\nduration = "{seconds}s"\nnoise = {noise}\npredictor = "{predictor}"\n'
    return "".join([head, *(kind.text for kind in kinds), *(one.text for one in functions), workflows, weights, *loads])


def cells(seed: int, quick: bool) -> list[Cell]:
    """Fleets have the parity of the seed, and are their own seeds."""
    numbers = [seed + 2 * place for place in range(QUICK if quick else FULL)]
    calls = 400 if quick else CALLS
    policies = QUICK_POLICIES if quick else RIVALS
    return [{"fleet": number, "seed": number, "calls": calls, "policy": policy} for number in numbers for policy in policies]


def run(cell: Cell) -> Row:
    summary = run_policy(scenario.parse(fleet(cell["fleet"])), cell["policy"], limit_s=LIMIT_S, calls=cell["calls"])
    return NO_FIGURE if summary is None else scores(summary)


def comparison(rows: list[Row]) -> Comparison:
    return Comparison.of(rows, lambda row: f"fleet {row['fleet']}")


def figures(rows: list[Row]) -> dict[str, Any]:
    return comparison(rows).figures()


def sections(rows: list[Row]) -> list[Section]:
    return comparison(rows).sections("mean attainment")
