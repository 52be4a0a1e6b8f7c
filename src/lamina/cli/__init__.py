"""The command line. One file per command, imported only when it is called, so that `--help` stays instant.

Exit codes: 0 done; 1 it failed; 2 bad usage or input; 3 refused (it could not have been in time); 4 no server there.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import Any

import click

from lamina.errors import LaminaError, Refused, Unreachable

EXIT_FAILED, EXIT_BAD, EXIT_REFUSED, EXIT_NO_SERVER = 1, 2, 3, 4


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(found.name for found in pkgutil.iter_modules(__path__) if not found.name.startswith("_"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = importlib.import_module(f"lamina.cli.{cmd_name}").command
        return command


def _version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from lamina import __version__

        click.echo(f"lamina {__version__}")
        ctx.exit()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
def root() -> None:
    """Serve machine-learning functions and workflows on slices of GPUs, each with a latency goal."""


def main(argv: list[str] | None = None) -> None:
    """Run a command; our own errors become a message and an exit code, never a traceback."""
    try:
        outcome: Any = root.main(args=argv, prog_name="lamina", standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("stopped", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except Refused as error:
        click.echo(f"refused: {error}", err=True)
        sys.exit(EXIT_REFUSED)
    except Unreachable as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(EXIT_NO_SERVER)
    except LaminaError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(EXIT_BAD if 400 <= error.status < 500 else EXIT_FAILED)
    sys.exit(outcome if isinstance(outcome, int) else 0)
