"""Unusable input files: the same words in all commands, with the name, what is wrong, what to do."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from lamina.cli import main
from lamina.errors import unreadable_file

HERE = Path(__file__).parents[2]
READERS = (
    "serve FILE.py",
    "run FILE.py f 1",
    "profile FILE.py",
    "draw FILE.py",
    "deploy FILE.py",
    "asl export FILE.py f",
    "asl lint FILE.json",
    "asl run FILE.json",
    "asl import FILE.json",
    "asl draw FILE.json",
    "asl run right.json --input @FILE.json",
    "sim FILE.toml",
    "plan FILE.toml",
    f"plan FILE.csv --profiles {HERE / 'profiles' / 'v100'}",
    "explain c1 --log FILE.jsonl",
    "profiles show FILE.json",
    "profiles plot FILE.json",
    "profiles compare FILE.json FILE.json",
    "profile right.py:f --input @FILE.json",
    "run right.py f --file FILE.json",
    "run right.py f --input x=@FILE.png",
    "call f --file FILE.json",
    "call f --input x=@FILE.png",
    "load http://127.0.0.1:9 --rate 1 --shape trace --trace FILE.csv",
    "load http://127.0.0.1:9 --rate 1 --file FILE.json",
    "sim right.toml --policy ./FILE.py",
    "lab run ./FILE.py",
)
ANY_BYTES = tuple(reader for reader in READERS if reader.endswith((".png", "--rate 1 --file FILE.json")))  #: whatever they are
SCENARIO = (HERE / "scenarios" / "quickstart.toml").read_text()


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imports_undone: None) -> None:
    monkeypatch.chdir(tmp_path)
    Path("right.py").write_text('import lamina\napp = lamina.App("small")\n\n\n@app.function()\ndef f(x):\n    return x\n')
    Path("right.json").write_text('{"StartAt": "A", "States": {"A": {"Type": "Pass", "End": true}}}')
    Path("right.toml").write_text(SCENARIO)


def told(capsys: pytest.CaptureFixture[str], command: str, name: str) -> tuple[str, str]:
    """What was wrong, and the hint; nothing else may have been said."""
    with pytest.raises(SystemExit) as ended:
        main(command.replace("FILE", name).split())
    assert ended.value.code == 2
    wrong, hint = capsys.readouterr().err.rstrip("\n").split("\n  hint: ")
    assert wrong.startswith("error: ") and "\n" not in wrong and "Errno" not in wrong and hint
    return wrong, hint


def file_of(command: str, name: str) -> str:
    """As the command is given it."""
    return next(word.rpartition("@")[2] for word in command.replace("FILE", name).split() if name in word).removeprefix("./")


@pytest.mark.parametrize("command", READERS)
def test_a_file_that_is_not_there_is_named(capsys, command: str):
    wrong, _ = told(capsys, command, "missing")
    assert wrong.endswith(f"no file {file_of(command, 'missing')!r}")


@pytest.mark.parametrize(
    "command", [one for one in READERS if not one.startswith(("deploy", "serve FILE"))]
)  # which take folders
def test_a_folder_in_its_place_is_named(capsys, command: str):
    Path(file_of(command, "folder")).mkdir()
    wrong, _ = told(capsys, command, "folder")
    assert wrong.endswith(f"{file_of(command, 'folder')!r} is a folder")


@pytest.mark.parametrize("content", [b"\x14\xb9\x02\x00\xff", b""], ids=["binary", "empty"])
@pytest.mark.parametrize("command", [reader for reader in READERS if reader not in ANY_BYTES])
def test_a_file_of_another_kind_is_named(capsys, command: str, content: bytes):
    name = file_of(command, "other")
    Path(name).write_bytes(content)
    wrong, _ = told(capsys, command, "other")
    assert name in wrong


def test_a_file_that_may_not_be_read_is_told_so_with_where_to_look():
    error = unreadable_file("app.py", PermissionError(errno.EACCES, "Permission denied"), "", field="--file")
    assert str(error) == "--file: 'app.py' may not be read by this user\n  hint: ls -l tells whose it is"


def test_a_name_that_is_nearly_right_is_guessed_beside_it(capsys):
    Path("deep").mkdir()
    Path("deep/quickstart.toml").touch()
    assert told(capsys, "sim deep/FILE.toml", "quikstart")[1] == "did you mean 'deep/quickstart.toml'?"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("srve", "No such command 'srve'. Did you mean 'serve'?"),
        ("token lst", "No such command 'lst'. Did you mean 'list'?"),
        ("help", "No such command 'help'. Did you mean '--help'?"),
        ("asl help", "No such command 'help'. Did you mean '--help'?"),
        ("profiles xyz", "No such command 'xyz'. There are compare, ls, plot, pull, show."),
    ],
)
def test_a_command_that_is_none_is_told_in_one_way(capsys, words: str, said: str):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"\nError: {said}\n")
