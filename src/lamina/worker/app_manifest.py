"""App manifest: what an app contains, found in a process of its own: `python -m lamina.worker.app_manifest APP FD` writes JSON.

Importing an app runs its code, and the right to deploy does not include the gateway's memory or time. So the manifest is not a
file with a name, which that code could replace by a pipe or a link: it is memory without one, sealed at its size.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from typing import Any

import msgspec
from msgspec import Struct

from lamina.core.workflow.flow import Flow
from lamina.errors import BadValue, LaminaError, LoadFailed
from lamina.ipc.confined_exec import confined_command
from lamina.ipc.confinement import Confinement, clean_environment, enter, process_namespace
from lamina.sdk.binding import Param
from lamina.sdk.tensors import Signature
from lamina.sdk.triggers import Trigger
from lamina.types import FunctionSpec

IMPORT_LIMIT_S = 60.0
MAX_BYTES = 2 * 2**20
"""Of a manifest: two thousand functions fit, and to decode it takes the loop's thread some ten milliseconds."""

MAX_TARGETS, MAX_NODES = 1_000, 10_000
_HEAD = 8  #: bytes of its length


class TargetDescription(Struct, frozen=True):
    """Description of a function or a workflow, as clients see it."""

    name: str
    params: tuple[Param, ...]
    doc: str = ""
    signature: Signature | None = None
    returns: dict[str, Any] = {}  #: JSON Schema of a result


class AppManifest(Struct, frozen=True):
    app: str
    functions: tuple[FunctionSpec, ...]
    flows: tuple[Flow, ...]
    about: tuple[TargetDescription, ...]
    error: str = ""
    hint: str = ""
    triggers: tuple[Trigger, ...] = ()


async def describe_app(app: str, confinement: Confinement | None = None, python: str = "") -> AppManifest:
    """Manifest of the app at `app`; importing it may take a minute, and what it writes is read with care. It is imported behind
    the walls that its functions will have, by the interpreter of its environment."""
    out = os.memfd_create("lamina-manifest", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(out, MAX_BYTES)  # no page of it is there before it is written
        fcntl.fcntl(out, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        await _import_app(app, out, confinement or Confinement(), python)
        manifest = await asyncio.to_thread(_read_manifest, out)
    finally:
        os.close(out)
    if manifest.error:
        raise LoadFailed(manifest.error, hint=manifest.hint)
    return manifest


async def _import_app(app: str, out: int, confinement: Confinement, python: str) -> None:
    walls = msgspec.json.encode(Confinement() if python else confinement).decode()
    command = [sys.executable, "-P", "-m", "lamina.worker.app_manifest", app, str(out), walls]
    if python:
        command = confined_command(confinement, python, command[1:])
    with process_namespace() if confinement.hides_processes else contextlib.nullcontext():
        process = subprocess.Popen(
            command,
            env=clean_environment(os.environ, confinement),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(out,),
        )
    try:
        await asyncio.to_thread(process.wait, IMPORT_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise LoadFailed(
            f"importing the app took longer than {IMPORT_LIMIT_S:g} s", hint="load models in load(), not at import"
        ) from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.to_thread(process.wait)


def _read_manifest(out: int) -> AppManifest:
    size = int.from_bytes(os.pread(out, _HEAD, 0), "big")
    if size > MAX_BYTES - _HEAD:
        raise LoadFailed(f"the app describes itself in more than {MAX_BYTES >> 20} MiB", hint="deploy it in parts")
    try:
        manifest = msgspec.json.decode(os.pread(out, size, _HEAD), type=AppManifest)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        raise LoadFailed("importing the app ended its process", hint="try it here first: lamina run FILE NAME") from None
    nodes = sum(len(flow.nodes) for flow in manifest.flows)
    for count, most, what in ((len(manifest.functions), MAX_TARGETS, "functions"), (nodes, MAX_NODES, "nodes of workflows")):
        if count > most:
            raise LoadFailed(f"the app has {count} {what}; at most {most} are taken", hint="deploy it in parts")
    return manifest


def build_manifest(app: str) -> AppManifest:
    from lamina.sdk.app_loader import load_app

    try:
        found = load_app(app)
        if found.mounts:
            raise BadValue(
                "mount: web apps of deployed apps are not served", hint="serve it as the server's own app: lamina serve app.py"
            )
        deployed = found.deployed()
    except LaminaError as error:
        return AppManifest("", (), (), (), error.message, error.hint)
    about = [
        TargetDescription(one.name, one.params, one.doc, one.signature, one.result_schema) for one in found.functions.values()
    ]
    about += [
        TargetDescription(one.name, one.params, one.doc, one.signature, one.result_schema) for one in found.workflows.values()
    ]
    return AppManifest(found.name, deployed.functions, deployed.flows, tuple(about), triggers=tuple(found.triggers))


def main() -> None:
    app, out = sys.argv[1], int(sys.argv[2])
    enter(msgspec.json.decode(sys.argv[3], type=Confinement))  # before any code but ours is loaded
    body = msgspec.json.encode(build_manifest(app))
    os.pwrite(out, body[: MAX_BYTES - _HEAD], _HEAD)
    os.pwrite(out, len(body).to_bytes(_HEAD, "big"), 0)


if __name__ == "__main__":
    main()
