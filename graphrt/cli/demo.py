"""`graphrt demo`."""

from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from .common import Backend, BackendOption, Device, DeviceOption, torch_device, user_errors
from .outputs import STDOUT, JsonOption, plain_console, write_json


def demo(
    device: DeviceOption = Device.AUTO,
    backend: BackendOption = Backend.AUTO,
    requests: Annotated[int, typer.Option(min=1, max=256, help="Requests to decode.")] = 6,
    batch: Annotated[int, typer.Option(min=1, max=256, help="Rows decoded at once; requests beyond it wait.")] = 4,
    tokens: Annotated[
        int, typer.Option(min=1, max=2048, help="New tokens of the longest request; 1000 take a minute on a CPU.")
    ] = 64,
    query_len: Annotated[int, typer.Option(min=1, max=16, help="Window: 1 + most draft tokens.")] = 8,
    json_file: JsonOption = None,
) -> None:
    """Decode real text speculatively with a small KDA model, one recorded step replayed, and check every claim.

    Exit status 1 if a check fails.

    \b
    Examples:
      graphrt demo
      graphrt demo --requests 2 --tokens 24
      graphrt demo --device cuda --backend triton --json demo.json
    """
    from graphrt.demo.run import DemoOptions, run_demo
    from graphrt.demo.show import show

    with user_errors():
        options = DemoOptions(torch_device(device), backend.value, requests, batch, tokens, query_len)
    with _ProgressDisplay() as display:
        report = run_demo(options, display.update)
    if json_file != STDOUT:
        show(report, plain_console())
    write_json(report.as_json(), json_file)
    raise typer.Exit(0 if report.passed else 1)


class _ProgressDisplay:
    """One bar a phase on standard error, gone from the screen when the report is printed; only on a terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("requests"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
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
