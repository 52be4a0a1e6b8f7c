"""Dense array of all predictions for one function, computed beforehand: searches ask for hundreds of configurations at once.

One array, `[batch, units]`; asking is indexing. Two hundred and fifty-six answers take a few microseconds instead of a few
hundred. It does not learn: make a new one when the predictor has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lamina.core.policy import Predictor
from lamina.errors import BadValue

if TYPE_CHECKING:
    import numpy as np

    Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class DenseTable:
    times_us: Ints  #: row 0 and column 0 are unused, so that sizes are indices

    def many_us(self, batches: Sequence[int] | Ints, units: Sequence[int] | Ints) -> Ints:
        """Times of configurations `(batches[i], units[i])`."""
        found: Ints = self.times_us[batches, units]
        return found


def dense_table(predictor: Predictor, function: str, kind: str, max_batch: int, units: int) -> DenseTable:
    import numpy as np

    if not predictor.latency_us(function, kind, 1, units):
        raise BadValue(f"nothing is known of {function!r} on {kind!r}", hint="profile it, or predict it from static features")
    times = np.zeros((max_batch + 1, units + 1), dtype=np.int64)
    for batch in range(1, max_batch + 1):
        for count in range(1, units + 1):
            times[batch, count] = predictor.latency_us(function, kind, batch, count)
    return DenseTable(times)
