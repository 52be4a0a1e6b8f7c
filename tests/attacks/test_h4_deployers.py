"""H4: what a tenant's code has made is read with limits on size and time, and never where calls are served."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import stat
import zipfile
from pathlib import Path
from typing import Any

import pytest

from lamina.errors import BadValue, LaminaError, LoadFailed
from lamina.gateway.deploy import app_package
from lamina.gateway.deploy.app_versions import MAX_TRIGGERS, check_manifest
from lamina.sdk.triggers import Trigger
from lamina.types import FunctionSpec, QuotaSpec, ScaleSpec, Slo
from lamina.values.references import ShmRef
from lamina.values.shm import ShmReader
from lamina.values.shm_directory import BadSlot, slot_path
from lamina.worker import app_manifest
from lamina.worker.app_manifest import AppManifest, TargetDescription, describe_app
from tests.gateway.deploy.admin_fixture import zipped

GOOD = """
import lamina
app = lamina.App("good")

@app.function()
def f(x):
    return x
"""

HOSTILE = {
    "the file it is to write replaced by a pipe": """
import os, sys
try:
    os.unlink(sys.argv[2])
except OSError:
    pass
os.mkfifo(sys.argv[2])
os._exit(0)
""",
    "the file replaced by a link to zeros without end": """
import os, sys
try:
    os.unlink(sys.argv[2])
except OSError:
    pass
os.symlink("/dev/zero", sys.argv[2])
os._exit(0)
""",
    "a manifest that grows": """
import os, sys
with open(f"/proc/self/fd/{sys.argv[2]}" if sys.argv[2].isdigit() else sys.argv[2], "wb") as out:
    for _ in range(64):
        out.write(bytes(2**20))
os._exit(0)
""",
    "a length that is a lie": """
import os, sys
os.pwrite(int(sys.argv[2]), (2**62).to_bytes(8, "big"), 0)
os._exit(0)
""",
    "no JSON": """
import os, sys
os.pwrite(int(sys.argv[2]), (9).to_bytes(8, "big") + b"{[{[{[{[{", 0)
os._exit(0)
""",
    "brackets without end": """
