"""Explanation of a refusal in sentences, and as a sum of times, from the history of a call (`flight_recorder.call_history`).

The command line and the console show the same text. Figures are those that the policy weighed; nothing is estimated here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

LIKE = "like call "
"""Begins the reason of a rejection that was repeated from the cache; the id of the call that was decided about follows."""

NOTICED = 0.02
"""Of the time a call has: what it lay unread for is told from here on."""


class TimeTerm(NamedTuple):
    """One term of the time a call would have taken, in milliseconds."""

    name: str
    ms: float
    meaning: str


def milliseconds(value: float) -> str:
    """A time as people write it."""
    if value >= 10_000:
        return f"{value / 1000:,.1f} s"
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 1 else f"{value * 1000:.0f} µs"


def refusal_reason(told: dict[str, Any]) -> str:
    """Why a call was refused, as a word; "" if it was not."""
    return str(told.get("end", {}).get("what", "")).partition("refused: ")[2]


def repeated_call(told: dict[str, Any]) -> str:
    """The call whose rejection was repeated for this one; "" where it was decided about itself."""
    why = told.get("end", {}).get("why")
    return why[len(LIKE) :].partition(" ")[0] if isinstance(why, str) and why.startswith(LIKE) else ""


def time_terms(told: dict[str, Any]) -> list[TimeTerm]:
    """What was added up and compared with the deadline of a refused call; empty where no times were weighed."""
    why, unread_ms = told.get("end", {}).get("why"), told.get("unread_ms") or 0.0
    if not isinstance(why, dict) or "expected_ms" not in why or not why["expected_ms"]:
        return []
    expected_ms = float(why["expected_ms"])
    terms = [TimeTerm("unread", unread_ms, "in the network's buffers, before the server's process could read it")]
    terms.append(TimeTerm("expected", expected_ms, "its own time, what waits before it and what is running, by the predictions"))
    terms.append(TimeTerm("margin", expected_ms * float(why.get("margin") or 0.0), "a fixed share of that, for errors of it"))
    terms.append(
        TimeTerm("reserve", float(why.get("reserve_ms") or 0.0), "learnt from earlier calls of this target that were late")
    )
    return [term for term in terms if term.ms > 0]


def explain_refusal(told: dict[str, Any]) -> list[str]:
    """Sentences that say why a call was refused; empty if it was not."""
    reason = refusal_reason(told)
    if not reason:
        return []
    if like := repeated_call(told):
        return [
            f"It came right after call {like} of the same target, which was refused, and nothing had ended since.",
            *_short(reason),
        ]
    return _BY_REASON.get(reason, _other)(told)


def _deadline(told: dict[str, Any]) -> list[str]:
    why, goal_ms, offer_ms = told["end"].get("why"), told.get("goal_ms"), told["end"].get("offer_ms")
    shed = isinstance(why, dict) and why.get("rule") == "load shedding"
    if shed:
        said = [
            "More is asked for than the devices can do in time, so each target gets its share of them.",
            f"{told.get('target', 'Its target')} has had its share for now, and calls of others would have been late instead.",
        ]
        return [*said, f"At its share, this call would have been done after {milliseconds(offer_ms)}."] if offer_ms else said
    terms = time_terms(told)
    if not terms:
        text = (
            f"It could have been promised within {milliseconds(offer_ms)}" if offer_ms else "It could not have been done in time"
        )
        said = [f"{text}, and it had {milliseconds(goal_ms)}." if goal_ms else f"{text}."]
        return [*said, f"The policy says: {why}."] if isinstance(why, str) else said
    said, total_ms = [], sum(term.ms for term in terms)
    by_name = {term.name: term.ms for term in terms}
    unread_ms, spare_ms = by_name.get("unread", 0.0), by_name.get("margin", 0.0) + by_name.get("reserve", 0.0)
    if goal_ms is not None:
        said.append(f"It had {milliseconds(goal_ms)} from its arrival to its answer.")
        if unread_ms > NOTICED * goal_ms:
            said.append(
                f"{milliseconds(unread_ms)} of that had passed when the server read it: its process was busy, or the machine was."
            )
    then = "From then on it" if len(said) > 1 else "It"
    said.append(f"{then} was expected to take {milliseconds(by_name['expected'])}, with all that waits and runs before it.")
    if spare_ms:
        said.append(f"A promise needs {milliseconds(spare_ms)} to spare, for what predictions get wrong.")
    if goal_ms is not None and total_ms > goal_ms:
        said.append(f"Together that is {milliseconds(total_ms)}, {milliseconds(total_ms - goal_ms)} too late.")
    said.append("It was refused at once, so that the client can go elsewhere instead of waiting for an answer that comes late.")
    return said


def _quota(told: dict[str, Any]) -> list[str]:
    limit = told["end"].get("why")
    tenant = f"tenant {told['tenant']}" if told.get("tenant") else "its tenant"
    reached = (
        f"{tenant.capitalize()} may have {limit}, and had reached that."
        if limit
        else f"{tenant.capitalize()} had reached a limit."
    )
    return [reached, "Whether the devices had room for the call was not asked: limits come first."]


def _share(told: dict[str, Any]) -> list[str]:
    calls = f"calls of tenant {told['tenant']}" if told.get("tenant") else "calls without a tenant"
    return [
        f"A call of another tenant had just found no room, while {calls} were more than their part of those under way.",
        f"For a moment new {calls} are refused, until the others have their part.",
    ]


def _cost(told: dict[str, Any]) -> list[str]:
    why = told["end"].get("why")
    if not isinstance(why, dict) or "expected_cost" not in why:
        return [f"It would have cost more than its limit{f': {why}' if isinstance(why, str) else ''}."]
    return [f"In the time it had it would have cost {why['expected_cost']:.3g}, and its limit was {why['cost_limit']:.3g}."]


def _queue_full(told: dict[str, Any]) -> list[str]:
    why = told["end"].get("why")
    said = [f"The queue was full: {why}."] if isinstance(why, str) else ["The queue of one of its functions was full."]
    return [*said, "Calls of it come faster than they are served."]


def _overloaded(told: dict[str, Any]) -> list[str]:
    return [
        "More calls came than the server's own process could handle, whatever its devices could do.",
        "Each target was held to the same number of calls a second, and an ingress process refused what was over it.",
    ]


def _no_capacity(told: dict[str, Any]) -> list[str]:
    what = "it asks for more units or memory, or another kind of device, than there is, or than instances that must stand leave."
    return [f"No device here can run it: {what}"]


def _bad_value(told: dict[str, Any]) -> list[str]:
    why = told["end"].get("why")
    text = why.removeprefix("before the controller: ") if isinstance(why, str) else ""
    return [
        f"Its input does not fit{f': {text}' if text else '.'}",
        "The request itself has to be another; time or devices change nothing.",
    ]


def _other(told: dict[str, Any]) -> list[str]:
    why = told["end"].get("why")
    text = why.removeprefix("before the controller: ") if isinstance(why, str) else ""
    return [f"It was refused before anything was planned{f': {text}' if text else ''}."]


def _short(reason: str) -> list[str]:
    return ["What was found for that call holds for this one; it was not computed again."] if reason in _BY_REASON else []


_BY_REASON: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "deadline": _deadline,
    "quota": _quota,
    "share": _share,
    "cost": _cost,
    "queue-full": _queue_full,
    "overloaded": _overloaded,
    "no-capacity": _no_capacity,
    "bad-value": _bad_value,
}
