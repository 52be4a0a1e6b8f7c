"""Synchronous client of a store, inside a loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from lamina.store.base import Store, Work
from lamina.store.open import open_store

T = TypeVar("T")


def within(place: str | Store, work: Callable[[Store], Coroutine[Any, Any, T]], limit_s: float = 60.0) -> T:
    async def bounded() -> T:
        store = open_store(place) if isinstance(place, str) else place
        store.start()
        try:
            return await asyncio.wait_for(work(store), limit_s)
        finally:
            await store.close()

    return asyncio.run(bounded())


def written(store: Store, work: Work[T], *, required: bool = False) -> Awaitable[Any]:
    done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    store.write(work, done.set_result, required=required)
    return done


def read(store: Store, work: Work[T]) -> Awaitable[Any]:
    done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    store.read(work, done.set_result)
    return done
