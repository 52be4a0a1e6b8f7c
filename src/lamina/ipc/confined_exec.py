"""Confined start of another interpreter: `python -m lamina.ipc.confined_exec CONFINEMENT PYTHON ARGUMENT...`.

The interpreter of an app's environment runs code of its packages as it starts (`.pth` files). So walls are put up by the server's
own interpreter, which then becomes that one: nothing of the app is run before.
"""

from __future__ import annotations

import os
import sys

import msgspec

from lamina.ipc.confinement import Confinement, enter


def confined_command(confinement: Confinement, python: str, arguments: list[str]) -> list[str]:
    """Command line that confines itself and becomes `python` with these arguments."""
    walls = msgspec.json.encode(confinement).decode()
    return [sys.executable, "-P", "-m", "lamina.ipc.confined_exec", walls, python, *arguments]


def main() -> None:
    enter(msgspec.json.decode(sys.argv[1], type=Confinement))
    for name in ("PYTHONPATH", "PYTHONHOME"):  # of the server; its packages come behind those of the environment
        os.environ.pop(name, None)
    os.environ["VIRTUAL_ENV"] = os.path.dirname(os.path.dirname(sys.argv[2]))
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
