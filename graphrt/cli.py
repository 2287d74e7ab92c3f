"""The `graphrt` command. Each subcommand imports what it needs when it runs, so that `--help` is instant."""

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    import torch

app = typer.Typer(
    help="CUDA-graph-centric runtime for speculative decoding with Kimi Delta Attention.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


class Device(StrEnum):
    """Where to run; auto takes a GPU if there is one."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Backend(StrEnum):
    """Which kernels to run; auto and fp32_deferred fall back and say why."""

    AUTO = "auto"
    FP32_DEFERRED = "fp32_deferred"
    TRITON = "triton"
    TORCH = "torch"


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


@app.command()
def demo(
    device: Annotated[Device, typer.Option(help="Where to run.")] = Device.AUTO,
    backend: Annotated[Backend, typer.Option(help="Which kernels to run.")] = Backend.AUTO,
    requests: Annotated[int, typer.Option(min=1, help="Requests to decode.")] = 6,
    batch: Annotated[int, typer.Option(min=1, help="Rows decoded at once; requests beyond it wait.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens of the longest request.")] = 64,
    query_len: Annotated[int, typer.Option(min=1, max=16, help="Window: 1 + most draft tokens.")] = 8,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the report here.")
    ] = None,
) -> None:
    """Decode real text speculatively with a small KDA model, one recorded step replayed, and check every claim."""
    from graphrt.demo.run import DemoOptions, run_demo
    from graphrt.demo.show import show

    try:
        options = DemoOptions(_torch_device(device), backend.value, requests, batch, tokens, query_len)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with _ProgressDisplay() as display:
        report = run_demo(options, display.update)
    show(report, Console())
    if json_file:
        json_file.write_text(json.dumps(report.as_json(), indent=2) + "\n")
    raise typer.Exit(0 if report.passed else 1)


def _torch_device(device: Device) -> "torch.device":
    import torch

    if device is Device.CPU or (device is Device.AUTO and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("device: expected a CUDA device for 'cuda', and torch finds none")
    return torch.device("cuda", torch.cuda.current_device())


class _ProgressDisplay:
    """One bar a phase on standard error, gone from the screen when the report is printed."""

    def __init__(self) -> None:
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("requests"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "_ProgressDisplay":
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def update(self, phase: str, done: int, total: int) -> None:
        if phase not in self._tasks:
            self._tasks[phase] = self._bars.add_task(phase, total=total)
        self._bars.update(self._tasks[phase], completed=done)
