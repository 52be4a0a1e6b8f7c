"""Event loop of an `async def` function: its own, and kept between calls, so that a session it opened in `load` stays open.

It runs one call at a time, as every instance does: what it waits for is not used for others. Many waits at once are many
instances (`Scale(max=...)`) or an `asyncio.gather` inside of one call.

Apart from `runner.py`, so that asyncio is imported for such functions alone.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import weakref
from collections.abc import AsyncIterator, Coroutine, Generator
from typing import Any, Final

_END: Final = object()


class CoroutineRunner:
    def __init__(self) -> None:
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)  # not the policy's, which another library may have set
        self.close = weakref.finalize(self, _close, self._runner)  #: at the latest with it: a test just ends

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine to its end; return or raise as it does."""
        around = contextvars.copy_context()  # a loop remembers the one of its beginning
        return self._run_in_thread(coroutine, around) if _is_running() else self._runner.run(coroutine, context=around)

    def iterate(self, items: AsyncIterator[Any]) -> Generator[Any, None, None]:
        """Items of an asynchronous iterator, one by one; closed with it."""

        async def next_piece() -> Any:
            return await anext(items, _END)

        async def leave() -> None:
            if hasattr(items, "aclose"):
                await items.aclose()

        try:
            while (item := self.run(next_piece())) is not _END:
                yield item
        finally:
            self.run(leave())

    def _run_in_thread(self, coroutine: Coroutine[Any, Any, Any], around: contextvars.Context) -> Any:
        """Run in a thread beside: in a notebook, or under another loop, this thread has a loop already. It waits meanwhile."""
        outcome: list[Any] = []

        def work() -> None:
            try:
                outcome.extend((self._runner.run(coroutine, context=around), None))
            except BaseException as error:
                outcome.extend((None, error))

        thread = threading.Thread(target=work, name="lamina-await")
        thread.start()
        thread.join()
        value, error = outcome
        if error is not None:
            raise error
        return value


def _close(runner: asyncio.Runner) -> None:
    if not _is_running():
        runner.close()
        return
    thread = threading.Thread(target=runner.close, name="lamina-await")  # two loops cannot run in one
    thread.start()
    thread.join()


def _is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
