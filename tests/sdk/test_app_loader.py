from __future__ import annotations

import os
import traceback
from pathlib import Path

import pytest

import lamina
from lamina.errors import BadValue, LoadFailed
from lamina.sdk.app_loader import load_app

pytestmark = pytest.mark.usefixtures("imports_undone")

ONE = 'import lamina\napp = lamina.App("one")\n'


def written(folder: Path, text: str, name: str = "my_app.py") -> str:
    file = folder / name
    file.write_text(text)
    return str(file)


def test_the_only_app_of_a_file_is_found(tmp_path: Path):
    assert load_app(written(tmp_path, ONE)).name == "one"


def test_an_app_is_found_by_its_name(tmp_path: Path):
    file = written(tmp_path, ONE + 'other = lamina.App("two")\n')
    assert load_app(f"{file}:other").name == "two"


def test_variables_are_set_while_an_app_is_imported_and_then_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("APP_NAME", "before")
    monkeypatch.delenv("APP_MORE", raising=False)
    file = written(tmp_path, 'import lamina, os\napp = lamina.App(os.environ["APP_NAME"] + os.environ["APP_MORE"])\n')
    assert load_app(file, {"APP_NAME": "one", "APP_MORE": "-more"}).name == "one-more"
    assert os.environ["APP_NAME"] == "before" and "APP_MORE" not in os.environ


def test_one_app_under_two_names_is_one_app(tmp_path: Path):
    assert load_app(written(tmp_path, ONE + "same = app\n")).name == "one"


def test_neighbours_of_the_file_can_be_imported(tmp_path: Path):
    written(tmp_path, "NAME = 'from-neighbour'\n", "neighbour_of_app.py")
    file = written(tmp_path, "import lamina, neighbour_of_app\napp = lamina.App(neighbour_of_app.NAME)\n")
    assert load_app(file).name == "from-neighbour"


def test_the_module_has_the_name_of_its_file(tmp_path: Path):
    app = load_app(written(tmp_path, ONE + "@app.function()\ndef f(x): ...\n"))
    assert app.functions["f"].__module__ == "my_app"
    assert app.functions["f"].place == "my_app.py:3"


def test_a_second_file_of_the_same_name_takes_its_place(tmp_path: Path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    load_app(written(tmp_path / "a", ONE))
    assert load_app(written(tmp_path / "b", ONE.replace("one", "two"))).name == "two"


def test_a_module_is_found_by_its_dotted_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_package").mkdir()
    written(tmp_path / "my_package", ONE, "serving.py")
    monkeypatch.chdir(tmp_path)
    assert load_app("my_package.serving:app").name == "one"


def test_a_missing_file_is_named():
    with pytest.raises(BadValue, match=r"no file 'nowhere/app\.py'"):
        load_app("nowhere/app.py")


def test_a_missing_module_is_named():
    with pytest.raises(BadValue, match=r"no module 'no_such_package\.serving'"):
        load_app("no_such_package.serving")


def test_a_file_without_an_app_says_how_to_make_one(tmp_path: Path):
    with pytest.raises(BadValue, match=r"no app in .*my_app\.py") as caught:
        load_app(written(tmp_path, "x = 1\n"))
    assert "lamina.App" in caught.value.hint


def test_several_apps_are_listed(tmp_path: Path):
    file = written(tmp_path, ONE + 'other = lamina.App("two")\n')
    with pytest.raises(BadValue, match=r"several apps in .*: app, other"):
        load_app(file)


def test_an_unknown_app_lists_the_known(tmp_path: Path):
    with pytest.raises(BadValue, match="there is app"):
        load_app(written(tmp_path, ONE) + ":nope")


def test_a_function_in_place_of_an_app_is_told_where_it_belongs(tmp_path: Path):
    file = written(tmp_path, ONE + "@app.function()\ndef shout(x): return x\n")
    with pytest.raises(BadValue, match=r"shout is no app but .* lamina run .*my_app.py shout"):
        load_app(f"{file}:shout")


def test_an_error_of_the_file_comes_with_the_users_frames_only(tmp_path: Path):
    file = written(tmp_path, "def broken():\n    raise RuntimeError('bad day')\nbroken()\n")
    with pytest.raises(LoadFailed, match="cannot be imported: RuntimeError: bad day") as caught:
        load_app(file)
    told = "".join(traceback.format_exception(caught.value.__cause__))
    assert [line.split(", in ")[1].strip() for line in told.splitlines() if ", in " in line] == ["<module>", "broken"]


@pytest.mark.parametrize("text", ["1 / 0\n", "def (:\n"])
def test_a_file_that_cannot_be_imported_is_named_as_in_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str):
    name = Path(written(tmp_path, text)).name
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LoadFailed, match=f"^{name} cannot be imported") as caught:
        load_app(name)
    assert str(tmp_path) not in caught.value.message


