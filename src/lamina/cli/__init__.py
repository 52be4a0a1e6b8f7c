"""The command line. One file per command, imported only when it is called, so that `--help` stays instant.

Exit codes: 0 done; 1 it failed; 2 bad usage or input; 3 refused (it could not have been in time); 4 no server there.
"""

from __future__ import annotations

import difflib
import importlib
import os
import pkgutil
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from lamina.errors import FunctionFailed, LaminaError, LoadFailed, Refused, Unreachable
from lamina.server.async_stderr import open_standard_files

CONFIG_FILE = "lamina.toml"
_VARIABLES = frozenset(f"LAMINA_{name}" for name in ("URL", "ADMIN_URL", "TOKEN", "CONFIG", "DATA", "JOIN", "VOLUMES"))
"""Variables that are read under the name of an option, without that of its command."""
_OF_KUBERNETES = re.compile(r"_SERVICE_(HOST|PORT)(_|$)|_PORT_\d+_(TCP|UDP|SCTP)(_|$)")
EXIT_FAILED, EXIT_BAD, EXIT_REFUSED, EXIT_NO_SERVER, EXIT_STOPPED = 1, 2, 3, 4, 130


_GROUPS = {
    "Serve and call": ("init", "dev", "serve", "call", "run", "load", "top", "runs", "state", "triggers", "bill"),
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
    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        return super().make_context(*args, **{"default_map": {}, **extra})  # filled when the file of options is known

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


def option_name(param: click.Parameter) -> str:
    """Name of a parameter as users know it: its longest option without dashes, or that of an argument."""
    return max(param.opts, key=len).lstrip("-") if isinstance(param, click.Option) else str(param.name)


def _default_options(ctx: click.Context, file: Path | None, environment: Mapping[str, str]) -> dict[str, Any]:
    """Defaults of the command that is called: from variables, and from the table of its name in `lamina.toml`. `dev` takes
    those of `serve` too."""
    name = str(ctx.invoked_subcommand)
    command = root.get_command(ctx, name)
    if command is None:
        return {}
    tables, found = _read_tables(file), dict[str, Any]()
    names = ("serve", "dev") if name == "dev" else (name,)
    for table in names:
        found |= _defaults(command, tables.get(table, {}), f"{file or CONFIG_FILE}: [{table}]")
    for variable, hint in unread_variables(command, names, environment).items():
        click.echo(f"warning: {variable} is not read: {hint}", err=True)
    for prefix in names:
        _merge(found, from_environment(command, f"LAMINA_{prefix}", environment))
    return {name: found}


def from_environment(command: click.Command, prefix: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Options that variables give: `--grpc-port` of `serve` is `LAMINA_SERVE_GRPC_PORT`; one that is repeatable has words."""
    found: dict[str, Any] = {}
    for param in command.params:
        variable = f"{prefix}_{option_name(param)}".upper().replace("-", "_")
        if isinstance(param, click.Option) and not param.is_eager and variable in environment:
            found[str(param.name)] = environment[variable].split() if param.multiple else environment[variable]
    for name, inner in command.commands.items() if isinstance(command, click.Group) else ():
        found |= {name: given} if (given := from_environment(inner, f"{prefix}_{name}", environment)) else {}
    return found


def unread_variables(command: click.Command, names: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that look like options of this command and are none, each with a hint: `LAMINA_PORT`, `LAMINA_SERVE_PROT`.

    Those that Kubernetes sets for a service named `lamina` (`LAMINA_PORT=tcp://...`) are no mistakes of the user's.
    """
    if isinstance(command, click.Group):
        return {}
    options = {
        option_name(param).upper().replace("-", "_"): param
        for param in command.params
        if isinstance(param, click.Option) and not param.is_eager
    }
    own = f"LAMINA_{names[-1].upper()}_"
    found: dict[str, str] = {}
    for variable, value in environment.items():
        if variable in _VARIABLES or _OF_KUBERNETES.search(variable) or value.startswith(("tcp://", "udp://", "sctp://")):
            continue
        option = variable.removeprefix("LAMINA_")
        if variable.startswith(own) and (option := variable.removeprefix(own)) not in options:
            close = difflib.get_close_matches(option, options, n=1)
            found[variable] = f"did you mean {own}{close[0]}?" if close else f"lamina {names[-1]} has no such option"
        elif option in options and variable == f"LAMINA_{option}":
            found[variable] = f"--{option_name(options[option])} is LAMINA_{names[0].upper()}_{option}"
    return found


def _merge(found: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, dict):
            _merge(found.setdefault(name, {}), value)
        else:
            found[name] = value


def _read_tables(file: Path | None) -> dict[str, Any]:
    """Tables of the file of options; without a name it need not be there."""
    import tomllib

    from lamina.errors import BadValue, read_user_file

    path = file or Path(CONFIG_FILE)
    if file is None and not path.is_file():
        return {}
    try:
        tables = tomllib.loads(read_user_file(path, "a file of options: docs/how-to/develop.md").decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadValue(f"{path}: not TOML: {error}", hint="tables of options, such as [serve] and port = 8701") from None
    for name in tables:
        if name not in _modules():
            close = difflib.get_close_matches(name, _modules(), n=1)
            raise BadValue(f"{path}: no command {name!r}", hint=f"did you mean [{close[0]}]?" if close else "lamina --help")
    return tables


def _defaults(command: click.Command, table: Any, where: str) -> dict[str, Any]:
    """Options of one command by the names of its parameters."""
    from lamina.errors import BadValue

    if not isinstance(table, dict):
        raise BadValue(f"{where}: {str(table)[:40]!r} is no table", hint="write its options below [NAME]")
    inner = command.commands if isinstance(command, click.Group) else {}
    params = {option_name(param): param for param in command.params if not (isinstance(param, click.Option) and param.is_eager)}
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("_", "-")
        if name in inner:
            found[name] = _defaults(inner[name], value, f"{where[:-1]}.{name}]")
        elif name in params and params[name].name is not None:
            found[str(params[name].name)] = value
        else:
            close = difflib.get_close_matches(name, [*params, *inner], n=1)
            there = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(params))}"
            raise BadValue(f"{where}: no option {key!r}", hint=there)
    return found


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
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    envvar="LAMINA_CONFIG",
    help=f"File of options, a table for each command; default: {CONFIG_FILE}, if it is there.",
)
@click.pass_context
def root(ctx: click.Context, config: Path | None) -> None:
    """Serve machine-learning functions and workflows on slices of GPUs, with latency SLOs."""
    assert ctx.default_map is not None
    ctx.default_map.update(_default_options(ctx, config, os.environ))


def main(argv: list[str] | None = None) -> None:
    """Run a command; our own errors become a message and an exit code, never a traceback."""
    open_standard_files()
    try:
        outcome: Any = root.main(args=argv, prog_name="lamina", standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("stopped", err=True)
        sys.exit(EXIT_STOPPED)
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


def _trace(error: LaminaError) -> str:
    """Traceback of user code, which the author of an app needs; frames of Lamina are never shown."""
    if isinstance(error, FunctionFailed):
        return error.remote_trace.rstrip() + "\n" if error.remote_trace else ""
    if isinstance(error, LoadFailed) and error.__cause__ is not None and not isinstance(error.__cause__, SyntaxError):
        from lamina.sdk.user_errors import user_trace

        return user_trace(error.__cause__)
    return ""
