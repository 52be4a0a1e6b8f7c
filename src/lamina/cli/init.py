"""`lamina init`: a new app from a template."""

from __future__ import annotations

from pathlib import Path

import click

from lamina.errors import BadValue

TEMPLATES = Path(__file__).parent / "templates"

_MODEL_FILES = {"onnx": "model.onnx"}
"""By template, the file that an app needs and its author has to bring."""
_NAMES = sorted(path.name for path in TEMPLATES.iterdir() if path.is_dir() and not path.name.startswith("_"))


@click.command()
@click.argument("folder", default=".", type=click.Path(path_type=Path, file_okay=False))
@click.option("--template", type=click.Choice(_NAMES), default="function", show_default=True, help="What to begin with.")
@click.option("--name", help="Name of the app; default: that of the folder.")
def command(folder: Path, template: str, name: str | None) -> None:
    """Make a new app in a folder: its code, a test, options and requirements.

    \b
    Examples:
      lamina init shop && cd shop && lamina dev app.py
      lamina init ocr --template workflow
    """
    from lamina.sdk.app import NAME_PATTERN

    app = name or folder.resolve().name.lower().replace(" ", "-")
    if not NAME_PATTERN.fullmatch(app):
        raise BadValue(f"--name: {app[:80]!r} cannot be used", hint="up to 63 of a-z 0-9 . _ - and a letter or digit first")
    sources = [*(TEMPLATES / "_all").iterdir(), *(TEMPLATES / template).iterdir()]
    files = {path.name.removesuffix(".txt.in"): path for path in sorted(sources) if path.is_file()}
    taken = [name for name in files if (folder / name).exists()]
    if taken:
        raise BadValue(f"{folder / taken[0]} is there already", hint="nothing was written; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in files.items():
        (folder / name).write_text(path.read_text().replace("APP_NAME", app))
        click.echo(f"wrote {folder / name}")
    if (model := _MODEL_FILES.get(template)) and not (folder / model).exists():
        click.echo(f"needed: your model, as {folder / model}; until it is there, the function cannot be loaded")
    step = f"cd {folder} && " if str(folder) != "." else ""
    click.echo(f"next: {step}lamina dev app.py      tests: pytest")