def test_a_syntax_error_names_its_line(tmp_path: Path):
    with pytest.raises(LoadFailed, match="SyntaxError") as caught:
        load_app(written(tmp_path, "x = 1\ndef (:\n"))
    assert "line 2" in caught.value.message


def test_a_missing_library_says_what_to_install(tmp_path: Path):
    with pytest.raises(LoadFailed, match="install 'no_such_library'"):
        load_app(written(tmp_path, "import no_such_library\n"))


def test_a_file_of_a_package_says_how_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "shop" / "web").mkdir(parents=True)
    for folder in ("shop", "shop/web"):
        (tmp_path / folder / "__init__.py").touch()
    file = tmp_path / "shop" / "web" / "main.py"
    file.write_text("from ..util import x\n")
    with pytest.raises(LoadFailed) as refused:
        load_app(str(file))
    assert refused.value.hint == "it is part of a package: name the module shop.web.main instead, from the folder above shop"
    (tmp_path / "alone.py").write_text("from .util import x\n")
    with pytest.raises(LoadFailed) as refused:
        load_app(str(tmp_path / "alone.py"))
    assert "without a dot" in refused.value.hint


@pytest.mark.parametrize(
    ("line", "told", "hint"),
    [
        ("@app.function(btach=4)\ndef f(x): ...", "@app.function has no option 'btach'", "did you mean 'batch'?"),
        ("@app.workflow(goal='1s')\ndef f(x): ...", "@app.workflow has no option 'goal'", "there are name, slo"),
        ("lamina.SLO(latncy='1s')", "SLO has no option 'latncy'", "did you mean 'latency'?"),
    ],
)
def test_an_option_that_there_is_not_is_told_as_a_wrong_value_is(tmp_path: Path, line: str, told: str, hint: str):
    with pytest.raises(BadValue) as refused:
        load_app(written(tmp_path, f"{ONE}{line}\n"))
    assert (refused.value.message, refused.value.hint) == (f"my_app.py:3: {told}", hint)


def test_a_wrong_keyword_of_another_librarys_function_stays_its_error(tmp_path: Path):
    with pytest.raises(LoadFailed, match="unexpected keyword"):
        load_app(written(tmp_path, f"{ONE}class Mine:\n    def f(self): ...\nMine().f(sideways=1)\n"))


def test_a_file_that_exits_is_an_error(tmp_path: Path):
    with pytest.raises(LoadFailed, match="SystemExit"):
        load_app(written(tmp_path, "raise SystemExit(1)\n"))


def test_a_file_with_the_name_of_a_module_in_use_is_refused(tmp_path: Path):
    with pytest.raises(BadValue, match="has the name of the module 'traceback'"):
        load_app(written(tmp_path, ONE, "traceback.py"))


def test_a_file_that_failed_can_be_loaded_once_it_is_repaired(tmp_path: Path):
    with pytest.raises(LoadFailed):
        load_app(written(tmp_path, "1 / 0\n"))
    assert load_app(written(tmp_path, ONE)).name == "one"


def test_the_public_names_are_all_there():
    assert all(getattr(lamina, name) is not None for name in lamina.__all__)


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nope'"):
        _ = lamina.Nope
