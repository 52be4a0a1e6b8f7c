"""Members of a cluster that lie, repeat themselves, or are simply wrong: refused, bounded, and without harm to others."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import socket
import time
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from lamina.cluster.cluster_engine import ClusterEngine
from lamina.cluster.credentials import TicketKey, proof
from lamina.cluster.data_port import DataClient, DataPort, FetchFailed, join_address, ref_for
from lamina.cluster.messages import (
    PROTOCOL,
    Beat,
    BeatHello,
    BusyInstance,
    Challenge,
    ChunkOnNode,
    CommitAnswer,
    CommitState,
    DoneOnNode,
    FailedOnNode,
    HeartbeatOnNode,
    Hello,
    JoinRefused,
    LoadedInstance,
    LoadOnNode,
    PausedOnNode,
    ReadState,
    ReadyOnNode,
    ReportOnNode,
    RunOnNode,
    SegmentedOnNode,
    StateAnswer,
    WatchOnNode,
    Welcome,
    to_agent_reader,
)
from lamina.cluster.packages import PackageSource, PackageStore
from lamina.cluster.value_fetcher import Fetched
from lamina.errors import LoadFailed
from lamina.gateway.deploy.app_package import unpack_from_leader
from lamina.gpu.protocol import ExecutorReport, ExecutorUsage, GpuClocks
from lamina.ipc.framing import pack
from lamina.sdk.app_state import UNKNOWN, StateCell, StateChange, StateChanges
from lamina.types import DeviceSpec
from lamina.values.references import NodeRef
from lamina.values.shm import ShmPool
from lamina.values.slot_refs import SlotReferences
from tests.cluster import apps
from tests.cluster.clusters import TOKEN, TestCluster, cluster, start_agent
from tests.serving import Browser, run

SECRET = TOKEN.encode()
DEVICE = DeviceSpec(id="cpu0", kind="cpu", units=2, memory_mib=4_000, family="cpu")


class Liar:
    """A member with the token, that says what a test wants."""

    def __init__(self, port: int, name: str, boot_us: int = 5) -> None:
        self.port, self.name, self.boot_us = port, name, boot_us
        self._frames = to_agent_reader()
        self._ahead: list[object] = []
        self._beats: asyncio.Task[None] | None = None
        self.loaded: list[LoadedInstance] = []

    async def next(self) -> object:
        """The next frame; None at the end."""
        while not self._ahead:
            try:
                data = await asyncio.wait_for(self.reader.read(65_536), 20)
            except ConnectionError:
                return None
            if not data:
                return None
            self._ahead += self._frames.feed(data)
        return self._ahead.pop(0)

    async def wait_for(self, kind: type) -> object:
        while not isinstance(frame := await self.next(), kind):
            assert frame is not None, f"closed while it waited for {kind.__name__}"
        return frame

    def say(self, *frames: object) -> None:
        self.writer.write(pack(*frames))  # type: ignore[arg-type]

    async def join(self) -> object:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        challenge = await self.next()
        if not isinstance(challenge, Challenge):
            return challenge
        nonce = os.urandom(32)
        said = proof(SECRET, "agent", challenge.nonce, nonce, self.name, self.boot_us)
        self.hello = Hello(self.name, self.boot_us, nonce, said, "127.0.0.1:1", [DEVICE], self.loaded, [])
        self.say(self.hello)
        answer = await self.next()
        if isinstance(answer, Welcome):
            self._beats = asyncio.create_task(self._beat(answer.incarnation))
        return answer

    async def _beat(self, incarnation: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        frames = to_agent_reader()
        try:
            (challenge,) = frames.feed(await reader.read(65_536))
            assert isinstance(challenge, Challenge)
            nonce = os.urandom(32)
            said = proof(SECRET, "beat", challenge.nonce, nonce, self.name, incarnation)
            writer.write(pack(BeatHello(self.name, incarnation, nonce, said)))
            for number in range(10_000):
                writer.write(pack(Beat(number, 100, 0)))
                await asyncio.sleep(0.05)
        finally:
            writer.close()

    def stop_beats(self) -> None:
        if self._beats is not None:
            self._beats.cancel()

    def close(self) -> None:
        self.stop_beats()
        self.writer.close()


@contextlib.asynccontextmanager
async def joined(made: TestCluster, name: str, boot_us: int = 5) -> AsyncIterator[Liar]:
    liar = Liar(made.port, name, boot_us)
    assert isinstance(await liar.join(), Welcome)
    try:
        yield liar
    finally:
        liar.close()


async def loaded(liar: Liar, function: str) -> str:
    """Say that a function has been loaded that was to be; its instance."""
    while True:
        frame = await liar.wait_for(LoadOnNode)
        assert isinstance(frame, LoadOnNode)
        liar.say(ReadyOnNode(frame.instance, 1_000))
        if frame.spec.name == function:
            return frame.instance


@pytest.fixture
def app(tmp_path: Path) -> Path:
    return apps.write(tmp_path / "app")


async def echo(made: TestCluster, value: object) -> int:
    async with Browser(made.gateway.port) as browser:
        return (await browser.post("/v1/functions/echo", value)).status


@pytest.mark.live
def test_clocks_power_and_temperature_of_a_nodes_gpu_are_in_status_and_metrics(app: Path, tmp_path: Path):
    clocks = GpuClocks(1_200, 1_980, 3_201, 655.5, 700.0, 81, ["temperature"])
    report = ExecutorReport(77, 1, 0.3, ["echo"], {"echo": {"all": 12.0}}, ExecutorUsage(10, 4_096, 3, 0, clocks=clocks))

    async def work() -> None:
        async with cluster(app, tmp_path) as made, joined(made, "far") as node:
            await made.live("far")
            node.say(ReportOnNode(DEVICE.id, report), ReportOnNode("gpu9", report))
            await made.until(lambda: bool(made.engine.executor_reports()))
            assert list(made.engine.executor_reports()) == [f"far.{DEVICE.id}"]  # of its own devices alone
            async with Browser(made.gateway.port) as browser:
                (device,) = (await browser.ask("GET", "/v1/status")).json["devices"]
                assert device["executor"]["clocks"]["temperature_c"] == 81 and device["executor"]["pid"] == 77
                text = (await browser.ask("GET", "/metrics")).body.decode()
            assert f'lamina_gpu_power_watts{{device="far.{DEVICE.id}"}} 655.5' in text
            assert f'lamina_gpu_slowed{{cause="temperature",device="far.{DEVICE.id}"}} 1.0' in text or (
                f'lamina_gpu_slowed{{device="far.{DEVICE.id}",cause="temperature"}} 1.0' in text
            )
            node.close()
            await made.until(lambda: not made.engine.executor_reports())  # it is gone, and so is what it said

    run(work, 60)


@pytest.mark.live
@pytest.mark.parametrize("lie", ["too-many", "not-its-value", "too-large", "unknown-batch"])
def test_an_agent_that_lies_about_results_harms_its_own_calls_at_most(app: Path, tmp_path: Path, lie: str):
    async def work() -> None:
        async with cluster(app, tmp_path) as made, joined(made, "liar") as liar:
            await made.live("liar")
            call = asyncio.create_task(echo(made, 1))
            await loaded(liar, "echo")
            batch = await liar.wait_for(RunOnNode)
            assert isinstance(batch, RunOnNode)
            if lie == "too-many":
                liar.say(DoneOnNode(batch.batch_id, 1, [b"\xc0"] * 9))
                await made.until(lambda: made.phase("liar") in ("lost", ""))
            elif lie == "not-its-value":
                liar.say(DoneOnNode(batch.batch_id, 1, [NodeRef("127.0.0.1:22", "gateway", 0, 100_000)]))
                assert await call == 503
            elif lie == "too-large":
                liar.say(DoneOnNode(batch.batch_id, 1, [NodeRef("127.0.0.1:22", "gateway", 0, 2**62)]))
                assert await call == 503  # and no memory is taken for it
            else:
                liar.say(DoneOnNode(batch.batch_id + 77, 1, [b"\xc0"]), DoneOnNode(batch.batch_id, 1, [b"\x01"]))
                assert await call == 200
            made.start("good")
            await made.live("good")
            liar.close()
            await made.until(lambda: made.phase("liar") in ("lost", ""))
            assert await echo(made, 2) == 200
            with contextlib.suppress(asyncio.CancelledError):
                call.cancel()
            made.gateway.driver.controller.state.check()

    run(work, 90)


@pytest.mark.live
def test_a_node_that_falls_silent_while_it_is_brought_in_gets_nothing(app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What it has loaded is compared with what is served, which takes as long as a package is made."""
    is_packed = asyncio.Event()

    async def slowly(engine: ClusterEngine, loaded: object) -> bool:
        await is_packed.wait()
        return False

    monkeypatch.setattr(ClusterEngine, "_is_current", slowly)

    async def work() -> None:
        async with cluster(app, tmp_path) as made:
            liar = Liar(made.port, "quiet")
            liar.loaded = [LoadedInstance("echo-1", "echo", DEVICE.id, "1", "0" * 64, 1, 1.0)]
            assert isinstance(await liar.join(), Welcome)
            await made.live("quiet")
            liar.stop_beats()
            await made.until(lambda: made.phase("quiet") == "suspect")
            is_packed.set()
            devices = made.gateway.driver.controller.state.devices
            await made.until(lambda: bool(devices))
            assert [device.is_suspended for device in devices.values()] == [True]
            liar.close()

    run(work, 60)


