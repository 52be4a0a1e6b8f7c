"""H4: the files by which a tenant's app asks for packages, and the folder they lie in, are a tenant's: neither may hang the
server, fill it, or have it read what is not the tenant's."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lamina.engines import app_environments
from lamina.engines.app_environments import AppEnvironments, find_requirements, read_apart
from lamina.errors import BadValue
from lamina.gateway.deploy.tenant_isolation import give_folder, user_of_folder
from tests.gateway.deploy.admin_fixture import managed
from tests.serving import run, write_app

USER = 200_123
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives folders to other users")


def folder_with(folder: Path, name: str, text: str) -> Path:
    folder.mkdir()
    (folder / name).write_text(text)
    return folder


LONG = ("a" + " " * 50_000 + "!", "a ;" + " " * 50_000 + "--hash", "a[" + " " * 50_000, "a >=1," + " ," * 20_000, "a" * 100_000)


@pytest.mark.parametrize("line", LONG, ids=range(len(LONG)))
def test_no_line_takes_long(tmp_path: Path, line: str) -> None:
    """A pattern holds the interpreter's lock: a line of 5,000 spaces would have stopped all of the server for an hour."""
    before = time.process_time()
    with pytest.raises(BadValue, match="is not taken"):
        find_requirements(folder_with(tmp_path / "a", "requirements.txt", f"numpy\n{line}\n"))
    assert time.process_time() - before < 2.0


@pytest.mark.parametrize(
    "marker", ["python_version > '3' --index-url http://10.0.0.1/", "python_version == '${PIP_INDEX_URL}'", "-e .", "x > '#'"]
)
def test_a_marker_has_no_options_and_no_variables(tmp_path: Path, marker: str) -> None:
    """pip puts variables of its environment in their place, and says in its error what is not right about them: the password
    of the operator's index."""
    with pytest.raises(BadValue, match="is not taken"):
        find_requirements(folder_with(tmp_path / "a", "requirements.txt", f"numpy ; {marker}\n"))


def test_markers_of_a_lock_file_do_not_double_with_each_level(tmp_path: Path) -> None:
    """Forty packages in a row, each needed by the one above under two markers: they took all memory there was."""

    def needs(name: str) -> str:
        return f"dependencies = [{{name='{name}', marker='x > 1'}}, {{name='{name}', marker='y > 1'}}]\n"

    lock = "[[package]]\nname = 'root'\nversion = '0'\nsource = { virtual = '.' }\n" + needs("p0")
    for number in range(40):
        lock += f"[[package]]\nname = 'p{number}'\nversion = '1'\nsource = {{ registry = 'https://index' }}\n"
        lock += needs(f"p{number + 1}") if number < 39 else ""
    found = find_requirements(folder_with(tmp_path / "a", "uv.lock", lock))
    assert found is not None and len(found.lines) == 40 and max(map(len, found.lines)) < 1_000


@pytest.mark.live
def test_toml_that_takes_hours_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_environments, "_READ_S", 3.0)
    began_s = time.monotonic()
    with pytest.raises(BadValue, match="within the limits"):
        read_apart(folder_with(tmp_path / "a", "pyproject.toml", ".".join("a" for _ in range(300_000)) + " = 1"))
    assert time.monotonic() - began_s < 30.0


@pytest.mark.live
@pytest.mark.parametrize("text", ["a = " + "[" * 5_000 + "]" * 5_000, "a = " + "1" * 5_000])
def test_toml_that_cannot_be_read_is_an_error_of_the_deployer(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadValue, match="not TOML"):
        read_apart(folder_with(tmp_path / "a", "pyproject.toml", text))


@pytest.mark.live
def test_what_is_read_apart_is_what_is_there(tmp_path: Path) -> None:
    for number, (name, text) in enumerate(
        (("requirements.txt", "numpy>=2\n"), ("pyproject.toml", "[tool.ruff]\n"), ("x.py", ""))
    ):
        folder = folder_with(tmp_path / str(number), name, text)
        assert read_apart(folder) == find_requirements(folder)


