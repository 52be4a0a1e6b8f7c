"""Closed-loop clients: each calls again a moment after its answer, unannounced; the server learns to wait for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

import lamina
from lamina import encoding, policies
from lamina.core.actions import Reply
from lamina.drivers.driver import Ending
from lamina.predict.online import OnlinePredictor
from lamina.testing import Runtime
from lamina.types import DeviceSpec, call_for

THINK_US, STAGGER_US = 300, 100


def step(batch: int) -> float:
    """Two at once cost nearly as much as sixteen: the step that matrix products have."""
    return 2.0 if batch == 1 else 4.0 + 0.15 * batch


class Loops(Runtime):
    """`clients` of them; the answers of one batch are read one after another, so their next calls come in a row."""

    def __init__(self, clients: int, takes: Callable[[int], float] = step, **options: object) -> None:
        app = lamina.App("loops")

        @app.function(batch=16, slo="2s", scale=lamina.Scale(min=1, max=1))
        def net(x: list[int]) -> list[int]:
            return x

        device = DeviceSpec(id="c", kind="test", family="cpu", units=1, memory_mib=1_000)
        options.setdefault("policy", "edf")
        super().__init__(app, takes={"net": takes}, devices=[device], **options)  # type: ignore[arg-type]
        self.controller.predictor = self.controller.view.predictor = OnlinePredictor()
        self.latencies_ms: list[float] = []
        self._last_end_us, self._in_row, self._made = -1, 0, 0
        for number in range(clients):
            self._call_at(1_000 + 50 * number)

    def _call_at(self, at_us: int) -> None:
        self._made += 1
        name = f"loop-{self._made}"

        def arrive() -> None:
            call = call_for(name, "net", self.now_us, self.controller.flows["net"].slo)
            self._driver.submit(call, {"x": encoding.encode(1)}, self._on_end)

        self._driver.schedule(at_us, arrive)

    def _on_end(self, ending: Ending) -> None:
        assert isinstance(ending, Reply)
        self.latencies_ms.append(ending.latency_us / 1000)
        self._in_row = self._in_row + 1 if self._last_end_us == self.now_us else 1
        self._last_end_us = self.now_us
        self._call_at(self.now_us + THINK_US + STAGGER_US * self._in_row)

    def sizes(self) -> Counter[int]:
        """Of the batches after it has had time to learn."""
        return Counter(len(batch.jobs) for batch in self.batches[50:])


@pytest.mark.parametrize("clients", [8, 16])
def test_all_clients_end_up_in_one_batch(clients: int) -> None:
    loops = Loops(clients)
    loops.advance("2s")
    assert loops.sizes().most_common(1)[0][0] == clients
    assert loops.sizes()[clients] > 0.9 * loops.sizes().total()


def test_a_client_alone_never_waits_for_company() -> None:
    loops = Loops(1)
    loops.advance("1s")
    assert set(loops.latencies_ms) == {2.0}


def test_waiting_for_them_serves_more_than_not_waiting() -> None:
    patient, hasty = Loops(16), Loops(16, policy=policies.build("edf", {"wait": False}))
    patient.advance("2s")
    hasty.advance("2s")
    assert len(patient.latencies_ms) > 1.15 * len(hasty.latencies_ms)


def test_without_patience_the_default_policy_serves_loops_as_well_as_edf() -> None:
    edf, frontier = Loops(16), Loops(16, policy=policies.build("frontier", {"patience": 0.0}))
    edf.advance("2s")
    frontier.advance("2s")
    assert len(frontier.latencies_ms) > 0.95 * len(edf.latencies_ms)


def test_two_clients_on_a_rented_device_are_not_made_to_wait_for_others_that_do_not_come() -> None:
    """Larger batches are cheaper there, and the two arrive close to each other; but no other client calls."""
    loops = Loops(2, takes=lambda batch: 1.0 + 0.5 * batch, policy=policies.build("frontier"))
    loops.advance("1s")
    assert len(loops.latencies_ms) > 600
