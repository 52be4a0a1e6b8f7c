"""Journal entries of a durable run: outcomes of its jobs, steps that wait for a report, and timers that were due.

A run moves on by these alone: all data it asks for follows from them and its inputs. So a store that writes them down before
they take effect, in their order, can bring the run back to where it was: begin it again, and replay them.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class JournalEntry(Struct, frozen=True, array_like=True):
    kind: Literal["done", "failed", "due", "waits"]
    at_us: int
    scope: int
    node: str
    execution_id: int = 0
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
    def execution_key(self) -> NodeExecutionKey:
        return self.scope, self.node, self.execution_id


NodeExecutionKey = tuple[int, str, int]
"""Scope, node, visit: where in its run a job belongs, in whatever process."""
