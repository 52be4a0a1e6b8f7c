"""INFless (ASPLOS 2022), as ESG's authors compare with it: a fixed part of the deadline per function.

The deadline is shared out once, by the functions' average times. Inside its share a step takes the largest batch that is
there and in time, on the configuration that serves most requests per resource (the part of a node's cores plus the part
of its units). What a step saves or wastes is not passed on, and where its input is does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lamina.core.flow import Flow
from lamina.core.policy import View
from lamina.core.queue import Job
from lamina.planner.configs import Config, Configs
from lamina.planner.esg.afw import MOST_KNOWN, Line
from lamina.planner.esg.split import functions_of, split
from lamina.planner.esg.tables import machine
from lamina.planner.lookahead import NodePath
from lamina.policies._afw import AfwPolicy


@dataclass(slots=True)
class Policy(AfwPolicy):
    """A fixed share of the deadline per step; inside it the largest batch, and the most throughput per resource."""

    _shares: dict[str, tuple[Flow, dict[NodePath, float]]] = field(default_factory=dict, init=False)
    _known: dict[tuple[str, NodePath, int, int], list[Config]] = field(default_factory=dict, init=False)

    def forget(self) -> None:
        self._shares.clear()
        self._known.clear()

    def local(self, line: Line) -> bool:
        return False

    def ranked(self, view: View, line: Line, jobs: list[Job]) -> Sequence[Config]:
        call = jobs[0].run.call
        share_us = int((call.deadline_us - call.arrived_us) * self._share(line))
        name = line.function.spec.name
        own = self._tables.up_to(name, len(jobs))
        key = (line.flow.name, line.path, share_us, len(own))
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            found = self._known[key] = self._rank(view, line, own, share_us)
        return found

    def _rank(self, view: View, line: Line, own: Configs, share_us: int) -> list[Config]:
        node = machine(view, line.function.spec)
        rows = [own[place] for place in range(len(own))]
        fits = [row for row in rows if row.time_us <= share_us]

        def per_resource(row: Config) -> float:
            assert node is not None
            part = row.units / node.spec.units + (row.cpus / node.spec.cores if node.spec.cores else 0.0)
            return row.batch / row.time_us / part

        if fits and node is not None:  # a function deployed anew may suit no machine, and have instances from before
            return sorted(fits, key=lambda row: (-row.batch, -per_resource(row), row.units, row.cpus))
        return sorted(rows, key=lambda row: (row.time_us, row.units, row.cpus))

    def _share(self, line: Line) -> float:
        known = self._shares.get(line.flow.name)
        if known is None or known[0] is not line.flow:
            tables = self._tables.known
            means = {path: float(tables[name].time_us.mean()) for path, name in functions_of(line.flow).items()}
            shares = split(line.flow, tables, 1, means).share
            known = self._shares[line.flow.name] = (line.flow, shares)
            self._known = {key: found for key, found in self._known.items() if key[0] != line.flow.name}
        return known[1][line.path]
