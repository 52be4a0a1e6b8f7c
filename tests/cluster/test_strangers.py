"""The port for agents, towards strangers: a wrong token, nonsense, floods. Refused, said clearly, and bounded."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from lamina.cluster import agent_listener, frame_link
from lamina.cluster.agent_listener import AgentListener, ListenForAgents
from lamina.cluster.credentials import JoinToken, TlsFiles, proof, read_token
from lamina.cluster.messages import (
    PROTOCOL,
    Beat,
    BeatHello,
    Challenge,
    Hello,
    JoinRefused,
    LoadedInstance,
    Welcome,
    to_agent_reader,
)
from lamina.errors import BadValue
from lamina.ipc.framing import pack
from lamina.types import DeviceSpec, SliceLimits
from tests.cluster import apps
from tests.cluster.clusters import TOKEN, cluster
from tests.serving import run

SECRET = TOKEN.encode()
DEVICE = DeviceSpec(id="cpu0", kind="cpu", units=2, memory_mib=1_000, family="cpu")


class FakeAgent:
    """An agent that says what a test wants."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.frames = to_agent_reader()

    async def __aenter__(self) -> FakeAgent:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def next(self) -> object:
        """The next frame; None at the end, which is a reset where the other side has not read all that was sent."""
        while True:
            try:
                data = await asyncio.wait_for(self.reader.read(65_536), 20)
            except ConnectionResetError:
                return None
            if not data:
                return None
            for frame in self.frames.feed(data):
                return frame

    async def hello(self, token: bytes = SECRET, **changes: object) -> object:
        """Say hello as node `one`; with `changes` to what the proof is for."""
        challenge = await self.next()
        assert isinstance(challenge, Challenge) and challenge.protocol == PROTOCOL
        nonce = os.urandom(32)
        said = proof(token, "agent", challenge.nonce, nonce, "one", 5)
        frame = Hello("one", 5, nonce, said, "127.0.0.1:1", [DEVICE], [], [])
        self.writer.write(pack(replace(frame, **changes)))
        return await self.next()


class Server:
    """A listener without engines."""

    def __init__(self, token: bytes = SECRET) -> None:
        self.opened: list[str] = []
        self.listener = AgentListener(
            ListenForAgents(host="127.0.0.1", port=0, token=JoinToken(token)), self._open, lambda change: None
        )

    def _open(self, link: object, hello: Hello, incarnation: int, key: object, address: str) -> Server:
        self.opened.append(hello.node)
        return self

    node, incarnation = "", 0

    def on_frame(self, frame: object) -> None:
        raise AssertionError("no frame is expected")

    async def __aenter__(self) -> Server:
        await self.listener.start("/dev/shm")
        self.listener.lead("cell", 3)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.listener.close()

    @property
    def port(self) -> int:
        return self.listener.port


def test_an_agent_without_the_token_is_refused_and_told_why():
    async def work() -> None:
        async with Server() as server, FakeAgent(server.port) as agent:
            answer = await agent.hello(token=b"another token of some length")
            assert isinstance(answer, JoinRefused) and answer.code == "join-denied" and "does not know" in answer.message
            assert await agent.next() is None and server.opened == []

    run(work, 30)


def test_without_a_token_only_processes_of_this_user_may_join(monkeypatch: pytest.MonkeyPatch):
    """On loopback there may be none, and code of tenants runs there too: an agent is given all code, values and secrets."""

    async def work() -> None:
        async with Server(token=b"") as server:
            async with FakeAgent(server.port) as agent:
                assert isinstance(await agent.hello(token=b""), Welcome)
            monkeypatch.setattr(frame_link, "peer_user", lambda local, peer: 200_000)
            async with FakeAgent(server.port) as agent:
                answer = await agent.next()
                assert isinstance(answer, JoinRefused) and answer.code == "join-denied"
            assert server.opened == ["one"]

    run(work, 30)


