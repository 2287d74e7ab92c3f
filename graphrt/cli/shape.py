"""The options that describe a model and how it is served."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch

    from graphrt.workload import Sizes


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


# Devices that usually share a layer's heads.
USUAL_TENSOR_PARALLEL = {Preset.KIMI_K3: 8, Preset.KIMI_LINEAR: 1}

PresetOption = Annotated[Preset, typer.Option(help="The model whose sizes hold where no option says otherwise.")]
LayersOption = Annotated[int | None, typer.Option("--layers", "-L", min=1, max=10_000, help="KDA layers.")]
HeadsOption = Annotated[int | None, typer.Option("--heads", "-H", min=1, help="Heads of the whole model.")]
LocalHeadsOption = Annotated[int | None, typer.Option("--heads", "-H", min=1, help="Heads on this device.")]
HeadDimOption = Annotated[int | None, typer.Option(min=16, help="Key and value dimension of a head, a power of two.")]
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


BatchOption = Annotated[int | None, typer.Option("--batch", "-B", min=1, help="Requests of the step.")]
AcceptedOption = Annotated[int | None, typer.Option(min=0, help="Tokens accepted by every row; half of the window.")]
CommitOption = Annotated[CommitKind, typer.Option(help="When accepted records reach the checkpoint.")]


def workload_sizes(
    device: "torch.device",
    *,
    preset: Preset,
    layers: int | None,
    heads: int | None,
    head_dim: int | None,
    query_len: int,
    batch: int | None,
    accepted: int | None,
    dtype: Dtype,
    checkpoint_dtype: Dtype,
) -> "Sizes":
    """The sizes of a synthetic step; on the CPU those that nobody gave are small, for plain torch is slow."""
    from graphrt.footprint import PRESETS
    from graphrt.workload import Sizes

    model = PRESETS[preset.value]
    small = device.type == "cpu"
    return Sizes(
        layers=layers or (2 if small else model.layers),
        heads=heads or (2 if small else model.heads // USUAL_TENSOR_PARALLEL[preset]),
        head_dim=head_dim or (32 if small else model.head_dim),
        spec_query_len=query_len,
        batch=batch or (4 if small else 16),
        accepted=query_len // 2 if accepted is None else accepted,
        dtype=dtype.torch,
        checkpoint_dtype=checkpoint_dtype.torch,
        conv_width=model.conv_width,
        gate_lower_bound=model.gate_lower_bound,
    )
