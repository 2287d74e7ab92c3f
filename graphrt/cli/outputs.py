"""Where the results of a command go: places that are tried before any work, each for one result."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from .common import refusal

STDOUT = Path("-")


def writable_file(context: typer.Context, option: typer.CallbackParam, file: Path | None) -> Path | None:
    """Callback of an option that names a file to write; - is standard output.

    Raises:
        typer.BadParameter: if that is impossible, or another option writes there.
    """
    if file is not None:
        _refuse_twice(context, option, file)
        if file != STDOUT:
            _refuse(file, fault_of_file(file))
    return file


def writable_folder(context: typer.Context, option: typer.CallbackParam, folder: Path | None) -> Path | None:
    """Callback of an option that names a folder for results, which need not be there yet; as `writable_file`."""
    if folder is not None:
        _refuse_twice(context, option, folder)
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        _refuse(folder, _fault(nearest, nearest))
    return folder


def fault_of_file(path: Path) -> str:
    """Why a file cannot be written, or nothing."""
    return "it is a folder" if path.is_dir() else _fault(path.parent, path)


def _fault(folder: Path, path: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is a file" if folder.exists() else f"there is no folder {folder}"
    return "" if os.access(path if path.exists() else folder, os.W_OK) else "this user may not"


def _refuse(path: Path, why: str) -> None:
    if why:
        raise typer.BadParameter(f"cannot write {path}: {why}")


def _refuse_twice(context: typer.Context, option: typer.CallbackParam, path: Path) -> None:
    for other in context.command.params:
        if other.name != option.name and context.params.get(other.name or "") == path:
            place = "standard output" if path == STDOUT else path
            raise typer.BadParameter(f"{place} is that of {other.opts[0]} already")


JsonOption = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        callback=writable_file,
        help="Also write the result here as JSON; - prints JSON and nothing else.",
    ),
]


def plain_console(stderr: bool = False) -> Console:
    """A terminal for texts that stand as they are: in 'graphrt[cute]' the brackets are no markup."""
    return Console(stderr=stderr, markup=False, emoji=False)


def show(parts: Iterable[RenderableType], *targets: Path | None) -> None:
    """Print tables and lines, unless standard output belongs to one of the results."""
    if STDOUT not in targets:
        console = plain_console()
        for part in parts:
            # A line stays one line, for people copy commands from it.
            console.print(part, soft_wrap=isinstance(part, str | Text))


def write(text: str, target: Path | None) -> None:
    """Write a result where an option asked for it.

    Raises:
        typer.Exit: with status 1 behind a sentence, if the file cannot be written, although it could before.
    """
    if target == STDOUT:
        typer.echo(text, nl=False)
    elif target is not None:
        try:
            target.write_text(text, encoding="utf-8")
        except OSError as error:
            raise refusal(f"cannot write {target}: {error.strerror}") from error


def write_json(value: Any, target: Path | None) -> None:
    """Write `value` where `--json` asked for it."""
    write(json.dumps(value, indent=2) + "\n", target)
