"""Does a case of tools/sanitizer_cases.py run every kernel variant that the compile check knows? No GPU needed.

Both sides launch with CPU tensors while the launches are collected instead of run. A CuTe variant is its static facts;
a Triton variant is its kernel, its switches, the arguments it goes without, and whether it takes any alignment. The
captured steps, which need a device, are left out. Exit status 1, and the variants, where one has no case.

    python tools/sanitizer_coverage.py
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import compile_check
import sanitizer_cases
import torch
import triton_variants

from graphrt.kernels.cute import build, commit, deferred

STEP_ENDS = ("graphrt_stage_kernel", "graphrt_stage_header_kernel", "graphrt_stage_advance_kernel")


def triton_variant(launch: triton_variants.Launch) -> str:
    """Kernel, switches and absent arguments of a launch, and whether the kernel is the one for any alignment."""
    given = launch.arguments
    switches = [f"{p.name}={given[p.name]}" for p in launch.kernel.params if isinstance(given[p.name], bool)]
    absent = [f"without {name}" for name, value in given.items() if value is None]
    pointers = [p for p in launch.kernel.params if p.name.endswith("_ptr")]
    unaligned = ["unaligned"] * all(p.do_not_specialize_on_alignment for p in pointers)
    return " ".join([launch.kernel.__name__, *switches, *absent, *unaligned])


def run_by_cases() -> set[Any]:
    """Every variant that a case launches."""
    launches: list[triton_variants.Launch] = []
    found: set[Any] = set()

    def keep(kernels: build.Kernels, facts: tuple, *arguments: Any) -> None:
        found.add((kernels is commit.KERNELS, facts))

    with ExitStack() as patches:
        patches.enter_context(triton_variants.collect_launches(launches, ""))
        patches.enter_context(patch.object(build.Kernels, "launch", keep))
        for module in (commit, deferred):
            patches.enter_context(patch.object(module, "sm_count", lambda device: 132))
        for name, case in sanitizer_cases.CASES.items():
            if "captured" not in name:
                case(torch.device("cpu"))
    return found | {triton_variant(launch) for launch in launches}


def known() -> Iterator[tuple[str, Any]]:
    """A name of every variant that the compile check knows, and the variant, in the cases' shape."""
    window = sanitizer_cases.WINDOW
    for label, kernels, facts in compile_check.cute_variants(2, window):
        yield f"cute {label}", (kernels is commit.KERNELS, facts)
    for launch in triton_variants.launches(16, window, torch.float32, torch.float32):
        # The staging, its header and the advance are what captured steps launch.
        if launch.kernel.__name__ not in STEP_ENDS:
            yield f"triton {triton_variant(launch)}", triton_variant(launch)


def main() -> int:
    run = run_by_cases()
    missing = [name for name, variant in known() if variant not in run]
    print("\n".join(missing) if missing else f"all of {len(dict(known()))} variants have a case")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
