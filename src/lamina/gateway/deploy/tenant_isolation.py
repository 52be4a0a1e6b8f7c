"""Isolation of tenants' deployments: which are taken, and which user of the machine they run as.

Code of a tenant is a stranger's. It is taken where the machine keeps it from the others (`engines/isolation.py`), or where the
operator trusts all deployers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from lamina.access.access_control import AccessControl
from lamina.drivers.engine import TargetSource
from lamina.engines.gpu_processes import GpuProcesses
from lamina.engines.isolation import ProcessIsolation, Walls
from lamina.errors import Forbidden
from lamina.ipc.confinement import Confinement
from lamina.types import FunctionSpec

_TRUST = "the operator may trust all deployers: lamina serve --trust-deployers"


class TenantIsolation:
    """Rules for deployments of tenants. `processes` is None for an engine without any; `on_gpus` isolates
    functions there."""

    def __init__(
        self,
        access: AccessControl,
        processes: ProcessIsolation | None,
        *,
        on_gpus: GpuProcesses | None = None,
        trusts_deployers: bool = False,
    ) -> None:
        self._access = access
        self._processes = processes
        self._on_gpus = on_gpus or GpuProcesses()
        self._trusts = trusts_deployers

    @property
    def walls(self) -> Walls:
        return self._processes.walls if self._processes is not None else Walls()

    async def try_walls(self) -> None:
        """Find out which walls this machine gives."""
        if self._processes is not None:
            await self._processes.try_walls()

    def check_tenant(self, tenant: str) -> None:
        """Refuse code of tenants where nothing keeps it apart."""
        if tenant and not self._trusts and not self.walls.hold:
            walls = self.walls
            why = next((f"{name}: {said}" for name in ("users", "processes", "files") if (said := getattr(walls, name))), "")
            raise Forbidden(f"tenants cannot deploy here: nothing would keep their code apart ({why})", hint=_TRUST)

    def check_functions(self, tenant: str, specs: Iterable[FunctionSpec]) -> None:
        """Refuse functions of tenants that would share a process: all of a GPU's are in one."""
        on_gpu = [spec.name for spec in specs if spec.gpu != "no"]
        if tenant and on_gpu and not self._trusts:
            raise Forbidden(f"tenants cannot deploy functions on a GPU here: {on_gpu[0]!r} would share its process", hint=_TRUST)

    def check_environment(self, python: str, specs: Iterable[FunctionSpec], user: int) -> None:
        """Refuse functions of an app with an environment that could not enter it."""
        if python:
            self._on_gpus.check_packages(specs, user)

    def confinement(self, user: int, path: Path, python: str = "", shows: tuple[str, ...] = ()) -> Confinement:
        """Walls to import an app or install its packages behind: those its functions will have, and a limit on what it starts."""
        if self._processes is None:
            return Confinement()
        source = TargetSource(path=str(path), user=user, python=python)
        return self._processes.confinement(source, None, f"import-{os.urandom(4).hex()}", shows)

    def end(self, confinement: Confinement) -> None:
        """Sweep up after an import."""
        if self._processes is not None:
            self._processes.end(confinement)

    async def user_of(self, tenant: str) -> int:
        """User that functions of a tenant run as; 0: the server's."""
        if not tenant or self._processes is None or not self.walls.hold:
            return 0
        return await self._access.user_of(tenant, self._processes.users)


def give_folder(folder: Path, user: int) -> None:
    """Let the user that an unpacked version runs as read it, and no other. It stays the server's: what its code could put into it
    (a link instead of a file) the server would follow when it reads the folder again."""
    os.chmod(folder.parent, 0o700)
    owner, access = (os.geteuid(), 0o050) if user else (-1, 0)
    _give(str(folder), owner, user or -1, 0o700 | access)
    for place, folders, _ in os.walk(folder):  # first of all: from then on nothing is put there
        for name in folders:
            _give(os.path.join(place, name), owner, user or -1, 0o700 | access)
    for place, folders, files in os.walk(folder):
        for path in (os.path.join(place, name) for name in (*folders, *files)):
            if os.path.islink(path):
                os.unlink(path)  # packages have none
            elif not os.path.isdir(path):
                _give(path, owner, user or -1, 0o600 | access & 0o060)


def user_of_folder(folder: Path) -> int:
    """The user that a version was given to; 0: none."""
    found = os.stat(folder)
    return found.st_gid if found.st_mode & 0o010 else 0


def _give(path: str, owner: int, group: int, mode: int) -> None:
    if not os.path.islink(path):
        os.chown(path, owner, group, follow_symlinks=False)
        os.chmod(path, mode)