def test_a_proof_is_good_for_one_connection_and_one_name():
    async def work() -> None:
        async with Server() as server:
            for stolen in ({"nonce": bytes(32)}, {"node": "two"}, {"boot_us": 6}):
                async with FakeAgent(server.port) as agent:
                    assert isinstance(await agent.hello(**stolen), JoinRefused)
            assert server.opened == []

    run(work, 30)


def test_a_good_agent_is_welcomed_and_its_leader_has_proved_itself():
    async def work() -> None:
        async with Server() as server, FakeAgent(server.port) as agent:
            answer = await agent.hello()
            assert isinstance(answer, Welcome) and (answer.epoch, answer.cell, answer.incarnation) == (3, "cell", 1)
            assert server.opened == ["one"]
            assert server.listener.registry.nodes["one"].phase.value == "joining"  # until it beats

    run(work, 30)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff\xff\xff\xff" + bytes(100),
        b"\x05\x00\x00\x00hello",
        bytes(pack(Beat(1, 0, 0))),
        os.urandom(100_000),
    ],
    ids=["http", "huge", "no-msgpack", "out-of-turn", "noise"],
)
def test_nonsense_is_cut_off_and_others_are_served(data: bytes):
    async def work() -> None:
        async with Server() as server, FakeAgent(server.port) as stranger:
            await stranger.next()
            stranger.writer.write(data)
            assert await stranger.next() is None
            async with FakeAgent(server.port) as agent:
                assert isinstance(await agent.hello(), Welcome)

    run(work, 30)


def test_silent_strangers_are_few_and_keep_no_agent_out(monkeypatch: pytest.MonkeyPatch):
    """A few connections a second, without a token, would have kept agents out for as long as they came."""
    monkeypatch.setattr(agent_listener, "MAX_STRANGERS", 8)

    async def work() -> None:
        async with Server() as server, contextlib.AsyncExitStack() as strangers:
            for _ in range(40):
                await strangers.enter_async_context(FakeAgent(server.port))
            async with FakeAgent(server.port) as agent:
                assert isinstance(await agent.hello(), Welcome)
            assert len(server.listener._strangers) <= 8

    run(work, 30)


