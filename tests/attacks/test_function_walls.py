"""Walls around functions (H3): what hostile code of a tenant finds of the server, of the operator and of other tenants.

Where the machine gives no walls (the server is not root, or the kernel says no) the tests of walls are skipped, and those that no
wall is needed for remain: a clean environment, and deployments of strangers that are refused.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lamina.access.admin_service import AdminService
from lamina.drivers.engine import TargetSource
from lamina.engines import isolation
from lamina.engines.isolation import Homes, ProcessIsolation, Walls, parse_users
from lamina.errors import BadValue
from lamina.ipc.confinement import Confinement, ProbeResult, clean_environment, end_cgroup, memory_kills
from lamina.server import listener, origins
from lamina.server.listener import UNKNOWN_USER, peer_user
from lamina.types import FunctionSpec
from lamina.values.references import ShmRef
from lamina.values.shm import ShmReader
from lamina.values.shm_directory import BadSlot
from lamina.values.slot_refs import SlotReferences
from tests.gateway.deploy.admin_fixture import ROOT, Managed, managed
from tests.serving import run, write_app

pytestmark = pytest.mark.live


def walls_hold() -> bool:
    async def tried() -> Walls:
        isolation = ProcessIsolation()
        try:
            return await isolation.try_walls()
        finally:
            isolation.close()

    return asyncio.run(tried()).hold


HOLD = os.geteuid() == 0 and walls_hold()
needs_walls = pytest.mark.skipif(not HOLD, reason="this machine gives no walls between tenants")

SPY = """
import os, subprocess, sys, time
from pathlib import Path
import lamina
app = lamina.App("{name}-app")

@app.function(scale=lamina.Scale(min=1, max=1))
def {name}_look(paths):
    home = Path(os.environ.get("TMPDIR", "/tmp"))

    def tried(act):
        try:
            return act()
        except OSError as error:
            return type(error).__name__
    return {{
        "environment": dict(os.environ),
        "user": [os.getuid(), os.getgid(), os.getgroups()],
        "processes": sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()),
        "home": [os.getcwd(), tried(lambda: (home / ".wall-test").write_text("x")), oct(os.stat(".").st_mode & 0o777)],
        "reads": {{path: tried(lambda: len(Path(path).read_bytes())) for path in paths}},
        "signals": tried(lambda: os.kill(os.getppid() or 99999, 0)),
        "setuid": tried(lambda: os.setuid(0)),
        "no_new_privs": "NoNewPrivs:\\t1" in Path("/proc/self/status").read_text(),
        "umask": os.umask(0o077),
    }}

@app.function(scale=lamina.Scale(max=1))
def {name}_double(x):
    return x + x

@app.workflow()
def {name}_four(x):
    return {name}_double({name}_double(x))

@app.function(scale=lamina.Scale(max=1))
def {name}_daemon(seconds):
    code = f"import time; time.sleep({{seconds}})"
    return subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdin=subprocess.DEVNULL).pid

@app.function(scale=lamina.Scale(max=1), idempotent=False)
def {name}_die(x):
    os._exit(3)
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_app(tmp_path_factory.mktemp("app"))


@pytest.fixture
def server_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMINA_SECRETS_KEY", "QUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUE=")
    for name in ("AWS_SECRET_ACCESS_KEY", "DATABASE_URL", "LAMINA_TOKEN", "HF_TOKEN"):
        monkeypatch.setenv(name, "the server's own")


async def deployed(server: Managed, *tenants: str) -> list[str]:
    tokens = []
    for tenant in tenants:
        tokens.append(await server.token("invoke", "read", "deploy", tenant=tenant))
        answer = await server.deploy(f"{tenant}-app", SPY.format(name=tenant), tokens[-1])
        assert answer.status == 200, answer.body
    return tokens


# ------------------------------------------------------------------------ environment


