"""Node pools and launchers: levels, boots learnt, and machines that go only when the policy has emptied them."""

from __future__ import annotations

import asyncio
import contextlib
import stat
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.cluster.kubernetes_api import KubernetesApi
from lamina.cluster.launchers import JoinTerms, Launcher, LaunchTerms, open_launcher, parse_terms
from lamina.cluster.launchers.command import CommandLauncher
from lamina.cluster.launchers.kubernetes import KubernetesLauncher
from lamina.cluster.node_pools import NodePool, NodePools
from lamina.core.actions import AddDevice, ReleaseDevice
from lamina.core.events import DeviceJoined, Event
from lamina.errors import BadValue, Conflict, LaminaError, UnknownPlugin
from lamina.types import DeviceSpec
from tests.cluster.kubernetes_server import FakeKubernetes

# ---------------------------------------------------------------------------------------------- terms


def test_terms_are_read_from_the_command_line() -> None:
    assert parse_terms("kubernetes:agents,kind=h200,min=1,max=20") == LaunchTerms("kubernetes", "agents", "h200", 1, 20)
    assert parse_terms("static") == LaunchTerms("static")
    assert parse_terms("ray:max=4") == LaunchTerms("ray", max=4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("command:x,max=many", "max='many' is no number of nodes"),
        ("command:x,most=3", "'most=3' is no term"),
        ("command:x,min=3,max=2", "min=3 is more than max=2"),
    ],
)
def test_terms_that_are_none_are_told(text: str, said: str) -> None:
    with pytest.raises(BadValue, match=said):
        parse_terms(text)


def test_an_unknown_launcher_is_told_with_those_there_are() -> None:
    with pytest.raises(UnknownPlugin, match="command, kubernetes, ray, static"):
        open_launcher(parse_terms("nomad"), JoinTerms())


# ---------------------------------------------------------------------------------------------- levels


def test_a_pool_is_doubled_at_most_while_machines_boot() -> None:
    pool = NodePool(LaunchTerms("x", max=20))
    for i in range(3):
        pool.joined(0, f"n{i}", ["h200"])
    assert [pool.request(1) for _ in range(5)] == [True, True, True, False, False]
    assert pool.wanted == 6


def test_the_time_of_a_boot_is_learnt() -> None:
    pool = NodePool(LaunchTerms("x"))
    pool.request(1_000_000)
    pool.joined(41_000_000, "a", ["cpu"])
    assert pool.boot_us == 40_000_000
    pool.request(50_000_000)
    pool.joined(110_000_000, "b", ["cpu"])
    assert pool.boot_us == 45_000_000


@given(st.lists(st.tuples(st.sampled_from(["request", "join", "leave", "release"]), st.integers(0, 5))), st.integers(0, 3))
def test_a_level_stays_within_its_bounds_and_covers_what_is_there(steps: list[tuple[str, int]], low: int) -> None:
    pool = NodePool(LaunchTerms("x", min=low, max=6))
    for now, (step, number) in enumerate(steps):
        node = f"n{number}"
        match step:
            case "request":
                pool.request(now)
            case "join":
                pool.joined(now, node, ["cpu"])
            case "leave":
                pool.left(node)
            case _ if node in pool.nodes and pool.may_release():
                pool.release(node)
        assert max(low, len(pool.nodes)) <= pool.wanted <= 6
        assert pool.boot_us >= 0


# --------------------------------------------------------------------------------- actions of the policy


class RecordingLauncher:
    """Launcher that writes down what it is told. Its nodes are n0, n1, ..."""

    def __init__(self, last: str = "") -> None:
        self.wanted: list[int] = []
        self.released: list[str] = []
        self.last = last
        self.told = asyncio.Event()

    def want(self, kind: str, count: int) -> None:
        self.wanted.append(count)
        self._loop.call_soon_threadsafe(self.told.set)

    def release(self, node: str) -> None:
        self.released.append(node)
        self._loop.call_soon_threadsafe(self.told.set)

    def makes(self, node: str) -> bool:
        return node.startswith("n")

    def next_to_leave(self, nodes: Sequence[str]) -> str:
        return self.last

    def begin(self) -> None:
        self._loop = asyncio.get_running_loop()


