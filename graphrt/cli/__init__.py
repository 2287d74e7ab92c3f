"""The `graphrt` command. Each subcommand imports what it needs when it runs, so that `--help` is instant."""

from typing import Annotated

import typer

from . import demo, doctor, plan

app = typer.Typer(
    help="CUDA-graph-centric runtime for speculative decoding with Kimi Delta Attention.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from graphrt import __version__

        typer.echo(f"graphrt {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options before the subcommand."""


for command in (doctor.doctor, plan.plan, demo.demo):
    app.command()(command)
