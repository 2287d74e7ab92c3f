"""Does every kernel variant compile for every architecture, and does any spill or use local memory? No GPU needed.

Compiles the CuTe DSL variants of one shape from numbers alone and, unless `--cute-only`, the Triton variants
(tools/triton_variants.py); prints registers, shared memory, spills and local memory of each. Exit status 1 on a spill
or local memory. `registers` is what a block starts with; the verify's warpgroups then share the register file out
(`setmaxnreg`, verify.py).

    python tools/compile_check.py --arch sm_90a sm_100a
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Usage:
    """What one variant costs on one target."""

    label: str
    arch: str
    registers: int
    shared_bytes: int
    spills: int
    local_bytes: int
    seconds: float


def tool(name: str) -> Path:
    """A CUDA binary that Triton's package carries."""
    import triton

    return Path(triton.__file__).parent / "backends/nvidia/bin" / name


def read_usage(cubin: Path) -> tuple[int, int, int]:
    """Registers, local bytes, and loads and stores of local memory (spills) of the one kernel in a cubin."""
    text = subprocess.run([tool("cuobjdump"), "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    sass = subprocess.run([tool("nvdisasm"), "-c", cubin], capture_output=True, text=True, check=True).stdout
    return used["REG"], used["STACK"] + used["LOCAL"], len(re.findall(r"\b(?:LDL|STL)\b", sass))


def cute_variants(heads: int, window: int) -> Iterator[tuple[str, object, tuple]]:
    """Label, family and static facts of every CuTe variant that contexts and verifies of one shape can launch."""
    from graphrt.kernels.cute import commit, deferred

    fp32, kinds = torch.float32, {torch.bfloat16: "bf16", torch.float16: "fp16"}
    for dtype, align, indexed in product(kinds, (False, True), (False, True)):
        label = f"fold {kinds[dtype]}{' align' if align else ''}{' indexed' if indexed else ''}"
        yield label, commit.KERNELS, commit.fold_facts(heads, window, dtype, fp32, fp32, align, indexed)
    names = {(0, False): "", (4, True): " with convolution", (4, False): " with convolution, shifted"}
    for dtype, conv, split in product(kinds, names, (1, 2)):
        label = f"verify {kinds[dtype]}{names[conv]} split {split}"
        facts = deferred.verify_facts(heads, window, dtype, fp32, fp32, *conv, split)
        yield label, deferred.KERNELS, facts
    # A_log and dt_bias may have any dtype; FP64 takes the most registers.
    bf16, fp64 = torch.bfloat16, torch.float64
    yield "fold wide parameters", commit.KERNELS, commit.fold_facts(heads, window, bf16, fp64, fp64, True, True)
    for split in (1, 2):
        facts = deferred.verify_facts(heads, window, bf16, fp64, fp64, 4, True, split)
        yield f"verify wide parameters with convolution split {split}", deferred.KERNELS, facts


def check_cute(heads: int, window: int, archs: list[str], only: str) -> list[Usage]:
    """Compile the variants whose label contains `only`, and read their machine code."""
    found = []
    for (label, kernels, facts), arch in product(cute_variants(heads, window), archs):
        if only not in label:
            continue
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            kernels.compile(facts, arch, f"--keep-cubin --dump-dir={folder}")
            seconds = time.perf_counter() - start
            (cubin,) = Path(folder).glob("*.cubin")
            registers, local, spills = read_usage(cubin)
        shared = kernels.shared_bytes(facts)
        found.append(Usage(f"{label} Q={window}", arch, registers, shared, spills, local, seconds))
    return found


def check_triton(archs: list[str], window: int) -> list[Usage]:
    """The Triton variants of the same shape; a target sm_90a is Triton's 90."""
    import triton_variants

    found = []
    for launch in triton_variants.launches(128, window, torch.float32, torch.bfloat16):
        for arch in archs:
            start = time.perf_counter()
            usage = triton_variants.compile_launch(launch, int(re.sub(r"\D", "", arch)))
            seconds = time.perf_counter() - start
            local = usage.spill_bytes
            found.append(Usage(usage.label, arch, usage.registers, usage.shared_bytes, local, local, seconds))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=["sm_90a", "sm_100a"])
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--query-len", type=int, default=8)
    parser.add_argument("--only", default="", help="CuTe variants whose label contains this")
    parser.add_argument("--cute-only", action="store_true")
    args = parser.parse_args()
    usages = check_cute(args.heads, args.query_len, args.arch, args.only)
    if not args.cute_only:
        usages += check_triton(args.arch, args.query_len)
    table = Table("variant", "arch", "registers", "shared bytes", "spills", "local bytes", "seconds")
    for u in usages:
        numbers = (u.registers, u.shared_bytes, u.spills, u.local_bytes)
        table.add_row(u.label, u.arch, *map(str, numbers), f"{u.seconds:.1f}")
    Console(width=140).print(table)
    bad = [u for u in usages if u.spills or u.local_bytes]
    for u in bad:
        print(f"{u.label} on {u.arch}: {u.spills} spills, {u.local_bytes} bytes of local memory", file=sys.stderr)
    return 1 if bad or not usages else 0


if __name__ == "__main__":
    sys.exit(main())
