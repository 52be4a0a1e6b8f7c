"""Node registry: which machines there are, and what is believed of each. A pure state machine; time is an argument.

A node is one agent: the devices of one machine. What it does is believed under its open *incarnation* alone: each accepted
hello opens a new one and closes the one before, and nothing that a closed one says counts. Beats say that a node lives. One
that misses a few is suspect: what it runs is waited for, and nothing new is sent there. One that is silent for longer is lost.

Time that this server itself could not look does not count: a leader that was frozen has not heard from any node, and none of
them is to blame.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from msgspec import Struct

from lamina.errors import LaminaError

BEAT_US = 100_000
"""Interval of a node's beats."""

SUSPECT_US = 300_000
"""Silence after which a node gets nothing new: three beats."""

LOST_US = 900_000
"""Silence after which a node is lost, and what ran there runs elsewhere: with the look that finds it and the second run, a caller
of short work is answered within a second."""

LATE_US, STUCK_US = 1_000_000, 10_000_000
"""How late the event loop of a node may be before it gets nothing new, and before it is lost. Its beats go on, for they have a
thread of their own, and nothing that it is told is done."""

FENCE_US = 3_000_000
"""How long an agent starts work without a word from its leader. Longer than `LOST_US`: it only has to end before a second copy of
work that must not run twice could begin, and such work is never sent elsewhere."""

FORGET_US = 60_000_000
"""How long a lost node is listed."""

LOOK_US = 50_000
"""How often the registry is to be looked at."""


class NodePhase(StrEnum):
    """Phases of a node."""

    JOINING = "joining"  #: its agent has said hello, and opens its devices
    LIVE = "live"
    SUSPECT = "suspect"  #: beats are missing: nothing new is sent there, what runs is waited for
    DRAINING = "draining"  #: its instances are replaced elsewhere, then it leaves
    LOST = "lost"  #: what ran there has been given up
    GONE = "gone"  #: it has left, or was lost for long: the next hello is that of a new node


NODE_TRANSITIONS: dict[NodePhase, dict[str, NodePhase]] = {
    NodePhase.JOINING: {"open": NodePhase.LIVE, "lose": NodePhase.LOST, "leave": NodePhase.GONE},
    NodePhase.LIVE: {
        "miss": NodePhase.SUSPECT,
        "drain": NodePhase.DRAINING,
        "lose": NodePhase.LOST,
        "leave": NodePhase.GONE,
    },
    NodePhase.SUSPECT: {
        "beat": NodePhase.LIVE,
        "drain": NodePhase.DRAINING,
        "lose": NodePhase.LOST,
        "leave": NodePhase.GONE,
    },
    NodePhase.DRAINING: {"lose": NodePhase.LOST, "leave": NodePhase.GONE},
    NodePhase.LOST: {"hello": NodePhase.JOINING, "leave": NodePhase.GONE},
    NodePhase.GONE: {"hello": NodePhase.JOINING},
}

OPEN = frozenset({NodePhase.JOINING, NodePhase.LIVE, NodePhase.SUSPECT, NodePhase.DRAINING})
"""Phases in which an incarnation is open."""


class NameTaken(LaminaError):
    """A second agent under the name of one that lives, and is newer."""

    status = 409
    code = "name-taken"


@dataclass(slots=True)
class NodeRecord:
    """What is known of one node. Written by the registry alone."""

    name: str
    phase: NodePhase
    incarnation: int  #: the last one opened
    boot_us: int  #: when its agent process began, since 1970 on its own clock: of two under one name the newer counts
    address: str = ""
    joined_us: int = 0
    heard_us: int = 0  #: when it last gave a sign of life
    since_us: int = 0  #: of its phase
    beats: int = 0
    rtt_us: int = 0
    lag_us: int = 0  #: how late its event loop is
    is_leaving: bool = False  #: it is to be drained, also when it comes back after a cut

    @property
    def is_open(self) -> bool:
        return self.phase in OPEN


class NodeChange(Struct, frozen=True):
    """A change of phase; `incarnation` is the one it is about."""

    node: str
    incarnation: int
    before: NodePhase
    after: NodePhase
    reason: str = ""


