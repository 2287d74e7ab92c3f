"""Compile every Triton kernel variant of a model's shape ahead of time, without a GPU: registers, spills, memory.

Question: does any variant spill or use local memory on any target? Method: the real launchers run with CPU tensors
while `JITFunction.run` is replaced, so signatures and specialisations are those of a real launch; each is compiled
for the target and its cubin is read with the cuobjdump that Triton ships.

    python tools/triton_variants.py --arch 80 90 100
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from graphrt import KDALayer, allocate_records, backends
from graphrt.capture.static import allocate_rows
from graphrt.errors import ErrorKind
from graphrt.kernels.stage import stage_header
from graphrt.layers import LayerStack
from graphrt.records import KDARecoverSSMRecords
from graphrt.steps import HEADER_WORDS, Advance, Commit, Plan, Rows, StageSources

_DTYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32", torch.int64: "i64",
    torch.uint8: "u8",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """One kernel launch as the launcher asked for it."""

    label: str
    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]


@dataclass(frozen=True)
class Usage:
    """What one variant costs on one target."""

    label: str
    arch: int
    registers: int
    spill_bytes: int
    shared_bytes: int


@contextmanager
def collect_launches(into: list[Launch], label: str) -> Iterator[None]:
    """Keep the launches of the block instead of running them."""
    original = triton.runtime.JITFunction.run

    def keep(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = [p.name for p in kernel.params]
        bound = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
        into.append(Launch(label, kernel, bound, {k: v for k, v in kwargs.items() if k not in names}))

    triton.runtime.JITFunction.run = keep
    try:
        yield
    finally:
        triton.runtime.JITFunction.run = original


def source_of(launch: Launch) -> ASTSource:
    """Signature, constants and alignment hints of a launch, by Triton's own rules of specialisation."""
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        specialise = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (specialise and isinstance(value, int) and value == 1):
            signature[parameter.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{_DTYPES[value.dtype]}"
            if not parameter.do_not_specialize_on_alignment:
                attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            if specialise and value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32"
    return ASTSource(launch.kernel, signature, constants, attributes)


def compile_launch(launch: Launch, arch: int) -> Usage:
    """Compile for sm_`arch` and read the resource usage out of the cubin."""
    compiled = triton.compile(source_of(launch), target=GPUTarget("cuda", arch, 32), options=launch.options)
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return Usage(
        label=f"{launch.label}: {launch.kernel.__name__}",
        arch=arch,
        registers=used["REG"],
        spill_bytes=used["STACK"] + used["LOCAL"],
        shared_bytes=compiled.metadata.shared,
    )


def launches(head_dim: int, window: int, pool: torch.dtype, activations: torch.dtype) -> list[Launch]:
    """Every kernel variant that a context and the verifies of one shape can launch."""
    heads, slots, rows, width = 12, 4, 4, 4
    conv_dim = 3 * heads * head_dim
    weight = torch.zeros(conv_dim, width)
    found: list[Launch] = []
    triton_backend = backends.load("triton")
    index = torch.zeros(2, dtype=torch.int32)
    errors = torch.zeros(2 * len(ErrorKind), dtype=torch.int32)
    for lower_bound in (-5.0, None):
        conv_state = torch.zeros(slots, conv_dim, width - 1 + window, dtype=activations)
        checkpoint = torch.zeros(slots, heads, head_dim, head_dim, dtype=pool)
        records = allocate_records(rows, heads, window, head_dim, activations, "cpu")
        layer = KDALayer(
            (conv_state, checkpoint), records, torch.zeros(heads), torch.zeros(heads * head_dim), heads, head_dim,
            lower_bound, weight,
        )  # fmt: skip
        stack = LayerStack.build([layer], spec_query_len=window, max_num_reqs=rows)
        plan = Plan.allocate(rows, torch.device("cpu"))
        q = torch.zeros(1, window, heads, head_dim, dtype=activations)
        step = Rows(index, index[:1], index, index, window)
        gate = "bounded" if lower_bound else "softplus"
        with collect_launches(found, f"{gate} K={head_dim} Q={window} {_DTYPES[pool]} pool"):
            kept = KDARecoverSSMRecords(stack.corrections[0], stack.key_gates[0])
            triton_backend.verify(
                q, q, q, q, q[..., 0], layer.A_log, layer.dt_bias, lower_bound, checkpoint, kept, step, q, errors
            )
            for align in (False, True):
                triton_backend.fold(stack, plan, index[:1], index, align)
        if lower_bound is None:
            continue
        x = torch.zeros(window, conv_dim, dtype=activations)
        with collect_launches(found, f"Q={window} {_DTYPES[activations]}"):
            for bias in (None, weight[:, 0].contiguous()):
                for keeps in (True, False):
                    triton_backend.conv_verify(x, conv_state, weight, bias, step, keeps, rows, x, errors)
            # Tokens that do not start on 16 bytes.
            shifted = torch.zeros(q.numel() + 1, dtype=activations)[1:].view(q.shape)
            triton_backend.verify(
                shifted, q, q, q, q[..., 0], layer.A_log, layer.dt_bias, lower_bound, checkpoint, kept, step, q, errors
            )
            wide = torch.zeros(window, conv_dim + 1, dtype=activations)[:, 1:]
            triton_backend.conv_verify(wide, conv_state, weight, None, step, True, rows, x, errors)
            turned = replace(stack, conv_states=[conv_state.transpose(1, 2).contiguous().transpose(1, 2)])
            for align, states in product((False, True), (stack, turned)):
                triton_backend.compact_conv(states, plan, index[:1], align)
            for eager in (None, torch.zeros(1, dtype=torch.uint8)):
                commit = Commit(index, index[:1], index, None, None, None, None, index, index, eager)
                triton_backend.plan_commit(plan, commit, stack.geometry, errors)
            triton_backend.plan_flush(plan, index[:1], index, index, True, None, stack.geometry, errors)
            triton_backend.align_eager_mask(index, index, 16, None, torch.zeros(1, dtype=torch.uint8))
            triton_backend.align_state_indices(index[:, None], index, 16, index, errors)
            _launch_step_ends(triton_backend, window, errors)
    return found


def _launch_step_ends(backend: backends.Backend, window: int, errors: torch.Tensor) -> None:
    """Staging by value and by header, and the advance; the number of rows is the only variant of theirs."""
    _, rows = allocate_rows(256, 8, torch.device("cpu"))
    backend.stage(rows, StageSources(0), None, errors)
    stage_header(rows, torch.zeros(HEADER_WORDS, dtype=torch.int64), errors)
    lengths = torch.zeros(256, dtype=torch.int32)
    backend.advance(Advance(rows, rows, lengths, lengths, None, window, 4, None), errors)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90, 100], help="compute capabilities, as 90")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--query-len", type=int, default=8)
    parser.add_argument(
        "--pool", choices=["float32", "bfloat16", "float16"], nargs="+", default=["float32", "bfloat16"]
    )
    args = parser.parse_args()
    table = Table("variant", "sm", "registers", "spill bytes", "shared bytes", title="Triton kernels")
    spills = 0
    for pool in args.pool:
        for launch in launches(args.head_dim, args.query_len, getattr(torch, pool), torch.bfloat16):
            for arch in args.arch:
                usage = compile_launch(launch, arch)
                spills += usage.spill_bytes > 0
                cells = (usage.arch, usage.registers, usage.spill_bytes, usage.shared_bytes)
                table.add_row(usage.label, *map(str, cells))
    Console(width=140).print(table)
    if spills:
        print(f"{spills} variants spill registers or use local memory", file=sys.stderr)
    return 1 if spills else 0


if __name__ == "__main__":
    sys.exit(main())
