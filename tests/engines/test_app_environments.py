"""Environments of apps: what a folder asks for is read with care, installed once, and removed when nothing needs it."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from lamina.engines.app_environments import AppEnvironments, EnvironmentOptions, find_requirements
from lamina.errors import BadValue, LoadFailed
from tests.engines.wheels import make_wheel

LOCK = """
version = 1
requires-python = ">=3.11"

[[package]]
name = "shop"
version = "0.1.0"
source = { virtual = "." }
dependencies = [
    { name = "tiny" },
    { name = "other", marker = "sys_platform == 'win32'" },
]

[package.dev-dependencies]
dev = [{ name = "unwanted" }]

[[package]]
name = "tiny"
version = "1.0"
source = { registry = "https://pypi.org/simple" }
dependencies = [{ name = "below" }]
wheels = [{ url = "https://files.example/tiny.whl", hash = "sha256:HASH1" }]

[[package]]
name = "below"
version = "3.1"
source = { registry = "https://pypi.org/simple" }
wheels = [{ url = "https://files.example/below.whl", hash = "sha256:HASH2" }]

[[package]]
name = "other"
version = "2.0"
source = { registry = "https://pypi.org/simple" }
dependencies = [{ name = "below" }]
wheels = []

[[package]]
name = "unwanted"
version = "1.0"
source = { registry = "https://pypi.org/simple" }
wheels = []
""".replace("HASH1", "a" * 64).replace("HASH2", "b" * 64)


def asked(folder: Path, **files: str) -> tuple[str, ...]:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    found = find_requirements(folder)
    return found.lines if found is not None else ()


def test_packages_are_read_without_comments_and_without_lamina_itself(tmp_path: Path) -> None:
    text = "# ours\nnumpy >=1.26,<3  # arrays\n\nlamina==0.1\nrequests[socks]==2.0 ; python_version < '4'\n"
    assert asked(tmp_path / "a", requirements__txt=text) == ("numpy >=1.26,<3", "requests[socks]==2.0 ; python_version < '4'")


def test_hashes_over_several_lines_are_kept(tmp_path: Path) -> None:
    text = f"tiny==1.0 \\\n    --hash=sha256:{'A' * 64} \\\n    --hash=sha256:{'b' * 64}\n"
    lines = asked(tmp_path / "a", requirements__txt=text)
    assert lines == (f"tiny==1.0 --hash=sha256:{'a' * 64} --hash=sha256:{'b' * 64}",)


@pytest.mark.parametrize(
    "line",
    [
        "-r /etc/passwd",
        "--index-url http://10.0.0.1/simple",
        "--extra-index-url=http://internal/",
        "-e .",
        "./wheels/x.whl",
        "/etc/shadow",
        "tiny @ http://169.254.169.254/latest",
        "tiny @ file:///etc/passwd",
        "git+https://host/x.git",
        "tiny==1.0 --install-option=x",
        "-f http://host/",
        "tiny ; python_version < '3' @ http://host",
        "http://host/x.whl",
        "tiny==1.0 -r other.txt",
    ],
)
def test_lines_that_lead_elsewhere_are_refused_with_their_number(tmp_path: Path, line: str) -> None:
    with pytest.raises(BadValue, match=r"requirements.txt: line 2: .* is not taken"):
        asked(tmp_path / "a", requirements__txt=f"numpy\n{line}\n")


def test_dependencies_of_a_project_are_read_and_a_file_of_tools_alone_is_none(tmp_path: Path) -> None:
    assert asked(tmp_path / "a", pyproject__toml='[project]\nname = "x"\ndependencies = ["tiny>=1"]\n') == ("tiny>=1",)
    assert asked(tmp_path / "b", pyproject__toml="[tool.ruff]\nline-length = 100\n") == ()


def test_a_lock_file_gives_what_its_project_needs_with_markers_and_hashes(tmp_path: Path) -> None:
    lines = asked(tmp_path / "a", uv__lock=LOCK, requirements__txt="ignored==1")
    assert lines == (
        f"below==3.1 --hash=sha256:{'b' * 64}",
        "other==2.0 ; (sys_platform == 'win32')",
        f"tiny==1.0 --hash=sha256:{'a' * 64}",
    )


def test_a_lock_file_with_a_package_from_elsewhere_is_refused(tmp_path: Path) -> None:
    changed = LOCK.replace(
        'registry = "https://pypi.org/simple" }\ndependencies = [{ name = "below" }]\nwheels = [{', 'git = "x" }\nwheels = [{'
    )
    with pytest.raises(BadValue, match="'tiny' comes from git, not from an index"):
        asked(tmp_path / "a", uv__lock=changed)


# ----------------------------------------------------------------------- building


def environments(tmp_path: Path, **options: object) -> AppEnvironments:
    make_wheel(tmp_path / "wheels", "tiny", "1.0")
    make_wheel(tmp_path / "wheels", "tiny", "2.0")
    make_wheel(tmp_path / "wheels", "msgspec", "0.0.1")
    return AppEnvironments(
        tmp_path / "environments",
        EnvironmentOptions(wheelhouse=str(tmp_path / "wheels"), **options),  # type: ignore[arg-type]
    )


def folder_with(tmp_path: Path, name: str, requirements: str) -> Path:
    asked(tmp_path / name, requirements__txt=requirements)
    return tmp_path / name


def printed(python: str, code: str) -> str:
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.live
def test_an_environment_has_its_packages_and_lamina_behind_them(tmp_path: Path) -> None:
    python = asyncio.run(environments(tmp_path).ensure(folder_with(tmp_path, "a", "tiny==1.0\n")))
    import lamina

    assert printed(python, "import tiny, lamina; print(tiny.version, lamina.__file__)") == f"1.0 {lamina.__file__}"


@pytest.mark.live
def test_the_same_packages_are_installed_once_and_others_apart(tmp_path: Path) -> None:
    made = environments(tmp_path)
    first = asyncio.run(made.ensure(folder_with(tmp_path, "a", "tiny==1.0\n")))
    again = asyncio.run(made.ensure(folder_with(tmp_path, "b", "# another text\ntiny==1.0\n")))
    other = asyncio.run(made.ensure(folder_with(tmp_path, "c", "tiny==2.0\n")))
    assert first == again != other


@pytest.mark.live
def test_packages_that_are_not_there_fail_with_the_last_lines_of_the_installer_and_leave_nothing(tmp_path: Path) -> None:
    made = environments(tmp_path)
    with pytest.raises(LoadFailed, match="cannot be installed") as caught:
        asyncio.run(made.ensure(folder_with(tmp_path, "a", "tiny==9.9\n")))
    assert "tiny==9.9" in caught.value.message
    assert [one for one in (tmp_path / "environments").iterdir() if one.is_dir()] == []


@pytest.mark.live
def test_a_version_that_lamina_cannot_run_with_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match="msgspec"):
        asyncio.run(environments(tmp_path).ensure(folder_with(tmp_path, "a", "msgspec==0.0.1\n")))


@pytest.mark.live
def test_packages_larger_than_the_limit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match="at most"):
        asyncio.run(environments(tmp_path, limit_bytes=1_000).ensure(folder_with(tmp_path, "a", "tiny==1.0\n")))


@pytest.mark.live
def test_an_installer_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match="not installed within"):
        asyncio.run(environments(tmp_path, limit_s=0.0).ensure(folder_with(tmp_path, "a", "tiny==1.0\n")))


@pytest.mark.live
def test_a_build_that_was_killed_is_done_again(tmp_path: Path) -> None:
    made = environments(tmp_path)
    folder = folder_with(tmp_path, "a", "tiny==1.0\n")
    half = tmp_path / "environments" / made.key_of(folder) / "bin"
    half.mkdir(parents=True)
    (half / "python").write_text("half of it")
    assert printed(asyncio.run(made.ensure(folder)), "import tiny; print(tiny.version)") == "1.0"


@pytest.mark.live
def test_two_servers_that_share_a_folder_build_one_environment(tmp_path: Path) -> None:
    one, other = environments(tmp_path), environments(tmp_path)
    folder = folder_with(tmp_path, "a", "tiny==1.0\n")

    async def both() -> list[str]:
        return await asyncio.gather(one.ensure(folder), other.ensure(folder))

    first, second = asyncio.run(both())
    assert first == second and printed(first, "import tiny; print(tiny.version)") == "1.0"


@pytest.mark.live
def test_environments_that_nothing_asks_for_are_removed(tmp_path: Path) -> None:
    made = environments(tmp_path)
    kept, gone = folder_with(tmp_path, "a", "tiny==1.0\n"), folder_with(tmp_path, "b", "tiny==2.0\n")
    for folder in (kept, gone):
        asyncio.run(made.ensure(folder))
    assert made.collect([made.key_of(kept)]) == []  # fresh ones stay: their version may be on its way
    assert made.collect([made.key_of(kept)], min_age_s=0.0) == [made.key_of(gone)]
    assert sorted(one.name for one in (tmp_path / "environments").iterdir() if one.is_dir()) == [made.key_of(kept)]
