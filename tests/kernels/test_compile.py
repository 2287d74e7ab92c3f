"""Triton kernels compile ahead of time for every supported target, without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_no_triton_kernel_spills_at_head_dim_128():
    """Every variant that a context or a verify launches compiles for each target and uses no local memory."""
    # Kernels defined under the interpreter cannot be compiled, so this runs in a process without it: one for all
    # targets, which share the imports and the launches.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, ROOT / "tools/triton_variants.py", "--arch", "80", "90", "100", "--pool", "float32"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    verifies = [line for line in done.stdout.splitlines() if "graphrt_verify_kernel" in line]
    assert [sum(f"│ {arch} " in line for line in verifies) for arch in (80, 90, 100)] == [3, 3, 3]
