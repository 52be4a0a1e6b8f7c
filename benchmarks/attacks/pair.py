"""Two servers on one store, as processes of their own: killed, frozen, cut off from the database, started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from benchmarks.attacks.histories import ask
from benchmarks.postgres import private_server
from benchmarks.servers import free_port

APP = """
import lamina

app = lamina.App("taken")
one = lamina.Scale(max=1)


@app.function(scale=lamina.Scale(min=1, max=1))
def act(what, name):  # one function for all that a campaign does: it has to start again and again
    if what == "counts":
        return [app.state.counter(one).value for one in name]
    if what == "mark":
        app.state.counter(name).add(1)
        app.state.counter("total").add(1)
    return name


@app.workflow()
async def act_once(name):
    return await act("mark", name)


@app.workflow()
async def act_thrice(name):
    return await act("pass", await act("mark", await act("pass", name)))


@app.function(scale=one)
def mark(name):
    app.state.counter(name).add(1)
    app.state.counter("total").add(1)
    return name


@app.function(scale=one)
def pass_on(name):
    return name


@app.workflow()
async def once(name):
    return await mark(name)


@app.workflow()
async def steps(name):
    return await pass_on(await mark(await pass_on(name)))


@app.function(scale=one)
def counts(names):
    return [app.state.counter(name).value for name in names]
"""


DISK_MIB = 64


def free_ports_for_agents() -> int:
    """A port that is free, with the one after it: for agents and for values."""
    return free_port(2)


class ServerProcess:
    """One `lamina serve`, on a port of its own."""

    def __init__(self, app: Path, store: str, log: Path, options: Sequence[str] = ()) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, "-m", "lamina", "serve", str(app), "--store", store, "--port", str(self.port), "--json"]
        self._command += options
        self._log = log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self.process is None or self.process.poll() is not None:
            with self._log.open("ab") as log:
                self.process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    async def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            for _ in range(400):
                if self.process.poll() is not None:
                    return
                await asyncio.sleep(0.05)
            self.kill()

    def workers(self) -> list[int]:
        """Processes that it has started."""
        pid = self.process.pid if self.process is not None and self.process.poll() is None else 0
        try:
            return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except OSError:
            return []

    async def role(self) -> str:
        """As it says itself; "" if it does not answer."""
        answer = await ask(self.url, "GET", "/healthz", timeout_s=1.0)
        return str(answer.body.get("role", "")) if answer.is_ok else ""

    async def is_ready(self) -> bool:
        return (await ask(self.url, "GET", "/readyz", timeout_s=1.0)).is_ok


class DatabaseProxy:
    """Way of one server to PostgreSQL, that can be cut: connections end and no others are made, or nothing gets through."""

    def __init__(self, folder: Path, behind: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self._behind = behind
        self._is_cut = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._connect, self.folder / ".s.PGSQL.5432")

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.close()
            return
        try:
            other, to = await asyncio.open_unix_connection(self._behind / ".s.PGSQL.5432")
        except OSError:
            writer.close()
            return
        self._writers |= {writer, to}
        await asyncio.gather(self._copy(reader, to), self._copy(other, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**16):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
        self._writers.discard(writer)
        writer.close()

    def cut(self) -> None:
        self._is_cut = True
        for writer in list(self._writers):
            writer.transport.abort()

    def hang(self) -> None:
        """Nothing gets through, and no side is told."""
        self._flows.clear()

    def mend(self) -> None:
        self._is_cut = False
        self._flows.set()

    async def stop(self) -> None:
        self.mend()
        self.cut()
        if self._server is not None:
            self._server.close()


class Pair:
    """Two servers, one of which leads."""

    def __init__(
        self,
        folder: Path,
        stores: tuple[str, str],
        proxies: tuple[DatabaseProxy, ...] = (),
        disk: Path | None = None,
        options: Sequence[Sequence[str]] = ((), ()),
        code: str = APP,
    ) -> None:
        app = folder / "app.py"
        app.write_text(code)
        self.folder = folder
        self.proxies = proxies
        self.disk = disk
        self.servers = [
            ServerProcess(app, store, folder / f"server-{number}.log", options[number]) for number, store in enumerate(stores)
        ]

    @property
    def urls(self) -> list[str]:
        return [one.url for one in self.servers]

    async def leader(self, limit_s: float = 60.0) -> int:
        """Which one leads and is ready; waits until one does."""
        until_s = time.monotonic() + limit_s
        while time.monotonic() < until_s:
            for number, one in enumerate(self.servers):
                if await one.is_ready():
                    return number
            await asyncio.sleep(0.02)
        raise TimeoutError("no server leads")

    async def both_up(self, limit_s: float = 60.0) -> int:
        """Which one leads; waits until the other stands by. One that has ended is started again, as by systemd."""
        until_s = time.monotonic() + limit_s
        while time.monotonic() < until_s:
            for one in self.servers:
                one.start()
            leader = await self.leader(limit_s)
            if await self.servers[1 - leader].role() == "standby":
                return leader
            await asyncio.sleep(0.05)
        raise TimeoutError("no server stands by")


WhenBegun = Callable[[Pair], Awaitable[None]]
"""Called when the first server was started: what it needs to be ready."""


@contextlib.asynccontextmanager
async def sqlite_pair(
    options: Sequence[Sequence[str]] = ((), ()), when_begun: WhenBegun | None = None, code: str = APP
) -> AsyncIterator[Pair]:
    """A pair on one file; on a small disk of its own, if this user may mount one, so that it can be filled."""
    with tempfile.TemporaryDirectory(prefix="pair-") as place, _small_disk(Path(place) / "disk") as disk:
        async with _running(Pair(Path(place), (f"{disk}/runs.db",) * 2, (), disk, options, code), when_begun) as pair:
            yield pair


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)]
    is_mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield folder
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)


@contextlib.asynccontextmanager
async def postgres_pair(
    url: str, options: Sequence[Sequence[str]] = ((), ()), when_begun: WhenBegun | None = None, code: str = APP
) -> AsyncIterator[Pair]:
    """A pair on a PostgreSQL server on a UNIX socket, each with a way there of its own."""
    with tempfile.TemporaryDirectory(prefix="pair-") as place:
        behind = Path(url.partition("host=")[2].partition("&")[0])
        schema = f"s{os.getpid()}_{time.monotonic_ns()}"
        import psycopg

        with psycopg.connect(url, autocommit=True) as server:
            server.execute(f"CREATE SCHEMA {schema}")
        proxies = tuple(DatabaseProxy(Path(place) / f"way-{number}", behind) for number in range(2))
        stores = [
            f"postgresql://owner@/postgres?host={quote(str(one.folder))}&options=-csearch_path%3D{schema}" for one in proxies
        ]
        for proxy in proxies:
            await proxy.start()
        try:
            async with _running(Pair(Path(place), (stores[0], stores[1]), proxies, None, options, code), when_begun) as pair:
                yield pair
        finally:
            for proxy in proxies:
                await proxy.stop()


@contextlib.asynccontextmanager
async def _running(pair: Pair, when_begun: WhenBegun | None = None) -> AsyncIterator[Pair]:
    try:
        pair.servers[0].start()
        if when_begun is not None:
            await when_begun(pair)
        await pair.leader()
        pair.servers[1].start()
        await pair.both_up()
        yield pair
    finally:
        for one in pair.servers:
            await one.end()


@contextlib.contextmanager
def database() -> Iterator[str]:
    """A PostgreSQL server of our own; "" if none is installed."""
    with private_server() as url:
        yield url
