"""Host side of the FP32 fold: what it supports, its variants, and its launch. The kernel is fold.py."""

import cutlass
import torch
from cutlass import Float32, Int32, Int64
from cutlass.base_dsl.enums import Arch
from torch import Tensor

from ...backends import Facts, Support
from ...environment import cute_arch
from .build import DTYPES, Kernels, sm_count, target, tickets
from .fold import FoldF32
from .items import ROWS
from .tile import MAX_Q, K

# Beyond it exp(-L) of a whole window, or the low TF32 part of exp(L), would no longer be a normal number.
MAX_WINDOW_DECAY = 64.0


_EXAMPLES = (tuple(Int64(0) for _ in range(15)), (Int32(0), Int32(0)), (Int32(0),) * 5, Float32(0.0))
KERNELS = Kernels(FoldF32, _EXAMPLES, "15q2q5qf4x")


def supported(
    state_ref: Tensor,
    lower_bound: float | None,
    spec_query_len: int = MAX_Q,
    dtype: torch.dtype = torch.bfloat16,
) -> Support:
    """Whether the FP32 kernels run on checkpoints like `state_ref` [slots, H, V, K]; false says why in `.reason`.

    `spec_query_len` is Q and `dtype` that of the records' key_gate, where the caller knows them.
    """
    return support_of(Facts.of(state_ref, lower_bound, spec_query_len, dtype))


def support_of(facts: Facts) -> Support:
    """`supported` by facts alone."""
    refusal = refusal_of(facts.dtype, facts.head_dim, facts.lower_bound)
    if refusal:
        return Support(False, refusal)
    if not 1 <= facts.spec_query_len <= MAX_Q:
        return Support(False, f"the CuTe DSL kernels take windows of 1 to {MAX_Q} tokens, got {facts.spec_query_len}")
    if facts.key_dtype not in (torch.bfloat16, torch.float16):
        return Support(False, f"the CuTe DSL verify takes 16-bit activations, got {facts.key_dtype}")
    if facts.device.type != "cuda":
        return Support(False, f"the CuTe DSL kernels need a CUDA device, the checkpoints are on {facts.device}")
    capability = torch.cuda.get_device_capability(facts.device)
    if capability < (9, 0):
        return Support(False, f"the CuTe DSL kernels need compute capability 9.0, {facts.device} has {capability}")
    arch = target(facts.device)
    if arch not in Arch.__members__:
        whose = "which CUTE_DSL_ARCH asks for" if cute_arch() else f"that of {facts.device}"
        return Support(False, f"this CuTe DSL ({cutlass.__version__}) does not know {arch}, {whose}")
    if not facts.aligned:
        return Support(False, "the CuTe DSL kernels take slots and record rows on 16 bytes")
    return Support(True, f"the FP32 CuTe DSL kernels run on {facts.device}")


def refusal_of(dtype: torch.dtype, head_dim: int, lower_bound: float | None) -> str:
    """What is wrong with a checkpoint's dtype, head dimension and gate, or nothing."""
    if dtype != torch.float32:
        return f"the CuTe DSL kernels take FP32 checkpoints, got {dtype}"
    if head_dim != K:
        return f"the CuTe DSL kernels take a head dimension of {K}, got {head_dim}"
    if lower_bound is None:
        return "the CuTe DSL kernels take the bounded gate, got lower_bound None"
    if not -MAX_WINDOW_DECAY <= MAX_Q * lower_bound < 0:
        return f"the CuTe DSL kernels take {-MAX_WINDOW_DECAY / MAX_Q} <= lower_bound < 0, got {lower_bound}"
    return ""


def use_commit_f32(num_heads: int, batch: int, num_layers: int) -> bool:
    """Whether a commit without `record_rows` takes this kernel and not the Triton fold: always.

    It is the faster from about 150 (request, head, layer) on: 31 µs to 41 for one request of 12 heads and 69 layers,
    1773 to 2220 for 64 (tools/results/h200/folds.json). With less to do both only wait, this one up to 1.4 µs longer:
    5.2 to 4.0 for a single one. That buys the promise that a checkpoint has the same bits whichever way its records
    got there, for the Triton fold rounds otherwise.
    """
    return num_heads * batch * num_layers > 0


def compile_commit_f32(
    state_ref: Tensor,
    spec_query_len: int,
    a_log_dtype: torch.dtype,
    align: bool,
    indexed: bool,
    dtype: torch.dtype = torch.bfloat16,
    dt_bias_dtype: torch.dtype = torch.float32,
) -> None:
    """Compile and load one variant for the device of `state_ref`; `dtype` is that of the records' key_gate."""
    facts = fold_facts(state_ref.shape[1], spec_query_len, dtype, a_log_dtype, dt_bias_dtype, align, indexed)
    KERNELS.load(facts, state_ref.device)


def fold_facts(heads, spec_query_len, dtype, a_log_dtype, dt_bias_dtype, align, indexed) -> tuple:
    """Key of a variant."""
    return (heads, spec_query_len, DTYPES[dtype], DTYPES[a_log_dtype], DTYPES[dt_bias_dtype], align, indexed)


def commit_f32(context, state_indices: Tensor, batch: int, align: bool, record_rows: Tensor | None = None) -> None:
    """Run the written plan of `context` over all its layers: `context.stack` and `context.plan`."""
    fold(context.stack, context.plan, state_indices[:batch], record_rows, align)


def fold(stack, plan, state_indices: Tensor, record_rows: Tensor | None, align: bool) -> None:
    """One launch on the current stream; the signature of the Triton fold.

    Args:
        stack: tables [L] int64 `*_addrs` and `*_strides` (elements), lists of the layers' tensors, `lower_bound`.
        plan: `commit_lens`, `final_state_indices`, `boundary_state_indices`, `boundary_recovery_lens` [R] int32.
        state_indices: [B] int32. record_rows: [>= B] int32, or None: row b has record row b.
    """
    state, correction, key_gate = stack.checkpoints[0], stack.corrections[0], stack.key_gates[0]
    batch, layers, heads = state_indices.shape[0], len(stack.checkpoints), state.shape[1]
    if batch == 0:
        return
    if record_rows is None and not use_commit_f32(heads, batch, layers):
        # Whoever only asks what is supported imports no Triton.
        from .. import fold as triton

        triton.fold(stack, plan, state_indices, record_rows, align)
        return
    rows = state_indices if record_rows is None else record_rows
    facts = fold_facts(
        heads,
        stack.spec_query_len,
        key_gate.dtype,
        stack.A_logs[0].dtype,
        stack.dt_biases[0].dtype,
        align,
        record_rows is not None,
    )
    tables = (
        stack.checkpoint_addrs,
        stack.checkpoint_strides,
        stack.correction_addrs,
        stack.correction_strides,
        stack.key_gate_addrs,
        stack.key_gate_strides,
        stack.A_log_addrs,
        stack.dt_bias_addrs,
    )
    vectors = (
        state_indices,
        rows,
        plan.commit_lens,
        plan.final_state_indices,
        plan.boundary_state_indices,
        plan.boundary_recovery_lens,
    )
    KERNELS.launch(
        facts,
        state.device,
        *(t.data_ptr() for t in (*tables, *vectors)),
        tickets(state.device) if batch <= ROWS else 0,
        state_indices.stride(0),
        rows.stride(0),
        state.shape[0],
        correction.shape[0],
        batch,
        layers,
        min(sm_count(state.device), batch * heads * layers),
        stack.lower_bound,
    )