def test_what_many_versions_say_alike_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All versions that are kept are looked through at each deployment: a process for each held up those of all tenants."""
    folders = [folder_with(tmp_path / str(number), "requirements.txt", "numpy>=2\n") for number in range(20)]
    other, none = folder_with(tmp_path / "a", "requirements.txt", "numpy>=1\n"), folder_with(tmp_path / "b", "x.py", "")
    read: list[Path] = []
    monkeypatch.setattr(app_environments, "read_apart", lambda folder: (read.append(folder), find_requirements(folder))[1])
    made = AppEnvironments(tmp_path / "environments")
    assert len({made.key_of(folder) for folder in folders}) == 1
    assert made.key_of(folders[0], USER).startswith(f"{USER}-") and made.key_of(none) == made.key_of(none) == ""
    assert made.key_of(other) != made.key_of(folders[0])
    assert read == [folders[0], none, other]
    (folders[0] / "requirements.txt").write_text("numpy>=1\n")
    assert made.key_of(folders[0]) == made.key_of(other)


# ------------------------------------------------------------------------- the folder of a version

PLANT = """
import os, sys
os.setgroups([])
os.setresgid(*[int(sys.argv[2])] * 3)
os.setresuid(*[int(sys.argv[2])] * 3)
os.chdir(sys.argv[1])
assert open("app.py").read() == "app" and open("below/data").read() == "data"
done = []
for name in ("requirements.txt", "below/data", "new", "below/new"):
    for work in (lambda: os.unlink(name), lambda: os.symlink("/etc/shadow", name), lambda: open(name, "w").write("x")):
        try:
            work()
            done.append(name)
        except OSError:
            pass
print(done)
"""


@pytest.mark.live
@as_root
def test_a_tenant_s_code_puts_nothing_into_the_folder_of_its_version(tmp_path: Path) -> None:
    """What it put there the server read as its own user: a link in the place of requirements.txt, and an error told its first
    line; a link in the place of any file, and agents were sent what it led to."""
    for above in (tmp_path, *tmp_path.parents):
        if above.stat().st_mode & 0o005 != 0o005 and above != Path("/"):
            above.chmod(above.stat().st_mode | 0o005)
    version = tmp_path / "kept" / "app" / "1"
    (version / "below").mkdir(parents=True)
    for name, text in (("app.py", "app"), ("requirements.txt", "numpy"), ("below/data", "data")):
        (version / name).write_text(text)
    (version / "below" / "planted").symlink_to("/etc/shadow")  # by the code of a version of before
    give_folder(version, USER)
    version.parent.chmod(0o755)  # where it runs it is led to the folder by its own view of the files
    assert user_of_folder(version) == USER and not (version / "below" / "planted").is_symlink()
    command = [sys.executable, "-c", PLANT, str(version), str(USER)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr


def test_a_version_of_the_operator_s_is_the_server_s_alone(tmp_path: Path) -> None:
    version = folder_with(tmp_path / "1", "app.py", "")
    give_folder(version, 0)
    assert user_of_folder(version) == 0 and (version / "app.py").stat().st_mode & 0o777 == 0o600


# ------------------------------------------------------------------------------- turns

HANGS = "import time\nwhile True:\n    time.sleep(1)\n"
GOOD = 'import lamina\napp = lamina.App("acme-app")\n\n@app.function()\ndef fine(x):\n    return x\n'


@pytest.mark.live
def test_an_import_that_hangs_holds_up_no_deployment_of_another_tenant(tmp_path: Path) -> None:
    """It held the lock for a minute, as often as it was deployed: others did not deploy, and their canaries were not ended."""

    async def work() -> list[int]:
        async with managed(write_app(tmp_path), tmp_path / "kept") as server, asyncio.timeout(50):
            evil = await server.token("deploy", "read", tenant="evil")
            acme = await server.token("deploy", "read", tenant="acme")
            hangs = [asyncio.create_task(server.deploy("evil-app", HANGS, evil)) for _ in "12"]
            while "evil-app" not in server.admin.deployments._incoming:
                await asyncio.sleep(0.01)
            done = [
                await server.deploy("acme-app", GOOD, acme),
                await server.deploy("evil-app", GOOD.replace("acme", "evil"), acme),
                await server.ask("POST", "/v1/functions/fine/terms", b'{"max": 2}', acme),
            ]
            assert not any(task.done() for task in hangs)
            for task in hangs:
                task.cancel()
            await asyncio.gather(*hangs, return_exceptions=True)
            return [one.status for one in done]

    assert run(work) == [200, 403, 200]
