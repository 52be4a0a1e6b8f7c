"""Launchers: what makes and ends machines with agents. One file each; the file name is the registration.

A launcher is told a level, not a step: `want(kind, count)` says how many nodes there ought to be, again and again, and does
nothing where there are as many. It never ends a node; `release` does, one by name. So a leader that has just taken over, and
knows of no node yet, takes none away. Everything here blocks, and is called in a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from lamina import plugins
from lamina.errors import BadValue

PACKAGE = "cluster.launchers"
DEFAULT_MAX = 8
WORDS = ("kind", "min", "max", "prefix")


class LaunchTerms(Struct, frozen=True):
    """What a launcher was told on the command line: `NAME:ARGUMENT,kind=h200,min=0,max=8,prefix=gpu-`."""

    launcher: str
    argument: str = ""
    kind: str = ""  #: of the devices its nodes bring; "": whatever they bring
    min: int = 0
    max: int = DEFAULT_MAX
    prefix: str = ""  #: of the names of its nodes; "": the launcher's own


class JoinTerms(Struct, frozen=True):
    """What an agent needs to join this cluster."""

    addresses: tuple[str, ...] = ()
    token: str = ""


class Launcher(Protocol):
    """Makes and ends nodes of one pool."""

    def want(self, kind: str, count: int) -> None:
        """See to it that there are `count` nodes. Told again and again; more than that are left alone."""
        ...

    def release(self, node: str) -> None:
        """End a node. Its agent gets a signal and the time it needs: it drains itself."""
        ...

    def makes(self, node: str) -> bool:
        """Whether a node of that name is one of its own."""
        ...

    def next_to_leave(self, nodes: Sequence[str]) -> str:
        """Which of its nodes `release` can end now; "": any."""
        ...


def parse_terms(text: str) -> LaunchTerms:
    """Terms from `--launcher`."""
    name, _, rest = text.partition(":")
    argument, *words = rest.split(",")
    if "=" in argument and argument.partition("=")[0] in WORDS:
        argument, words = "", [argument, *words]
    given: dict[str, str] = {}
    for word in words:
        key, sign, value = word.partition("=")
        if key not in WORDS or not sign or not value:
            raise BadValue(f"--launcher: {word[:80]!r} is no term", hint=f"such as kind=h200; there are {', '.join(WORDS)}")
        given[key] = value
    low, high = (_count(given.get(key, default), key) for key, default in (("min", "0"), ("max", str(DEFAULT_MAX))))
    if low > high:
        raise BadValue(f"--launcher: min={low} is more than max={high}", hint="min=0,max=8")
    return LaunchTerms(name.strip(), argument.strip(), given.get("kind", ""), low, high, given.get("prefix", ""))


def _count(text: str, key: str) -> int:
    if not text.isdecimal() or int(text) > 10_000:
        raise BadValue(f"--launcher: {key}={text[:40]!r} is no number of nodes", hint="0 to 10000")
    return int(text)


def open_launcher(terms: LaunchTerms, join: JoinTerms) -> Launcher:
    """The launcher of that name. Each module has a function `launcher(terms, join)`."""
    module = plugins.load(PACKAGE, terms.launcher)
    found: Launcher = module.launcher(terms, join)
    return found
