"""App manifest: what an app contains, found in a process of its own: `python -m lamina.worker.app_manifest APP FILE` writes JSON.

Importing an app runs its code, and the right to deploy does not include the gateway's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import msgspec
from msgspec import Struct

from lamina.core.workflow.flow import Flow
from lamina.errors import LaminaError, LoadFailed
from lamina.sdk.binding import Param
from lamina.sdk.tensors import Signature
from lamina.sdk.triggers import Trigger
from lamina.types import FunctionSpec

IMPORT_LIMIT_S = 60.0
MAX_BYTES = 16 * 2**20


class TargetDescription(Struct, frozen=True):
    """Description of a function or a workflow, as clients see it."""

    name: str
    params: tuple[Param, ...]
    doc: str = ""
    signature: Signature | None = None


class AppManifest(Struct, frozen=True):
    app: str
    functions: tuple[FunctionSpec, ...]
    flows: tuple[Flow, ...]
    about: tuple[TargetDescription, ...]
    error: str = ""
    hint: str = ""
    triggers: tuple[Trigger, ...] = ()


async def describe_app(app: str, out: Path) -> AppManifest:
    """Manifest of the app at `app`; importing it may take a minute, and what it writes is read with care."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "lamina.worker.app_manifest", app, str(out)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        await asyncio.wait_for(process.wait(), IMPORT_LIMIT_S)
    except TimeoutError:
        raise LoadFailed(
            f"importing the app took longer than {IMPORT_LIMIT_S:g} s", hint="load models in load(), not at import"
        ) from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    try:
        if out.stat().st_size > MAX_BYTES:
            raise LoadFailed(f"the app describes itself in more than {MAX_BYTES >> 20} MiB")
        manifest = msgspec.json.decode(out.read_bytes(), type=AppManifest)
    except (OSError, msgspec.MsgspecError):
        raise LoadFailed("importing the app ended its process", hint="try it here first: lamina run FILE NAME") from None
    if manifest.error:
        raise LoadFailed(manifest.error, hint=manifest.hint)
    return manifest


def build_manifest(app: str) -> AppManifest:
    from lamina.sdk.app_loader import load_app

    try:
        found = load_app(app)
        deployed = found.deployed()
    except LaminaError as error:
        return AppManifest("", (), (), (), error.message, error.hint)
    about = [TargetDescription(one.name, one.params, one.doc, one.signature) for one in found.functions.values()]
    about += [TargetDescription(one.name, one.params, one.doc, one.signature) for one in found.workflows.values()]
    return AppManifest(found.name, deployed.functions, deployed.flows, tuple(about), triggers=tuple(found.triggers))


def main() -> None:
    app, out = sys.argv[1:]
    Path(out).write_bytes(msgspec.json.encode(build_manifest(app)))


if __name__ == "__main__":
    main()
