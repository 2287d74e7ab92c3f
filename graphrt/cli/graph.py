"""`graphrt graph`: what a recorded step launches."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import RenderableType
from rich.table import Table

from .common import in_bytes, user_errors, working
from .outputs import JsonOption, show, writable_file, write, write_json
from .shape import StepOptions, with_step_options

if TYPE_CHECKING:
    from graphrt.capture import GraphNode, Recording


@with_step_options
def graph(
    step: StepOptions,
    every: Annotated[bool, typer.Option("--all", help="Every node on a line of its own.")] = False,
    dot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", callback=writable_file, help="Write a Graphviz graph; - prints it alone."),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Record a decode step and print its chain of kernels; on the CPU, its tape of launches.

    Without options a step of the preset's size is recorded on a GPU, a small one on the CPU.

    \b
    Examples:
      graphrt graph
      graphrt graph --layers 2 --commit eager --all
      graphrt graph --dot step.dot && dot -Tsvg step.dot -o step.svg
      graphrt graph --json -
    """
    from graphrt.capture import record

    with user_errors(), working("recording a step"):
        workload = step.workload()
        sizes = workload.sizes
        name = f"{step.commit.value} step of {sizes.batch} rows"
        recording = record(workload.run, device=workload.device, name=name)
    about = f"{sizes.layers} layers of {sizes.heads} heads x {sizes.head_dim}, {workload.context.backend}"
    show(_parts(recording, about, every), dot, json_file)
    write(recording.topology().dot(), dot)
    write_json({**recording.topology().as_dict(), "pool_bytes": recording.pool_bytes}, json_file)


class Run(NamedTuple):
    """`times` repetitions of `length` nodes, the first of them at `start`."""

    start: int
    length: int
    times: int


def folded(names: Sequence[str], longest: int = 16) -> list[Run]:
    """The sequence as runs: what a layer repeats is one run, and single nodes are runs of one."""
    runs, at = [], 0
    while at < len(names):
        best = Run(at, 1, 1)
        for length in range(1, min(longest, (len(names) - at) // 2) + 1):
            times = 1
            while names[at + times * length : at + (times + 1) * length] == names[at : at + length]:
                times += 1
            if times > 1 and times * length > best.times * best.length:
                best = Run(at, length, times)
        runs.append(best)
        at += best.length * best.times
    return runs


def _parts(recording: "Recording", about: str, every: bool) -> list[RenderableType]:
    topology = recording.topology()
    table = Table("#", "times", "phase", "node", "grid")
    names = [node.title for node in topology.nodes]
    for run in [Run(i, 1, 1) for i in range(len(names))] if every else folded(names):
        for i in range(run.start, run.start + run.length):
            node = topology.nodes[i]
            times = f"x {run.times}" if run.times > 1 else ""
            grid = " x ".join(map(str, node.facts["grid"])) if "grid" in node.facts else ""
            table.add_row(str(i), times, _phase(node), _short(node.name), grid)
        table.add_section()
    counts = ", ".join(f"{count} {kind}" for kind, count in topology.counts().items())
    programmatic = len(topology.programmatic())
    line = (
        f"nodes: {counts}; longest chain {topology.longest_chain}, at most {topology.num_branches} side by side, "
        f"{programmatic} programmatic edges; {in_bytes(recording.pool_bytes)} of results in the pool"
    )
    return [f"{recording.name}: {about}", table, line]


def _phase(node: "GraphNode") -> str:
    from graphrt.profiling import LAUNCH_CATEGORIES, phase_of

    return phase_of(node.name) or LAUNCH_CATEGORIES.get(node.stage or node.name, "")


def _short(name: str, width: int = 60) -> str:
    return name if len(name) <= width else f"{name[: width - 3]}..."
