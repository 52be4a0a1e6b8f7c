"""When the executor looks for garbage in cycles: when nobody is served.

A full collection holds the interpreter, and so every batch. While a function is loaded it takes 100 to 280 ms, for what has
just been imported is a million objects, and it came every other second (measured on an H200, five models). Once a function is
ready all of it is frozen, and collections take a few milliseconds again. What was garbage then, or is since its function left, is
found when nobody has been served for a while.
"""

from __future__ import annotations

import gc

SOME, MUCH = 10, 100
"""Middle collections since the last full one: enough to have one when nobody is served; so many that somebody has to wait."""

QUIET_S = 1.0
"""Nobody has been served for so long: time to look at what is frozen, too."""


def collect_by_hand() -> None:
    """From now on there are no full collections but those of `collect`. Most garbage is young, and found as ever."""
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 10**9)


def collect(*, is_idle: bool, is_loading: bool) -> bool:
    """Have one, if it is time; says whether it was."""
    since = gc.get_count()[2]
    is_due = not is_loading and (since >= MUCH or (is_idle and since >= SOME))
    if is_due:
        gc.collect()
    return is_due


def collect_frozen() -> None:
    """All there is; what is left of it is frozen again."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