def test_h3_functions_do_not_inherit_the_keys_of_the_server(app: Path, tmp_path: Path, server_secrets: None) -> None:
    """Of a tenant as of the operator's own app, on any machine."""
    source = 'import os, lamina\napp = lamina.App("own")\n@app.function(scale=lamina.Scale(max=1))\n'
    source += "def env():\n    return dict(os.environ)\n"

    async def work() -> tuple[Any, Any]:
        own = tmp_path / "own.py"
        own.write_text(source)
        async with managed(own, tmp_path / "kept") as server:
            (token,) = await deployed(server, "acme")
            desk = AdminService(server.admin.access)
            await desk.perform(ROOT, "secret/set", {"name": "key", "value": "acme's", "tenant": "acme"})
            theirs = await server.call("/v1/functions/acme_look", [], token)
            return (await server.call("/v1/functions/env")).json, theirs.json["environment"]

    for found in run(work):
        assert "PATH" in found and not [
            name for name in found if name.endswith(("_KEY", "_URL", "_TOKEN")) and name != "LAMINA_URL"
        ]
        assert "the server's own" not in found.values()


def test_what_the_operator_declares_reaches_its_own_functions(tmp_path: Path) -> None:
    from lamina.drivers.engine import EngineShared

    shared = EngineShared({"API_KEY": "k"})
    shared.set_sources({"theirs": TargetSource("app", "acme")})
    assert shared.environment("mine") == {"API_KEY": "k"} and shared.environment("theirs") == {}


def test_an_environment_is_made_of_a_list_of_names() -> None:
    inherited = {
        "PATH": "p",
        "OMP_NUM_THREADS": "2",
        "HOME": "/root",
        "SECRET": "s",
        "CUDA_VISIBLE_DEVICES": "0",
        "PGPASSWORD": "x",
    }
    assert clean_environment(inherited) == {"PATH": "p", "OMP_NUM_THREADS": "2", "HOME": "/root", "CUDA_VISIBLE_DEVICES": "0"}
    theirs = clean_environment(inherited, Confinement(user=7, folder="/h"))
    assert theirs["HOME"] == theirs["TMPDIR"] == "/h" and "SECRET" not in theirs


# ------------------------------------------------------------------------------ walls


@needs_walls
def test_h3_a_tenant_s_code_finds_nothing_of_others(app: Path, tmp_path: Path, server_secrets: None) -> None:
    async def work() -> tuple[Any, Any, list[str]]:
        async with managed(app, tmp_path / "kept", trusts_deployers=False, runs=True) as server:
            acme, evil = await deployed(server, "acme", "evil")
            assert (await server.call("/v1/state/k", 1, method="PUT")).status == 200
            folder, slots = tmp_path / "kept", server.gateway.driver.engine.references
            assert slots is not None
            ref = slots.pool.put(b"somebody's" * 10_000)
            assert ref is not None
            worker = next(pid for name, pid in server.gateway.driver.engine.cpu.pids.items() if name.startswith("acme_look"))  # type: ignore[attr-defined]
            paths = [
                str(folder / "store.db"),
                str(folder / "apps" / "acme-app" / "1" / "app.py"),
                str(app),
                f"{slots.directory.path}/gateway-{ref.slot}",
                "/proc/1/environ",
                f"/proc/{worker}/environ",
                f"/proc/{os.getpid()}/environ",
                "/etc/shadow",
            ]
            found = await server.call("/v1/functions/evil_look", paths, evil)
            own = await server.call("/v1/functions/acme_look", [str(folder / "apps" / "acme-app" / "1" / "app.py")], acme)
            return found.json, own.json, paths

    found, own, paths = run(work)
    assert found["processes"] == [1]
    environ = "/proc/1/environ"  # that is its own there
    assert found["reads"].pop(environ) > 0 and not [size for size in found["reads"].values() if isinstance(size, int)], found[
        "reads"
    ]
    assert found["user"][0] >= 200_000 and found["user"][0] == found["user"][1] and found["user"][2] == []
    assert found["user"] != own["user"] and next(iter(own["reads"].values())) > 0
    assert found["home"][1:] == [1, "0o700"] and found["home"][0] != own["home"][0]
    assert (found["setuid"], found["no_new_privs"], found["umask"]) == ("PermissionError", True, 0o077)
    assert paths