class Cluster:
    """Pools with one recording launcher, and what they asked of the leader."""

    def __init__(self, launcher: RecordingLauncher, terms: LaunchTerms) -> None:
        self.launcher = launcher
        self.drained: list[str] = []
        self.posted: list[Event] = []
        self.pools = NodePools([(launcher, NodePool(terms))], self.drained.append, self.posted.append)

    def join(self, node: str, gpus: int = 1) -> None:
        devices = [DeviceSpec(id=f"{node}.gpu{i}", kind="h200", units=5, memory_mib=1, node=node) for i in range(gpus)]
        self.pools.joined(node, [*devices, DeviceSpec(id=f"{node}.cpu0", kind="cpu", units=2, memory_mib=1, node=node)])

    async def told(self) -> None:
        await asyncio.wait_for(self.launcher.told.wait(), 20)
        self.launcher.told.clear()


def play(
    script: Callable[[Cluster], Awaitable[None]], *, last: str = "", terms: LaunchTerms | None = None
) -> tuple[Cluster, RecordingLauncher]:
    async def work() -> Cluster:
        cluster = Cluster(RecordingLauncher(last), terms or LaunchTerms("x", kind="h200"))
        cluster.launcher.begin()
        running = asyncio.create_task(cluster.pools.run())
        await script(cluster)
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return cluster

    cluster = asyncio.run(work())
    return cluster, cluster.launcher


def test_a_device_more_is_a_node_more() -> None:
    async def script(cluster: Cluster) -> None:
        cluster.join("n0")
        cluster.pools.perform(AddDevice("h200"))
        await cluster.told()
        while cluster.launcher.wanted[-1] != 2:
            await cluster.told()

    _, launcher = play(script)
    assert launcher.wanted[-1] == 2


def test_a_kind_that_no_pool_has_is_not_asked_for() -> None:
    async def script(cluster: Cluster) -> None:
        cluster.join("n0")
        cluster.pools.perform(AddDevice("v100"))

    cluster, _ = play(script)
    assert cluster.pools.status()[0].wanted == 1


def test_a_machine_goes_when_all_its_gpus_have_been_given_back() -> None:
    async def script(cluster: Cluster) -> None:
        cluster.join("n0")
        cluster.join("n1", gpus=2)
        cluster.pools.perform(ReleaseDevice("n1.gpu0"))
        assert cluster.drained == []
        cluster.pools.perform(ReleaseDevice("n1.gpu1"))
        while not cluster.launcher.released:
            await cluster.told()

    cluster, launcher = play(script)
    assert (cluster.drained, launcher.released) == (["n1"], ["n1"])
    assert cluster.pools.status()[0].wanted == 1


def test_what_was_given_back_of_a_machine_that_stays_is_at_hand_at_once() -> None:
    async def script(cluster: Cluster) -> None:
        cluster.join("n0", gpus=2)
        cluster.pools.perform(ReleaseDevice("n0.gpu1"))
        cluster.pools.perform(AddDevice("h200"))
        await asyncio.sleep(0)

    cluster, _ = play(script)
    assert [event.device.id for event in cluster.posted if isinstance(event, DeviceJoined)] == ["n0.gpu1"]
    assert cluster.pools.status()[0].wanted == 1


def test_where_only_the_last_machine_can_go_that_one_is_drained_and_the_emptied_one_stays() -> None:
    async def script(cluster: Cluster) -> None:
        cluster.join("n0")
        cluster.join("n1")
        cluster.pools.perform(ReleaseDevice("n0.gpu0"))
        while not cluster.launcher.released:
            await cluster.told()

    cluster, launcher = play(script, last="n1")
    assert (cluster.drained, launcher.released) == (["n1"], ["n1"])
    assert [event.device.id for event in cluster.posted if isinstance(event, DeviceJoined)] == ["n0.gpu0"]


