"""`graphrt bench`: the benches of the checkout in one table."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.table import Table

from .benches import BENCHES, Figure
from .common import option_error, refusal, working
from .outputs import JsonOption, show, writable_folder, write_json

_NAMES = ", ".join(BENCHES)


def bench(
    names: Annotated[list[str] | None, typer.Argument(metavar="BENCH", help=f"Some of {_NAMES}.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", callback=writable_folder, help="Keep results, logs and plots (with matplotlib) here."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few sizes and few repeats.")] = False,
    earlier: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="DIR",
            exists=True,
            file_okay=False,
            help="Measure nothing: show the results in this folder.",
        ),
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
      graphrt bench step --from tools/results/h200
    """
    for name in names or []:
        if name not in BENCHES:
            raise option_error("BENCH", f"expected some of {_NAMES}, got {name!r}")
    for option, given in {"--out": out is not None, "--quick": quick}.items():
        if earlier is not None and given:
            raise typer.BadParameter(f"--from measures nothing, so there is nothing for {option} to do")
    if earlier is not None:
        figures, missed = _kept(earlier, names)
    else:
        with TemporaryDirectory() as folder:
            figures, missed = _measured(Path(folder) if out is None else out, names, quick)
    notes = [f"left out {name}, {BENCHES[name].about}: {why}" for name, why in missed.items()]
    if out is not None:
        notes.append(f"results, logs and plots: {out}")
    if not figures:
        raise refusal("\n".join(notes) or f"no results of benches in {earlier}")
    show([_table(figures), *notes], json_file)
    write_json({"figures": [figure._asdict() for figure in figures], "notes": notes}, json_file)
    if names and missed:
        raise typer.Exit(1)


def _measured(out: Path, names: list[str] | None, quick: bool) -> tuple[list[Figure], dict[str, str]]:
    """Run what can run; and by name, why the others did not."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise option_error("--out", f"cannot make {out}: {error.strerror}") from error
    figures: list[Figure] = []
    missed: dict[str, str] = {}
    for one in [BENCHES[name] for name in names] if names else [one for one in BENCHES.values() if one.usual]:
        if why := one.why_not():
            missed[one.name] = why
            continue
        try:
            with working(f"{one.name}: {one.about}"):
                one.run(out, quick)
            figures += one.figures(out)
        except (RuntimeError, ValueError) as error:
            missed[one.name] = str(error)
    return figures, missed


def _kept(folder: Path, names: list[str] | None) -> tuple[list[Figure], dict[str, str]]:
    """What was measured into `folder`; and by name, why there is nothing of the others that were named."""
    figures: list[Figure] = []
    missed: dict[str, str] = {}
    for one in BENCHES.values():
        if names and one.name not in names:
            continue
        if not (folder / one.result).is_file():
            missed |= {one.name: f"no {one.result} in {folder}"} if names else {}
            continue
        try:
            figures += one.figures(folder)
        except ValueError as error:
            raise option_error("--from", str(error)) from error
    return figures, missed


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
