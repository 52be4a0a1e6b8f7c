"""`lamina cluster`, and machines that a launcher makes: real servers and agents as processes of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.servers import free_port
from click.testing import CliRunner, Result

from lamina.cli import root
from lamina.cluster.hosts import AgentHost, parse_hosts
from lamina.cluster.launchers import JoinTerms, LaunchTerms, open_launcher
from lamina.cluster.node_pools import NodePool
from lamina.core.actions import AddDevice, ReleaseDevice
from lamina.errors import BadValue, LoadFailed, NotFound
from tests.cluster.clusters import REPO, TOKEN, cluster
from tests.serving import Browser, run, write_app

pytestmark = pytest.mark.live

VERSION = """
import lamina

app = lamina.App("shop")


@app.function(scale=lamina.Scale(min=1, max=1))
def which(x):
    return "{version}"
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(REPO / "src"))
    (tmp_path / "home").mkdir()
    (tmp_path / "token").write_text(TOKEN)
    return tmp_path / "home"


@pytest.fixture
def server(home: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    """What a server with a port for agents says of itself."""
    (tmp_path / "app").mkdir()
    app = write_app(tmp_path / "app")
    command = [sys.executable, "-m", "lamina", "serve", str(app), "--port", "0", "--json", "--admin-port", "0", "--no-devices"]
    command += ["--agents", "127.0.0.1:0", "--join-token-file", str(tmp_path / "token"), "--store", str(tmp_path / "s.db")]
    with open(tmp_path / "server.log", "wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        if process.stdout is not None:
            process.stdout.close()
        for pid in home.glob(".lamina/agents/*/pid"):
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(pid.read_text()), signal.SIGKILL)


def lamina(*words: str) -> Result:
    return CliRunner().invoke(root, ["cluster", *words])


def said(*words: str) -> str:
    result = lamina(*words)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.output


def test_agents_go_up_are_listed_drained_and_go_down(server: dict[str, str], home: Path, tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"  # takes the host away and runs the rest here, as a shell there would
    ssh.write_text('#!/bin/sh\necho "$1" >> "$HOME/reached"\nshift\nexec sh -c "$*"\n')
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    way = ("--ssh", str(ssh))
    url = ("--admin-url", server["admin_url"])
    join = ("--join", f"127.0.0.1:{server['agents_port']}", "--token-file", str(tmp_path / "token"))
    agent = ("--agent-option", "--gpu=no", "--program", f"{sys.executable} -m lamina agent")

    assert "2 nodes are live" in said("up", "localhost=a", "far.example=b", *join, *agent, *way, *url, "--wait", "60s")
    assert (home / "reached").read_text() == "far.example\n"
    assert "running" in said("up", "localhost=a", *join, *agent)  # it runs already: nothing is done
    listed = {one["name"]: one["state"] for one in json.loads(said("status", "--json", *url))}
    assert listed == {"a": "live", "b": "live"}
    assert "cpu (" in said("status", *url)
    token = home / ".lamina" / "agents" / "a" / "token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600

    assert said("drain", "a", *url) == "a is draining\n"
    assert isinstance(lamina("drain", "nowhere", *url).exception, NotFound)
    ended = said("down", "localhost=a", "far.example=b", *way)
    assert "b: ended" in ended and "killed" not in ended
    assert said("down", "localhost=a") == "a: none\n"
    assert not token.exists()


def test_two_versions_of_a_deployed_app_are_served_side_by_side_on_an_agent(
    server: dict[str, str], home: Path, tmp_path: Path
) -> None:
    """The one beside has a name of its own, which its code does not know."""
    join = ("--join", f"127.0.0.1:{server['agents_port']}", "--token-file", str(tmp_path / "token"))
    agent = ("--agent-option", "--gpu=no", "--program", f"{sys.executable} -m lamina agent")
    url = ("--admin-url", server["admin_url"])
    said("up", "localhost=a", *join, *agent, *url, "--wait", "60s")
    shop = tmp_path / "shop.py"
    for version, traffic in (("first", ()), ("second", ("--traffic", "50"))):
        shop.write_text(VERSION.format(version=version))
        result = CliRunner().invoke(root, ["deploy", str(shop), *url, *traffic, "--timeout", "60"])
        assert result.exit_code == 0, result.output + repr(result.exception)

    async def ask() -> set[str]:
        async with Browser(int(server["url"].rpartition(":")[2])) as browser:
            return {(await browser.post("/v1/functions/which", number)).json for number in range(40)}

    assert asyncio.run(ask()) == {"first", "second"}


def test_a_host_that_fails_is_named_and_the_others_are_done(server: dict[str, str], tmp_path: Path) -> None:
    join = ("--join", f"127.0.0.1:{server['agents_port']}", "--token-file", str(tmp_path / "token"))
    program = tmp_path / "either"
    program.write_text(
        f'#!/bin/sh\n[ "$4" = bad ] && {{ echo "no disk" >&2; exit 7; }}\nexec {sys.executable} -m lamina agent "$@"\n'
    )
    program.chmod(0o700)
    result = lamina("up", "localhost=bad", "localhost=good", *join, "--program", str(program), "--agent-option", "--gpu=no")
    assert isinstance(result.exception, LoadFailed)
    assert "1 of 2 hosts failed: bad" in str(result.exception)
    assert "no disk" in result.output and "good: started" in result.output
    said("down", "localhost=good")


def test_hosts_are_named_with_or_without_their_node() -> None:
    assert parse_hosts(["ada@gpu1", "gpu2=two"]) == [AgentHost("ada@gpu1", "gpu1"), AgentHost("gpu2", "two")]


@pytest.mark.parametrize(
    ("hosts", "told"),
    [
        (["-oProxyCommand=x"], "no host"),
        (["a b"], "no host"),
        (["gpu1", "gpu1"], "two nodes are called 'gpu1'"),
        (["a=$(x)"], "no host"),
    ],
)
def test_what_is_no_host_is_told(hosts: list[str], told: str) -> None:
    with pytest.raises(BadValue, match=told):
        parse_hosts(hosts)


# ------------------------------------------------------------------------------------------ with a launcher


def test_a_device_that_the_policy_asks_for_is_a_machine_that_joins_and_one_given_back_ends(home: Path, tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    app = write_app(tmp_path / "app")
    program = tmp_path / "launch"  # `want KIND COUNT` starts the machine vm-0, `release NODE` ends it
    program.write_text(
        f"""#!/bin/sh
if [ "$1" = want ] && [ ! -e "$HOME/pid" ]; then
  setsid {sys.executable} -m lamina agent --join "$LAMINA_JOIN" --name vm-0 --gpu no --grace 2s > "$HOME/log" 2>&1 < /dev/null &
  echo $! > "$HOME/pid"
elif [ "$1" = release ]; then
  kill "$(cat "$HOME/pid")"
  echo "$2" > "$HOME/released"
fi
"""
    )
    program.chmod(0o700)
    port = free_port(2)
    terms = LaunchTerms("command", str(program), max=2, prefix="vm-")
    launcher = open_launcher(terms, JoinTerms((f"127.0.0.1:{port}",), TOKEN))

    async def work() -> None:
        async with cluster(app, tmp_path, port=port, pools=((launcher, NodePool(terms)),)) as made:
            made.engine.perform(AddDevice("cpu"))
            await made.until(lambda: made.phase("vm-0") == "live")
            (device,) = made.gateway.driver.controller.state.devices.values()
            assert device.spec.launched
            assert made.engine.pools.status()[0].boot_us > 0
            async with Browser(made.gateway.port) as browser:
                assert (await browser.post("/v1/functions/echo", 7)).json == 7
            made.engine.perform(ReleaseDevice(device.spec.id))
            await made.until(lambda: made.phase("vm-0") == "" and (home / "released").exists(), 60)
            assert (home / "released").read_text() == "vm-0\n"
            assert made.engine.pools.status()[0].wanted == 0

    try:
        run(work, 120)
    finally:
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((home / "pid").read_text()), signal.SIGKILL)


def test_a_machine_that_no_launcher_made_stays_when_it_is_given_back(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    app = write_app(tmp_path / "app")

    async def work() -> None:
        async with cluster(app, tmp_path) as made:
            made.start("one")
            await made.live("one")
            (device,) = made.gateway.driver.controller.state.devices
            assert not made.gateway.driver.controller.state.devices[device].spec.launched
            made.engine.perform(ReleaseDevice(device))
            await asyncio.sleep(0)
            assert made.phase("one") == "live"
            async with Browser(made.gateway.port) as browser:
                assert (await browser.post("/v1/functions/echo", 7)).json == 7

    run(work, 60)
