"""Models of the V100 set that nobody has seen, probed where we choose: how many probes does a stated error take?

RaPP fixes its eleven places, and all its quotas at one batch size on all SMs. Here the known models say where a new one tells
most: the first places are those after which they, left out, are predicted best (as `fit_model.py` does it); from then on
the next is where the rest of the grid is least sure. How a cell is predicted from probes anywhere:

*Processes* over probes and static features say what slices need (G), what launches take under a quota (T; for all shares and by
share), and the cells themselves; the guess is the mean of both `max(G, T)` and the cell. *What it missed by at the probes* is
then spread to cells nearby: where launches bind, to the same quota at near shares and batches; where the slice does, to near
shares and batches.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks.prediction.unseen import FOLDS, Setting, around
from benchmarks.prediction.v100 import FULL, PROBED_QUOTAS, PROBED_SHARES, SHARES, Set, load, off, parts

COUNTS = (5, 8, 11, 16, 24, 32, 48, 64, 96)
GOAL = 0.045
FIRST = 8  #: places chosen by leaving known models out; a search, where the rest follows from one matrix
TRIED_SHARES, TRIED_QUOTAS = (0, 1, 3, 7, 12, 19), (0, 1, 2, 4, 6, 9)  #: for these
LOOKED_AT = (1, 4, 8, 13, 18)  #: shares by which they are judged
NOISE = 0.1  #: of a probe, over what cells nearby have in common

CELLS = np.arange(800).reshape(4, 20, 10)
RAPP = [*CELLS[0, PROBED_SHARES, FULL], *CELLS[2, -1, PROBED_QUOTAS]]


class Guess(NamedTuple):
    """All `[model, cell]`."""

    bound: Any  #: by launches: 1 surely, 0 surely not
    cells: Any  #: from the processes over cells alone
    mixed: Any  #: with max(G, T)


def _alike(axis: Any, reach: float) -> Any:
    return np.exp(-0.5 * ((axis[:, None] - axis[None]) / reach) ** 2)


_BATCH, _SHARE, _QUOTA = (axis.reshape(-1) for axis in np.indices(CELLS.shape))
LAUNCHED = 0.1 + 0.1 * _alike(_QUOTA, 0.7) * (1 + _alike(_SHARE, 5.0) + _alike(_BATCH, 1.0))
SLICED = 0.5 * _alike(np.log(np.array(SHARES))[_SHARE], 0.5) * _alike(_BATCH, 1.0)
"""How much of what the guess missed two cells have in common, where launches bind both, and where the slice does."""


def wanted_of(data: Set, shares: Any = slice(None)) -> list[Any]:
    """What processes are asked for at some shares: G, T, T by share and the cells themselves."""
    slices, typical, local = parts(data.grid)
    return [slices[:, :, shares, None], typical[:, :, None], local[:, :, shares], data.grid[:, :, shares]]


def guess(data: Set, wanted: list[Any], places: list[int], known: Any, out: Any) -> Guess:
    """Of the known models as if they had been left out."""
    models = len(data.grid)
    probes = data.grid.reshape(models, -1)[:, places]
    level = probes.mean(1, keepdims=True)
    spread = data.features[known].std(0)
    static = np.clip((data.features - data.features[known].mean(0)) / np.where(spread < 1e-6, 1.0, spread), -3, 3)
    seen = [probes - level, level, static / np.sqrt(static.shape[1])]
    each = 11 / len(places)  # many probes together count no more than few
    setting: Setting = (each, 0.01, 0.1), (each, 0.01, 0.05), 0.15
    flat = around(level, seen, np.column_stack([part.reshape(models, -1) for part in wanted]), known, out, setting)
    ends = np.cumsum([part[0].size for part in wanted])[:-1]
    g, t, here, cells = (made.reshape(part.shape) for made, part in zip(np.split(flat, ends, axis=1), wanted, strict=True))
    bound = 1 / (1 + np.exp((g - t) / 0.1))
    mixed = (np.maximum(g, t) + np.maximum(g, here) + cells) / 3
    return Guess(*(part.reshape(models, -1) for part in (bound, cells, mixed)))


def corrected(data: Set, places: list[int], made: Guess) -> Any:
    """The guess, and what the probes say it missed by."""
    answer = made.mixed.copy()
    missed = (data.grid.reshape(answer.shape) - answer)[:, places]
    for model, launches in enumerate(made.bound):
        common = _common(launches, launches[places], places)
        answer[model] += common @ np.linalg.solve(common[places] + NOISE * np.eye(len(places)), missed[model])
    return answer


def _common(one: Any, other: Any, places: Any) -> Any:
    """Of all cells with those at `places`, by whether launches bind them."""
    return np.outer(one, other) * LAUNCHED[:, places] + np.outer(1 - one, 1 - other) * SLICED[:, places]


def choose(data: Set, known: Any, most: int) -> list[int]:
    """Places in the order they are worth measuring, from known models alone."""
    tried = CELLS[:, TRIED_SHARES][:, :, TRIED_QUOTAS].reshape(-1).tolist()
    few = Set(data.names, *(part[known] for part in data[1:]))
    everybody, nobody = np.arange(len(known)), np.arange(0)
    some = wanted_of(few, LOOKED_AT)
    truth = some[-1].reshape(len(known), -1)

    def missed(places: list[int]) -> float:
        return float(np.abs(guess(few, some, places, everybody, nobody).mixed - truth).mean())

    chosen: list[int] = []
    while len(chosen) < FIRST:
        chosen.append(min((place for place in tried if place not in chosen), key=lambda place: missed([*chosen, place])))
    launches = guess(few, wanted_of(few), chosen, everybody, nobody).bound
    free = 1 - launches
    unsure = (launches.T @ launches * LAUNCHED + free.T @ free * SLICED) / len(known)
    for place in chosen:
        unsure = _told(unsure, place)
    while len(chosen) < most:
        gain = (unsure**2).sum(0) / (np.diag(unsure) + NOISE)
        gain[chosen] = 0.0
        chosen.append(int(gain.argmax()))
        unsure = _told(unsure, chosen[-1])
    return chosen


def _told(unsure: Any, place: int) -> Any:
    """What is unsure of all cells once this one is measured."""
    return unsure - np.outer(unsure[:, place], unsure[:, place]) / (unsure[place, place] + NOISE)


def fold(data: Set, out: Any) -> dict[str, dict[str, Any]]:
    """Mean error of each model of a fold, at the cells not probed, by number of probes."""
    known = np.setdiff1d(np.arange(len(data.grid)), out)
    chosen, wanted = choose(data, known, max(COUNTS)), wanted_of(data)
    truth, found = data.grid.reshape(len(data.grid), -1), {}
    for label, places in [(str(count), chosen[:count]) for count in COUNTS] + [("RaPP's 11", RAPP)]:
        made = guess(data, wanted, places, known, out)
        unseen = np.ix_(out, np.setdiff1d(CELLS, places))
        answers = {"cells alone": made.cells, "mape": corrected(data, places, made)}
        found[label] = {way: off(answer, truth)[unseen].mean(1) for way, answer in answers.items()}
    return found


def own_probes(seed: int) -> dict[str, Any]:
    data = load()
    folds = [np.sort(some) for some in np.array_split(np.random.default_rng(seed).permutation(len(data.grid)), FOLDS)]
    with ProcessPoolExecutor() as pool:
        found = list(pool.map(partial(fold, data), folds))
    by_count: dict[str, Any] = {}
    for label in found[0]:
        errors = {way: np.concatenate([one[label][way] for one in found]) for way in found[0][label]}
        by_count[label] = {way: float(some.mean()) for way, some in errors.items()}
        by_count[label]["median"] = float(np.median(errors["mape"]))
    met = next((count for count in COUNTS if by_count[str(count)]["mape"] <= GOAL), None)
    made = {"seed": seed, "folds": FOLDS, "goal met with": met, "probes": by_count}
    shown = ", ".join(f"{label}: {one['mape']:.2%}" for label, one in by_count.items())
    print(f"  own probes, seed {seed}, by their number: {shown}", flush=True)
    return made