@needs_walls
def test_h3_code_that_runs_when_an_app_is_imported_is_behind_the_same_walls(
    app: Path, tmp_path: Path, server_secrets: None
) -> None:
    source = (
        "import os, lamina\n"
        "seen = [os.getuid(), sorted(n for n in os.listdir('/proc') if n.isdecimal()), 'DATABASE_URL' in os.environ]\n"
        'app = lamina.App("acme-app")\n@app.function()\ndef f(x):\n    return x\n'
        "raise ValueError(repr(seen))\n"
    )

    async def work() -> str:
        async with managed(app, tmp_path / "kept", trusts_deployers=False) as server:
            answer = await server.deploy("acme-app", source, await server.token("deploy", tenant="acme"))
            return str(answer.json["detail"])

    said = run(work)
    assert "[200000, ['1'], False]" in said and said.startswith("app.py "), said  # as it is named in the package (M9)


KNOCK = """
import socket, lamina
app = lamina.App("evil-app")

def said(port, head, wait=True):
    with socket.socket() as client:
        client.connect(("127.0.0.1", port))
        client.sendall(head.encode())
        return int(client.recv(4096).split()[1]) if wait else 0

@app.function(scale=lamina.Scale(min=1, max=1))
def evil_knock(calls, management, token):
    def head(line, *more):
        return "\\r\\n".join((line + " HTTP/1.1", "host: 127.0.0.1", "content-length: 0", *more, "", ""))
    for _ in range(20):
        said(calls, head("PUT /v1/state/k", "content-type: application/json").replace("length: 0", "length: 1") + "2", wait=False)
    ways = [(calls, "GET /v1/state/k"), (calls, "GET /v1/status")]
    ways += [(management, "POST /v1/admin/token/list"), (management, "GET /v1/apps")]
    return {
        "without": [said(port, head(line)) for port, line in ways],
        "with": [said(port, head(line, f"authorization: Bearer {token}")) for port, line in ways],
    }
"""


@needs_walls
def test_h3_a_tenant_s_code_on_this_machine_is_not_its_operator(app: Path, tmp_path: Path) -> None:
    """On loopback no token is asked for, and its functions run there: they need one all the same, also if they do not wait."""

    async def work() -> tuple[Any, Any]:
        async with managed(app, tmp_path / "kept", trusts_deployers=False, runs=True) as server:
            token = await server.token("invoke", "read", "deploy", tenant="evil")
            assert (await server.deploy("evil-app", KNOCK, token)).status == 200
            assert (await server.call("/v1/state/k", 1, method="PUT")).status == 200
            inputs = {"calls": server.gateway.port, "management": server.admin.port, "token": token}
            found = await server.call("/v1/functions/evil_knock", inputs, token)
            return found.json, (await server.call("/v1/state/k", method="GET")).json

    found, kept = run(work)
    assert found["without"] == [401] * 4
    assert found["with"] == [404, 403, 403, 200], "what its token may"
    assert kept["value"] == 1, "a request whose sender is gone was carried out as the operator's"


