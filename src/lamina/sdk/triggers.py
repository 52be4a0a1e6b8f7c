"""Triggers: a clock (`@app.every`, `@app.cron`), a change of state (`@app.on_change`) or a message of a broker
(`@app.on_message`) that starts a workflow."""

from __future__ import annotations

from typing import Any, Literal, Protocol, get_args

from msgspec import Struct
from msgspec.structs import replace

from lamina.errors import BadValue, checked_text
from lamina.sdk.binding import Param, bind_named
from lamina.sdk.cron import parse_cron
from lamina.types import NEVER_US
from lamina.units import parse_us

Overlap = Literal["skip", "queue", "cancel", "allow"]
"""What becomes of a start while the run of the one before is under way: it is left out; it waits; that run is cancelled; or both
run at once."""


def checked_overlap(overlap: str | None) -> Overlap | None:
    if overlap is not None and overlap not in get_args(Overlap):
        raise BadValue(f"overlap: {overlap!r} is none of {', '.join(get_args(Overlap))}", hint='"skip" is usual for a clock')
    return overlap  # type: ignore[return-value]


class Trigger(Struct, frozen=True):
    """A trigger. `key` is a pattern (`*` matches anything) of the keys of the app's state, or of that of `workflow`; `topic` is
    one of the `broker` that the operator has named so. `id` is that of one which was added to a running server."""

    kind: Literal["every", "cron", "change", "message"]
    target: str
    every_us: int = 0
    cron: str = ""
    zone: str = "UTC"
    key: str = ""
    workflow: str = ""
    input: dict[str, Any] = {}
    takes: tuple[str, ...] = ()  #: of what a trigger tells, the parameters its target has
    overlap: Overlap | None = None  #: None: the usual one of its kind
    broker: str = ""
    topic: str = ""
    id: str = ""

    @property
    def on_overlap(self) -> Overlap:
        """Clocks skip: what is slower than its clock would pile up. Of changes and messages none is left out: each may be a
        different one."""
        return self.overlap or ("allow" if self.kind in ("change", "message") else "skip")

    @property
    def name(self) -> str:
        """Stable name: the same after a restart, and different for triggers that mean different things."""
        return f"{self.kind}/{self.target}/{self.when}" + (f"#{self.id}" if self.id else "")

    @property
    def when(self) -> str:
        """What starts it, in a few words."""
        match self.kind:
            case "cron":
                return f"{self.cron} {self.zone}"
            case "every":
                return f"{self.every_us}us"
            case "change":
                return f"{self.workflow}:{self.key}"
        return f"{self.broker}:{self.topic}"

    def next_us(self, after_us: int) -> int:
        """Next time a clock starts it. Intervals count from 1970, so that a restart does not move them."""
        if self.kind == "cron":
            return parse_cron(self.cron, self.zone).after_us(after_us)
        return (after_us // self.every_us + 1) * self.every_us

    def inputs(self, told: dict[str, Any]) -> dict[str, Any]:
        """Inputs of the call: those given with the trigger, and of `told` those it has parameters for."""
        if self.takes == ("input",):
            return {"input": {**told, **self.input}}
        return {**{name: told[name] for name in self.takes if name in told}, **self.input}


TRIGGER_PARAMETERS = {
    "every": ("due",),
    "cron": ("due",),
    "change": ("key", "value", "version"),
    "message": ("topic", "message", "message_id"),
}
"""What a trigger tells its target."""


MAX_TOPIC = 1_024
MAX_STARS = 16


class TriggerTarget(Protocol):
    """What a trigger can start."""

    @property
    def name(self) -> str: ...

    @property
    def params(self) -> tuple[Param, ...]: ...


def make_trigger(
    *,
    every: str = "",
    cron: str = "",
    zone: str = "UTC",
    on_change: str = "",
    workflow: str = "",
    broker: str = "",
    topic: str = "",
    input: dict[str, Any] | None = None,
    overlap: str | None = None,
    id: str = "",
) -> Trigger:
    """A trigger without its target; exactly one of `every`, `cron`, `on_change` and `broker` says when it starts."""
    given = [name for name, value in (("every", every), ("cron", cron), ("on_change", on_change), ("broker", broker)) if value]
    if len(given) != 1:
        said = " and ".join(given) or "nothing"
        raise BadValue(f"trigger: {said} says when it starts", hint="give one of every, cron, on_change, or broker with topic")
    common: dict[str, Any] = {"input": input or {}, "overlap": checked_overlap(overlap), "id": id}
    match given[0]:
        case "every":
            return checked_trigger(Trigger("every", "", every_us=parse_us(every, "every"), **common))
        case "cron":
            return checked_trigger(Trigger("cron", "", cron=cron, zone=zone, **common))
        case "on_change":
            return checked_trigger(Trigger("change", "", key=on_change, workflow=workflow, **common))
    return checked_trigger(Trigger("message", "", broker=broker, topic=topic, **common))


def checked_trigger(trigger: Trigger) -> Trigger:
    """The trigger, if it can be served. Those of deployed apps come from code that may have written anything."""
    key, topic = trigger.key, trigger.topic
    match trigger.kind:
        case "every":
            if not 100_000 <= trigger.every_us < NEVER_US:
                raise BadValue(f"every: '{trigger.every_us / 1_000:g}ms' is too often, or never", hint="at least 100ms")
        case "cron":
            parse_cron(trigger.cron, trigger.zone)
        case "change":
            if len(key) > MAX_TOPIC or key.count("*") > MAX_STARS:
                raise BadValue(
                    f"on_change: {key[:60]!r} is too long", hint=f"up to {MAX_TOPIC} characters, and {MAX_STARS} times *"
                )
            checked_text("on_change", key)
        case "message":
            if not 1 <= len(topic) <= MAX_TOPIC:
                hint = f"1 to {MAX_TOPIC}: a topic, subject or queue"
                raise BadValue(f"topic: {topic[:60]!r} has {len(topic)} characters", hint=hint)
            checked_text("topic", topic)
    return trigger


def bind_trigger(trigger: Trigger, target: TriggerTarget) -> Trigger:
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
