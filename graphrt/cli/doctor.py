"""`graphrt doctor`: what is installed, what would run here, and why not something better."""

import importlib.metadata as metadata
import platform
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from .common import Backend, BackendOption, Device, DeviceOption, in_bytes, torch_device
from .outputs import JsonOption, show, write_json
from .shape import (
    USUAL_TENSOR_PARALLEL,
    CheckpointDtypeOption,
    Dtype,
    DtypeOption,
    Preset,
    PresetOption,
    QueryLenOption,
)

if TYPE_CHECKING:
    from graphrt.backends import Choice, Facts
    from graphrt.footprint import Model


class State(StrEnum):
    """Of a finding. Only `bad` makes the exit status 1."""

    OK = "ok"
    NOTE = "note"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    what: str
    state: State
    detail: str


_STYLES = {State.OK: "green", State.NOTE: "yellow", State.BAD: "red"}


def doctor(
    preset: PresetOption = Preset.KIMI_K3,
    device: DeviceOption = Device.AUTO,
    backend: BackendOption = Backend.AUTO,
    query_len: QueryLenOption = 8,
    checkpoint_dtype: CheckpointDtypeOption = Dtype.FP32,
    dtype: DtypeOption = Dtype.BF16,
    trial: Annotated[bool, typer.Option(help="Run a small step and compare it with the plain form.")] = True,
    json_file: JsonOption = None,
) -> None:
    """What is installed, which backend would run a model here, and why not a better one.

    Exit status 1 if a package is missing, if no backend can run, or not the one that --backend names, and if the trial
    step fails or is wrong.

    \b
    Examples:
      graphrt doctor
      graphrt doctor --preset kimi-linear --checkpoint-dtype bf16
      graphrt doctor --backend fp32_deferred --no-trial --json -
    """
    from graphrt.backends import Facts
    from graphrt.footprint import PRESETS

    place, model = torch_device(device), PRESETS[preset.value]
    facts = Facts(
        device=place,
        dtype=checkpoint_dtype.torch,
        head_dim=model.head_dim,
        aligned=True,
        lower_bound=model.gate_lower_bound,
        spec_query_len=query_len,
        key_dtype=dtype.torch,
    )
    heads = model.heads // USUAL_TENSOR_PARALLEL[preset]
    findings = [*_installed(), *_machine(), *_runs(backend.value, facts, model, heads, trial)]
    show([_table(model, facts, findings)], json_file)
    write_json([asdict(finding) for finding in findings], json_file)
    raise typer.Exit(1 if any(finding.state is State.BAD for finding in findings) else 0)


def _table(model: "Model", facts: "Facts", findings: list[Finding]) -> RenderableType:
    kinds = " and ".join(str(kind).removeprefix("torch.") for kind in (facts.dtype, facts.key_dtype))
    title = f"graphrt for {model.name}: {kinds}, head dimension {facts.head_dim}, window {facts.spec_query_len}"
    table = Table("", "", "", title=title, title_justify="left", show_header=False)
    for finding in findings:
        table.add_row(finding.what, Text(finding.state.value, style=_STYLES[finding.state]), finding.detail)
    return table


def _installed() -> Iterator[Finding]:
    version = platform.python_version()
    good = sys.version_info >= (3, 11)
    yield Finding("Python", State.OK if good else State.BAD, f"{version} (3.11 or later)")
    for name in ("torch", "triton", "nvtx", "safetensors"):
        yield _package(name, required=True)
    yield _package("nvidia-cutlass-dsl", required=False)


def _package(name: str, required: bool) -> Finding:
    """Whether the installed version is one that graphrt's own metadata allows."""
    wanted = _wanted(name)
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        missing = f"not installed; graphrt wants {wanted}" + ("" if required else ": pip install 'graphrt[cute]'")
        return Finding(name, State.BAD if required else State.NOTE, missing)
    if _allowed(version, wanted):
        return Finding(name, State.OK, f"{version} ({wanted})")
    return Finding(name, State.NOTE, f"{version}, and graphrt was made for {wanted}")