def connected(user: int) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """A connection of a process of that user."""
    code = "import os, socket, sys\nc = socket.socket()\nos.setuid(int(sys.argv[2]))\nc = socket.socket()\n"
    code += "c.connect(('127.0.0.1', int(sys.argv[1])))\nsys.stdin.read()\n"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        command = [sys.executable, "-c", code, str(listening.getsockname()[1]), str(user)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        listening.settimeout(30)
        return listening.accept()[0], process


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a process of another user")
def test_the_kernel_says_whose_the_other_end_of_a_connection_is() -> None:
    connection, process = connected(200_007)
    with connection, process:
        ends = connection.getsockname(), connection.getpeername()
        assert peer_user(*ends) == listener._listed_user(*ends) == 200_007
        process.communicate(b"")
        connection.settimeout(30)
        assert connection.recv(1) == b""
        assert peer_user(*ends) == listener._listed_user(*ends) == UNKNOWN_USER, "its process is gone: it is no one's"


def test_only_loopback_listeners_ask_whose_a_connection_is(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: Any = SimpleNamespace(get_extra_info=lambda name: ("127.0.0.1", 1))
    users = iter([5, 1_500, UNKNOWN_USER])
    monkeypatch.setattr(origins, "peer_user", lambda local, peer: next(users))
    policy = origins.OriginPolicy("127.0.0.1", origins.OriginSettings(tenant_users=(1_000, 2_000)))
    assert [policy.is_of_tenant(ends) for _ in range(3)] == [False, True, True]
    assert not origins.OriginPolicy("127.0.0.1").is_of_tenant(ends)
    assert not origins.OriginPolicy("10.0.0.1", origins.OriginSettings(tenant_users=(1_000, 2_000))).is_of_tenant(ends)


@needs_walls
def test_h3_values_of_any_size_go_in_and_out_through_shared_memory(app: Path, tmp_path: Path) -> None:
    async def work() -> None:
        async with managed(app, tmp_path / "kept", trusts_deployers=False) as server:
            (acme,) = await deployed(server, "acme")
            for size in (10, 200_000, 3_000_000, 200_000):
                text = "x" * size
                answer = await server.call("/v1/workflows/acme_four", text, acme)
                assert answer.status == 200 and answer.json == text * 4
            slots = server.gateway.driver.engine.references
            assert slots is not None
            left = [name for name in os.listdir(slots.directory.path) if name.startswith("gateway-")]
            assert not [
                name for name in left if os.stat(f"{slots.directory.path}/{name}").st_mode & 0o040
            ]  # shown once, never used again

    run(work)


@needs_walls
def test_low_what_a_function_has_started_ends_with_its_worker(app: Path, tmp_path: Path) -> None:
    marker = 7_654_321

    def alive() -> list[str]:
        found = []
        for name in os.listdir("/proc"):
            try:
                if name.isdecimal() and str(marker).encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                    found.append(name)
            except OSError:
                continue
        return found

    async def work() -> None:
        async with managed(app, tmp_path / "kept", trusts_deployers=False) as server:
            (acme,) = await deployed(server, "acme")
            assert (await server.call("/v1/functions/acme_daemon", marker, acme)).status == 200
            assert alive()
        until_s = time.monotonic() + 10
        while alive() and time.monotonic() < until_s:
            await asyncio.sleep(0.05)
        assert not alive()

    run(work)


@needs_walls
def test_a_tenant_keeps_its_user_and_no_other_gets_it(app: Path, tmp_path: Path) -> None:
    async def users(*tenants: str) -> dict[str, int]:
        async with managed(app, tmp_path / "kept", trusts_deployers=False) as server:
            return {name: await server.admin.access.user_of(name, (300_000, 300_003)) for name in tenants}

    first = run(lambda: users("acme", "evil"))
    assert run(lambda: users("late", "evil", "acme")) == {"late": 300_002, **first}
    with pytest.raises(Exception, match="no user is left"):
        run(lambda: users("one-more"))


# ---------------------------------------------------------------- machines without walls


def test_h3_where_nothing_keeps_strangers_apart_their_deployments_are_refused(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    async def work() -> list[Any]:
        async with managed(app, tmp_path / "kept", trusts_deployers=False) as server:
            token = await server.token("deploy", tenant="acme")
            refused = await server.deploy("acme-app", SPY.format(name="acme"), token)
            own = await server.deploy("operators-app", SPY.format(name="operators"))  # the operator's own
            walls = (await server.call("/v1/status", method="GET")).json["walls"]
            return [refused, own, walls]

    refused, own, walls = run(work)
    assert refused.status == 403 and "--trust-deployers" in refused.json["hint"] and "not root" in refused.json["detail"]
    assert own.status == 200 and walls["users"] == "the server is not root"


@needs_walls
def test_functions_of_tenants_do_not_share_the_process_of_a_gpu(app: Path, tmp_path: Path) -> None:
    source = 'import lamina\napp = lamina.App("acme-app")\n@app.function(gpu=lamina.GPU(0.5))\ndef f(x):\n    return x\n'

    async def work() -> Any:
        async with managed(app, tmp_path / "kept", trusts_deployers=False) as server:
            return await server.deploy("acme-app", source, await server.token("deploy", tenant="acme"))

    answer = run(work)
    assert answer.status == 403 and "GPU" in answer.json["detail"]


@pytest.mark.skipif(os.geteuid() != 0, reason="walls are tried by root alone")
def test_there_are_no_walls_where_a_setuid_program_makes_root_of_a_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    def probed(user: int) -> ProbeResult:
        return ProbeResult(user, (), (1,), False, True, True, True)

    monkeypatch.setattr(isolation, "_probe", probed)
    walls = asyncio.run(ProcessIsolation().try_walls())
    assert not walls.hold and walls.lines()[0] == "users: none: it gets that of a setuid program"


def test_walls_are_named_one_to_a_line() -> None:
    assert Walls(users="", processes="", files="", limits="no control group for cpu").lines() == [
        "users: one for each tenant",
        "processes: those of others are hidden",
        "files: a private folder for each tenant",
        "limits: none: no control group for cpu",
    ]
    assert not Walls().hold and Walls(users="", processes="", files="").hold


@pytest.mark.parametrize("text", ["", "5", "0-10", "5000-4000", "a-b", "1000-99999999999"])
def test_a_range_of_users_is_checked(text: str) -> None:
    with pytest.raises(BadValue, match="--tenant-users"):
        parse_users(text)


# ----------------------------------------------------------------------- limits, slots


def test_cpu_memory_is_what_a_control_group_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolation = ProcessIsolation()
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    monkeypatch.setattr(isolation, "_cgroup_base", str(tmp_path))
    made = isolation.confinement(TargetSource(), FunctionSpec(name="f", memory_mib=500, cores=2), "f-1", ())
    assert made.cgroup == f"{tmp_path}/f-1" and 500 << 20 < made.memory_bytes < 700 << 20 and made.user == 0
    assert isolation.confinement(TargetSource(), FunctionSpec(name="f"), "f-2", ()).memory_bytes == 0


def test_a_control_group_gets_its_limits_before_it_is_joined(tmp_path: Path) -> None:
    """Files stand for the kernel's."""
    from lamina.ipc.confinement import _join_cgroup

    for name in ("memory.max", "pids.max", "cpu.max", "cgroup.procs"):
        (tmp_path / name).touch()
    _join_cgroup(Confinement(cgroup=str(tmp_path), memory_bytes=1_000, processes=5, cores=1.5))
    read = {name: (tmp_path / name).read_text() for name in ("memory.max", "pids.max", "cpu.max", "cgroup.procs")}
    assert read == {"memory.max": "1000", "pids.max": "5", "cpu.max": "150000 100000", "cgroup.procs": "0"}
    (tmp_path / "memory.events").write_text("low 0\noom 1\noom_kill 2\n")
    assert memory_kills(str(tmp_path)) == 2
    assert not end_cgroup(str(tmp_path)) and (tmp_path / "cgroup.kill").read_text() == "1"


@needs_walls
def test_memory_that_no_control_group_counts_has_a_looser_limit(tmp_path: Path) -> None:
    source = (
        'import lamina\napp = lamina.App("acme-app")\n@app.function(cpu=lamina.CPU(1, memory="64MiB"))\n'
        "def eat(mib):\n    return len(bytearray(mib << 20)) >> 20\n"
    )

    async def work() -> list[int]:
        async with managed(write_app(tmp_path), tmp_path / "kept", trusts_deployers=False) as server:
            token = await server.token("deploy", "invoke", tenant="acme")
            assert (await server.deploy("acme-app", source, token)).status == 200
            return [(await server.call("/v1/functions/eat", mib, token)).status for mib in (100, 3_000)]

    statuses = run(work)
    assert statuses[0] == 200 and statuses[1] in (500, 503)


@needs_walls
def test_slots_of_another_user_are_read_as_copies_and_never_waited_for(tmp_path: Path) -> None:
    base = tempfile.mkdtemp()
    slots = SlotReferences(2**20, base)
    try:
        worker = slots.add_worker(200_123)
        folder = Path(slots.directory.path) / worker.owner
        assert folder.stat().st_uid == 200_123
        (folder / f"{worker.owner}-0").write_bytes(b"x" * 100)
        os.mkfifo(folder / f"{worker.owner}-1")
        (folder / f"{worker.owner}-2").symlink_to("/etc/passwd")
        reader = ShmReader(slots.directory.path)
        view = reader.view(ShmRef(worker.owner, 0, 100))
        (folder / f"{worker.owner}-0").write_bytes(b"")  # cut short: a mapping would end the reader
        assert bytes(view) == b"x" * 100
        for slot in (0, 1, 2):
            with pytest.raises(BadSlot):
                reader.view(ShmRef(worker.owner, slot, 100))
        slots.on_worker_lost(worker)
        assert not folder.exists()
    finally:
        slots.close()
        assert sys.platform == "linux" and not os.listdir(base)


def test_a_server_alone_in_its_control_group_moves_into_a_leaf_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files stand for the kernel's."""
    from lamina.engines import isolation

    (tmp_path / "cgroup.controllers").write_text("cpu memory pids io\n")
    monkeypatch.setattr(isolation, "_own_cgroup", lambda: str(tmp_path))
    (tmp_path / "cgroup.procs").write_text(f"{os.getpid()}\n1\n")
    isolation._move_into_leaf(str(tmp_path))
    assert not (tmp_path / "lamina-server").exists()  # others are in it too
    (tmp_path / "cgroup.procs").write_text(f"{os.getpid()}\n")
    isolation._move_into_leaf(str(tmp_path))
    isolation._enable(str(tmp_path))
    assert (tmp_path / "lamina-server" / "cgroup.procs").read_text() == "0"
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"


# ------------------------------------------------------------------------------- what is left behind


def test_homes_of_a_killed_server_go_at_the_next_start_and_those_of_a_live_one_stay(tmp_path: Path) -> None:
    left = "import os, sys; from lamina.engines.isolation import Homes; print(Homes(sys.argv[1]).path, flush=True)"
    made = subprocess.run([sys.executable, "-c", f"{left}; os._exit(9)", tmp_path], capture_output=True, text=True, check=False)
    killed = Path(made.stdout.strip())
    (killed / "200000").mkdir()
    (killed / "200000" / "data").write_text("of a tenant")
    with subprocess.Popen(
        [sys.executable, "-c", f"{left}; sys.stdin.read()", tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as live:
        assert live.stdout is not None
        other = Path(live.stdout.readline().strip())
        (other / "200000").mkdir()
        (tmp_path / "lamina-homes-of-mine").mkdir()  # without a lock: not one of ours
        homes = Homes(str(tmp_path))
        assert not killed.exists()
        assert (other / "200000").is_dir() and (tmp_path / "lamina-homes-of-mine").is_dir()
        assert os.stat(homes.path).st_mode & 0o777 == 0o711
        homes.close()
        live.kill()
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted([other.name, "lamina-homes-of-mine"])
    Homes(str(tmp_path)).close()
    assert [one.name for one in tmp_path.iterdir()] == ["lamina-homes-of-mine"]


CUTTER = """
import json, os, threading, time
import lamina
app = lamina.App("acme-app")

@app.function(scale=lamina.Scale(min=1, max=1))
def cut(size):
    setup = json.loads(open("/proc/self/cmdline", "rb").read().split(b"\\0")[-2])
    folder = os.path.join(setup["folder"], setup["owner"])

    def shorten():
        until = time.monotonic() + 5
        while time.monotonic() < until:
            for name in os.listdir(folder):
                os.truncate(os.path.join(folder, name), 0)

    threading.Thread(target=shorten, daemon=True).start()
    return bytes(size)
"""


@needs_walls
def test_a_tenant_s_worker_that_cuts_its_slots_short_does_not_end_the_server(app: Path, tmp_path: Path) -> None:
    """A mapped file that is cut short ends the process that reads it: here the one that serves everybody."""

    async def work() -> None:
        async with managed(str(app), tmp_path / "kept", trusts_deployers=False) as server:
            token = await server.token("deploy", "invoke", tenant="acme")
            assert (await server.deploy("acme-app", CUTTER, token)).status == 200
            statuses = {(await server.call("/v1/functions/cut", 3_000_000, token)).status for _ in range(2)}
            assert statuses <= {200, 500, 503, 504}
            assert await server.token("invoke", tenant="acme")  # it lives, and answers

    run(work)
