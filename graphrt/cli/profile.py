"""`graphrt profile`: a recorded loop for profilers, and the command lines that profile it."""

import json
import shlex
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import RenderableType
from rich.text import Text

from .common import in_bytes, refusal, user_errors, working
from .outputs import JsonOption, show, writable_file, write, write_json
from .shape import StepOptions, with_step_options

if TYPE_CHECKING:
    import torch

    from graphrt.workload import Workload

RANGE = "graphrt.profile"
"""Message of the NVTX range around the loop."""


@with_step_options
def profile(
    step: StepOptions,
    context: typer.Context,
    accepted: Annotated[
        int | None, typer.Option(min=0, help="Tokens accepted by every row; half of the window.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Replays in the profiled part.")] = 20,
    torch_file: Annotated[
        Path | None,
        typer.Option(
            "--torch",
            metavar="FILE",
            callback=writable_file,
            help="Write a trace for Perfetto, with a lane for every phase; - prints it alone.",
        ),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Replay a recorded step between cudaProfilerStart and Stop, and print how to profile exactly that.

    Without options the step has the preset's size on a GPU, a small one on the CPU. The loop stands in the NVTX range
    graphrt.profile of the domain graphrt. Without a profiler it only takes the time. Open the file of --torch at
    ui.perfetto.dev; tools/draw_timeline.py draws one step of it.

    \b
    Examples:
      graphrt profile --batch 64
      graphrt profile --commit eager --torch eager.json
      graphrt profile --layers 2 --steps 3 --json -
    """
    with user_errors(), working("recording a step"):
        workload = step.workload(accepted)
        sizes, place = workload.sizes, workload.device
        workload.capture()
        workload.replay(3)
    loop = _loop(workload, place)
    if torch_file is None:
        with working("replaying"):
            microseconds = _profiled(loop, steps, place)
    else:
        with working("tracing"):
            microseconds = _traced(loop, steps, place, torch_file)
    commands = _commands(_arguments(context))
    result = {
        "device": _device_name(place),
        "backend": workload.context.backend,
        "backend_reason": workload.context.backend_reason,
        "commit": workload.step.choice.reason,
        "sizes": asdict(sizes) | {"dtype": str(sizes.dtype), "checkpoint_dtype": str(sizes.checkpoint_dtype)},
        "steps": steps,
        "us_per_step": microseconds,
        "graph_bytes": asdict(workload.step.memory()),
        "trace": str(torch_file) if torch_file else None,
        "commands": commands,
    }
    show(_lines(result, commands), torch_file, json_file)
    write_json(result, json_file)


def _loop(workload: "Workload", place: "torch.device") -> Callable[[int], None]:
    """What replays steps: the recording itself, or on the CPU its launches one by one, for a trace to name them."""
    if place.type == "cuda":
        return workload.replay
    from torch.profiler import record_function

    from graphrt.capture import record
    from graphrt.capture.tape import TapeRecording

    recording = cast(TapeRecording, record(workload.run, device=place, name="step"))

    def replay(steps: int) -> None:
        for _ in range(steps):
            for node in recording.nodes:
                with record_function(node.name):
                    node.call()

    return replay


def _profiled(loop: Callable[[int], None], steps: int, place: "torch.device") -> float:
    """Microseconds a step, between the marks that profilers wait for."""
    import torch

    from graphrt import profiling

    if place.type == "cpu":
        with profiling.annotated("replay", RANGE), torch.no_grad():
            return _timed(loop, steps)
    torch.cuda.synchronize(place)
    torch.cuda.profiler.start()
    with profiling.annotated("replay", RANGE):

        def until_done(count: int) -> None:
            loop(count)
            torch.cuda.synchronize(place)

        microseconds = _timed(until_done, steps)
    torch.cuda.profiler.stop()
    return microseconds


def _timed(loop: Callable[[int], None], steps: int) -> float:
    begin = perf_counter()
    loop(steps)
    return 1e6 * (perf_counter() - begin) / steps


def _traced(loop: Callable[[int], None], steps: int, place: "torch.device", target: Path) -> float:
    """As `_profiled`, under torch's profiler; writes the trace with its lanes."""
    import torch

    from graphrt.trace import load_trace, slices_of, with_lanes

    kinds = [torch.profiler.ProfilerActivity.CPU]
    if place.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profiler:
        microseconds = _profiled(loop, steps, place)
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(exported))
        trace = load_trace(exported)
    if not slices_of(trace):
        raise refusal("the profiler saw no launch; may this process use the GPU's performance counters?")
    write(json.dumps(with_lanes(trace)), target)
    return microseconds


def _arguments(context: typer.Context) -> list[str]:
    """This invocation's options, without those that only say where results go."""
    words = []
    for option in context.command.params:
        value = context.params.get(option.name or "")
        if option.name in ("torch_file", "json_file") or value is None or value == option.default:
            continue
        words += [option.opts[0], str(value)]
    return words


def _commands(arguments: list[str]) -> dict[str, str]:
    """By name: the exact command lines."""
    run = ["graphrt", "profile", *arguments]
    nsys = ["nsys", "profile", "--trace=cuda,nvtx", "--cuda-graph-trace=node", "--force-overwrite=true"]
    commands = {
        "timeline": [
            *nsys, "--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--output=graphrt", *run,
        ],
        "timeline, by NVTX range": [
            *nsys, "--capture-range=nvtx", f"--nvtx-capture={RANGE}@graphrt", "--capture-range-end=stop",
            "--output=graphrt", *run,
        ],
        "time by kernel": ["nsys", "stats", "--report=cuda_gpu_kern_sum,nvtx_sum", "graphrt.nsys-rep"],
        "counters of each kernel": [
            "ncu", "--nvtx", f"--nvtx-include=graphrt@{RANGE}/", "--graph-profiling=node", "--clock-control=none",
            "--kernel-name=regex:graphrt_", "--launch-count=12", "--set=detailed", "--export=graphrt",
            "--force-overwrite", *run,
        ],
    }  # fmt: skip
    return {name: shlex.join(words) for name, words in commands.items()}


CLOCKS = """\
Clocks: ncu leaves them as they are (--clock-control=none), so its times are those of the card as it serves. To hold
them still, where you may: nvidia-smi --lock-gpu-clocks=MHZ, and --reset-gpu-clocks behind it; the highest MHZ:
nvidia-smi --query-gpu=clocks.max.sm --format=csv,noheader,nounits"""


def _lines(result: dict[str, Any], commands: dict[str, str]) -> list[RenderableType]:
    sizes = result["sizes"]
    lines: list[RenderableType] = [
        f"{sizes['layers']} layers of {sizes['heads']} heads x {sizes['head_dim']}, {sizes['batch']} rows, "
        f"{sizes['accepted']} of {sizes['spec_query_len']} tokens accepted, {result['backend']} on {result['device']}",
        f"backend: {result['backend_reason']}",
        f"commit: {result['commit']}",
        f"{result['us_per_step']:,.1f} us a step, mean of {result['steps']} replays in a row",
    ]
    if graphs := result["graph_bytes"]["device"]:
        lines.append(f"the recording took {in_bytes(graphs)} of device memory")
    if result["trace"]:
        lines.append(f"trace: {result['trace']} (ui.perfetto.dev; process 'graphrt by phase')")
    for name, command in commands.items():
        lines += ["", Text(f"{name}:", style="bold"), f"  {command}"]
    return [*lines, "", CLOCKS]


def _device_name(place: "torch.device") -> str:
    from graphrt.choice import device_name

    return device_name(place)
