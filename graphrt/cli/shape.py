"""The options that describe a model and how it is served; those of a synthetic step as one object."""

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import NO_ROOM, Backend, BackendOption, Device, DeviceOption, in_bytes, refusal, torch_device

if TYPE_CHECKING:
    import torch

    from graphrt.workload import Sizes, Workload


class Preset(StrEnum):
    """A model whose shape is known."""

    KIMI_K3 = "kimi-k3"
    KIMI_LINEAR = "kimi-linear"


class Dtype(StrEnum):
    """A floating dtype, by its usual short name."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def torch(self) -> "torch.dtype":
        """As torch names it."""
        import torch

        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.value]


# Above what any model has: sizes whose bytes still fit 64 bits.
MOST_HEADS = 4096

# Devices that usually share a layer's heads.
USUAL_TENSOR_PARALLEL = {Preset.KIMI_K3: 8, Preset.KIMI_LINEAR: 1}

PresetOption = Annotated[Preset, typer.Option(help="The model whose sizes hold where no option says otherwise.")]
LayersOption = Annotated[int | None, typer.Option("--layers", "-L", min=1, max=10_000, help="KDA layers.")]
HeadsOption = Annotated[
    int | None, typer.Option("--heads", "-H", min=1, max=MOST_HEADS, help="Heads of the whole model.")
]
LocalHeadsOption = Annotated[
    int | None, typer.Option("--heads", "-H", min=1, max=MOST_HEADS, help="Heads on this device.")
]
HeadDimOption = Annotated[
    int | None, typer.Option(min=16, max=1024, help="Key and value dimension of a head, a power of two.")
]
QueryLenOption = Annotated[int, typer.Option("--query-len", "-Q", min=1, max=16, help="Window: 1 + most draft tokens.")]
TensorParallelOption = Annotated[
    int | None, typer.Option("--tp", min=1, help="Devices that share the heads; 8 for kimi-k3, 1 otherwise.")
]
CheckpointDtypeOption = Annotated[Dtype, typer.Option(help="Of the checkpoints.")]
DtypeOption = Annotated[
    Dtype, typer.Option(help="Of activations, convolution states, and the records' keys and gates.")
]


class CommitKind(StrEnum):
    """When accepted records reach the checkpoint; auto is what the measured table chooses."""

    AUTO = "auto"
    DEFERRED = "deferred"
    EAGER = "eager"


CommitOption = Annotated[CommitKind, typer.Option(help="When accepted records reach the checkpoint.")]
BatchOption = Annotated[
    int | None, typer.Option("--batch", "-B", min=1, max=4096, help="Requests of the step; 16, on the CPU 4.")
]


@dataclass(frozen=True, slots=True)
class StepOptions:
    """A synthetic step as its options describe it: every field is an option of each command that records one."""

    preset: PresetOption = Preset.KIMI_K3
    layers: LayersOption = None
    heads: LocalHeadsOption = None
    head_dim: HeadDimOption = None
    query_len: QueryLenOption = 8
    batch: BatchOption = None
    commit: CommitOption = CommitKind.DEFERRED
    device: DeviceOption = Device.AUTO
    backend: BackendOption = Backend.AUTO
    dtype: DtypeOption = Dtype.BF16
    checkpoint_dtype: CheckpointDtypeOption = Dtype.FP32

    def workload(self, accepted: int | None = None) -> "Workload":
        """The step, ready to be recorded. On the CPU sizes that nobody gave are small, for plain torch is slow.

        Args:
            accepted: tokens that every row accepts; half of the window if None.

        Raises:
            ValueError: for a size that does not fit.
            typer.Exit: with status 1 behind a sentence, if the device has no room for it.
        """
        from graphrt.footprint import PRESETS
        from graphrt.workload import Sizes, Workload

        place, model = torch_device(self.device), PRESETS[self.preset.value]
        small = place.type == "cpu"
        sizes = Sizes(
            layers=self.layers or (2 if small else model.layers),
            heads=self.heads or (2 if small else model.heads // USUAL_TENSOR_PARALLEL[self.preset]),
            head_dim=self.head_dim or (32 if small else model.head_dim),
            spec_query_len=self.query_len,
            batch=self.batch or (4 if small else 16),
            accepted=self.query_len // 2 if accepted is None else accepted,
            dtype=self.dtype.torch,
            checkpoint_dtype=self.checkpoint_dtype.torch,
            conv_width=model.conv_width,
            gate_lower_bound=model.gate_lower_bound,
        )
        _check_room(sizes, place)
        commit = None if self.commit is CommitKind.AUTO else self.commit.value
        return Workload(sizes, place, backend=self.backend.value, commit=commit)


def _check_room(sizes: "Sizes", device: "torch.device") -> None:
    """Before anything is allocated: a CPU without room would stop the process, or others, without a word."""
    import torch

    from graphrt.footprint import Model, Service, footprint

    model = Model("step", sizes.layers, sizes.heads, sizes.head_dim, sizes.conv_width, sizes.gate_lower_bound)
    batch = sizes.batch
    service = Service(sizes.spec_query_len, batch, batch + 1, sizes.checkpoint_dtype, sizes.dtype)
    needed = footprint(model, service).total
    if device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[0]
    else:
        room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > room:
        raise refusal(f"the step needs {in_bytes(needed)}, and {device} has {in_bytes(room)}: {NO_ROOM}")


def with_step_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose options are the fields of `StepOptions`, its first argument, and then its own."""
    kind = Parameter.KEYWORD_ONLY
    shared = [Parameter(one.name, kind, default=one.default, annotation=one.type) for one in fields(StepOptions)]
    own = [one.replace(kind=kind) for one in list(signature(command).parameters.values())[1:]]

    @wraps(command)
    def run(**values: Any) -> None:
        command(StepOptions(**{one.name: values.pop(one.name) for one in shared}), **values)

    # Where typer looks for options.
    vars(run)["__signature__"] = Signature([*shared, *own])
    run.__annotations__ = {one.name: one.annotation for one in (*shared, *own)}
    return run
