"""Incremental re-planning: only models with a changed rate, without new cuts; all anew if that does not work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from lamina.published.gpulet.draft import DraftPlan
from lamina.published.gpulet.elastic_partitioning import RateDemand, schedule

ReplanMode = Literal["inc", "full"]


def replan(
    draft: DraftPlan, changed: Sequence[RateDemand], everything: Sequence[RateDemand], fresh: Callable[[], DraftPlan]
) -> tuple[ReplanMode, bool, DraftPlan]:
    """How it was done, whether it worked, and the draft that holds now: the old one, unchanged, if nothing works."""
    undo = draft.snapshot(range(len(draft.gpus)))
    draft.recount_memory()
    draft.may_split = False
    if schedule(draft, changed):
        return "inc", True, draft
    undo()
    anew = fresh()
    if schedule(anew, sorted(everything, key=lambda wanted: -wanted.rate)):
        return "full", True, anew
    return "full", False, draft
