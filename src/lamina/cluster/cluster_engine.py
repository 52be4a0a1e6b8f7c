"""Cluster engine: the engines of this machine and the devices of all nodes as one. The driver sees devices only.

Changes of the registry become events of the controller: a node that joins brings its devices and what it has loaded, one that is
silent is suspended, one that is lost takes its devices with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from msgspec.structs import replace

from lamina.cluster.agent_listener import AgentListener, IngressPeer, ListenForAgents
from lamina.cluster.credentials import TicketKey
from lamina.cluster.frame_link import FrameLink
from lamina.cluster.launchers import Launcher
from lamina.cluster.messages import Hello, IngressHello, LoadedInstance, MachineLost
from lamina.cluster.node_pools import NodePool, NodePools
from lamina.cluster.node_registry import NodeChange, NodePhase
from lamina.cluster.packages import Pack, PackageSource
from lamina.cluster.remote_engine import RemoteEngine
from lamina.cluster.remote_values import LeaderParts
from lamina.cluster.value_fetcher import ValueFetcher
from lamina.core.actions import Action, AddDevice, DropJob, Kill, Load, ReleaseDevice, Resize, StartBatch, Unload
from lamina.core.events import DeviceDraining, DeviceJoined, DeviceLost, DeviceSuspended, Event, InstanceFound, InstanceLost
from lamina.drivers.engine import JobValues
from lamina.engines.composite import CompositeEngine
from lamina.errors import Conflict, LaminaError, NotFound
from lamina.gpu.protocol import ExecutorReport
from lamina.ipc.event_loop import clock_us
from lamina.ipc.framing import read_mask
from lamina.state.kv_state import StateTable
from lamina.types import DeviceSpec

log = logging.getLogger("lamina")

RELEASE_S = 0.5
"""How long a node keeps a value that is not needed any more, at most."""


class ClusterEngine(CompositeEngine):
    """Composite engine with nodes. `local`: this machine's own devices take batches too."""

    def __init__(
        self,
        here: CompositeEngine,
        listen: ListenForAgents,
        app_path: str,
        state: StateTable,
        pack: Pack,
        *,
        local: bool = True,
        pools: Sequence[tuple[Launcher, NodePool]] = (),
    ) -> None:
        super().__init__(here.cpu, here.gpus)
        self.nodes: dict[str, RemoteEngine] = {}  #: by name: the open incarnations
        self._uses_local = local
        self._of_remote_instance: dict[str, RemoteEngine] = {}
        self._state = state
        self._packages = PackageSource(app_path, self.references, pack)
        self._fetcher = ValueFetcher(listen.tls.for_client(), self.references.pool)
        self._tasks: set[asyncio.Task[None]] = set()
        self._parts_for_nodes: LeaderParts | None = None  #: from `start` on
        self._post: Callable[[Event], None] = lambda event: None
        self.listener = AgentListener(listen, self._open_node, self._on_change)
        self.pools = NodePools(pools, self.drain, lambda event: self._post(event))
        self._launching: asyncio.Task[None] | None = None

    @property
    def devices(self) -> list[DeviceSpec]:
        """Devices that are there from the start; those of nodes join later."""
        return super().devices if self._uses_local else []

    def executor_report(self, device: str) -> ExecutorReport | None:
        node = self.nodes.get(device.rpartition(".")[0])
        return node.executor_reports.get(device) if node is not None else super().executor_report(device)

    def executor_reports(self) -> dict[str, ExecutorReport]:
        found = super().executor_reports()
        for node in self.nodes.values():
            found.update(node.executor_reports)
        return found

    async def start(self, post: Callable[[Event], None], values: JobValues, deadline_us: Callable[[str], int]) -> None:
        await super().start(post, values, deadline_us)
        self._post = post

        def on_event(event: Event) -> None:
            if type(event) is InstanceLost:
                self._of_remote_instance.pop(event.instance, None)
            post(event)

        self._parts_for_nodes = LeaderParts(
            post=on_event,
            values=values,
            deadline_us=deadline_us,
            shared=self.shared,
            references=self.references,
            state=self._state,
            packages=self._packages,
            fetcher=self._fetcher,
            machine_of_owner={},
        )
        await self.listener.start(self.references.directory.path, self.references.is_current)
        self._spawn(self._prepare_package())
        self._spawn(self._release_values())

    async def _release_values(self) -> None:
        """Tell nodes now and then which values are not needed any more, also those that get no more batches."""
        while True:
            await asyncio.sleep(RELEASE_S)
            for node in list(self.nodes.values()):  # one that does not read what it is sent is lost by this
                node.flush_releases()

    async def _prepare_package(self) -> None:
        """Pack the server's own app, as it is now: agents that join get what is served, whatever becomes of its files."""
        with contextlib.suppress(LaminaError):  # an agent that needs it is told
            await self._packages.get("")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def lead(self, term: int) -> None:
        """Take agents. `term` is that of the store, whose epochs they obey in order; 0: there is no store, and no other
        leader."""
        self.listener.lead("" if term else os.urandom(8).hex(), term or 1)
        self._launching = self._launching or asyncio.get_running_loop().create_task(self.pools.run())

    def accept_ingress(self, open_ingress: Callable[[LeaderParts, FrameLink, IngressHello, TicketKey, str], IngressPeer]) -> None:
        """Take front doors of other machines too."""

        def opened(link: FrameLink, hello: IngressHello, key: TicketKey, own_address: str) -> IngressPeer:
            assert self._parts_for_nodes is not None
            return open_ingress(self._parts_for_nodes, link, hello, key, own_address)

        self.listener.accept_ingress(opened)

    def stand_by(self, refusal: Callable[[], LaminaError]) -> None:
        self.listener.stand_by(refusal)
        self._stop_launching()

    def _stop_launching(self) -> None:
        if self._launching is not None:
            self._launching.cancel()
            self._launching = None

    # ------------------------------------------------------------------- actions

    def perform(self, action: Action) -> None:
        kind = type(action)
        if kind is StartBatch:
            node = self._of_remote_instance.get(action.instance)  # type: ignore[union-attr]
            if node is not None:
                self._start_on_node(node, action)  # type: ignore[arg-type]
            else:
                self._start_here(action)  # type: ignore[arg-type]
            return
        match action:
            case Load():
                node = self._node_of_device(action.device)
                if node is not None:
                    self._of_remote_instance[action.instance] = node
                    node.perform(action)
                    return
            case Unload():
                node = self._of_remote_instance.pop(action.instance, None)
                if node is not None:
                    node.perform(action)
                    return
            case Kill() | Resize():
                node = self._of_remote_instance.get(action.instance)
                if node is not None:
                    node.perform(action)
                    return
            case DropJob():
                for node in list(self.nodes.values()):
                    node.perform(action)
            case AddDevice() | ReleaseDevice():
                self.pools.perform(action)
                return
            case _:
                pass
        super().perform(action)

    def _node_of_device(self, device: str) -> RemoteEngine | None:
        return next((node for node in self.nodes.values() if any(one.id == device for one in node.devices)), None)

    def _start_on_node(self, node: RemoteEngine, action: StartBatch) -> None:
        """Values on GPUs of this machine are fetched first; those of other nodes their machine fetches itself."""
        for gpu in self.gpus:
            if refs := gpu.missing(action):
                gpu.fetch(refs, lambda: self._start_on_node(node, action))
                return
        node.perform(action)

    def _start_here(self, action: StartBatch) -> None:
        machines = self._parts_for_nodes.machine_of_owner if self._parts_for_nodes is not None else {}
        for machine in machines.values():
            if refs := machine.missing(action):
                machine.fetch(refs, lambda: self._start_here(action))
                return
        super().perform(action)

    # --------------------------------------------------------------------- nodes

    def _open_node(self, link: FrameLink, hello: Hello, incarnation: int, key: TicketKey, own_address: str) -> RemoteEngine:
        assert self._parts_for_nodes is not None
        node = RemoteEngine(self._parts_for_nodes, link, hello, incarnation, key, own_address)
        self.nodes[hello.node] = node
        return node

    def _on_change(self, change: NodeChange) -> None:
        node = self.nodes.get(change.node)
        said = f" ({change.reason})" if change.reason else ""
        log.info("node %s, incarnation %d: %s%s", change.node, change.incarnation, change.after.value, said)
        if node is None or node.incarnation != change.incarnation:
            return
        match change.before, change.after:
            case NodePhase.JOINING, NodePhase.LIVE:
                self._spawn(self._join(node))
            case _, NodePhase.SUSPECT:
                self._suspend(node, True)
            case NodePhase.SUSPECT, NodePhase.LIVE:
                self._suspend(node, False)
            case _, NodePhase.DRAINING:
                self._drain(node)
            case _, NodePhase.LOST | NodePhase.GONE:
                self._lose(node, change)
            case _:
                pass

    async def _join(self, node: RemoteEngine) -> None:
        """Bring in a node's devices, and what is loaded there of the code that is served now: in one turn, so that nothing is
        loaded beside what is about to be adopted."""
        kept: list[tuple[str, LoadedInstance]] = []
        outdated: list[tuple[str, LoadedInstance]] = []
        for name, one in node.found_instances():
            (kept if await self._is_current(one) else outdated).append((name, one))
        if self.nodes.get(node.node) is not node:
            return  # lost meanwhile
        self.pools.joined(node.node, node.devices)
        launched = self.pools.may_end(node.node)
        devices = [replace(device, launched=launched) for device in node.devices]
        for device in devices:
            self._post(DeviceJoined(device))
        for name, found in kept:
            self._of_remote_instance[name] = node
            where = f"{node.node}.{found.device}"
            self._post(InstanceFound(name, where, found.function, found.version, read_mask(found.mask), found.quota))
        for name, _ in outdated:
            node.perform(Unload(name))
        if self.listener.registry.nodes[node.node].phase is NodePhase.SUSPECT:  # since before its devices were known
            self._suspend(node, True)
        if node.is_draining:
            self._drain(node)

    async def _is_current(self, loaded: LoadedInstance) -> bool:
        """Whether it was loaded from the package that its function has now."""
        if self.shared.spec_of(loaded.function) is None:
            return False
        try:
            return (await self._packages.get(self.shared.source(loaded.function).path)).sha256 == loaded.sha256
        except LaminaError:
            return False

    def _suspend(self, node: RemoteEngine, suspended: bool) -> None:
        if suspended:
            log.warning("node %s gives no sign of life: nothing new is sent there", node.node)
        for device in node.devices:
            self._post(DeviceSuspended(device.id, suspended))

    def _drain(self, node: RemoteEngine) -> None:
        for device in node.devices:
            self._post(DeviceSuspended(device.id, False))
            self._post(DeviceDraining(device.id))
        node.drain()

    def _lose(self, node: RemoteEngine, change: NodeChange) -> None:
        if change.after is NodePhase.LOST:
            log.warning("node %s is lost (%s): what ran there runs elsewhere", node.node, change.reason)
        del self.nodes[node.node]
        for name in [name for name, where in self._of_remote_instance.items() if where is node]:
            del self._of_remote_instance[name]
        node.close(change.reason)
        for other in list(self.nodes.values()):
            other.on_machine_lost(node.data_address)
        self.listener.tell_fronts(MachineLost(node.data_address))
        self.pools.left(node.node)
        for device in node.devices:
            self._post(DeviceLost(device.id, blames=False))

    def drain(self, name: str) -> None:
        """Drain a node. Raises `NotFound` or `Conflict`."""
        known = self.listener.registry.nodes.get(name)
        if known is None:
            raise NotFound(f"no node {name[:80]!r}", hint=f"there are {', '.join(self.listener.registry.nodes) or 'none'}")
        if not self.listener.drain(name) and not (known.is_leaving and known.is_open):
            raise Conflict(f"node {name!r} is {known.phase.value}", hint="only a live node can be drained")

    def list_nodes(self) -> list[dict[str, Any]]:
        """All nodes, for `GET /v1/nodes`."""
        found, now_us = [], clock_us()
        for record in self.listener.registry.nodes.values():
            node = self.nodes.get(record.name) if record.is_open else None
            found.append(
                {
                    "name": record.name,
                    "state": record.phase.value,
                    "incarnation": record.incarnation,
                    "epoch": self.listener.epoch,
                    "address": record.address,
                    "data_address": node.data_address if node is not None else "",
                    "devices": [
                        {"id": one.id, "kind": one.kind, "family": one.family, "units": one.units, "memory_mib": one.memory_mib}
                        for one in (node.devices if node is not None else [])
                    ],
                    "instances": node.instances if node is not None else [],
                    "rtt_us": record.rtt_us,
                    "lag_us": record.lag_us,
                    "beats": record.beats,
                    "silent_ms": max(0, now_us - record.heard_us) // 1000,
                    "packages": sorted(node.packages) if node is not None else [],
                }
            )
        return found

    async def stop(self, grace_s: float) -> None:
        self._stop_launching()
        for node in list(self.nodes.values()):
            await node.wait_drained(grace_s)
        self._post = lambda event: None
        for task in self._tasks:
            task.cancel()
        self.listener.close()
        for node in self.nodes.values():
            node.close("the server ends")
        self.nodes.clear()
        await self._fetcher.close()
        await super().stop(grace_s)
