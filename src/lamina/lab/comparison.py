"""Comparison of policies on the same draws: means with intervals, regret, one bill for all, and the cells where `frontier` is
behind.

Every experiment that compares hands its rows in here, so that a mean, an interval and the word "behind" mean the same on
every page.

Draws. A policy is run on several seeds, and all policies on the same ones. The interval is the 95 % one of Student's t over
seeds; two policies are compared by the differences seed by seed, which leaves out what the draws have in common. Seeds of one
run are all even or all odd: constants are tuned on odd ones, and only even ones are reported.

Bill. Three prices of the same run, per 1,000 answers in time, because systems differ in what they pay for. *Used*: device
time under batches. *Held*: the same, and slices that stand whether a batch is on them or not. *Rent*: whole devices, for as
long as anything is loaded on them while calls are offered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, NamedTuple

from lamina.core.policy import DispatchRole
from lamina.drivers.driver import Ending, EventObserver
from lamina.errors import NoCapacity
from lamina.lab.experiment import Cell, Plot, ResultTable, Row, Section
from lamina.lab.runner import CpuLimitExceeded, cpu_limit
from lamina.sim.decision_charge import DecisionCharge
from lamina.sim.run import run as simulate
from lamina.sim.scenario import Scenario
from lamina.sim.summary import Summary, TotalRow

OURS = "frontier"
SEEDS, QUICK_SEEDS = 10, 2
CLOSE = 0.01
"""Within a point of the best counts as as good as the best."""

WITHIN = 0.005
"""Half a point less is behind; of a bill, a hundredth more."""

DEARER = 1.01
STARVED = 0.9
"""A worst target with less than this part of its fair share is starved for the others."""

BILLS = ("used", "held", "rent")

RIVALS: dict[str, tuple[str, dict[str, Any]]] = {
    "fifo": ("fifo", {}),
    "edf": ("edf", {}),
    "clockwork": ("clockwork", {}),
    "admission": ("admission", {}),
    "kserve": ("kserve", {}),
    "has": ("has", {"period_us": 1_000_000, "window_us": 1_000_000}),
    "has(published)": ("has", {"compat": True, "period_us": 1_000_000}),
    "fastgshare": ("fastgshare", {"period_us": 1_000_000}),
    "fastgshare(quota)": ("fastgshare", {"period_us": 1_000_000, "elastic": False}),
    "knix": ("knix", {}),
    "gpulet": ("gpulet", {}),
    "greedy_part": ("greedy_part", {}),
    "timesharing": ("timesharing", {}),
    "esg": ("esg", {}),
    "infless": ("infless", {}),
    "orion": ("orion", {}),
    "aquatope": ("aquatope", {}),
    "kaas_affinity": ("kaas_affinity", {}),
    "kaas_balance": ("kaas_balance", {}),
    "kaas_srtf": ("kaas_srtf", {}),
    "kaas_mlfq": ("kaas_mlfq", {}),
    "kaas_exclusive": ("kaas_exclusive", {}),
    "frontier": ("frontier", {}),
}
"""All policies there are that decide on line, by the name they have in tables. `planned` follows a plan it is given. Those
that adapt by periods do so every second, because runs are short."""


def draw_seeds(seed: int, quick: bool, count: int = SEEDS) -> list[int]:
    """Seeds of one run, all even or all odd as `seed` is."""
    return [seed + 2 * step for step in range(QUICK_SEEDS if quick else count)]


# ------------------------------------------------------------------------------------- one run to one row


def bill(total: TotalRow) -> Row:
    """Bills of a run. Rent is for the time in which calls are offered: a last answer a little later adds nothing."""
    rent = total.occupied * total.offered_s / total.ended_s if total.ended_s else 0.0
    return {"used": total.used, "held": total.cost, "rent": rent}


def scores(summary: Summary) -> Row:
    """Mean and least attainment over targets; of a target without a goal, the share of calls that are answered."""
    by_target = {
        row.target: (row.attainment if row.slo_ms else row.answered / max(1, row.offered))
        for row in summary.targets
        if row.offered
    }
    total = summary.total
    return {
        "score": fmean(by_target.values()),
        "worst": min(by_target.values()),
        "targets": by_target,
        "in_time": total.in_time,
        "utilisation": total.utilisation,
        **bill(total),
    }


NO_FIGURE = {"score": None}


def run_policy(
    scenario: Scenario,
    name: str,
    *,
    limit_s: float,
    calls: int | None = None,
    options: dict[str, Any] | None = None,
    decisions: DecisionCharge | None = None,
    watch: EventObserver | None = None,
    on_policy: Callable[[DispatchRole], None] | None = None,
    on_end: Callable[[int, Ending], None] | None = None,
) -> Summary | None:
    """The scenario under the policy of this name; None if it refuses to deploy it, or takes too much processor time.

    `options` takes the place of those in `RIVALS`, and `name` is then that of the policy itself.
    """
    policy, options = RIVALS.get(name, (name, {})) if options is None else (name, options)
    if policy == "kaas_mlfq":
        options = options | {"seed": scenario.seed}
    try:
        with cpu_limit(limit_s):
            return simulate(
                scenario, policy, options, calls=calls, decisions=decisions, watch=watch, on_policy=on_policy, on_end=on_end
            )
    except (CpuLimitExceeded, NoCapacity):
        return None


# ------------------------------------------------------------------------------------------------ intervals

_T975 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110,
         2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)  # fmt: skip
"""Student's t, 97.5 %, by degrees of freedom from 1 on."""


