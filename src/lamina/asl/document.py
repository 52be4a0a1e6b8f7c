"""State machine documents: parsing from JSON, and the errors of invalid ones."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from lamina.errors import BadFlow


@dataclass(frozen=True, slots=True)
class LintProblem:
    path: str
    clause: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: [{self.clause}] {self.message}"


class BadDocument(BadFlow):
    """Invalid state machine; `problems` are all that was found."""

    def __init__(self, problems: list[LintProblem], source: str = "", *, hint: str = "") -> None:
        prefix = f"{source}: " if source else ""
        super().__init__("\n".join(f"{prefix}{problem}" for problem in problems), hint=hint)
        self.problems = problems
        self.source = source


def parse_document(text: str | bytes, source: str = "") -> Any:
    """Parse a document from JSON; a duplicate name in one object is refused, since one of the two would be lost."""
    try:
        return json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except _DuplicateError as error:
        raise BadDocument([LintProblem("$", "JSON", str(error))], source) from None
    except (ValueError, RecursionError) as error:
        hint = "a state machine is one JSON object, with StartAt and States"
        raise BadDocument([LintProblem("$", "JSON", f"not JSON: {error}")], source, hint=hint) from None


class _DuplicateError(ValueError):
    pass


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, _ in pairs if sum(other == key for other, _ in pairs) > 1)
        raise _DuplicateError(f"{twice!r} stands twice in one object")
    return found


def _no_constant(word: str) -> Any:
    raise ValueError(f"JSON has no {word}")
