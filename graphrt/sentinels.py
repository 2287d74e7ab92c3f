"""The three constants of the contract that engines and kernels share."""

NULL_BLOCK_ID = 0
"""A state slot at or below this id holds no state: its row reads and writes nothing."""

SCRATCH_ROW = -1
"""The record row of whoever owns none. Verifies may write it, nothing reads it."""

FP32_DEFERRED = "fp32_deferred"
"""Backend name of the FP32 CuTe DSL kernels."""