class Interval(NamedTuple):
    """A mean, and half the width of its 95 % interval; infinite for a single draw."""

    mean: float
    half: float

    @property
    def excludes_zero(self) -> bool:
        return abs(self.mean) > self.half

    def text(self, factor: float = 1.0) -> str:
        if not math.isfinite(self.half):
            return f"{factor * self.mean:.3g}"
        return f"{factor * self.mean:.{_digits(factor * self.half)}f} ± {factor * self.half:.2g}"


def _digits(half: float) -> int:
    return max(0, min(4, 1 - math.floor(math.log10(half)))) if half > 0 else 2


def interval(values: Iterable[float]) -> Interval:
    some = list(values)
    if len(some) < 2:
        return Interval(some[0] if some else math.nan, math.inf)
    t = _T975[len(some) - 2] if len(some) <= len(_T975) + 1 else 1.96
    return Interval(fmean(some), t * stdev(some) / math.sqrt(len(some)))


# --------------------------------------------------------------------------------------------- the comparison


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rows by cell, policy and seed. `measure` is what is compared, more of it being better unless `less`."""

    cells: dict[str, dict[str, dict[int, Row]]]
    measure: str = "score"
    less: bool = False
    bills: tuple[str, ...] = BILLS

    @classmethod
    def of(cls, rows: Iterable[Row], label: Callable[[Row], str], name: Callable[[Row], str] = lambda row: str(row["policy"]),
           measure: str = "score", less: bool = False, bills: tuple[str, ...] = BILLS) -> Comparison:  # fmt: skip
        cells: dict[str, dict[str, dict[int, Row]]] = {}
        for row in rows:
            if "error" not in row and row.get(measure) is not None:
                cells.setdefault(label(row), {}).setdefault(name(row), {})[row.get("seed", 0)] = row
        return cls(cells, measure, less, bills)

    @property
    def policies(self) -> list[str]:
        return list(dict.fromkeys(policy for by in self.cells.values() for policy in by))

    def mean(self, cell: str, policy: str, key: str | None = None) -> Interval:
        return interval(row[key or self.measure] for row in self.cells[cell][policy].values())

    def best(self, cell: str) -> str:
        """The policy with the best mean; `frontier` if it is one of several."""
        sign = 1 if self.less else -1
        return min(self.cells[cell], key=lambda policy: (sign * self.mean(cell, policy).mean, policy != OURS))

    def regret(self, cell: str, policy: str) -> float:
        """How far its mean is from that of the best policy in this cell; of what should be small, as a part of the best."""
        best, mine = self.mean(cell, self.best(cell)).mean, self.mean(cell, policy).mean
        return (mine / best - 1 if best else 0.0) if self.less else best - mine

    def fair_share(self, cell: str) -> float | None:
        """Of its worst target, what the policy serves that serves its worst target best: so much can be had for all of them."""
        means = [self._worst(cell, policy) for policy in self.cells[cell]]
        return max([mean for mean in means if mean is not None], default=None)

    def starved(self, policy: str) -> list[str]:
        """Cells in which its worst target has less than nine tenths of the fair share. Not where policies differ in what they
        need: then their targets had different devices."""
        found: list[str] = []
        if self.less:
            return found
        for cell, by in self.cells.items():
            worst, fair = self._worst(cell, policy) if policy in by else None, self.fair_share(cell)
            if worst is not None and fair is not None and worst < STARVED * fair:
                found.append(cell)
        return found

    def fair_regret(self, cell: str, policy: str) -> float | None:
        """How far its mean is from that of the best policy that starves no target in this cell: what is ahead only because it
        serves some targets instead of others is left out. Not where targets are not told apart."""
        fair = self.fair_share(cell)
        if fair is None or self.less:
            return None
        able = [one for one in self.cells[cell] if (self._worst(cell, one) or 0.0) >= STARVED * fair]
        best = max(self.mean(cell, one).mean for one in able)
        return max(0.0, best - self.mean(cell, policy).mean)

    def _worst(self, cell: str, policy: str) -> float | None:
        values = [row["worst"] for row in self.cells[cell][policy].values() if row.get("worst") is not None]
        return fmean(values) if values else None

    def difference(self, cell: str, one: str, other: str, key: str | None = None) -> Interval:
        """`one` less `other`, seed by seed."""
        mine, theirs = self.cells[cell][one], self.cells[cell][other]
        return interval(
            mine[seed][key or self.measure] - theirs[seed][key or self.measure] for seed in mine.keys() & theirs.keys()
        )

    def bill(self, cell: str, policy: str, kind: str) -> float:
        """Per 1,000 answers in time, over all seeds; infinite if there are none."""
        rows = self.cells[cell][policy].values()
        answers = sum(row["in_time"] for row in rows)
        return 1_000 * sum(row[kind] for row in rows) / answers if answers else math.inf

    def figures(self, behind: bool = True) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for policy in self.policies:
            cells = [cell for cell, by in self.cells.items() if policy in by]
            regrets = [self.regret(cell, policy) for cell in cells]
            worst = [row["worst"] for cell in cells for row in self.cells[cell][policy].values() if row.get("worst") is not None]
            fair = [regret for cell in cells if (regret := self.fair_regret(cell, policy)) is not None]
            found[policy] = {
                "cells": len(cells),
                "mean": fmean(self.mean(cell, policy).mean for cell in cells),
                "half": half if math.isfinite(half := self._over_seeds(policy, cells).half) else None,
                "worst_target": fmean(worst) if worst else None,
                "starved_in": len(self.starved(policy)) / len(cells) if worst else None,
                "regret": fmean(regrets),
                "worst_regret": max(regrets),
                "best_in": fmean(regret <= CLOSE for regret in regrets),
                "fair_regret": fmean(fair) if fair else None,
                "worst_fair_regret": max(fair, default=None),
                "fair_best_in": fmean(regret <= CLOSE for regret in fair) if fair else None,
                **{kind: self.bill_ratio(policy, kind) for kind in self.bills},
            }
        return {"policies": found, "bill_over_frontier": self.bill_ratios()} | (
            {"frontier_behind": self.behind(), "frontier_starves_in": self.starved(OURS)} if behind else {}
        )

    def _over_seeds(self, policy: str, cells: list[str]) -> Interval:
        """Interval of the mean over cells, where all of them have the same seeds; of the cells, where each has its own."""
        seeds = set.intersection(*({*self.cells[cell][policy]} for cell in cells))
        if len(seeds) > 1:
            return interval(fmean(self.cells[cell][policy][seed][self.measure] for cell in cells) for seed in sorted(seeds))
        return interval(self.mean(cell, policy).mean for cell in cells)

    def bill_ratio(self, policy: str, kind: str) -> float | None:
        """Geometric mean over cells of its bill over that of `frontier`, where both answer something in time."""
        pairs = [
            (self.bill(cell, policy, kind), self.bill(cell, OURS, kind))
            for cell, by in self.cells.items()
            if policy in by and OURS in by and "in_time" in next(iter(by[policy].values()))
        ]
        logs = [math.log(theirs / ours) for theirs, ours in pairs if 0 < theirs < math.inf and 0 < ours < math.inf]
        return math.exp(fmean(logs)) if logs else None

    def bill_ratios(self) -> dict[str, dict[str, float | None]]:
        return {
            policy: {kind: self.bill_ratio(policy, kind) for kind in self.bills} for policy in self.policies if policy != OURS
        }

    def behind(self) -> list[dict[str, Any]]:
        """Cells in which another policy does better than `frontier`, or as well for a lower bill of any kind."""
        found: list[dict[str, Any]] = []
        for cell, by in self.cells.items():
            others = [policy for policy in by if policy != OURS]
            if OURS not in by or not others:
                continue
            mine = self.mean(cell, OURS).mean
            sign = -1 if self.less else 1
            best = max(others, key=lambda policy: sign * self.mean(cell, policy).mean)
            theirs = self.mean(cell, best).mean
            short = (mine / theirs - 1 if theirs else 0.0) if self.less else theirs - mine
            if short > (CLOSE if self.less else WITHIN):
                clear = self.difference(cell, best, OURS).excludes_zero
                found.append(_entry(cell, self.measure, mine, best, theirs, clear))
            slack = CLOSE * mine if self.less else WITHIN
            equal = [policy for policy in others if sign * self.mean(cell, policy).mean >= sign * mine - slack]
            for kind in self.bills if "in_time" in next(iter(by[OURS].values())) else ():
                cheapest = min(equal, key=lambda policy: self.bill(cell, policy, kind), default=None)
                if cheapest is not None and self.bill(cell, OURS, kind) > DEARER * self.bill(cell, cheapest, kind):
                    clear = self.difference(cell, cheapest, OURS, kind).excludes_zero
                    ours, least = self.bill(cell, OURS, kind), self.bill(cell, cheapest, kind)
                    found.append(_entry(cell, kind, ours, cheapest, least, clear))
        return found

    # ------------------------------------------------------------------------------------ sections

    def sections(self, what: str = "attainment", factor: float = 100.0, per_cell: bool = True) -> list[Section]:
        """All policies; the cells where `frontier` is behind; every cell with its interval. Nothing, if there are no rows."""
        if not self.cells:
            return []
        return [self.summary(what, factor), self.behind_section(what, factor)] + (
            [self.by_cell(what, factor)] if per_cell else []
        )

    def summary(self, what: str, factor: float = 100.0) -> Section:
        found = self.figures(behind=False)["policies"]
        sign = 1 if self.less else -1
        order = sorted(found, key=lambda policy: sign * found[policy]["mean"])
        has_worst = any(one["worst_target"] is not None for one in found.values())
        unit = " %" if factor == 100 else ""
        columns = [
            "policy",
            "cells",
            f"{what}{unit}",
            "±",
            *([f"worst target{unit}", "starved, % of cells"] if has_worst else []),
        ]
        columns += [
            "mean regret",
            "worst regret",
            "within a point of the best, % of cells" if not self.less else "within 1 %, % of cells",
        ]
        if has_worst:
            columns += ["mean regret to the fair", "worst regret to the fair", "within a point of the fair, % of cells"]
        columns += [f"{kind} / {OURS}'s" for kind in self.bills]
        table = [
            [policy, one["cells"], factor * one["mean"], None if one["half"] is None else factor * one["half"]]
            + ([_times(factor, one["worst_target"]), _times(100, one["starved_in"])] if has_worst else [])
            + [100 * one["regret"], 100 * one["worst_regret"], 100 * one["best_in"]]
            + ([_times(100, one[key]) for key in ("fair_regret", "worst_fair_regret", "fair_best_in")] if has_worst else [])
            + [one[kind] for kind in self.bills]
            for policy in order
            for one in [found[policy]]
        ]
        text = (
            f"{self._draws()} Regret: {'percent' if self.less else 'points'} from the best of all policies in a cell. Bills are "
            f"geometric means over cells, per answer in time: device time used, time held, rent of whole devices; {OURS} is 1."
        )
        if has_worst:
            text += (
                " Starved: the worst target has less than 0.9 of what it has under the policy that serves its worst target best."
                " The fair: policies that starve no target in the cell; others may be ahead only by leaving some unserved."
            )
        bars: dict[str, list[tuple[float | str, float]]] = {what: [(row[0], row[2]) for row in table]}
        return Section(
            "All policies", text, ResultTable(columns, table), Plot("bar", "policy", f"{what}{unit}", bars), headline=True
        )

    def behind_section(self, what: str, factor: float = 100.0) -> Section:
        found = self.behind()
        worse = [one for one in found if one["measure"] == self.measure]
        cells = sum(OURS in by for by in self.cells.values())
        dearer = {one["cell"] for one in found if one not in worse}
        text = (
            f"In {len({one['cell'] for one in worse})} of {cells} cells another policy has a better {what}, by more than "
            f"{'1 %' if self.less else 'half a point'}; in {len(dearer)} one that does as well has a lower "
            "bill. Clear: the 95 % interval of the difference, seed by seed, leaves out zero."
        )
        if starved := self.starved(OURS):
            text += f" A target is starved in {len(starved)}: {'; '.join(starved)}."
        table = [
            [one["cell"], what if one["measure"] == self.measure else one["measure"], one["policy"]]
            + [
                None if one[key] is None else (factor if one["measure"] == self.measure else 1) * one[key]
                for key in ("theirs", "ours")
            ]
            + ["yes" if one["clear"] else "no"]
            for one in found
        ]
        columns = ["cell", "measure", "ahead", "its", f"{OURS}'s", "clear"]
        return Section(f"Where {OURS} is behind", text, ResultTable(columns, table), headline=True)

    def by_cell(self, what: str, factor: float = 100.0) -> Section:
        table = [
            [cell, *(self.mean(cell, policy).text(factor) if policy in by else None for policy in self.policies)]
            for cell, by in self.cells.items()
        ]
        return Section(
            f"Every cell: {what}", "Mean and half the width of its 95 % interval.", ResultTable(["cell", *self.policies], table)
        )

    def _draws(self) -> str:
        seeds = sorted({seed for by in self.cells.values() for rows in by.values() for seed in rows})
        each = max((len(rows) for by in self.cells.values() for rows in by.values()), default=0)
        if not seeds:
            return "No rows."
        kind = "even seeds, as reported" if seeds[0] % 2 == 0 else "odd seeds, on which constants may be tuned"
        return f"{each} draw{'s'[: each != 1]} a cell, seeds {seeds[0]} to {seeds[-1]}: {kind}."


def _entry(cell: str, measure: str, ours: float, policy: str, theirs: float, clear: bool) -> dict[str, Any]:
    return {"cell": cell, "measure": measure, "policy": policy, "theirs": _six(theirs), "ours": _six(ours), "clear": clear}


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


def _six(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def mean_rows(rows: Sequence[Row], keep: Iterable[str] = ()) -> Row:
    """One row for several seeds: means of numbers, the first of all else. `keep` names numbers that are no measurement."""
    first = rows[0]
    kept = {"seed", *keep}
    return {
        key: fmean(row[key] for row in rows)
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and key not in kept
        and all(row.get(key) is not None for row in rows)
        else value
        for key, value in first.items()
    }


def cells_for(settings: Iterable[Cell], names: Iterable[str], seeds: Iterable[int]) -> list[Cell]:
    """Every setting under every policy with every seed; seeds outermost, so that a run cut short still compares."""
    settings, names = list(settings), list(names)
    return [{**setting, "policy": name, "seed": seed} for seed in seeds for setting in settings for name in names]
