"""The `graphrt` command, a file for each subcommand. Each imports what it needs when it runs."""

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from . import bench, demo, doctor, graph, plan, profile
from .common import user_errors

app = typer.Typer(
    help="CUDA-graph-centric runtime for speculative decoding with Kimi Delta Attention.\n\n"
    "Exit status 0; 1 if something could not be done, or a check failed; 2 for a wrong option or value.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
)


class Command(TyperCommand):
    """A subcommand whose help fills the terminal's lines, and whose usage errors begin with what is wrong."""

    def __init__(self, *args: Any, help: str = "", **options: Any) -> None:
        paragraphs = help.split("\n\n")
        told = [text if text.startswith("\b") else text.replace("\n", " ") for text in paragraphs]
        super().__init__(*args, help="\n\n".join(told), **options)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer does. Its checks by pydantic put the name of pydantic's error in front."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise


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
    from graphrt.environment import ANNOTATE, CHECK

    with user_errors():
        for switch in (ANNOTATE, CHECK):
            switch.is_on()


for command in (doctor.doctor, plan.plan, demo.demo, bench.bench, graph.graph, profile.profile):
    app.command(cls=Command)(command)
