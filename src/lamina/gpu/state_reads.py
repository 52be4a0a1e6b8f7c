"""State reads of an executor: its threads ask the gateway for keys, and wait for the answers; the serving thread does not.

Callables of users run in threads of their slices, which may wait. `pre` and `post` of a model run in the serving thread, which
must not: it would hold up every function of the device. So the first read there interrupts them (`try_here`), and from then on
they run in a thread of their function.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from lamina.sdk.app_state import StateCell, StateKey
from lamina.worker.protocol import StateRead, StateValue


class _MustWait(BaseException):
    """A read in the thread that waits for nothing. No error of the user's: `except Exception` lets it through."""


class StateReads:
    def __init__(self, send: Callable[[StateRead], None]) -> None:
        self._send = send
        self._serving = 0
        self._interrupted = False
        self._questions = itertools.count(1)
        self._answers: dict[int, Future[StateCell]] = {}  #: by question

    def begin(self) -> None:
        """This is the serving thread."""
        self._serving = threading.get_ident()

    def read(self, batch_id: int, place: int, key: StateKey) -> StateCell:
        """Read a key for the job at a place of a batch; from any thread but the serving one, which is interrupted."""
        if threading.get_ident() == self._serving:
            self._interrupted = True
            raise _MustWait
        number = next(self._questions)
        answer = self._answers[number] = Future()
        self._send(StateRead(batch_id, place, number, *key))
        return answer.result()

    def on_answer(self, frame: StateValue) -> None:
        waiting = self._answers.pop(frame.question, None)
        if waiting is not None:
            waiting.set_result(frame.cell)

    def try_here(self, work: Callable[[], list[Any]]) -> list[Any] | None:
        """Run this in the serving thread; None: it reads the state, and has to run in another."""
        self._interrupted, found = False, None
        with contextlib.suppress(_MustWait):
            found = work()
        return None if self._interrupted else found  # interrupted also if the user's code has swallowed that
