"""`graphrt bench`: the benches of the checkout in one table."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.table import Table

from .benches import BENCHES, Bench, Figure
from .common import refusal, working
from .outputs import JsonOption, show, writable_folder, write_json

_NAMES = ", ".join(BENCHES)


def bench(
    names: Annotated[list[str] | None, typer.Argument(metavar="[BENCH]...", help=f"Some of {_NAMES}.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", callback=writable_folder, help="Keep results, logs and plots (with matplotlib) here."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few sizes and few repeats.")] = False,
    earlier: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="Measure nothing: show the results in this folder.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Measure, and show everything in one table.

    Benches are tools of the checkout and run one after the other; without names, all that can run here, but for the one
    that downloads. `to floor` is the time over what the card's memory allows. Exit status 1 if a named bench gave none.

    \b
    Examples:
      graphrt bench --quick
      graphrt bench step host --out results
      graphrt bench --from tools/results/h200
    """
    for name in names or []:
        if name not in BENCHES:
            raise typer.BadParameter(f"BENCH: expected some of {_NAMES}, got {name!r}")
    missed: dict[str, str] = {}
    if earlier is not None:
        figures = _read(earlier, names)
    else:
        with TemporaryDirectory() as folder:
            figures, missed = _measured(Path(folder) if out is None else out, names, quick)
    notes = [f"left out {name}, {BENCHES[name].about}: {why}" for name, why in missed.items()]
    if not figures:
        raise refusal("; ".join(notes) or f"no results in {earlier}")
    if out is not None:
        notes.append(f"results, logs and plots: {out}")
    show([_table(figures), *notes], json_file)
    write_json({"figures": [figure._asdict() for figure in figures], "notes": notes}, json_file)
    if names and missed:
        raise typer.Exit(1)


def _measured(out: Path, names: list[str] | None, quick: bool) -> tuple[list[Figure], dict[str, str]]:
    """Run what can run; and by name, why the others did not."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"cannot make {out}: {error.strerror}") from error
    figures: list[Figure] = []
    missed: dict[str, str] = {}
    for one in [BENCHES[name] for name in names] if names else [one for one in BENCHES.values() if one.usual]:
        why = one.why_not() or _run(one, out, quick)
        if why:
            missed[one.name] = why
        else:
            figures += one.read(out / one.result)
    return figures, missed


def _run(one: Bench, out: Path, quick: bool) -> str:
    """Run a bench; why it failed, or nothing."""
    with working(f"{one.name}: {one.about}"):
        try:
            one.run(out, quick)
        except RuntimeError as error:
            return str(error)
    return ""


def _read(folder: Path, names: list[str] | None) -> list[Figure]:
    figures: list[Figure] = []
    for one in BENCHES.values():
        path = folder / one.result
        if path.is_file() and (not names or one.name in names):
            try:
                figures += one.read(path)
            except (ValueError, KeyError, TypeError) as error:
                raise typer.BadParameter(f"{path} is no result of {one.tool} ({error!r})") from error
    return figures


def _table(figures: list[Figure]) -> RenderableType:
    table = Table("bench", "case", "what", "time", "to floor")
    for column in table.columns[3:]:
        column.justify = "right"
    before: Figure | None = None
    for figure in figures:
        if before is not None and figure.bench != before.bench:
            table.add_section()
        same = before is not None and (figure.bench, figure.case) == (before.bench, before.case)
        head = ("", "") if same else (figure.bench, figure.case)
        ratio = "" if figure.to_floor is None else f"{figure.to_floor:.2f}"
        table.add_row(*head, figure.what, f"{figure.value:,.1f} {figure.unit}", ratio)
        before = figure
    return table