def _wanted(name: str) -> str:
    """The versions of a package that graphrt declares, as pip writes them; empty if it declares none."""
    for requirement in metadata.requires("graphrt") or []:
        text = requirement.partition(";")[0].strip()
        if re.split(r"[<>=!~\[ ]", text)[0] == name:
            return text.removeprefix(name)
    return ""


def _allowed(version: str, wanted: str) -> bool:
    def parts(text: str) -> tuple[int, ...]:
        return tuple(int(number) for number in re.findall(r"\d+", text.partition("+")[0])[:3])

    compare: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
        ">=": lambda a, b: a >= b,
        "<": lambda a, b: a < b,
        "==": lambda a, b: a == b,
    }
    bounds = re.findall(r"(>=|<|==)([\d.]+)", wanted)
    return all(compare[sign](parts(version), parts(bound)) for sign, bound in bounds)


def _machine() -> Iterator[Finding]:
    import torch

    from graphrt import profiling

    yield (
        Finding("driver", State.OK, text) if (text := _driver()) else Finding("driver", State.NOTE, "no NVIDIA driver")
    )
    built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
    if not torch.cuda.is_available():
        yield Finding("GPU", State.NOTE, f"none that torch can use; {built}")
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        free = torch.cuda.mem_get_info(index)[0]
        detail = (
            f"{facts.name}, compute capability {facts.major}.{facts.minor}, {facts.multi_processor_count} SMs, "
            f"{in_bytes(free)} of {in_bytes(facts.total_memory)} free; {built}"
        )
        yield Finding(f"GPU {index}", State.OK if (facts.major, facts.minor) >= (8, 0) else State.NOTE, detail)
    attached = "a tool listens: ranges are on" if profiling.ranges is not None else "no tool listens: ranges are off"
    yield Finding("NVTX", State.OK, attached)


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"\d+\.\d+(\.\d+)?", text)
    return found.group() if found else text.partition("\n")[0]


def _runs(backend: str, facts: "Facts", model: "Model", heads: int, trial: bool) -> Iterator[Finding]:
    """Each backend, the one that would run, and what a small step of it gives."""
    from graphrt import backends

    for name in backends.BACKENDS:
        support = backends.supports(name, facts)
        yield Finding(f"backend {name}", State.OK if support else State.NOTE, support.reason)
    try:
        choice = backends.choose(backend, facts)
    except ValueError as error:
        yield Finding("would run", State.BAD, str(error))
        return
    name = choice.backend.name
    best = "torch" if facts.device.type == "cpu" else backends.BACKENDS[0]
    if backend in ("auto", name):
        yield Finding("would run", State.OK if name in (backend, best) else State.NOTE, f"{name}: {choice.reason}")
    else:
        yield Finding("would run", State.BAD, f"{name} in place of {backend}, which was asked for: {choice.reason}")
    yield _eager_or_deferred(choice, facts, model, heads)
    if trial:
        yield _trial(choice, facts)


def _eager_or_deferred(choice: "Choice", facts: "Facts", model: "Model", heads: int) -> Finding:
    from graphrt.choice import StepShape, choose_commit, device_name

    shape = StepShape(
        device=device_name(facts.device),
        backend=choice.backend.name,
        layers=model.layers,
        heads=heads,
        head_dim=facts.head_dim,
        spec_query_len=facts.spec_query_len,
    )
    return Finding("commit", State.OK, choose_commit(shape).reason)


def _trial(choice: "Choice", facts: "Facts") -> Finding:
    """Two deferred steps and a drain on one layer, against the plain form on the CPU in float64."""
    from .common import working
    from .trial import TOLERANCES, largest_error

    name = choice.backend.name
    with working(f"compiling and running a small step with {name}"):
        try:
            error = largest_error(name, facts)
        except Exception as failure:
            return Finding("trial step", State.BAD, f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}")
    bound = TOLERANCES[facts.dtype]
    state = State.OK if error <= bound else State.BAD
    return Finding("trial step", state, f"checkpoint within {error:.1e} of float64, at most {bound:.0e}")