def test_silent_strangers_do_not_stay(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lamina.cluster.frame_link.HANDSHAKE_S", 0.3)

    async def work() -> None:
        async with Server() as server, FakeAgent(server.port) as stranger:
            assert isinstance(await stranger.next(), Challenge)
            assert await stranger.next() is None

    run(work, 30)


def test_a_stranger_that_talks_without_end_is_cut_off():
    async def work() -> None:
        async with Server() as server, FakeAgent(server.port) as stranger:
            await stranger.next()
            stranger.writer.write((60 * 2**20).to_bytes(4, "little"))
            sent = 0
            with contextlib.suppress(ConnectionError):
                while sent < 64 * 2**20:
                    stranger.writer.write(bytes(65_536))
                    await asyncio.wait_for(stranger.writer.drain(), 10)
                    sent += 65_536
            assert sent < 16 * 2**20  # what was on its way when it was cut off

    run(work, 30)


def test_beats_need_the_token_and_an_open_incarnation():
    async def work() -> None:
        async with Server() as server, FakeAgent(server.port) as agent:
            welcome = await agent.hello()
            assert isinstance(welcome, Welcome)
            for incarnation, token in ((welcome.incarnation, b"another token of some length"), (9, SECRET)):
                async with FakeAgent(server.port) as beats:
                    challenge = await beats.next()
                    assert isinstance(challenge, Challenge)
                    nonce = os.urandom(32)
                    said = proof(token, "beat", challenge.nonce, nonce, "one", incarnation)
                    beats.writer.write(pack(BeatHello("one", incarnation, nonce, said)))
                    assert isinstance(await beats.next(), JoinRefused)
            assert server.listener.registry.nodes["one"].phase.value == "joining"

    run(work, 30)


ODD: list[dict[str, Any]] = [
    {"units": 0},
    {"units": 2**40},
    {"memory_mib": -1},
    {"memory_mib": 2**60},
    {"cores": -1},
    {"price_per_s": float("nan")},
    {"price_per_s": -1.0},
    {"core_price_per_s": float("inf")},
    {"link_mib_per_s": -5.0},
    {"link_latency_us": -(2**40)},
    {"id": ""},
    {"id": "b.cpu0"},  # would be a device of a node "a.b"
    {"id": "x" * 1_000},
    {"kind": ""},
    {"kind": "k" * 1_000},
    {"kind": "h200\n# HELP"},
    {"limits": SliceLimits(sizes=(0,))},
    {"limits": SliceLimits(sizes=(10**9,))},
    {"limits": SliceLimits(batches_per_instance=-1)},
]


@pytest.mark.parametrize("devices", [[DEVICE, DEVICE], *([replace(DEVICE, **odd)] for odd in ODD)])
def test_devices_that_make_no_sense_are_refused(devices: list[DeviceSpec]):
    async def work() -> None:
        async with Server() as server, FakeAgent(server.port) as agent:
            answer = await agent.hello(devices=devices)
            assert isinstance(answer, JoinRefused) and "make no sense" in answer.message

    run(work, 30)


def test_what_an_agent_has_loaded_stands_on_a_device_of_its_own():
    loaded = [LoadedInstance("f-1-n1", "f", "b.cpu0", "", "0" * 64, 0, 1.0)]  # of node "one" it would be one of "one.b"

    async def work() -> None:
        async with Server() as server, FakeAgent(server.port) as agent:
            answer = await agent.hello(loaded=loaded)
            assert isinstance(answer, JoinRefused) and "make no sense" in answer.message

    run(work, 30)


def test_why_an_agent_is_not_taken_is_logged_once_and_not_at_every_try(caplog: pytest.LogCaptureFixture):
    async def work() -> None:
        async with Server() as server:
            for token in (b"another token", b"another token", b"another token"):
                async with FakeAgent(server.port) as agent:
                    assert isinstance(await agent.hello(token=token), JoinRefused)
            async with FakeAgent(server.port) as agent:
                assert isinstance(await agent.hello(devices=[replace(DEVICE, units=0)]), JoinRefused)

    run(work, 30)
    told = [record.getMessage() for record in caplog.records if "is not taken" in record.getMessage()]
    assert len(told) == 2 and "join token" in told[0] and "make no sense" in told[1]


@pytest.mark.live
def test_an_agent_says_why_it_is_not_taken(tmp_path: Path):
    async def work() -> None:
        async with cluster(apps.write(tmp_path / "app"), tmp_path) as made:
            made.start("wrong", token="another token of some length")
            await made.until(lambda: "does not know the join token" in made.log("wrong"))
            assert made.nodes() == {}

    run(work, 60)


def test_a_token_is_needed_off_loopback_and_has_a_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LAMINA_JOIN_TOKEN", raising=False)
    assert not read_token(None, "--token-file", "127.0.0.1")
    with pytest.raises(BadValue, match="need a join token"):
        read_token(None, "--token-file", "0.0.0.0")
    (tmp_path / "token").write_text("short\n")
    with pytest.raises(BadValue, match="has 5 bytes"):
        read_token(tmp_path / "token", "--token-file", "0.0.0.0")
    with pytest.raises(BadValue, match="an authority, a certificate and its key"):
        TlsFiles(ca="ca.pem").check()


def test_a_token_in_a_file_is_read_again_when_it_has_changed(tmp_path: Path):
    file = tmp_path / "token"
    file.write_text("the first token of some length\n")
    token = read_token(file, "--token-file")
    assert token.accepted == (b"the first token of some length",)
    file.write_text("the-second-token-of-some-length\n\nthe first token of some length\n")
    assert token.own == b"the-second-token-of-some-length" and len(token.accepted) == 2
    for spoilt in ("", "short\n"):
        file.write_text(spoilt)
        assert token.own == b"the-second-token-of-some-length"
    file.unlink()
    assert token.own == b"the-second-token-of-some-length"
