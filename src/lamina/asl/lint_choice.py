"""Linter of Choice rules: each tests one thing, and only the outermost says where to go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lamina.asl.choice_rules import COMBINED, COMPARATORS, TESTS, WITH_PATH, compared_type, has_compared_type
from lamina.asl.lint_fields import Finding
from lamina.asl.paths import PathError, json_type_of, parse_path


def choice_problems(state: dict[str, Any], path: str) -> Iterator[Finding]:
    rules = state.get("Choices")
    if not isinstance(rules, list) or not rules:
        yield f"{path}.Choices", "Choice State", "Choices must be an array of at least one rule"
        return
    for index, rule in enumerate(rules):
        yield from _rule(rule, f"{path}.Choices[{index}]", outermost=True)


def _rule(rule: Any, path: str, *, outermost: bool) -> Iterator[Finding]:
    clause = "Choice State: rules"
    if not isinstance(rule, dict):
        yield path, clause, f"a rule is an object, not a {json_type_of(rule)}"
        return
    if not outermost and "Next" in rule:
        yield f"{path}.Next", clause, "a rule inside another must not say where to go"
    if "Condition" in rule:
        yield f"{path}.Condition", "Query language", "JSONata is not supported, and Condition belongs to it"
        return
    heads = [key for key in rule if key in COMBINED or key in COMPARATORS]
    if len(heads) != 1:
        yield path, clause, f"a rule has exactly one comparison, And, Or or Not, and this has {heads or 'none'}"
        return
    head = heads[0]
    known = {head, "Comment", *(("Next",) if outermost else ()), *(() if head in COMBINED else ("Variable",))}
    for key in rule.keys() - known - {"Next"}:
        yield f"{path}.{key}", clause, f"a rule has no field {key!r}"
    if head == "Not":
        yield from _rule(rule["Not"], f"{path}.Not", outermost=False)
    elif head in COMBINED:
        inner = rule[head]
        if not isinstance(inner, list) or not inner:
            yield f"{path}.{head}", clause, f"{head} must be an array of at least one rule"
            return
        for index, part in enumerate(inner):
            yield from _rule(part, f"{path}.{head}[{index}]", outermost=False)
    else:
        yield from _comparison(rule, head, path)


def _comparison(rule: dict[str, Any], head: str, path: str) -> Iterator[Finding]:
    clause = f"Choice State: {head}"
    if "Variable" not in rule:
        yield path, clause, "a comparison needs a Variable"
    else:
        yield from _path(rule["Variable"], f"{path}.Variable", clause)
    value = rule[head]
    if head in TESTS:
        if not isinstance(value, bool):
            yield f"{path}.{head}", clause, f"must be true or false, not {value!r}"
    elif head in WITH_PATH:
        yield from _path(value, f"{path}.{head}", clause)
    elif not (isinstance(value, str) if head == "StringMatches" else has_compared_type(compared_type(head), value)):
        kind = "String" if head == "StringMatches" else compared_type(head)
        yield f"{path}.{head}", clause, f"must be a {kind.lower()} to compare with, not {value!r}"


def _path(text: Any, at: str, clause: str) -> Iterator[Finding]:
    try:
        parse_path(text if isinstance(text, str) else "")
    except PathError as error:
        yield at, f"Paths; {clause}", str(error)
