"""`graphrt plan`: what the runtime takes of a device's memory."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.table import Table

from .common import in_bytes, user_errors
from .outputs import JsonOption, show, write_json
from .shape import (
    USUAL_TENSOR_PARALLEL,
    CheckpointDtypeOption,
    Dtype,
    DtypeOption,
    HeadDimOption,
    HeadsOption,
    LayersOption,
    Preset,
    PresetOption,
    QueryLenOption,
    TensorParallelOption,
)

if TYPE_CHECKING:
    from graphrt.footprint import Footprint, Model, Service


def plan(
    preset: PresetOption = Preset.KIMI_K3,
    layers: LayersOption = None,
    heads: HeadsOption = None,
    head_dim: HeadDimOption = None,
    query_len: QueryLenOption = 8,
    requests: Annotated[int, typer.Option("--requests", "-R", min=1, max=2**20, help="Most requests of a step.")] = 256,
    slots: Annotated[
        int | None,
        typer.Option(min=2, max=2**24, help="State slots, the null slot included; requests + 1 if not given."),
    ] = None,
    checkpoint_dtype: CheckpointDtypeOption = Dtype.FP32,
    dtype: DtypeOption = Dtype.BF16,
    tp: TensorParallelOption = None,
    blocks: Annotated[int, typer.Option(min=0, max=2**20, help="Columns of the staged block table (align mode).")] = 0,
    json_file: JsonOption = None,
) -> None:
    """Bytes of checkpoints, records and everything else on one device, and what other ways would take.

    \b
    Examples:
      graphrt plan
      graphrt plan --preset kimi-linear --requests 64 --query-len 4
      graphrt plan -L 48 -H 32 --tp 4 --slots 4000 --json -
    """
    from graphrt.footprint import PRESETS, Service, footprint

    known = PRESETS[preset.value]
    model = replace(
        known, layers=layers or known.layers, heads=heads or known.heads, head_dim=head_dim or known.head_dim
    )
    service = Service(
        spec_query_len=query_len,
        max_num_reqs=requests,
        num_slots=requests + 1 if slots is None else slots,
        checkpoint_dtype=checkpoint_dtype.torch,
        dtype=dtype.torch,
        tensor_parallel=USUAL_TENSOR_PARALLEL[preset] if tp is None else tp,
        block_table_width=blocks,
    )
    with user_errors():
        found = footprint(model, service)
    show(_tables(model, service, found), json_file)
    write_json(_as_json(model, service, found), json_file)


def _tables(model: "Model", service: "Service", found: "Footprint") -> list[RenderableType]:
    heads = model.heads // service.tensor_parallel
    shape = (
        f"{model.layers} KDA layers of {heads} heads x {model.head_dim} on each of {service.tensor_parallel} devices, "
        f"Q = {service.spec_query_len}, R = {service.max_num_reqs}, {service.num_slots} slots"
    )
    parts = Table("", "bytes", "", "share")
    for column in parts.columns[1:]:
        column.justify = "right"
    for name, count in [*found.parts.items(), ("graphs, estimated", found.graphs)]:
        parts.add_row(name, f"{count:,}", in_bytes(count), f"{count / found.total:.2%}")
    parts.add_section()
    parts.add_row("on the device", f"{found.total:,}", in_bytes(found.total), "")
    parts.add_row("pinned on the host", f"{found.host_pinned:,}", in_bytes(found.host_pinned), "")

    records, checkpoints = found.parts["records"], found.parts["checkpoints"]
    ways = Table("how drafts are taken back", "on top of one state a slot", "times the records", title_justify="left")
    ways.columns[1].justify = ways.columns[2].justify = "right"
    rows = {
        "records (graphrt)": records,
        "a snapshot for every token of a window": found.snapshots,
        "a ring of Q states in every slot": found.ring - checkpoints,
    }
    for name, count in rows.items():
        ways.add_row(name, in_bytes(count), f"{count / records:.1f}")
    return [f"{model.name}: {shape}", parts, ways]


def _as_json(model: "Model", service: "Service", found: "Footprint") -> dict[str, object]:
    served = asdict(service) | {"checkpoint_dtype": str(service.checkpoint_dtype), "dtype": str(service.dtype)}
    return {"model": asdict(model), "service": served, "bytes": asdict(found) | {"total": found.total}}
