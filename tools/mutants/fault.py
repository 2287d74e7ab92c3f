"""What a fault is, and the tests that are asked for several of them."""

from dataclasses import dataclass

TORCH, TRITON = "not triton", "triton"


@dataclass(frozen=True)
class Mutant:
    """One fault."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    select: str = TORCH
    """For `pytest -k`."""


VERIFY = ("tests/test_verify.py", "tests/test_traces.py")
DUMMY = ("tests/test_dummy_rows.py", "tests/test_clamping.py")
FOLD = ("tests/test_commit.py", "tests/test_flush_drain.py", "tests/test_align.py")
STATE = ("tests/test_state_machine.py",)
STAGE = ("tests/capture/test_inputs.py", "tests/kernels/test_stage.py")
STEP = ("tests/capture/test_decode_step.py",)
RUNNER = ("tests/capture/test_runner.py",)
CUTE_ORDER = ("tests/kernels/cute/test_order.py",)
CUTE_VARIANTS = ("tests/kernels/cute/test_fp32_variants.py",)
CUTE_HOST = ("tests/kernels/cute/test_cute_compile.py", "tests/test_build_faults.py")

REFERENCE, PLAN = "kernels/reference.py", "kernels/reference_plan.py"
CUTE = "kernels/cute/"
