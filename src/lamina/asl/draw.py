"""Drawing of flows as SVG: boxes downwards, inner flows inside the box of their step.

Of a flow traced from Python only what does something is drawn: steps that just pass values on, and edges that follow from
others, would hide it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

from lamina.asl.annotations import StepNote
from lamina.asl.export import is_asl_flow
from lamina.asl.layout import place
from lamina.asl.simplify import simplified
from lamina.core.workflow.flow import (
    Choice,
    Each,
    Fail,
    FallibleNode,
    Flow,
    Node,
    Parallel,
    Pass,
    Succeed,
    Task,
    Wait,
    inner_flows,
)

CHAR, LINE, PAD = 6.9, 16.0, 10.0
LABEL_CHARS, LABEL_CHAR = 24, 6.0
LOOP_X = 26.0  #: how far to the right an edge back up runs

_FILL = {Task: "#dbe9f6", Each: "#f4f6f8", Parallel: "#f4f6f8", Choice: "#fdf1d3", Wait: "#ece7f6", Pass: "#ffffff"}
_STYLE = """
text { font: 12px ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1c2733; }
.name { font-weight: 600; } .more { fill: #566473; font-size: 11px; font-weight: 400; }
.label { fill: #3c4a58; font-size: 11px; paint-order: stroke; stroke: #fff; stroke-width: 4px; stroke-linejoin: round; }
.way { fill: none; stroke: #5b6b7b; stroke-width: 1.3; } .caught { stroke: #b4452f; stroke-dasharray: 5 4; }
.box { stroke: #8796a5; stroke-width: 1; } .end { stroke: #3b7d4f; } .bad { stroke: #b4452f; }
.hot { stroke: #c77d11; stroke-width: 2.4; }
"""


@dataclass(slots=True)
class _Picture:
    width: float
    height: float
    parts: list[str] = field(default_factory=list)


def draw_flow(flow: Flow, notes: Mapping[str, StepNote] | None = None, subtitle: str = "") -> str:
    """Draw a flow. `notes` are shown under the names of steps: their time, slack or batch, say; critical ones stand out."""
    picture = _machine(flow, notes or {})
    width = max(picture.width, (len(flow.name) + len(subtitle)) * CHAR) + 4 * PAD
    height = picture.height + 6 * PAD
    body = "\n".join(picture.parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(flow.name, quote=True)}">\n'
        f"<style>{_STYLE}</style>\n"
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto-start-reverse">'
        '<path d="M0 0L8 4L0 8z" fill="#5b6b7b"/></marker></defs>\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n'
        f'<g transform="translate({2 * PAD:.0f} {4 * PAD:.0f})">\n'
        f'<text class="name" x="0" y="{-2 * PAD:.0f}">{escape(flow.name)}'
        f'<tspan class="more" dx="10">{escape(subtitle)}</tspan></text>\n{body}\n</g>\n</svg>\n'
    )


def _machine(flow: Flow, notes: Mapping[str, StepNote]) -> _Picture:
    edges = [(name, *edge) for name, node in flow.nodes.items() for edge in _edges(node)]
    nodes, starts = flow.nodes, flow.start
    if not is_asl_flow(flow):
        nodes, starts, edges = simplified(flow, edges)
    inner = {name: [_machine(part, notes) for part in inner_flows(node)] for name, node in nodes.items()}
    texts = {name: _texts(node, notes.get(name)) for name, node in nodes.items()}
    sizes = {name: _size(texts[name], inner[name]) for name in nodes}
    words = [len(label) * LABEL_CHAR for _, _, label, _ in edges]
    placed = place(sizes, [(a, b) for a, b, _, _ in edges], starts, words)
    picture = _Picture(placed.width, placed.height)
    labels: list[str] = []
    labelled: dict[str, int] = {}
    loops = 0
    for (a, b, label, caught), way in zip(edges, placed.ways, strict=True):
        kind = "way caught" if caught else "way"
        if way:
            picture.parts.append(f'<path class="{kind}" d="{_curve(way)}" marker-end="url(#tip)"/>')
            x, y = _label_at(way, row=labelled.get(a, 0) % 2)
            labelled[a] = labelled.get(a, 0) + bool(label)
        else:
            loops += 1
            right = placed.width + LOOP_X * loops
            (ax, ay), (bx, by) = placed.centre[a], placed.centre[b]
            ax, bx = ax + sizes[a][0] / 2, bx + sizes[b][0] / 2
            d = f"M{ax:.1f} {ay:.1f}C{right:.1f} {ay:.1f} {right:.1f} {by:.1f} {bx:.1f} {by:.1f}"
            picture.parts.append(f'<path class="{kind}" d="{d}" marker-end="url(#tip)"/>')
            picture.width = max(picture.width, right)
            x, y = ax + 8, ay - 5
        if label:
            anchor = "middle" if way else "start"
            labels.append(f'<text class="label" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(label)}</text>')
    for name, node in nodes.items():
        look = " hot" if name in notes and notes[name].critical else ""
        picture.parts += _box(node, texts[name], placed.centre[name], sizes[name], inner[name], look)
    picture.parts += labels
    return picture


def _texts(node: Node, note: StepNote | None) -> list[str]:
    more: list[str] = []
    block = (node.data or {}).get("block") if isinstance(node, Each) else None
    match node:
        case Task():
            more = [f"calls {node.function}"] if node.function != node.name else []
            more += _guards(node)
        case Each() if block is not None:
            more = _guards(node)
        case Each():
            limit = f", {node.max_concurrency} at once" if node.max_concurrency else ""
            more = [f"for each item{limit}", *_guards(node)]
        case Parallel():
            count = len(node.branches)
            more = [f"{node.wait_for} of {count} branches" if node.wait_for else f"{count} branches", *_guards(node)]
        case Wait():
            more = [f"wait {node.duration_us / 1e6:g} s" if node.duration_us else "wait"]
        case Fail():
            more = [f"fail {node.error}".strip()]
        case Succeed():
            more = ["succeed"]
        case Choice():
            more = ["choice"]
        case _:
            pass
    return [*(_cut(text, 44) for text in [node.name, *more]), *([_cut(note.text, 64)] if note else [])]


def _guards(node: FallibleNode) -> list[str]:
    guard = node.error_policy
    if guard is None:
        return []
    said = [f"up to {max(retrier.attempts for retrier in guard.retry)} retries"] if guard.retry else []
    return said + ([f"at most {guard.timeout_us / 1e6:g} s"] if guard.timeout_us else [])


def _size(texts: list[str], inner: list[_Picture]) -> tuple[float, float]:
    width = max(len(text) for text in texts) * CHAR + 2 * PAD
    height = len(texts) * LINE + PAD
    if inner:
        width = max(width, sum(part.width for part in inner) + (len(inner) + 1) * 2 * PAD)
        height += max(part.height for part in inner) + 3 * PAD
    return max(70.0, width), height


def _edges(node: Node) -> list[tuple[str, str, bool]]:
    """Edges of a node: target, label, and whether it is an error that goes there."""
    if isinstance(node, Choice):
        rules = _rules(node)
        return [(name, rules[index], False) for index, branch in enumerate(node.branches) for name in branch]
    found = [(name, "", False) for name in node.next]
    if isinstance(node, FallibleNode) and node.error_policy is not None:
        said = (node.data or {}).get("catches") or [", ".join(catcher.errors) for catcher in node.error_policy.catch]
        pairs = zip(node.error_policy.catch, said, strict=True)
        found += [(name, _cut(errors, LABEL_CHARS), True) for catcher, errors in pairs for name in catcher.next]
    if isinstance(node, Task):
        found += [(name, "may", False) for name in node.potential_next]
    return found


def _rules(node: Choice) -> list[str]:
    count = len(node.branches)
    data: Any = node.data if isinstance(node.data, dict) else {}
    if "asl" in data:
        said = [_cut(_rule(rule), LABEL_CHARS) for rule in data["asl"]["Choices"]]
    else:
        said = [_cut(_expr(rule), LABEL_CHARS) for rule in data.get("rules", ())] if data else [str(i) for i in range(count)]
    return [*said, *["otherwise"] * (count - len(said))]


def _expr(expr: list[Any]) -> str:
    """An expression as text, about as it was written."""
    head = expr[0]
    if head in ("node", "input", "item"):
        name, *path = expr[1:] if head != "item" else ["item", *expr[1:]]
        return re.sub(r"-\d+$", "", str(name)) + "".join(f"[{key!r}]" for key in path)
    if head == "value":
        return repr(expr[1])
    if head == "not":
        return f"not {_expr(expr[1])}"
    if head in ("list", "dict", "first", "when"):
        return "..."
    return f" {head} ".join(_expr(inner) for inner in expr[1:])


_SIGNS = {"LessThanEquals": "<=", "GreaterThanEquals": ">=", "Equals": "=", "LessThan": "<", "GreaterThan": ">"}


def _rule(rule: dict[str, Any]) -> str:
    for head, word in (("And", " and "), ("Or", " or ")):
        if head in rule:
            return word.join(_rule(inner) for inner in rule[head])
    if "Not" in rule:
        return f"not {_rule(rule['Not'])}"
    name, value = next((key, value) for key, value in rule.items() if key not in ("Variable", "Next", "Comment"))
    sign = next((sign for word, sign in _SIGNS.items() if name.removesuffix("Path").endswith(word)), name)
    if sign == name and isinstance(value, bool):
        return f"{rule['Variable']} {'' if value else 'not '}{name}"
    return f"{rule['Variable']} {sign} {value}"


def _box(
    node: Node, texts: list[str], centre: tuple[float, float], size: tuple[float, float], inner: list[_Picture], look: str
) -> list[str]:
    (x, y), (width, height) = centre, size
    left, top = x - width / 2, y - height / 2
    kind = "box bad" if isinstance(node, Fail) else "box end" if isinstance(node, Succeed) else "box"
    radius = height / 2 if isinstance(node, Succeed | Fail) else 14 if isinstance(node, Choice) else 5
    fill = _FILL.get(type(node), "#ffffff")
    shape = f'x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius:.1f}"'
    parts = [f'<rect class="{kind}{look}" {shape} fill="{fill}"/>']
    for index, text in enumerate(texts):
        style = "more" if index else "name"
        at = top + PAD / 2 + LINE * (index + 0.78)
        parts.append(f'<text class="{style}" x="{x:.1f}" y="{at:.1f}" text-anchor="middle">{escape(text)}</text>')
    if inner:
        used = sum(part.width for part in inner) + (len(inner) - 1) * 2 * PAD
        at_x, at_y = x - used / 2, top + len(texts) * LINE + 2.5 * PAD
        for part in inner:
            parts += [f'<g transform="translate({at_x:.1f} {at_y:.1f})">', *part.parts, "</g>"]
            at_x += part.width + 2 * PAD
    return parts


def _curve(way: list[tuple[float, float]]) -> str:
    """Through all points, leaving and arriving downwards."""
    d = f"M{way[0][0]:.1f} {way[0][1]:.1f}"
    for (ax, ay), (bx, by) in itertools.pairwise(way):
        middle = (ay + by) / 2
        d += f"L{bx:.1f} {by:.1f}" if ax == bx else f"C{ax:.1f} {middle:.1f} {bx:.1f} {middle:.1f} {bx:.1f} {by:.1f}"
    return d


def _label_at(way: list[tuple[float, float]], row: int) -> tuple[float, float]:
    """Where the words of an edge stand: towards its end, where edges that leave one box have parted; neighbours take turns."""
    at = 1 if len(way) > 2 and way[0][0] == way[1][0] else 0
    (ax, ay), (bx, by) = way[at], way[at + 1]
    t = 0.5 if row else 0.78
    weight = t * t * (3 - 2 * t)
    return ax + (bx - ax) * weight, ay + (by - ay) * t + 3


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
