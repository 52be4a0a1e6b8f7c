"""Triggers: a clock (`@app.every`, `@app.cron`) or a change of state (`@app.on_change`) that starts a workflow."""

from __future__ import annotations

from typing import Any, Literal, get_args

from msgspec import Struct
from msgspec.structs import replace

from lamina.errors import BadValue
from lamina.sdk import cron
from lamina.sdk.binding import bind_named
from lamina.sdk.remote_target import RemoteTarget

Overlap = Literal["skip", "queue", "cancel", "allow"]
"""What becomes of a start while the run of the one before is under way: it is left out; it waits; that run is cancelled; or both
run at once."""


def checked_overlap(overlap: str | None) -> Overlap | None:
    if overlap is not None and overlap not in get_args(Overlap):
        raise BadValue(f"overlap: {overlap!r} is none of {', '.join(get_args(Overlap))}", hint='"skip" is usual for a clock')
    return overlap  # type: ignore[return-value]


class Trigger(Struct, frozen=True):
    """A trigger. `key` is a pattern (`*` matches anything) of the keys of the app's state, or of that of `workflow`."""

    kind: Literal["every", "cron", "change"]
    target: str
    every_us: int = 0
    cron: str = ""
    zone: str = "UTC"
    key: str = ""
    workflow: str = ""
    input: dict[str, Any] = {}
    takes: tuple[str, ...] = ()  #: of what a trigger tells, the parameters its target has
    overlap: Overlap | None = None  #: None: the usual one of its kind

    @property
    def on_overlap(self) -> Overlap:
        """Clocks skip: what is slower than its clock would pile up. Of changes none is left out: each may be a different one."""
        return self.overlap or ("allow" if self.kind == "change" else "skip")

    @property
    def name(self) -> str:
        """Stable name: the same after a restart, and different for triggers that mean different things."""
        whens = {"cron": f"{self.cron} {self.zone}", "every": f"{self.every_us}us", "change": f"{self.workflow}:{self.key}"}
        return f"{self.kind}/{self.target}/{whens[self.kind]}"

    def next_us(self, after_us: int) -> int:
        """Next time a clock starts it. Intervals count from 1970, so that a restart does not move them."""
        if self.kind == "cron":
            return cron.parse_cron(self.cron, self.zone).after_us(after_us)
        return (after_us // self.every_us + 1) * self.every_us

    def inputs(self, told: dict[str, Any]) -> dict[str, Any]:
        """Inputs of the call: those given with the trigger, and of `told` those it has parameters for."""
        if self.takes == ("input",):
            return {"input": {**told, **self.input}}
        return {**{name: told[name] for name in self.takes if name in told}, **self.input}


TRIGGER_PARAMETERS = {"every": ("due",), "cron": ("due",), "change": ("key", "value", "version")}
"""What a trigger tells its target."""


def bind_trigger(trigger: Trigger, target: RemoteTarget[..., Any]) -> Trigger:
    """The trigger with its target and the parameters it fills in; the target must need no others."""
    names = [param.name for param in target.params]
    takes = ("input",) if names == ["input"] else tuple(name for name in TRIGGER_PARAMETERS[trigger.kind] if name in names)
    made = replace(trigger, target=target.name, takes=takes)
    try:
        bind_named(target.params, made.inputs(dict.fromkeys(TRIGGER_PARAMETERS[trigger.kind])))
    except BadValue as error:
        told = ", ".join(TRIGGER_PARAMETERS[trigger.kind])
        raise BadValue(
            f"{target.name!r} cannot be started by itself: {error.message}", hint=f"it is told {told}; give the rest with input="
        ) from None
    return made
