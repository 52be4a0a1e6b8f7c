"""Node pools: how many machines of each launcher there ought to be, and the performance of `AddDevice` and `ReleaseDevice`.

A policy asks for one more device of a kind, and gives back one that it has emptied. A machine may have several devices; it goes
when all of them have been given back. Until then, and for as long as its launcher cannot end just that machine, what was given
back is at hand: the next request for a device gets it at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from lamina.cluster.launchers import Launcher, LaunchTerms
from lamina.core.actions import AddDevice, ReleaseDevice
from lamina.core.events import DeviceJoined, Event
from lamina.ipc.event_loop import clock_us
from lamina.types import DeviceSpec

log = logging.getLogger("lamina")

AGAIN_S = 30.0
"""How often a launcher is told again what is wanted while nodes are missing: what it made may have vanished."""


class NodePool:
    """Level of one launcher: a pure state machine, with time as an argument.

    At most as many nodes are on their way as there are already, or one: requests come faster than machines boot, and each would
    be taken for one more."""

    def __init__(self, terms: LaunchTerms) -> None:
        self.terms = terms
        self.wanted = terms.min
        self.boot_us = 0  #: learnt, from the request to the node; 0: none has come yet
        self.kinds: set[str] = {terms.kind} if terms.kind else set()  #: of the devices its nodes bring
        self.nodes: dict[str, int] = {}  #: by name, when it joined
        self._asked_us: deque[int] = deque()

    def serves(self, kind: str) -> bool:
        """Whether its nodes bring devices of a kind; one that never had a node may bring any."""
        return kind in self.kinds or not self.kinds

    def request(self, now_us: int) -> bool:
        """One node more, if that is allowed; says whether the level has changed."""
        level = max(self.wanted, len(self.nodes))
        if level >= self.terms.max or level - len(self.nodes) >= max(1, len(self.nodes)):
            return False
        self.wanted = level + 1
        self._asked_us.append(now_us)
        return True

    def joined(self, now_us: int, node: str, kinds: Sequence[str]) -> None:
        if node not in self.nodes and self._asked_us:
            took_us = now_us - self._asked_us.popleft()
            self.boot_us = took_us if not self.boot_us else self.boot_us + (took_us - self.boot_us) // 4
        self.nodes[node] = now_us
        if not self.terms.kind:
            self.kinds.update(kinds)
        self.wanted = max(self.wanted, len(self.nodes))

    def left(self, node: str) -> None:
        """A node is lost, or has ended: as many are wanted as before."""
        self.nodes.pop(node, None)

    def may_release(self) -> bool:
        return len(self.nodes) > self.terms.min

    def release(self, node: str) -> None:
        """A node is given back: one less is wanted."""
        self.nodes.pop(node, None)
        self.wanted = max(self.terms.min, min(self.wanted, len(self.nodes)))
        self._asked_us.clear()


class PoolStatus(Struct, frozen=True):
    """A pool, for people: `lamina cluster status`."""

    launcher: str
    wanted: int
    nodes: list[str]
    boot_us: int
    error: str = ""  #: what the launcher said last, if it failed


class NodePools:
    """All pools of a leader, and the tasks that tell their launchers.

    `drain(node)` has its instances replaced elsewhere; `post` is the controller's."""

    def __init__(
        self, pools: Sequence[tuple[Launcher, NodePool]], drain: Callable[[str], None], post: Callable[[Event], None]
    ) -> None:
        self._pools = list(pools)
        self._drain = drain
        self._post = post
        self._devices: dict[str, dict[str, DeviceSpec]] = {}  #: by node and id, of all nodes that are live
        self._returned: dict[str, set[str]] = {}  #: by node: devices that the policy has given back
        self._errors: dict[int, str] = {}
        self._changed = asyncio.Event()
        self._releases: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------------- nodes

    def may_end(self, node: str) -> bool:
        """Whether a launcher has made a node that has joined, and may end it: its pool has more than the fewest."""
        found = self._pool_of(node)
        return found is not None and found[1].may_release()

    def joined(self, node: str, devices: Sequence[DeviceSpec]) -> None:
        self._devices[node] = {device.id: device for device in devices}
        self._returned.pop(node, None)
        found = self._pool_of(node)
        if found is not None:
            found[1].joined(clock_us(), node, [device.kind for device in devices])

    def left(self, node: str) -> None:
        self._devices.pop(node, None)
        self._returned.pop(node, None)
        found = self._pool_of(node)
        if found is not None:
            found[1].left(node)
            self._changed.set()

    def _pool_of(self, node: str) -> tuple[Launcher, NodePool] | None:
        return next(((launcher, pool) for launcher, pool in self._pools if launcher.makes(node)), None)

    # ----------------------------------------------------------------------- actions

    def perform(self, action: AddDevice | ReleaseDevice) -> None:
        if isinstance(action, AddDevice):
            self._add(action.kind)
        else:
            self._release(action.device)

    def _add(self, kind: str) -> None:
        for node, returned in self._returned.items():
            for device in sorted(returned):
                spec = self._devices[node][device]
                if spec.kind == kind:
                    returned.discard(device)
                    self._rejoin(node, spec)
                    return
        for _, pool in self._pools:
            if pool.serves(kind) and pool.request(clock_us()):
                log.info("one more node of %s is wanted: %d", pool.terms.launcher, pool.wanted)
                self._changed.set()
                return

    def _release(self, device: str) -> None:
        node = next((name for name, devices in self._devices.items() if device in devices), None)
        if node is None:
            return  # it has left by itself
        devices = self._devices[node]
        returned = self._returned.setdefault(node, set())
        returned.add(device)
        found = self._pool_of(node)
        if found is None:
            self._keep(node)
            return
        launcher, pool = found
        kinds = {devices[device].kind, *({pool.terms.kind} if pool.terms.kind else ())}
        if any(spec.kind in kinds and spec.id not in returned for spec in devices.values()):
            return  # others of its devices are in use
        leaving = launcher.next_to_leave(list(pool.nodes)) or node
        if leaving != node or not pool.may_release():
            self._keep(node)
        if pool.may_release():
            pool.release(leaving)
            self._drain(leaving)
            task = asyncio.get_running_loop().create_task(self._end(launcher, leaving))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    def _keep(self, node: str) -> None:
        """Take what was given back into service again: this node does not go."""
        devices = self._devices[node]
        for device in sorted(self._returned.pop(node, ())):
            self._rejoin(node, devices[device])

    def _rejoin(self, node: str, spec: DeviceSpec) -> None:
        joined = DeviceJoined(replace(spec, launched=self.may_end(node)))
        asyncio.get_running_loop().call_soon(self._post, joined)  # the controller is in the middle of an event

    async def _end(self, launcher: Launcher, node: str) -> None:
        try:
            await asyncio.to_thread(launcher.release, node)
            log.info("node %s is released", node)
        except Exception as error:
            log.error("node %s cannot be released: %s", node, error)

    # ------------------------------------------------------------------------- tasks

    async def run(self) -> None:
        """Tell launchers what is wanted: at once after a change, and again while nodes are missing."""
        while True:
            self._changed.clear()
            for number, (launcher, pool) in enumerate(self._pools):
                if pool.wanted > len(pool.nodes):
                    await self._tell(number, launcher, pool)
            try:
                await asyncio.wait_for(self._changed.wait(), AGAIN_S)
            except TimeoutError:
                continue

    async def _tell(self, number: int, launcher: Launcher, pool: NodePool) -> None:
        kind = pool.terms.kind or min(pool.kinds, default="")
        try:
            await asyncio.to_thread(launcher.want, kind, pool.wanted)
            self._errors.pop(number, None)
        except Exception as error:  # of a cloud, a cluster, a program: the next time may be better
            said = str(error)
            if self._errors.get(number) != said:
                log.error("launcher %s cannot make %d nodes: %s", pool.terms.launcher, pool.wanted, said)
            self._errors[number] = said

    def status(self) -> list[PoolStatus]:
        return [
            PoolStatus(pool.terms.launcher, pool.wanted, sorted(pool.nodes), pool.boot_us, self._errors.get(number, ""))
            for number, (_, pool) in enumerate(self._pools)
        ]
