"""Incremental re-planning: only models with a changed rate, without new cuts; all anew if that does not work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from lamina.planner.glet.draft import Draft
from lamina.planner.glet.schedule import Wanted, schedule

Mode = Literal["inc", "full"]


def replan(
    draft: Draft, changed: Sequence[Wanted], everything: Sequence[Wanted], fresh: Callable[[], Draft]
) -> tuple[Mode, bool, Draft]:
    """How it was done, whether it worked, and the draft that holds now: the old one, unchanged, if nothing works."""
    undo = draft.undo(range(len(draft.gpus)))
    draft.recount_memory()
    draft.may_split = False
    if schedule(draft, changed):
        return "inc", True, draft
    undo()
    anew = fresh()
    if schedule(anew, sorted(everything, key=lambda wanted: -wanted.rate)):
        return "full", True, anew
    return "full", False, draft
