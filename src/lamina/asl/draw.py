"""Drawings of flows as text: Mermaid, which GitHub and documentation tools render, or DOT for Graphviz.

Of a flow traced from Python only what does something is drawn: steps that just pass values on, and edges that follow from
others, would hide it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lamina.asl.annotations import StepNote
from lamina.asl.export import is_asl_flow
from lamina.core.workflow.flow import (
    Choice,
    Each,
    Fail,
    FallibleNode,
    Flow,
    Node,
    Parallel,
    Pass,
    Task,
    Wait,
    inner_flows,
)

Format = Literal["mermaid", "dot"]

MAX_LABEL_CHARS = 24
MAX_NAME_CHARS = 44
MAX_NOTE_CHARS = 64

_PLAIN, _LINE, _CRITICAL = "#ffffff", "#8796a5", "#c77d11"
_FILL = {"task": "#dbe9f6", "group": "#f4f6f8", "choice": "#fdf1d3", "wait": "#ece7f6"}
_FILL |= dict.fromkeys(("pass", "succeed", "fail"), _PLAIN)
_STROKE = {"succeed": "#3b7d4f", "fail": "#b4452f"}


@dataclass(frozen=True, slots=True)
class _Edge:
    start: str
    end: str
    label: str = ""
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class _Box:
    """A node as it is drawn: an id, lines of text, and the graphs inside."""

    id: str
    kind: str
    lines: list[str]
    is_critical: bool
    inner: list[_Graph]


@dataclass(frozen=True, slots=True)
class _Graph:
    boxes: dict[str, _Box]
    edges: list[_Edge]


def draw_flow(flow: Flow, notes: Mapping[str, StepNote] | None = None, subtitle: str = "", format: Format = "mermaid") -> str:
    """Draw a flow. `notes` are shown under the names of steps: their time, slack or batch, say; critical ones stand out."""
    numbers = iter(range(1_000_000))
    graph = _graph(flow, notes or {}, lambda: f"n{next(numbers)}")
    title = f"{flow.name}  {subtitle}".strip()
    return _mermaid(graph, title) if format == "mermaid" else _dot(graph, title)


def flow_graph(flow: Flow) -> dict[str, Any]:
    """The graph that is drawn, as plain values: boxes with the graphs inside them, and edges between boxes by name."""
    numbers = iter(range(1_000_000))
    return _plain(_graph(flow, {}, lambda: f"n{next(numbers)}"))


def _plain(graph: _Graph) -> dict[str, Any]:
    return {
        "boxes": [
            {"name": name, "kind": box.kind, "lines": box.lines[1:], "inner": [_plain(inner) for inner in box.inner]}
            for name, box in graph.boxes.items()
        ],
        "edges": [{"from": edge.start, "to": edge.end, "label": edge.label, "is_error": edge.is_error} for edge in graph.edges],
    }


# ----------------------------------------------------------------------------------------------------------------- the graph


def _graph(flow: Flow, notes: Mapping[str, StepNote], new_id: Callable[[], str]) -> _Graph:
    edges = [edge for node in flow.nodes.values() for edge in _edges(node)]
    nodes = dict(flow.nodes)
    if not is_asl_flow(flow):
        nodes, edges = _simplified(nodes, edges)
    boxes = {}
    for name, node in nodes.items():
        note = notes.get(name)
        lines = [_cut(line, MAX_NAME_CHARS) for line in (name, *_details(node))]
        lines += [_cut(note.text, MAX_NOTE_CHARS)] if note else []
        inner = [_graph(part, notes, new_id) for part in inner_flows(node)]
        boxes[name] = _Box(new_id(), _kind(node), lines, note is not None and note.critical, inner)
    return _Graph(boxes, edges)


def _kind(node: Node) -> str:
    return "group" if isinstance(node, Each | Parallel) else type(node).__name__.lower()


def _details(node: Node) -> list[str]:
    match node:
        case Task():
            return ([f"calls {node.function}"] if node.function != node.name else []) + _limits(node)
        case Each() if (node.data or {}).get("block") is not None:  # a try or timeout of one item
            return _limits(node)
        case Each():
            return [f"for each item{f', {node.max_concurrency} at once' if node.max_concurrency else ''}", *_limits(node)]
        case Parallel():
            count = len(node.branches)
            return [f"{node.wait_for} of {count} branches" if node.wait_for else f"{count} branches", *_limits(node)]
        case Wait():
            return [f"wait {node.duration_us / 1e6:g} s" if node.duration_us else "wait"]
        case Fail():
            return [f"fail {node.error}".strip()]
        case Pass():
            return []
        case _:
            return [_kind(node)]


def _limits(node: FallibleNode) -> list[str]:
    policy = node.error_policy
    if policy is None:
        return []
    labels = [f"up to {max(retrier.attempts for retrier in policy.retry)} retries"] if policy.retry else []
    return labels + ([f"at most {policy.timeout_us / 1e6:g} s"] if policy.timeout_us else [])


def _edges(node: Node) -> Iterator[_Edge]:
    if isinstance(node, Choice):
        for label, branch in zip(_rules(node), node.branches, strict=True):
            yield from (_Edge(node.name, name, label) for name in branch)
        return
    yield from (_Edge(node.name, name) for name in node.next)
    if isinstance(node, FallibleNode) and node.error_policy is not None:
        labels = (node.data or {}).get("catches") or [", ".join(catcher.errors) for catcher in node.error_policy.catch]
        for catcher, errors in zip(node.error_policy.catch, labels, strict=True):
            yield from (_Edge(node.name, name, _cut(errors, MAX_LABEL_CHARS), is_error=True) for name in catcher.next)
    if isinstance(node, Task):
        yield from (_Edge(node.name, name, "may") for name in node.potential_next)


def _rules(node: Choice) -> list[str]:
    count = len(node.branches)
    data: Any = node.data if isinstance(node.data, dict) else {}
    if "asl" in data:
        labels = [_cut(_rule(rule), MAX_LABEL_CHARS) for rule in data["asl"]["Choices"]]
    else:
        labels = (
            [_cut(_expression(rule), MAX_LABEL_CHARS) for rule in data.get("rules", ())]
            if data
            else [str(i) for i in range(count)]
        )
    return [*labels, *["otherwise"] * (count - len(labels))]


def _expression(expr: list[Any]) -> str:
    """An expression of a traced workflow, about as it was written."""
    head = expr[0]
    if head in ("node", "input", "item"):
        name, *path = expr[1:] if head != "item" else ["item", *expr[1:]]
        return re.sub(r"-\d+$", "", str(name)) + "".join(f"[{key!r}]" for key in path)
    if head == "value":
        return repr(expr[1])
    if head == "not":
        return f"not {_expression(expr[1])}"
    if head in ("list", "dict", "first", "when"):
        return "..."
    return f" {head} ".join(_expression(inner) for inner in expr[1:])


_SIGNS = {"LessThanEquals": "<=", "GreaterThanEquals": ">=", "Equals": "=", "LessThan": "<", "GreaterThan": ">"}


def _rule(rule: dict[str, Any]) -> str:
    """A choice rule of a document, in short."""
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


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


# ------------------------------------------------------------------------------------------------------------ simplification


def _simplified(nodes: dict[str, Node], edges: list[_Edge]) -> tuple[dict[str, Node], list[_Edge]]:
    """Without steps that only pass values on, and without edges that others imply."""
    hidden = [name for name, node in nodes.items() if isinstance(node, Pass)]
    if len(hidden) == len(nodes):
        hidden = hidden[1:]
    remaining = dict.fromkeys(edges)
    for name in hidden:
        before = [edge for edge in remaining if edge.end == name]
        after = [edge for edge in remaining if edge.start == name]
        through = [
            _Edge(a.start, b.end, a.label or b.label, a.is_error or b.is_error) for a in before for b in after if a.start != b.end
        ]
        remaining = dict.fromkeys([edge for edge in remaining if name not in (edge.start, edge.end)] + through)
    return {name: node for name, node in nodes.items() if name not in hidden}, _transitive_reduction(_labelled(list(remaining)))


def _labelled(edges: list[_Edge]) -> list[_Edge]:
    """Of several edges between two nodes, the one with a label; where an error goes is another matter."""
    found: dict[tuple[str, str, bool], _Edge] = {}
    for edge in edges:
        key = (edge.start, edge.end, edge.is_error)
        if key not in found or (edge.label and not found[key].label):
            found[key] = edge
    return list(found.values())


def _transitive_reduction(edges: list[_Edge]) -> list[_Edge]:
    """Without edges that a longer path implies; labels are never lost. Traced flows have no loops."""
    after: dict[str, set[str]] = {}
    for edge in edges:
        if not edge.is_error:  # branches of a decision meet again; one of an error may not even be taken
            after.setdefault(edge.start, set()).add(edge.end)
    reached: dict[str, set[str]] = {}

    def reach(name: str) -> set[str]:
        if name not in reached:
            reached[name] = set()
            reached[name] = set().union(*({end} | reach(end) for end in after.get(name, ())))
        return reached[name]

    def is_implied(edge: _Edge) -> bool:
        if edge.is_error:
            twins = [one for one in edges if one.is_error and (one.start, one.label) == (edge.start, edge.label)]
            return any(edge.end in reach(one.end) for one in twins if one.end != edge.end)
        return not edge.label and any(edge.end in reach(other) for other in after.get(edge.start, ()) if other != edge.end)

    return [edge for edge in edges if not is_implied(edge)]


# ------------------------------------------------------------------------------------------------------------------- Mermaid

_SHAPES = {"choice": ("{{", "}}"), "succeed": ("([", "])"), "fail": ("([", "])"), "wait": ("(", ")")}
_ENTITIES = {"#": "#35;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "&": "#amp;", "`": "#96;", "\n": " "}


def _mermaid(graph: _Graph, title: str) -> str:
    kinds = sorted({box.kind for box in _all_boxes(graph)})
    lines = [
        *("---", f"title: {_quoted(title)}", "---", "flowchart TD"),
        *_mermaid_graph(graph, "    "),
        *(f"    classDef {kind} fill:{_FILL[kind]},stroke:{_STROKE.get(kind, _LINE)},color:#1c2733" for kind in kinds),
        f"    classDef critical stroke:{_CRITICAL},stroke-width:3px",
    ]
    return "\n".join(lines) + "\n"


def _mermaid_graph(graph: _Graph, indent: str) -> Iterator[str]:
    for box in graph.boxes.values():
        text = '"' + "<br/>".join(_mermaid_text(line) for line in box.lines) + '"'
        if box.inner:
            yield f"{indent}subgraph {box.id}[{text}]"
            for inner in box.inner:
                yield from _mermaid_graph(inner, indent + "    ")
            yield f"{indent}end"
            yield f"{indent}class {box.id} {box.kind}"
        else:
            begin, end = _SHAPES.get(box.kind, ("[", "]"))
            yield f"{indent}{box.id}{begin}{text}{end}:::{box.kind}"
        if box.is_critical:
            yield f"{indent}class {box.id} critical"
    for edge in graph.edges:
        arrow = "-.->" if edge.is_error else "-->"
        label = f'|"{_mermaid_text(edge.label)}"|' if edge.label else ""
        yield f"{indent}{graph.boxes[edge.start].id} {arrow}{label} {graph.boxes[edge.end].id}"


def _all_boxes(graph: _Graph) -> Iterator[_Box]:
    for box in graph.boxes.values():
        yield box
        for inner in box.inner:
            yield from _all_boxes(inner)


def _mermaid_text(text: str) -> str:
    return "".join(_ENTITIES.get(char, char) for char in text)


# ----------------------------------------------------------------------------------------------------------------------- DOT

_DOT_SHAPES = {"choice": "diamond", "succeed": "oval", "fail": "oval"}


def _dot(graph: _Graph, title: str) -> str:
    lines = [
        "digraph {",
        f'    graph [label={_quoted(title)}, labelloc=t, compound=true, fontname="sans-serif"]',
        '    node [shape=box, style="filled,rounded", fontname="sans-serif"]',
        '    edge [fontname="sans-serif", fontsize=11, color="#5b6b7b"]',
        *_dot_graph(graph, "    "),
        "}",
    ]
    return "\n".join(lines) + "\n"


def _dot_graph(graph: _Graph, indent: str) -> Iterator[str]:
    for box in graph.boxes.values():
        label = _quoted("\n".join(box.lines))
        colour = _CRITICAL if box.is_critical else _STROKE.get(box.kind, _LINE)
        look = f'color="{colour}", fillcolor="{_FILL[box.kind]}"' + (", penwidth=2.5" if box.is_critical else "")
        if box.inner:
            yield f"{indent}subgraph cluster_{box.id} {{"
            yield f'{indent}    graph [label={label}, style="filled,rounded", {look}]'
            for inner in box.inner:
                yield from _dot_graph(inner, indent + "    ")
            yield f"{indent}}}"
        else:
            yield f"{indent}{box.id} [label={label}, shape={_DOT_SHAPES.get(box.kind, 'box')}, {look}]"
    for edge in graph.edges:
        start, end = graph.boxes[edge.start], graph.boxes[edge.end]
        options = [f"label={_quoted(edge.label)}"] if edge.label else []
        options += ['style=dashed, color="#b4452f"'] if edge.is_error else []
        options += [f"ltail=cluster_{start.id}"] if start.inner else []
        options += [f"lhead=cluster_{end.id}"] if end.inner else []
        yield f"{indent}{_anchor(start, last=True)} -> {_anchor(end)}" + (f" [{', '.join(options)}]" if options else "")


def _anchor(box: _Box, *, last: bool = False) -> str:
    """The node an edge of a cluster is tied to: its first or last one."""
    while box.inner:
        box = list(box.inner[-1 if last else 0].boxes.values())[-1 if last else 0]
    return box.id


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