@pytest.mark.live
def test_what_an_agent_says_of_its_busy_instances_is_not_believed_beyond_its_devices(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def is_current(engine: ClusterEngine, loaded: object) -> bool:
        return True

    monkeypatch.setattr(ClusterEngine, "_is_current", is_current)

    async def work() -> None:
        async with cluster(app, tmp_path) as made:
            state = made.gateway.driver.controller.state
            version = state.functions["echo"].spec.version
            liar = Liar(made.port, "liar")
            busy = [BusyInstance(b"\xff" * 9, 2**60, 2**60, 2**60), BusyInstance(0, 5, 5), BusyInstance(2, 2**60, 0, 7)]
            where = (DEVICE.id, version, "0" * 64, 0, 1.0)
            liar.loaded = [LoadedInstance(f"n{number}", "echo", *where, one) for number, one in enumerate(busy)]
            assert isinstance(await liar.join(), Welcome)
            watch = await liar.wait_for(WatchOnNode)
            assert isinstance(watch, WatchOnNode)
            (batch,) = state.batches.values()
            assert batch.id == watch.batch_id and batch.mask == 2 and not batch.cores
            liar.say(DoneOnNode(batch.id, 5, []), CommitState(1, batch.id, 5, [], []), FailedOnNode(batch.id + 1, "abandoned"))
            liar.say(PausedOnNode(batch.id, 3, 5), SegmentedOnNode("none", 5))
            await liar.wait_for(CommitAnswer)
            assert state.batches == {batch.id: batch}
            liar.say(FailedOnNode(batch.id, "abandoned"))
            await made.until(lambda: not state.batches)
            state.check()
            liar.close()

    run(work, 60)


@pytest.mark.live
def test_an_agent_reads_and_changes_no_state_but_that_of_its_own_batches(app: Path, tmp_path: Path):
    async def work() -> None:
        async with cluster(app, tmp_path) as made, joined(made, "liar") as liar:
            await made.live("liar")
            state = made.gateway._runtime.state
            liar.say(CommitState(1, 4711, 0, [], [StateChanges(0, [], [])]))  # of no batch: to no effect
            await asyncio.sleep(0)
            state.cells[state.resolve_key("counted", "", "app", "secret")] = StateCell("value", b"\x01", 1)
            liar.say(ReadState(2, "counted", "a-call", "app", "secret"))  # of a function that it does not run
            answer = await liar.wait_for(StateAnswer)
            assert isinstance(answer, StateAnswer) and answer.cell == UNKNOWN
            assert made.phase("liar") == "live"  # its instance may just have been unloaded

    run(work, 60)


@pytest.mark.live
def test_a_change_of_state_whose_result_cannot_be_fetched_is_not_made(app: Path, tmp_path: Path):
    async def work() -> None:
        async with cluster(app, tmp_path) as made, joined(made, "liar") as liar:
            await made.live("liar")

            async def kept() -> int:
                async with Browser(made.gateway.port) as browser:
                    return (await browser.post("/v1/functions/kept", 300_000)).status

            call = asyncio.create_task(kept())
            instance = await loaded(liar, "kept")
            while (batch := await liar.wait_for(RunOnNode)).instance != instance:  # type: ignore[attr-defined]
                pass
            assert isinstance(batch, RunOnNode)
            change = StateChanges(0, [], [StateChange("app", "kept", "value", "put", b"\x01")])
            liar.say(CommitState(1, batch.batch_id, 5, [NodeRef("", "w1", 0, 300_000)], [change]))
            assert await call == 503  # there is nothing at the data port that it has named
            assert not made.gateway._runtime.state.cells
            made.gateway.driver.controller.state.check()

    run(work, 60)


@pytest.mark.live
def test_results_that_have_come_of_a_batch_that_never_comes_whole_keep_no_memory(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def work() -> None:
        async with cluster(app, tmp_path) as made, joined(made, "one") as node:
            await made.live("one")
            pool, queue = made.engine.references.pool, made.gateway.driver.controller.state.functions["echo"].queue
            calls = [asyncio.create_task(echo(made, number)) for number in range(3)]
            await made.until(lambda: len(queue) == 3)
            await loaded(node, "echo")
            batch = await node.wait_for(RunOnNode)
            assert isinstance(batch, RunOnNode) and len(batch.jobs) > 1
            coming: list[Callable[[Fetched], None]] = []
            monkeypatch.setattr(made.engine._fetcher, "bring", lambda ref, then: coming.append(then))
            held = pool.used_bytes
            node.say(DoneOnNode(batch.batch_id, 1, [NodeRef("", "w1", slot, 100_000) for slot in range(len(batch.jobs))]))
            await made.until(lambda: len(coming) == len(batch.jobs))
            reserved = pool.reserve(100_000)
            assert reserved is not None
            reserved[1].release()
            coming[0](reserved[0])
            node.close()
            await made.until(lambda: made.phase("one") in ("lost", ""))
            assert pool.used_bytes == held
            for call in calls:
                call.cancel()

    run(work, 60)


@pytest.mark.live
def test_an_agent_speaks_for_no_call_but_those_that_run_on_it(app: Path, tmp_path: Path):
    async def work() -> None:
        async with cluster(app, tmp_path) as made, joined(made, "liar") as liar:
            await made.live("liar")
            call = asyncio.create_task(echo(made, 1))
            await loaded(liar, "echo")
            batch = await liar.wait_for(RunOnNode)
            assert isinstance(batch, RunOnNode)
            (job,) = batch.jobs
            heard: list[bytes] = []
            made.gateway.driver.data.pieces["another-call"] = heard.append
            liar.say(ChunkOnNode("another-call", job.ref.id, b"\x01"), HeartbeatOnNode("another-call", job.ref.id))
            liar.say(DoneOnNode(batch.batch_id, 1, [b"\x01"]))
            assert await call == 200 and heard == []

    run(work, 60)


@pytest.mark.live
def test_of_two_agents_with_one_name_the_later_one_serves_and_the_other_says_why_not(app: Path, tmp_path: Path):
    async def work() -> None:
        async with cluster(app, tmp_path) as made:
            made.start("one")
            await made.live("one")
            first = made.agents["one"]
            (tmp_path / "again").mkdir()
            second = start_agent(tmp_path / "again", "one", f"127.0.0.1:{made.port}")
            made.agents["two"] = second
            log = tmp_path / "one.log"
            await made.until(lambda: "another agent serves as node" in log.read_text())
            await made.until(lambda: made.phase("one") == "live")
            assert await echo(made, 1) == 200
            first.end()
            assert await echo(made, 2) == 200

    run(work, 90)


@pytest.mark.live
def test_an_agent_of_another_version_says_so_and_stays_out(tmp_path: Path):
    async def work() -> None:
        async def leader(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(pack(Challenge(PROTOCOL + 1, os.urandom(32), 1, "cell")))
            with contextlib.suppress(ConnectionError):
                said.append(await reader.read(100))
            writer.close()

        said: list[bytes] = []
        server = await asyncio.start_server(leader, "127.0.0.1", 0)
        agent = start_agent(tmp_path, "old", f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        try:
            until_s = time.monotonic() + 30
            while f"speaks version {PROTOCOL + 1}" not in (tmp_path / "old.log").read_text():
                assert time.monotonic() < until_s
                await asyncio.sleep(0.02)
            assert set(said) <= {b""}  # it has told that server nothing
        finally:
            agent.end()
            server.close()

    run(work, 60)


def test_a_replayed_hello_opens_nothing(app: Path, tmp_path: Path):
    async def work() -> None:
        async with cluster(app, tmp_path) as made, joined(made, "one", boot_us=7) as one:
            thief = Liar(made.port, "one")
            thief.reader, thief.writer = await asyncio.open_connection("127.0.0.1", made.port)
            assert isinstance(await thief.next(), Challenge)
            thief.say(one.hello)  # as it was heard on the wire
            answer = await thief.next()
            assert isinstance(answer, JoinRefused) and answer.code == "join-denied"
            assert made.engine.listener.registry.nodes["one"].incarnation == 1
            thief.close()

    run(work, 60)


def test_a_hundred_agents_join_at_once_and_leave_at_once(app: Path, tmp_path: Path):
    async def work() -> None:
        async with cluster(app, tmp_path) as made:
            names = [f"n{number}" for number in range(100)]
            liars = [Liar(made.port, name) for name in names]

            async def enter(liar: Liar) -> None:
                while not isinstance(await liar.join(), Welcome):  # too many strangers at a time: it tries again, as agents do
                    liar.writer.close()
                    await asyncio.sleep(0.05)

            await asyncio.gather(*(enter(liar) for liar in liars))
            assert len(made.engine.listener.registry.nodes) == 100
            await made.until(lambda: all(made.phase(name) == "live" for name in names), 60)
            devices = made.gateway.driver.controller.state.devices
            await made.until(lambda: len(devices) == 100)
            for liar in liars:
                liar.close()
            await made.until(lambda: not devices)
            made.gateway.driver.controller.state.check()

    run(work, 120)


# ------------------------------------------------------------------------ values, packages, clocks

KEY = TicketKey(b"a token of some length", "cell", 3)


def test_a_ticket_ends_with_its_value_also_when_another_is_in_the_slot(tmp_path: Path):
    pool = ShmPool(str(tmp_path), "gateway", 2**22)
    port = DataPort(str(tmp_path), "127.0.0.1", 0, None, lambda owner, slot, serial: pool.serial(slot) == serial)
    port.set_keys(KEY)
    client = DataClient()
    try:
        first = pool.put(b"a" * 100_000)
        assert first is not None
        ticket = ref_for(KEY, join_address("127.0.0.1", port.port), first, pool.serial(first.slot))
        room = bytearray(100_000)
        client.fetch(ticket, room)
        assert bytes(room) == b"a" * 100_000
        pool.free(first.slot)
        with pytest.raises(FetchFailed, match="the value is gone"):
            client.fetch(ticket, room)
        second = pool.put(b"b" * 100_000)
        assert second is not None and second.slot == first.slot
        with pytest.raises(FetchFailed, match="the value is gone"):
            client.fetch(ticket, room)
        forged = ref_for(KEY, ticket.address, second, pool.serial(second.slot))
        with pytest.raises(FetchFailed, match="the ticket is not good"):
            client.fetch(type(forged)(*(forged.address, "gateway", second.slot, 100_000, 0, ticket.ticket, forged.serial)), room)
    finally:
        client.close()
        port.close()
        pool.close()


@pytest.mark.parametrize("skew_s", [-240, 240])
def test_clocks_may_differ_by_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skew_s: int):
    pool = ShmPool(str(tmp_path), "gateway", 2**22)
    port = DataPort(str(tmp_path), "127.0.0.1", 0)
    port.set_keys(KEY)
    client, now = DataClient(), time.time
    try:
        ref = pool.put(b"x" * 70_000)
        assert ref is not None
        monkeypatch.setattr(time, "time", lambda: now() + skew_s)  # of the leader, which makes tickets
        asked = ref_for(KEY, join_address("127.0.0.1", port.port), ref)
        monkeypatch.setattr(time, "time", now)
        client.fetch(asked, bytearray(70_000))
    finally:
        client.close()
        port.close()
        pool.close()


def zipped(text: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("app.py", text)
    return out.getvalue()


@pytest.mark.live
def test_a_package_that_was_changed_on_disk_is_fetched_again(tmp_path: Path):
    content = zipped("print(1)")
    sha256 = hashlib.sha256(content).hexdigest()
    fetched = 0

    async def fetch() -> bytes:
        nonlocal fetched
        fetched += 1
        return content

    async def work() -> None:
        store = PackageStore(tmp_path, unpack_from_leader)
        assert await store.ensure(sha256, fetch) and not await store.ensure(sha256, fetch)
        file = Path(store.path(sha256, "app.py"))
        (file.parent / "__pycache__").mkdir()  # what Python adds is no change
        assert not await store.ensure(sha256, fetch) and fetched == 1
        file.chmod(0o600)
        file.write_text("print(2)")
        assert await store.ensure(sha256, fetch) and fetched == 2
        assert Path(store.path(sha256, "app.py")).read_text() == "print(1)"
        Path(store.path(sha256, "app.py")).unlink()
        again = PackageStore(tmp_path, unpack_from_leader)  # after a restart
        assert again.stored() == [sha256] and await again.ensure(sha256, fetch) and fetched == 3

    run(work, 60)


@pytest.mark.live
def test_packages_of_a_thousand_deployments_do_not_fill_the_disk_of_an_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lamina.cluster.packages.KEPT_PACKAGES", 3)

    async def work() -> None:
        store, made = PackageStore(tmp_path, unpack_from_leader), []
        for number in range(10):
            content = zipped(f"print({number})")
            made.append(hashlib.sha256(content).hexdigest())

            async def fetch(content: bytes = content) -> bytes:
                return content

            assert await store.ensure(made[-1], fetch, lambda: made[:1])
            os.utime(tmp_path / made[-1], (number, number))
        assert set(store.stored()) == {made[0], *made[-4:]}  # what is loaded, what has come last, and three more

    run(work, 60)


def test_packages_of_versions_that_are_not_served_any_more_take_no_memory(tmp_path: Path):
    async def work() -> None:
        references = SlotReferences(8 * 2**20)
        source = PackageSource("own.py", references, lambda path, whole: (str(path).encode() * 20_000, path.name))
        for version in range(100):
            package = await source.get(f"v{version}.py")
            source.retain([f"v{version}.py", ""])
            assert references.pool.used_bytes <= 2 * 2**20
        assert await source.get("v99.py") is package  # that which is served is there
        references.close()

    run(work, 60)


def test_a_package_that_is_not_what_it_is_called_is_not_unpacked(tmp_path: Path):
    async def work() -> None:
        store = PackageStore(tmp_path, unpack_from_leader)

        async def fetch() -> bytes:
            return zipped("print('another')")

        with pytest.raises(LoadFailed, match="another hash than it should"):
            await store.ensure("0" * 64, fetch)
        assert store.stored() == []

    run(work, 60)


def test_a_half_open_connection_that_sends_nothing_holds_no_place_for_long(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("lamina.cluster.agent_listener.MAX_STRANGERS", 16)
    monkeypatch.setattr("lamina.cluster.frame_link.HANDSHAKE_S", 0.5)

    async def work() -> None:
        async with cluster(app, tmp_path) as made:
            silent = [socket.create_connection(("127.0.0.1", made.port)) for _ in range(40)]
            strangers = made.engine.listener._strangers
            try:
                await made.until(lambda: bool(strangers))
                assert len(strangers) <= 16
                await made.until(lambda: not strangers)
                async with joined(made, "one"):
                    await made.live("one")
            finally:
                for one in silent:
                    one.close()

    run(work, 60)
