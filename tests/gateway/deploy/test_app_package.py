"""App packages (T7, T8): uploads that try to write elsewhere, or more than they may."""

from __future__ import annotations

import io
import stat
import zipfile
from pathlib import Path

import pytest

from lamina.cluster.packages import PackageStore
from lamina.errors import BadValue
from lamina.gateway.deploy.app_package import PackageLimits, pack, pack_around, unpack
from tests.gateway.deploy.admin_fixture import zipped


def entry(name: str, data: bytes = b"x", mode: int = 0) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        info = zipfile.ZipInfo(name)
        info.external_attr = mode << 16
        archive.writestr(info, data, zipfile.ZIP_DEFLATED)
    return out.getvalue()


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "name",
    [
        "../x", "a/../../x", "/etc/x", "C:/x", "C:\\x", "..\\x", "a//x", "./x", "a/./x", ".hidden", "a/.git/x", "x\n", "x ",
        "%2e%2e%2fx", "%252e%252e/x", "\uff41.py", "\u0430.py", "x" * 300, "/".join("abcdefghi"), "-x", "~/x", "con:",
    ],
)  # fmt: skip
def test_a_name_that_is_not_plain_writes_nothing_anywhere(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadValue):
        unpack(entry(name), tmp_path / "in" / "package")
    assert not files(tmp_path)


def test_a_name_that_goes_on_behind_a_nul_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadValue):
        unpack(entry("a_b").replace(b"a_b", b"a\x00b"), tmp_path / "package")


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFSOCK])
def test_links_and_special_files_are_refused(tmp_path: Path, kind: int) -> None:
    with pytest.raises(BadValue, match="plain file"):
        unpack(entry("link", b"/etc/passwd", kind | 0o777), tmp_path / "package")
    assert not files(tmp_path)


def test_names_that_differ_in_case_alone_are_one(tmp_path: Path) -> None:
    with pytest.raises(BadValue, match="twice"):
        unpack(zipped({"app.py": b"1", "APP.py": b"2"}), tmp_path / "package")


@pytest.mark.parametrize(
    ("body", "limits"),
    [
        (zipped({f"f{number}": b"" for number in range(1_000)}), PackageLimits()),
        (zipped({"zeros": bytes(3 * 2**20)}), PackageLimits()),  # a bomb: 1 to 1000
        (zipped({"a": bytes(600), "b": bytes(600)}), PackageLimits(total_bytes=1_000)),
        (zipped({"a": bytes(600)}), PackageLimits(file_bytes=500)),
        (zipped({}), PackageLimits()),
    ],
)
def test_too_many_too_large_or_nothing_is_refused_before_a_byte_is_written(
    tmp_path: Path, body: bytes, limits: PackageLimits
) -> None:
    with pytest.raises(BadValue):
        unpack(body, tmp_path / "package", limits)
    assert not files(tmp_path)


def test_a_size_that_lies_is_found_out(tmp_path: Path) -> None:
    body = bytearray(zipped({"a": b"x" * 1_000}))
    for at in (body.index(b"PK\x01\x02") + 24, 22):  # the size, in the directory and in front of the file
        body[at : at + 4] = (10).to_bytes(4, "little")
    with pytest.raises(BadValue):
        unpack(bytes(body), tmp_path / "package")


def test_a_package_cut_short_or_damaged_is_refused_or_whole(tmp_path: Path) -> None:
    given = {"app.py": b"print('hello, and some more to be sure')" * 20, "b.txt": b"b"}
    body = zipped(given)
    for at in range(len(body)):
        for kind, broken in enumerate((body[:-at], body[at:], body[:at] + b"\xff" + body[at + 1 :], body[:at] + body[at + 1 :])):
            folder = tmp_path / f"{at}-{kind}"
            try:
                unpack(broken, folder)
            except BadValue:
                continue
            assert {path.read_bytes() for path in files(folder)} <= set(given.values())


def test_a_folder_comes_out_as_it_went_in_and_for_us_alone(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "lib").mkdir(parents=True)
    (source / "app.py").write_text("x = 1")
    (source / "lib" / "m.py").write_text("y = 2")
    (source / "__pycache__").mkdir()
    (source / "__pycache__" / "app.pyc").write_bytes(b"no")
    (source / ".env").write_text("no")
    body, name = pack(source)
    assert (body, name) == pack(source) and name == "app.py"
    unpack(body, tmp_path / "out")
    assert sorted(str(path.relative_to(tmp_path / "out")) for path in files(tmp_path / "out")) == ["app.py", "lib/m.py"]
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o700


def test_what_others_keep_beside_an_app_is_no_part_of_it(tmp_path: Path) -> None:
    """Else each server in turn would have other code for its agents, and all they have loaded would be loaded again; and a
    virtual environment has more files than a package may have."""
    app, environment = tmp_path / "app.py", tmp_path / "venv"
    app.write_text("x = 1")
    (environment / "lib").mkdir(parents=True)
    (environment / "pyvenv.cfg").touch()
    (environment / "lib" / "numpy.py").touch()
    alone = pack_around(app, False)
    assert alone == pack_around(app, False) and zipfile.ZipFile(io.BytesIO(alone[0])).namelist() == ["app.py"]
    agent = tmp_path / "agent" / "packages"
    PackageStore(agent, lambda body, folder: None)  # type: ignore[arg-type, return-value]
    (agent / ("0" * 64)).mkdir()
    (agent / ("0" * 64) / "app.py").write_text("x = 1")
    assert pack_around(app, False) == alone
