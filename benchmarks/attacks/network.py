"""Machines on one machine: network namespaces on a bridge, whose cables can be pulled and whose packets get lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field


def sh(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)


def tries(command: str) -> bool:
    """Whether a command works here."""
    return subprocess.run(command.split(), capture_output=True, check=False).returncode == 0


def has_namespaces() -> bool:
    """Whether this user may make network namespaces."""
    if os.geteuid() or not shutil.which("ip"):
        return False
    probe = f"lamprobe{os.getpid()}"
    return tries(f"ip netns add {probe}") and tries(f"ip netns del {probe}")


@dataclass(slots=True)
class Network:
    """A bridge with this machine at `host`, and a namespace for each of the others."""

    host: str
    spaces: dict[str, str] = field(default_factory=dict)  #: by name of the machine
    links: dict[str, str] = field(default_factory=dict)  #: the end of its cable on this machine

    def within(self, name: str) -> tuple[str, ...]:
        """Command that starts another one on a machine."""
        return ("ip", "netns", "exec", self.spaces[name])

    def pull(self, name: str) -> None:
        sh(f"ip link set {self.links[name]} down")

    def plug(self, name: str) -> None:
        sh(f"ip link set {self.links[name]} up")

    def delay(self, name: str, terms: str = "delay 1ms loss 1%") -> bool:
        """Delay and loss by `tc netem` on the way to a machine; False: this kernel has none."""
        return tries(f"tc qdisc add dev {self.links[name]} root netem {terms}")

    def lose(self, name: str, percent: int) -> bool:
        """Drop so many of the packets that arrive at a machine; False: this kernel cannot."""
        rule = f"add rule inet lamina in numgen random mod 100 < {percent} drop"
        inside = " ".join(self.within(name))
        made = tries(f"{inside} nft add table inet lamina")
        made = made and tries(f"{inside} nft add chain inet lamina in {{ type filter hook input priority 0 ; }}")
        return made and tries(f"{inside} nft {rule}")

    def lose_nothing(self, name: str) -> None:
        tries(f"{' '.join(self.within(name))} nft delete table inet lamina")


@contextlib.contextmanager
def machines(*names: str) -> Iterator[Network]:
    """A network namespace for each, on one bridge with this one. Needs root."""
    tag = f"lm{os.getpid() % 10_000}"
    net = f"10.{os.getpid() % 200 + 20}.{os.getpid() // 200 % 250}"
    bridge = f"{tag}br"
    found = Network(f"{net}.1")
    try:
        sh(f"ip link add {bridge} type bridge")
        sh(f"ip addr add {net}.1/24 dev {bridge}")
        sh(f"ip link set {bridge} up")
        for number, name in enumerate(names):
            space, outer = f"{tag}{name}", f"{tag}o{number}"
            sh(f"ip netns add {space}")
            sh(f"ip link add {outer} type veth peer name eth0 netns {space}")
            sh(f"ip link set {outer} master {bridge} up")
            sh(f"ip -n {space} addr add {net}.{number + 2}/24 dev eth0")
            sh(f"ip -n {space} link set eth0 up")
            sh(f"ip -n {space} link set lo up")
            found.spaces[name], found.links[name] = space, outer
        yield found
    finally:
        for name in names:
            tries(f"ip netns del {tag}{name}")
        tries(f"ip link del {bridge}")
