"""What a run that must not be lost is told by the world: the outcomes of its jobs, and that its timers are due.

A run moves on by these alone: every question of its is answered from them and its inputs. So whoever writes them down before
they take effect, in their order, can bring the run back to where it was: begin it again, and tell it the same.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class Note(Struct, frozen=True, array_like=True):
    kind: Literal["done", "failed", "due"]
    at_us: int
    scope: int
    node: str
    visit: int = 0
    attempt: int = 0
    job_id: int = 0  #: holds only until the controller ends
    error: str = ""  #: a stable word
    name: str = ""  #: what the error is called where it was raised
    purpose: str = ""  #: of a timer
    function: str = ""  #: of a job, like the four below: for people who look at the run
    queued_us: int = 0
    began_us: int = 0
    slice: str = ""
    batch: int = 0

    @property
    def place(self) -> Place:
        return self.scope, self.node, self.visit


Place = tuple[int, str, int]
"""Scope, node, visit: where in its run a job belongs, in whatever process."""
