"""CPU affinity: the gateway avoids the cores that batches have leased; the processes it starts do not."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from lamina.worker.cpu_affinity import GatewayAffinity


def on_its_own_thread(act: Callable[[], set[int]]) -> set[int]:
    """What a thread is bound to dies with it: no other thread of this process is to be moved."""
    found: list[set[int]] = []
    thread = threading.Thread(target=lambda: found.append(act()))
    thread.start()
    thread.join()
    return found[0]


def test_a_leased_core_is_left_to_the_batch_if_there_is_another() -> None:
    def act() -> set[int]:
        aside = GatewayAffinity()
        aside.avoid(0b1)
        return os.sched_getaffinity(0)

    allowed = sorted(os.sched_getaffinity(0))
    assert on_its_own_thread(act) == set(allowed[1:] or allowed)


def test_where_every_core_is_leased_all_are_used() -> None:
    def act() -> set[int]:
        aside = GatewayAffinity()
        aside.avoid(0b1)
        aside.avoid((1 << len(aside.allowed)) - 1)
        return os.sched_getaffinity(0)

    assert on_its_own_thread(act) == os.sched_getaffinity(0)


def test_when_nothing_is_leased_any_more_all_are_used_again() -> None:
    def act() -> set[int]:
        aside = GatewayAffinity()
        aside.avoid(0b1)
        aside.avoid(0)
        return os.sched_getaffinity(0)

    assert on_its_own_thread(act) == os.sched_getaffinity(0)
