"""Simplification of traced flows for drawing: steps that only pass values on are left out, and so are implied edges."""

from __future__ import annotations

from lamina.core.workflow.flow import Flow, Node, Pass

Edge = tuple[str, str, str, bool]
"""From, to, label, and whether an error goes there."""


def simplified(flow: Flow, edges: list[Edge]) -> tuple[dict[str, Node], tuple[str, ...], list[Edge]]:
    """Nodes, those that start, and edges."""
    starts = list(flow.start)
    hidden = [name for name, node in flow.nodes.items() if isinstance(node, Pass)]
    if len(hidden) == len(flow.nodes):
        hidden = hidden[1:]
    kept = list(dict.fromkeys(edges))
    for name in hidden:
        before = [edge for edge in kept if edge[1] == name]
        after = [edge for edge in kept if edge[0] == name]
        through = [(a, d, label or more, caught or bad) for a, _, label, caught in before for _, d, more, bad in after if a != d]
        kept = list(dict.fromkeys([edge for edge in kept if name not in edge[:2]] + through))
        if name in starts:
            starts = list(dict.fromkeys([*(one for one in starts if one != name), *(edge[1] for edge in after)]))
    nodes = {name: node for name, node in flow.nodes.items() if name not in hidden}
    return nodes, tuple(starts) or tuple(nodes)[:1], _transitive_reduction(_without_duplicates(kept))


def _without_duplicates(edges: list[Edge]) -> list[Edge]:
    """Of several edges between two nodes, the one with words; where an error goes is another matter."""
    found: dict[tuple[str, str, bool], Edge] = {}
    for edge in edges:
        key = (edge[0], edge[1], edge[3])
        if key not in found or (edge[2] and not found[key][2]):
            found[key] = edge
    return list(found.values())


def _transitive_reduction(edges: list[Edge]) -> list[Edge]:
    """Without those that a longer way says already; words are never lost. Traced flows have no loops."""
    after: dict[str, set[str]] = {}
    for a, b, _, caught in edges:
        if not caught:  # ways that part for a decision meet again; for an error they may not even be taken
            after.setdefault(a, set()).add(b)
    reached: dict[str, set[str]] = {}

    def reach(name: str) -> set[str]:
        if name not in reached:
            reached[name] = set()
            reached[name] = set().union(*({b} | reach(b) for b in after.get(name, ())))
        return reached[name]

    def is_implied(edge: Edge) -> bool:
        a, b, label, caught = edge
        if caught:
            return any(b in reach(d) for c, d, said, bad in edges if (c, said, bad) == (a, label, True) and d != b)
        return not label and any(b in reach(other) for other in after.get(a, ()) if other != b)

    return [edge for edge in edges if not is_implied(edge)]
