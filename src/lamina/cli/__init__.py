"""The command line. One file per command, imported only when it is called, so that `--help` stays instant.

Exit codes: 0 done; 1 it failed; 2 bad usage or input; 3 refused (it could not have been in time); 4 no server there.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import sys
from pathlib import Path
from typing import Any

import click

from lamina.errors import FunctionFailed, LaminaError, LoadFailed, Refused, Unreachable

EXIT_FAILED, EXIT_BAD, EXIT_REFUSED, EXIT_NO_SERVER, EXIT_STOPPED = 1, 2, 3, 4, 130


_GROUPS = {
    "Serve and call": ("serve", "call", "run", "load", "top", "runs", "state", "bill"),
    "Workflows": ("draw", "asl"),
    "Measure, plan and compare": ("profile", "profiles", "plan", "sim", "explain", "policies", "lab"),
    "Manage a server": ("deploy", "traffic", "ls", "logs", "history", "rollback", "scale", "resize", "agent"),
    "Let others in": ("login", "token", "tenant", "user", "secret", "audit"),
}
"""How `--help` lists them; what is in none comes last, so a new file needs no entry."""


def _modules() -> dict[str, str]:
    """Commands with their modules: a file each in `cli/`, or `command.py` in a package that brings its own, such as `lab`."""
    own = {found.name: f"lamina.cli.{found.name}" for found in pkgutil.iter_modules(__path__) if not found.name.startswith("_")}
    brought = (path.parent.name for path in sorted(Path(__file__).parent.parent.glob("*/command.py")))
    return own | {name: f"lamina.{name}.command" for name in brought}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_modules())

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rest = [name for name in self.list_commands(ctx) if not any(name in names for names in _GROUPS.values())]
        for title, names in {**_GROUPS, "More": tuple(rest)}.items():
            found = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(title):
                formatter.write_dl([(name, command.get_short_help_str(200)) for name, command in found if command is not None])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = _modules().get(cmd_name)
        if module is None:
            return None
        command: click.Command = importlib.import_module(module).command
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        fail_if_unknown_command(ctx, args, self.list_commands(ctx))
        return super().resolve_command(ctx, args)


def fail_if_unknown_command(ctx: click.Context, args: list[str], known: list[str]) -> None:
    """Fail with a suggestion for an unknown command, in the same words for all command groups."""
    if not args or args[0].startswith("-") or args[0] in known:
        return
    options = [f"--{args[0]}"] if args[0] == "help" or (args[0] == "version" and ctx.parent is None) else []
    close = options or difflib.get_close_matches(args[0], known, n=1)
    few = f" There are {', '.join(known)}." if len(known) <= 12 else ""
    ctx.fail(f"No such command {args[0]!r}." + (f" Did you mean {close[0]!r}?" if close else few))


def _version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from lamina import __version__

        click.echo(f"lamina {__version__}")
        ctx.exit()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
def root() -> None:
    """Serve machine-learning functions and workflows on slices of GPUs, with latency SLOs."""


def main(argv: list[str] | None = None) -> None:
    """Run a command; our own errors become a message and an exit code, never a traceback."""
    try:
        outcome: Any = root.main(args=argv, prog_name="lamina", standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("stopped", err=True)
        sys.exit(EXIT_STOPPED)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except Refused as error:
        click.echo(f"refused: {error}{_offer(error)}", err=True)
        sys.exit(EXIT_REFUSED)
    except Unreachable as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(EXIT_NO_SERVER)
    except LaminaError as error:
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))  # call and step, from the client
        click.echo(f"{_trace(error)}error: {error}{notes}", err=True)
        sys.exit(EXIT_BAD if 400 <= error.status < 500 else EXIT_FAILED)
    except UnicodeDecodeError as error:
        click.echo(f"error: not UTF-8 text: {error.object[:20]!r}\n  hint: is it the right file?", err=True)
        sys.exit(EXIT_BAD)
    except OSError as error:
        click.echo(
            f"error: {error.filename or 'this machine'}: {error.strerror or error}\n  hint: {_os_error_hint(error)}", err=True
        )
        sys.exit(EXIT_BAD)
    sys.exit(outcome if isinstance(outcome, int) else 0)


def _os_error_hint(error: OSError) -> str:
    """Hint for an error of the operating system; commands that know more say it themselves."""
    if isinstance(error, PermissionError):
        return "whose is it, and who runs this? ls -l tells"
    if isinstance(error, FileNotFoundError):
        return "is the path right, and are its folders there?"
    return "the path, and the room and rights there"


def _offer(error: Refused) -> str:
    """The latency that could be met instead, and the price, as far as the server names them."""
    from lamina.units import show_us

    offer = f"\n  offer: {show_us(round(1000 * error.offer_ms))}" if error.offer_ms else ""
    return offer + (f"\n  price: {error.price:.3g}" if error.price else "")


def _trace(error: LaminaError) -> str:
    """Traceback of user code, which the author of an app needs; frames of Lamina are never shown."""
    if isinstance(error, FunctionFailed):
        return error.remote_trace.rstrip() + "\n" if error.remote_trace else ""
    if isinstance(error, LoadFailed) and error.__cause__ is not None and not isinstance(error.__cause__, SyntaxError):
        from lamina.sdk.user_errors import user_trace

        return user_trace(error.__cause__)
    return ""
