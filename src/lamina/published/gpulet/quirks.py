"""Quirks of gpu-let's program that a plan may repeat. The algorithm exists once; these flags are all that differs.

`COMPAT` repeats every one, so that plans equal the original's to the last digit. `REPAIRED` repeats none. Q2 to Q11 are the
numbers of the table in README.md beside it. Q1, the order of the models, is no flag: an order is an argument of
the scheduler.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, fields

_SINGLE = struct.Struct("f")


def _to_single(value: float) -> float:
    """The nearest 32-bit float. One operation in 64 bits and one rounding give what a 32-bit machine would."""
    rounded: float = _SINGLE.unpack(_SINGLE.pack(value))[0]
    return rounded


def _as_it_is(value: float) -> float:
    return value


@dataclass(frozen=True, slots=True)
class Quirks:
    blind_to_neighbours: bool  #: Q2 a slot is tested against its neighbour's duty, not against its slowdown
    stops_short: bool  #: Q3 batch 32 and a knee at 100 % are never found
    whole_gpu_first: bool  #: Q4 a whole GPU beats an exact fit on an earlier one
    index_for_gpu: bool  #: Q5 the place in the list of wanted gpulets is mistaken for the number of a GPU
    charges_newcomer: bool  #: Q6 throughput a neighbour loses is added to the newcomer's bill
    checks_network_once: bool  #: Q7 the network limit is looked at in one of three places
    forgets_residue: bool  #: Q8 a merged residue that finds no place is dropped in silence
    stale_duty: bool  #: Q9 the duty cycle left behind in an emptied gpulet still counts
    whole_rates: bool  #: Q11 rates are cut to whole numbers, and up to 15 a second are let go
    books_first_model_only: bool  #: a second model on a gpulet costs no memory
    saturates_regardless: bool  #: a model too slow for its SLO even at batch 1 still gets a throughput
    tolerant: bool  #: a slowed residue may be 5 % late, a model may be 15 % short
    single_precision: bool  #: 32-bit floats throughout

    @property
    def single(self) -> Callable[[float], float]:
        return _to_single if self.single_precision else _as_it_is

    @property
    def whole(self) -> Callable[[float], float]:
        return int if self.whole_rates else _as_it_is


COMPAT = Quirks(*(True for _ in fields(Quirks)))
REPAIRED = Quirks(*(False for _ in fields(Quirks)))
