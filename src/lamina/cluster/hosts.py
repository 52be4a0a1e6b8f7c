"""Agents on plain hosts, started and ended over ssh or as local processes.

All that is known of an agent lies on its host: a folder `~/.lamina/agents/NODE` with its token, process id and log. So nothing
has to be remembered here, and a command repeated does no harm. What runs on a host is one `sh` script, the same here and there.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence

from msgspec import Struct

from lamina.errors import BadValue, LoadFailed

LOCAL = ("localhost", "127.0.0.1")
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10"
CONNECT_S = 60.0
_HOST = re.compile(r"([A-Za-z0-9_.-]+@)?[A-Za-z0-9][A-Za-z0-9.:-]*")
_NODE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?")

_START = """
set -e
umask 077
folder="$HOME/.lamina/agents/{node}"
mkdir -p "$folder"
cat > "$folder/token"
if [ -f "$folder/pid" ] && grep -q -a -e agent "/proc/$(cat "$folder/pid")/cmdline" 2>/dev/null; then
  echo "running $(cat "$folder/pid")"
  exit 0
fi
nohup setsid {command} --join {join} --name {node} --token-file "$folder/token" {options} >> "$folder/log" 2>&1 < /dev/null &
echo $! > "$folder/pid"
sleep 0.3
if ! kill -0 "$(cat "$folder/pid")" 2>/dev/null; then
  tail -n 3 "$folder/log" >&2
  exit 1
fi
echo "started $(cat "$folder/pid")"
"""

_STOP = """
folder="$HOME/.lamina/agents/{node}"
cat > /dev/null
pid="$(cat "$folder/pid" 2>/dev/null)" || {{ echo "none"; exit 0; }}
if grep -q -a -e agent "/proc/$pid/cmdline" 2>/dev/null; then
  kill -TERM "$pid"
  waited=0
  while kill -0 "$pid" 2>/dev/null && [ $waited -lt {tenths} ]; do sleep 0.1; waited=$((waited + 1)); done
  if kill -0 "$pid" 2>/dev/null; then kill -KILL "$pid"; echo "killed $pid"; else echo "ended $pid"; fi
else
  echo "none"
fi
rm -f "$folder/pid" "$folder/token"
"""


class AgentHost(Struct, frozen=True):
    """A host, and the name of the node on it."""

    host: str
    node: str

    @property
    def is_local(self) -> bool:
        return self.host in LOCAL


def parse_hosts(texts: Sequence[str]) -> list[AgentHost]:
    """Hosts as people write them: `user@gpu1`, or `gpu1=NODE` with a name for its node. Several on one host need names."""
    found: list[AgentHost] = []
    for text in texts:
        host, _, node = text.partition("=")
        node = node or host.rpartition("@")[2]
        if not _HOST.fullmatch(host) or not _NODE.fullmatch(node):
            raise BadValue(f"HOST: {text[:80]!r} is no host", hint="user@host, or host=NODE")
        if any(one.node == node for one in found):
            raise BadValue(f"HOST: two nodes are called {node!r}", hint=f"name them: {host}=a {host}=b")
        found.append(AgentHost(host, node))
    return found


def start_agent(at: AgentHost, join: str, token: str, *, ssh: str = SSH, program: str = "", options: Sequence[str] = ()) -> str:
    """Start an agent, unless it runs. What was done, in a word and a process id."""
    script = _START.format(
        node=at.node,
        command=program or (_here() if at.is_local else "lamina agent"),
        join=shlex.quote(join),
        options=" ".join(shlex.quote(one) for one in options),
    )
    return _run(at, script, token, ssh, CONNECT_S)


def stop_agent(at: AgentHost, grace_s: float, *, ssh: str = SSH) -> str:
    """End an agent: it drains itself for `grace_s`, then it is killed."""
    return _run(at, _STOP.format(node=at.node, tenths=int(grace_s * 10)), "", ssh, grace_s + CONNECT_S)


def _here() -> str:
    return f"{shlex.quote(sys.executable)} -m lamina agent"


def _run(at: AgentHost, script: str, told: str, ssh: str, limit_s: float) -> str:
    command = ["sh", "-c", script] if at.is_local else [*shlex.split(ssh), at.host, f"sh -c {shlex.quote(script)}"]
    try:
        done = subprocess.run(command, input=told.encode(), capture_output=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LoadFailed(f"{at.host}: {error}") from None
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip() or f"exit code {done.returncode}"
        raise LoadFailed(f"{at.host}, node {at.node}: {said[-400:]}", hint=f"~/.lamina/agents/{at.node}/log on {at.host}")
    return done.stdout.decode("utf-8", "replace").strip().rpartition("\n")[2]