import os, sys
deep = b'{"app":' + b'[' * 1_000_000
os.pwrite(int(sys.argv[2]), len(deep).to_bytes(8, "big") + deep, 0)
os._exit(0)
""",
    "nothing at all": "import os; os._exit(3)",
}


async def lag_ms(work: asyncio.Future[object]) -> float:
    """The longest time that the loop did not turn while this was going on."""
    loop = asyncio.get_running_loop()
    worst, last_s = 0.0, loop.time()
    while not work.done():
        await asyncio.sleep(0.005)
        worst, last_s = max(worst, loop.time() - last_s), loop.time()
    return 1_000 * worst


def described(tmp_path: Path, source: str) -> LaminaError | None:
    """What describing it came to. It must come to an end."""
    (tmp_path / "app.py").write_text(source)
    before = set(os.listdir("/proc/self/fd"))

    async def work() -> LaminaError | None:
        try:
            await asyncio.wait_for(describe_app(str(tmp_path / "app.py")), 50)
        except LaminaError as error:
            return error
        return None

    with contextlib.chdir(tmp_path):  # where what it replaces by a pipe or a link would be
        found = asyncio.run(work())
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 1
    return found


@pytest.mark.live
def test_an_app_is_described(tmp_path: Path) -> None:
    assert described(tmp_path, GOOD) is None


@pytest.mark.live
@pytest.mark.parametrize("how", HOSTILE)
def test_an_app_that_lies_about_itself_is_refused_in_time(tmp_path: Path, how: str) -> None:
    error = described(tmp_path, HOSTILE[how])
    assert isinstance(error, LoadFailed)
    assert not [path for path in tmp_path.iterdir() if path.name not in ("app.py", "__pycache__") and path.is_file()]


@pytest.mark.live
def test_an_app_with_too_many_functions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_manifest, "MAX_TARGETS", 0)
    error = described(tmp_path, GOOD)
    assert isinstance(error, LoadFailed) and "1 functions" in error.message


# ----------------------------------------------------------------------------------- packages


def unpacked(body: bytes, into: Path, limit_s: float = 30.0) -> None:
    asyncio.run(app_package.unpack_apart(body, into, limit_s))


@pytest.mark.live
def test_a_package_is_unpacked_apart_into_folders_of_its_own(tmp_path: Path) -> None:
    unpacked(zipped({"app.py": b"1", "a/b/c.py": b"2"}), tmp_path / "apps" / "mine" / "1")
    assert (tmp_path / "apps/mine/1/a/b/c.py").read_bytes() == b"2"
    for folder in ("apps", "apps/mine", "apps/mine/1", "apps/mine/1/a", "apps/mine/1/a/b"):
        assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == 0o700, folder


@pytest.mark.live
@pytest.mark.parametrize("names", [("a", "a/b"), ("a/b", "a"), ("A", "a/b"), ("a", "a/b/c"), ("a/", "a")])
def test_a_file_that_is_also_a_folder_is_refused(tmp_path: Path, names: tuple[str, str]) -> None:
    with pytest.raises(BadValue, match="package"):
        unpacked(zipped(dict.fromkeys(names, b"")), tmp_path / "package")


@pytest.mark.live
def test_what_is_wrong_with_a_package_is_said_from_there(tmp_path: Path) -> None:
    with pytest.raises(BadValue, match="not a zip file"):
        unpacked(b"nonsense", tmp_path / "package")
    with pytest.raises(BadValue, match="no name for a file"):
        unpacked(zipped({"../x": b""}), tmp_path / "package")


@pytest.mark.live
def test_a_table_of_many_names_does_not_stop_the_loop(tmp_path: Path) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for number in range(20_000):
            archive.writestr(f"f{number}", b"")

    async def work() -> None:
        unpacking = asyncio.ensure_future(app_package.unpack_apart(out.getvalue(), tmp_path / "package"))
        await lag_ms(unpacking)
        with pytest.raises(BadValue, match="20000 files"):
            await unpacking

    asyncio.run(work())


@pytest.mark.live
def test_unpacking_without_end_is_ended(tmp_path: Path) -> None:
    with pytest.raises(BadValue, match="longer than"):
        unpacked(zipped({"app.py": b"1"}), tmp_path / "package", limit_s=0.001)


# -------------------------------------------------------------------------- results in shared memory


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_a_slot_that_is_not_a_plain_file_is_refused_and_not_waited_for(tmp_path: Path, kind: str) -> None:
    ref = ShmRef("owner", 1, 10)
    path = slot_path(str(tmp_path), ref.owner, ref.slot)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        os.mkdir(path)
    else:
        os.symlink("/dev/zero", path)
    with pytest.raises(BadSlot):
        ShmReader(str(tmp_path)).view(ref)


def forged(functions: tuple[FunctionSpec, ...] = (), triggers: tuple[Trigger, ...] = ()) -> AppManifest:
    specs = functions or (FunctionSpec(name="f"),)
    return AppManifest("evil", specs, (), tuple(TargetDescription(one.name, ()) for one in specs), triggers=triggers)


@pytest.mark.parametrize(
    "trigger",
    [
        Trigger("every", "f", every_us=0),
        Trigger("every", "f", every_us=1),
        Trigger("every", "f", every_us=-1),
        Trigger("cron", "f", cron="no clock"),
        Trigger("cron", "f", cron="* * * * *", zone="../etc"),
        Trigger("change", "f", key="*a" * 100),
        Trigger("message", "f", broker="b", topic=""),
        Trigger("every", "f", every_us=10**9, id="of-another"),
        Trigger("every", "g", every_us=10**9),
    ],
    ids=str,
)
def test_a_forged_trigger_is_refused_before_anything_is_served(trigger: Trigger) -> None:
    """The code of an app writes its manifest, and need not use the SDK for it. A clock of no time at all failed where it was set
    going: in the middle of a deployment, and at every start of the server before the triggers of others."""
    with pytest.raises(BadValue):
        check_manifest(forged(triggers=(trigger,)), "evil", "evil", [])


def test_triggers_of_an_app_are_limited() -> None:
    clock = Trigger("every", "f", every_us=10**9)
    check_manifest(forged(triggers=(clock,) * MAX_TRIGGERS), "evil", "evil", [])
    with pytest.raises(BadValue, match="triggers"):
        check_manifest(forged(triggers=(clock,) * (MAX_TRIGGERS + 1)), "evil", "evil", [])


@pytest.mark.parametrize(
    "forgery",
    [
        {"cores": -1}, {"cores": 0}, {"max_batch": 0}, {"memory_mib": -5}, {"share": -0.5}, {"share": 7.0}, {"input_kib": -1},
        {"slo": Slo(latency_us=-1)}, {"slo": Slo(target=float("nan"))}, {"slo": Slo(timeout_us=-1)}, {"cache_us": -1},
        {"quota": QuotaSpec(request=-1.0)}, {"quota": QuotaSpec(limit=float("inf"))}, {"scale": ScaleSpec(idle_us=-1)},
        {"scale": ScaleSpec(min=3, max=2)},
    ],
    ids=str,
)  # fmt: skip
def test_a_forged_function_is_refused(forgery: dict[str, Any]) -> None:
    """With these numbers the controller counts for everybody."""
    with pytest.raises(BadValue, match="makes no sense"):
        check_manifest(forged((FunctionSpec(name="f", **forgery),)), "evil", "evil", [])