def test_the_fewest_machines_stay_and_one_of_no_launcher_too() -> None:
    async def script(cluster: Cluster) -> None:
        cluster.join("n0")
        cluster.join("by-hand")
        cluster.pools.perform(ReleaseDevice("n0.gpu0"))
        cluster.pools.perform(ReleaseDevice("by-hand.gpu0"))
        await asyncio.sleep(0)

    cluster, launcher = play(script, terms=LaunchTerms("x", kind="h200", min=1))
    assert (cluster.drained, launcher.released) == ([], [])
    assert {event.device.id for event in cluster.posted if isinstance(event, DeviceJoined)} == {"n0.gpu0", "by-hand.gpu0"}
    assert not cluster.pools.may_end("n0") and not cluster.pools.may_end("by-hand")


def test_a_machine_that_died_is_asked_for_again_and_a_launcher_that_fails_is_heard() -> None:
    async def script(cluster: Cluster) -> None:
        cluster.join("n0")
        cluster.pools.left("n0")
        await cluster.told()
        assert cluster.launcher.wanted[-1] == 1

        def fail(kind: str, count: int) -> None:
            cluster.launcher._loop.call_soon_threadsafe(cluster.launcher.told.set)
            raise BadValue("no quota left")

        cluster.launcher.want = fail  # type: ignore[method-assign]
        cluster.pools.left("n0")
        await cluster.told()
        while not cluster.pools.status()[0].error:
            await asyncio.sleep(0)

    cluster, _ = play(script)
    assert "no quota left" in cluster.pools.status()[0].error


# ------------------------------------------------------------------------------------ the command launcher


def program(folder: Path, text: str) -> Path:
    path = folder / "launch"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.live
def test_a_program_of_the_operator_is_told_what_is_wanted_and_how_to_join(tmp_path: Path) -> None:
    path = program(tmp_path, f'echo "$@" "$LAMINA_JOIN" "$LAMINA_JOIN_TOKEN" >> {tmp_path}/said')
    found = open_launcher(parse_terms(f"command:{path},prefix=gpu-"), JoinTerms(("a:1", "b:2"), "token"))
    found.want("h200", 3)
    found.release("gpu-7")
    assert (tmp_path / "said").read_text() == "want h200 3 a:1,b:2 token\nrelease gpu-7 a:1,b:2 token\n"
    assert found.makes("gpu-1") and not found.makes("cpu-1")


@pytest.mark.live
def test_a_program_that_fails_is_heard(tmp_path: Path) -> None:
    found = CommandLauncher(str(program(tmp_path, "echo first; echo out of capacity >&2; exit 3")), "", JoinTerms())
    with pytest.raises(LaminaError, match="exit code 3: out of capacity"):
        found.want("", 1)


def test_a_program_that_is_not_there_is_told_before_anything_starts() -> None:
    with pytest.raises(BadValue, match="no program '/absent'"):
        open_launcher(parse_terms("command:/absent"), JoinTerms())


# --------------------------------------------------------------------------------- the Kubernetes launcher


@pytest.fixture
def cluster() -> Iterator[FakeKubernetes]:
    with contextlib.closing(FakeKubernetes()) as found:
        found.scales = {"agents": {"wanted": 2, "there": 2}}
        yield found


def stateful(cluster: FakeKubernetes) -> Launcher:
    return KubernetesLauncher(KubernetesApi(cluster.url, "ml", lambda: cluster.token), "agents")


@pytest.mark.live
def test_the_scale_of_the_set_is_raised_and_never_lowered_by_a_want(cluster: FakeKubernetes) -> None:
    launcher = stateful(cluster)
    launcher.want("h200", 4)
    assert cluster.scales["agents"]["wanted"] == 4
    launcher.want("h200", 1)  # a leader that has just taken over, and knows of one node so far
    assert cluster.scales["agents"]["wanted"] == 4


@pytest.mark.live
def test_the_last_pod_is_the_one_that_can_go(cluster: FakeKubernetes) -> None:
    launcher = stateful(cluster)
    assert launcher.next_to_leave(["agents-0", "agents-10", "agents-9"]) == "agents-10"
    assert launcher.makes("agents-3") and not launcher.makes("agents-x") and not launcher.makes("other-1")
    launcher.release("agents-1")
    assert cluster.scales["agents"]["wanted"] == 1
    with pytest.raises(Conflict, match="agents-1 is not the last pod"):
        launcher.release("agents-1")
