"""A leader in this process and agents in processes of their own, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lamina import policies
from lamina.bootstrap import ClusterOptions, open_local
from lamina.cluster.agent_listener import ListenForAgents
from lamina.cluster.cluster_engine import ClusterEngine
from lamina.cluster.credentials import JoinToken, TlsFiles
from lamina.cluster.launchers import Launcher
from lamina.cluster.node_pools import NodePool
from lamina.core.controller import HANG_FLOOR_US
from lamina.gateway.bootstrap import Gateway, ListenConfig, open_gateway
from lamina.gateway.deploy.app_package import pack_around

TOKEN = "a token that only tests know"
NO_TLS = TlsFiles()
REPO = Path(__file__).parents[2]


@dataclass
class AgentProcess:
    """One `lamina agent`."""

    name: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()


def start_agent(
    folder: Path, name: str, joins: str, *options: str, token: str = TOKEN, within: tuple[str, ...] = (), path: str = ""
) -> AgentProcess:
    """Start one; `within` is a command that it is started by, such as `ip netns exec NAME`, `path` a folder of modules first."""
    command = [*within, sys.executable, "-m", "lamina", "agent", "--join", joins, "--name", name, "--gpu", "no", "--json"]
    command += ["--folder", str(folder / name), *options]
    env = {**os.environ, "LAMINA_JOIN_TOKEN": token, "PYTHONPATH": f"{path}:{REPO / 'src'}"}
    with open(folder / f"{name}.log", "ab") as log:
        return AgentProcess(name, subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True))


@dataclass
class TestCluster:
    """A leader and its agents."""

    __test__ = False

    gateway: Gateway
    folder: Path
    agents: dict[str, AgentProcess] = field(default_factory=dict)

    @property
    def engine(self) -> ClusterEngine:
        assert self.gateway.cluster is not None
        return self.gateway.cluster

    @property
    def port(self) -> int:
        return self.engine.listener.port

    def start(self, name: str, *options: str, token: str = TOKEN, path: str = "") -> AgentProcess:
        self.agents[name] = start_agent(self.folder, name, f"127.0.0.1:{self.port}", *options, token=token, path=path)
        return self.agents[name]

    def phase(self, name: str) -> str:
        node = self.engine.listener.registry.nodes.get(name)
        return node.phase.value if node is not None else ""

    def nodes(self) -> dict[str, dict[str, Any]]:
        return {node["name"]: node for node in self.engine.list_nodes()}

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    async def until(self, is_so: Callable[[], bool], limit_s: float = 30.0) -> None:
        """Wait for something to become true; what has happened is said if it does not."""
        until_s = time.monotonic() + limit_s
        while not is_so():
            if time.monotonic() > until_s:
                logs = "\n".join(f"--- {name}\n{self.log(name)[-3_000:]}" for name in self.agents)
                raise AssertionError(f"it did not become so in {limit_s:g} s; {json.dumps(self.engine.list_nodes())}\n{logs}")
            await asyncio.sleep(0.005)

    async def live(self, *names: str) -> None:
        await self.until(lambda: all(self.phase(name) == "live" for name in names))


@contextlib.asynccontextmanager
async def cluster(
    app: Path,
    folder: Path,
    *,
    policy: str = "edf",
    local: bool = False,
    ingress: int = 0,
    token: str | JoinToken = TOKEN,
    tls: TlsFiles = NO_TLS,
    host: str = "127.0.0.1",
    port: int = 0,
    pools: tuple[tuple[Launcher, NodePool], ...] = (),
    hang_floor_us: int = HANG_FLOOR_US,
) -> AsyncIterator[TestCluster]:
    listen = ListenForAgents(
        host=host, port=port, token=token if isinstance(token, JoinToken) else JoinToken(token.encode()), tls=tls
    )
    runtime = open_local(
        str(app),
        policy=policies.build(policy),
        hang_floor_us=hang_floor_us,
        cluster=ClusterOptions(listen=listen, pack=pack_around, local_devices=local, pools=pools),
    )
    gateway = await open_gateway(runtime, ListenConfig(ingress=ingress))
    made = TestCluster(gateway, folder)
    try:
        yield made
    finally:
        for agent in made.agents.values():
            agent.end()
        await gateway.stop(2)
