"""Triton kernels compile ahead of time for every supported target, without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_no_triton_kernel_spills_at_head_dim_128(arch):
    """Every variant that a context or a verify launches compiles for the target and uses no local memory."""
    # Kernels defined under the interpreter cannot be compiled, so this runs in a process without it.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, ROOT / "tools/triton_variants.py", "--arch", str(arch), "--pool", "float32"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "graphrt_verify_kernel" in done.stdout
