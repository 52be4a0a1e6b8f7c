"""Supervisor of the GPU executor process and its hot standby.

Imports and first runs take nearly all of a restart: five seconds for torchvision alone, up to three for each model. So the
standby is told what the executor has imported, and imports it too, and which models are loaded there, and has them ready:
opened, in pinned memory, with kernels chosen by the libraries. When the executor ends, the standby needs weights and graphs,
nothing else.

Such a standby has the device open. Under MPS that would be its end, for an error of the device there ends all clients; then, and
on a device that is small, it leaves the device alone and has the imports only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from lamina.live.frames import DeviceRef, ErrorInfo, pack
from lamina.live.gpu_frames import Fetch, Fetched, Forget, FromExecutor, Go, GpuSetup, Import, StandBy, StandingBy
from lamina.live.ledger import DeviceSlots, Ledger, WorkerSlots
from lamina.live.process import Kind, WorkerProcess

log = logging.getLogger("lamina")

SPARE_AFTER_S = 3.0
"""From a device being open until a spare process gets ready behind it: first those who wait for functions."""

AGAIN_AFTER_S = 30.0
"""From the end of a spare until the next. The second that ends by itself was the last to open the device, for that may be why."""

MOST_SPARES = 4
"""That end by themselves behind one executor; then there are no more."""

MOST_IMPORTS = 50_000


@dataclass(slots=True, eq=False)
class Life:
    """One executor process, from start to end, with the slots and device values it holds for us."""

    slots: WorkerSlots
    values: DeviceSlots
    process: WorkerProcess | None = None
    is_up: bool = False
    forgotten: list[int] = field(default_factory=list)
    fetching: dict[int, list[Callable[[], None]]] = field(default_factory=dict)

    def send(self, *frames: Any) -> None:
        if self.process is None:
            return
        ahead: list[Any] = [*self.slots.released()]
        if self.forgotten:
            ahead.append(Forget(self.forgotten))
            self.forgotten = []
        self.process.send(pack(*ahead, *frames))

    def missing(self, leaves: Iterable[Any]) -> list[DeviceRef]:
        """Which of these values are on this device, and have not been fetched yet?"""
        held = self.values
        mine = [leaf for leaf in leaves if isinstance(leaf, DeviceRef) and leaf.owner == held.owner]
        return [leaf for leaf in mine if leaf.slot not in held.copies and leaf.slot not in held.lost]

    def fetch(self, refs: list[DeviceRef], then: Callable[[], None]) -> None:
        """Call `then` when all of them are here, or lost with the device."""
        left = {ref.slot for ref in refs}
        for slot in list(left):

            def one(slot: int = slot) -> None:
                left.discard(slot)
                if not left:
                    then()

            waiting = self.fetching.setdefault(slot, [])
            waiting.append(one)
            if len(waiting) == 1:
                self.values.pin(slot)  # nobody may let it go while it is on its way
                self.send(Fetch(slot))

    def fetched(self, frame: Fetched) -> None:
        if isinstance(frame.value, ErrorInfo):
            self.values.lost.add(frame.slot)
        else:
            self.values.copies[frame.slot] = frame.value
        waiting = self.fetching.pop(frame.slot, [])
        for then in waiting:
            then()
        if waiting:
            self.values.unpin(frame.slot)


class Lives:
    """Owner of the executor and its standby.

    `setup` describes a process that serves; `frame` and `lost` are called for the one that does. `opens_ahead`: a standby may
    have the device open."""

    def __init__(
        self,
        setup: Callable[[Life], GpuSetup],
        kind: Kind,
        ledger: Ledger,
        frame: Callable[[Life, FromExecutor], None],
        lost: Callable[[Life], None],
        *,
        opens_ahead: bool,
    ) -> None:
        self.now: Life | None = None
        self.restarts = -1  #: the first start is none
        self.standing_by: list[str] | None = None  #: functions that are ready in the spare; None without one
        self.replaced_s = 0.0  #: from the last loss until the device was open again
        self._opens_ahead = opens_ahead
        self._wanted: list[tuple[str, int, str]] = []
        self._began_s = 0.0
        self._setup, self._kind, self._ledger = setup, kind, ledger
        self._frame, self._lost = frame, lost
        self._loop = asyncio.get_running_loop()
        self._spare: Life | None = None
        self._imported: list[str] = []
        self._spares_lost = 0  #: behind this executor
        self._processes: set[WorkerProcess] = set()
        self._is_stopping = False

    def take_over(self) -> None:
        """Start an executor for the device: promote the standby, or start a fresh process, which needs ten seconds."""
        self.restarts += 1
        self._began_s = self._loop.time()
        spare, self._spare, self.standing_by = self._spare, None, None
        self.now = spare or self._spawn()
        if spare is not None:
            spare.send(Go())

    def is_up(self, life: Life) -> None:
        life.is_up = True
        self._spares_lost = 0
        self.replaced_s = self._loop.time() - self._began_s
        self._loop.call_later(SPARE_AFTER_S, self._make_spare)

    def imported(self, names: list[str]) -> None:
        self._imported += names[: MOST_IMPORTS - len(self._imported)]
        if self._spare is not None:
            self._spare.send(Import(names))

    def stand(self, functions: list[tuple[str, int, str]]) -> None:
        """Set the models that are loaded now (name, standing slice, app): the standby has them ready too."""
        self._wanted = functions
        if self._spare is not None and self._opens_ahead:
            self._spare.send(StandBy(functions))

    def _make_spare(self) -> None:
        if not self._is_stopping and self._spare is None and self.now is not None:
            self._spare, self.standing_by = self._spawn(is_spare=True), []
            if self._imported:
                self._spare.send(Import(self._imported))
            self.stand(self._wanted)

    def _spawn(self, is_spare: bool = False) -> Life:
        life = Life(self._ledger.open_worker(), self._ledger.open_device(lambda slot: life.forgotten.append(slot)))
        setup = replace(self._setup(life), is_spare=is_spare, opens_ahead=is_spare and self._opens_ahead)
        try:
            process = WorkerProcess(
                self._loop, setup, lambda frame: self._heard(life, frame), lambda: self._ended(life), kind=self._kind
            )
        except OSError as error:
            log.error("no executor for %s could be started: %s", setup.device, error.strerror)
            self._loop.call_soon(self._ended, life)
            return life
        life.process = process
        self._processes.add(process)
        process.finished.add_done_callback(lambda _: self._processes.discard(process))
        return life

    def _heard(self, life: Life, frame: FromExecutor) -> None:
        if life is not self._spare:
            self._frame(life, frame)
        elif isinstance(frame, StandingBy):
            self.standing_by = frame.functions

    def _ended(self, life: Life) -> None:
        """Handle the end of a process; called once for each, whatever ended it."""
        if self._spare is life:
            self._spare = self.standing_by = None
            self.close(life)
            self._spares_lost += 1
            self._opens_ahead = self._opens_ahead and self._spares_lost < 2
            if self._spares_lost < MOST_SPARES:
                self._loop.call_later(AGAIN_AFTER_S, self._make_spare)
            return
        self.now = None
        self._lost(life)

    def close(self, life: Life) -> None:
        """Release the slots and device values of a process that has ended."""
        self._ledger.orphan(life.slots)
        self._ledger.close_device(life.values)

    async def stop(self, unload_s: float, *, is_idle: bool) -> None:
        self._is_stopping = True
        if self._spare is not None and self._spare.process is not None:
            self._spare.process.kill()
        life = self.now
        if life is not None and life.process is not None:
            if life.is_up and is_idle:
                life.process.stop(unload_s)
            else:
                life.process.kill()
        if self._processes:
            await asyncio.wait([process.finished for process in self._processes])
