"""Output tags: what a function prints says for which calls, and nothing else about it changes."""

from __future__ import annotations

import io

import pytest

from lamina.sdk.context import BatchContext, active_context
from lamina.worker.output_tags import TaggedStream, split_tag


def printed(*pieces: str, calls: tuple[str, ...] = ("c1", "c2"), function: str = "f") -> list[tuple[str, tuple[str, ...], str]]:
    real = io.StringIO()
    marked = TaggedStream(real)
    with active_context(BatchContext(call_ids=calls, function=function)):
        for piece in pieces:
            marked.write(piece)
        marked.finish()
    return [split_tag(line) for line in real.getvalue().splitlines()]


def test_each_line_names_its_function_and_its_calls() -> None:
    assert printed("one\ntwo\n") == [("f", ("c1", "c2"), "one"), ("f", ("c1", "c2"), "two")]


def test_a_line_in_pieces_is_one_line() -> None:
    assert printed("a", "b", "\n", "c") == [("f", ("c1", "c2"), "ab"), ("f", ("c1", "c2"), "c")]


def test_outside_of_a_batch_there_is_no_mark() -> None:
    assert printed("loading\n", function="") == [("", (), "loading")]


def test_a_large_batch_is_named_by_the_first_of_its_calls() -> None:
    ((_, calls, text),) = printed("x\n", calls=tuple(f"call-{number:04}" for number in range(500)))
    assert text == "x" and calls == tuple(f"call-{number:04}" for number in range(len(calls))) and 50 < len(calls) < 200


@pytest.mark.parametrize("line", ["", "plain", "\x1f", "a\x1fb\x1fc\x1fd", "\x1fonly\x1ftwo"])
def test_what_is_no_mark_stays_text(line: str) -> None:
    assert split_tag(line) == ("", (), line)