class NodeRegistry:
    """All nodes of one leader. Every method takes the time, and returns what has changed, in order."""

    def __init__(
        self, suspect_us: int = SUSPECT_US, lost_us: int = LOST_US, forget_us: int = FORGET_US, look_us: int = LOOK_US
    ) -> None:
        self.nodes: dict[str, NodeRecord] = {}
        self._suspect_us, self._lost_us, self._forget_us, self._look_us = suspect_us, lost_us, forget_us, look_us
        self._looked_us = -1
        self._incarnations = 0

    def is_current(self, name: str, incarnation: int) -> bool:
        """Whether what this incarnation says is believed."""
        node = self.nodes.get(name)
        return node is not None and node.is_open and node.incarnation == incarnation

    # ------------------------------------------------------------------- events

    def hello(self, now_us: int, name: str, boot_us: int, address: str = "") -> tuple[int, list[NodeChange]]:
        """A new incarnation, which closes the one before. Raises `NameTaken` if that one lives and is of a newer agent."""
        changes: list[NodeChange] = []
        node = self.nodes.get(name)
        if node is not None and node.is_open:
            if boot_us < node.boot_us and node.phase is not NodePhase.SUSPECT:
                raise NameTaken(
                    f"another agent serves as node {name!r}, and was started later",
                    hint="give each agent a --name of its own, or end one of the two",
                )
            changes += self._move(now_us, node, "lose", "replaced")
        self._incarnations += 1
        if node is None:
            node = NodeRecord(name, NodePhase.GONE, 0, 0)
            self.nodes[name] = node
        before = node.phase
        node.phase = NODE_TRANSITIONS[before]["hello"]
        node.is_leaving = node.is_leaving and node.boot_us == boot_us
        node.incarnation, node.boot_us, node.address = self._incarnations, boot_us, address
        node.joined_us = node.heard_us = node.since_us = now_us
        node.beats = node.rtt_us = node.lag_us = 0
        changes.append(NodeChange(name, node.incarnation, before, node.phase))
        return node.incarnation, changes

    def opened(self, now_us: int, name: str, incarnation: int) -> list[NodeChange]:
        """Its devices are open."""
        node = self._current(name, incarnation)
        if node is None or node.phase is not NodePhase.JOINING:
            return []
        node.heard_us = max(node.heard_us, now_us)
        opened = self._move(now_us, node, "open")
        return opened + self._move(now_us, node, "drain", "drain") if node.is_leaving else opened

    def beat(
        self, now_us: int, name: str, incarnation: int, rtt_us: int = 0, lag_us: int = 0, unheard_us: int = 0
    ) -> list[NodeChange]:
        """A sign of life. One that says that it has not heard this server for `unheard_us` counts for as long ago, less the two
        beats that are usual: a node that cannot be told anything is as good as silent."""
        node = self._current(name, incarnation)
        if node is None:
            return []
        node.heard_us = max(node.heard_us, now_us - max(0, unheard_us - 2 * BEAT_US))
        node.beats += 1
        node.lag_us = lag_us
        if lag_us >= STUCK_US:
            return self._move(now_us, node, "lose", "its event loop stands still")
        if rtt_us:
            node.rtt_us = rtt_us if not node.rtt_us else node.rtt_us + (rtt_us - node.rtt_us) // 8
        if node.phase is NodePhase.LIVE and lag_us >= LATE_US:
            return self._move(now_us, node, "miss", "its event loop is late")
        is_back = node.phase is NodePhase.SUSPECT and now_us - node.heard_us < self._suspect_us and lag_us < LATE_US
        return self._move(now_us, node, "beat") if is_back else []

    def lose(self, now_us: int, name: str, incarnation: int, reason: str) -> list[NodeChange]:
        """Its connection has ended, it says that it is fenced, or its launcher says that it is gone."""
        node = self._current(name, incarnation)
        return self._move(now_us, node, "lose", reason) if node is not None else []

    def drain(self, now_us: int, name: str) -> list[NodeChange]:
        """It is to leave; one that joins just now when its devices are open."""
        node = self.nodes.get(name)
        if node is not None and node.is_open:
            node.is_leaving = True
        if node is None or node.phase not in (NodePhase.LIVE, NodePhase.SUSPECT):
            return []
        return self._move(now_us, node, "drain", "drain")

    def leave(self, now_us: int, name: str, incarnation: int) -> list[NodeChange]:
        """Its agent has said that it ends, with nothing left to do."""
        node = self._current(name, incarnation)
        return self._move(now_us, node, "leave", "left") if node is not None else []

    def look(self, now_us: int) -> list[NodeChange]:
        """Find nodes that are silent. To be called every `look_us`; what it was late by counts for no node."""
        if self._looked_us >= 0:
            blind_us = now_us - self._looked_us - 2 * self._look_us
            if blind_us > 0:
                for node in self.nodes.values():
                    node.heard_us = min(now_us, node.heard_us + blind_us)
        self._looked_us = now_us
        changes: list[NodeChange] = []
        for node in list(self.nodes.values()):
            silent_us = now_us - node.heard_us
            if node.is_open and silent_us >= self._lost_us:
                changes += self._move(now_us, node, "lose", "silent")
            elif node.phase is NodePhase.LIVE and silent_us >= self._suspect_us:
                changes += self._move(now_us, node, "miss", "silent")
            elif node.phase is NodePhase.LOST and now_us - node.since_us >= self._forget_us:
                changes += self._move(now_us, node, "leave", "lost for long")
        for name in [name for name, node in self.nodes.items() if node.phase is NodePhase.GONE]:
            del self.nodes[name]
        return changes

    # ------------------------------------------------------------------ inside

    def _current(self, name: str, incarnation: int) -> NodeRecord | None:
        node = self.nodes.get(name)
        return node if node is not None and node.is_open and node.incarnation == incarnation else None

    def _move(self, now_us: int, node: NodeRecord, event: str, reason: str = "") -> list[NodeChange]:
        before, after = node.phase, NODE_TRANSITIONS[node.phase][event]
        node.phase, node.since_us = after, now_us
        return [NodeChange(node.name, node.incarnation, before, after, reason)]
