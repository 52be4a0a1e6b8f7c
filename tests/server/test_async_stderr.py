"""Async stderr: unread lines do not block the server."""

from __future__ import annotations

import io
import os
import sys

import click
import pytest

from lamina.server.async_stderr import AsyncStderr, async_stderr


def test_what_was_written_is_there_in_its_order_when_the_block_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with async_stderr():
        for number in range(100):
            print(number, file=sys.stderr)
        kept = sys.stderr
    assert stream.getvalue().split() == [str(number) for number in range(100)]
    assert sys.stderr is stream
    kept.write("later")  # a logger may still have it
    assert stream.getvalue().endswith("later")


def test_what_click_says_goes_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with async_stderr():
        click.echo("error: cannot listen", err=True)
    assert stream.getvalue() == "error: cannot listen\n"


def test_a_pipe_that_is_not_read_stops_nothing_and_what_is_left_out_is_counted() -> None:
    ours, theirs = os.pipe()
    with open(theirs, "w") as full, open(ours) as reader:
        stream = AsyncStderr(full, most_chars=200_000)
        for _ in range(4_000):
            stream.write("x" * 99 + "\n")  # 400 kB; a pipe takes 64
        seen = [reader.readline() for _ in range(1_900)]
        stream.write("the next\n")
        later = reader.readline()
        while "the next" not in later and "dropped" not in later:
            later = reader.readline()
        stream.close()
    assert set(seen) == {"x" * 99 + "\n"}
    assert "pieces were dropped here" in later
