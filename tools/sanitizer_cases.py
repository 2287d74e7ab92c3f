"""Small runs of every kernel variant, each in a process of its own: what `tools/sanitize.py` puts under the sanitizer.

`tools/racecheck.py` takes the CuTe cases from here as well.

    python tools/sanitizer_cases.py --list
    python tools/sanitizer_cases.py "triton fold align"

On the CPU (`--device cpu`) the Triton cases run in the interpreter, which shows that they run at all.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch

Case = Callable[[torch.device], None]
HALF, FP16 = torch.bfloat16, torch.float16
SLOTS, WINDOW = 7, 4


def make_pool(
    device: torch.device,
    *,
    shifted: bool = False,
    turned: bool = False,
    wide: bool = False,
    padded: bool = False,
    **changes: Any,
) -> Any:
    """A pool of 7 slots and 4 record rows, slots 1 to 4 and the null slot filled, everything initialised.

    Args:
        shifted: the convolution states have one column less, that of an engine. turned: their channels are innermost.
        wide: A_log and dt_bias in FP64.
        padded: a few elements lie between one slot and the next, so that slots are not on 16 elements.
    """
    from graphrt.testing import poisoned_pool

    sizes = {"num_layers": 1, "num_slots": SLOTS, "max_num_reqs": 4, "spec_query_len": WINDOW, "conv_dim": 48}
    pool = poisoned_pool(device=device, **sizes | changes)
    for layer in pool.layers:
        conv_state, checkpoint = layer.kv_cache
        if shifted:
            conv_state = conv_state[:, :, 1:].contiguous()
        if turned:
            conv_state = conv_state.transpose(1, 2).contiguous().transpose(1, 2)
        layer.kv_cache = tuple(map(apart, (conv_state, checkpoint))) if padded else (conv_state, checkpoint)
        if wide:
            layer.A_log, layer.dt_bias = layer.A_log.double(), layer.dt_bias.double()
        for records in (layer.recoverssm_records.correction, layer.recoverssm_records.key_gate):
            records.zero_()
    for slot in range(5):
        pool.fill(slot, slot)
    return pool


def apart(state: torch.Tensor) -> torch.Tensor:
    """Zeros like a state, four elements between its slots."""
    size = state[0].numel()
    return state.new_zeros(state.shape[0], size + 4)[:, :size].unflatten(1, state.shape[1:])


def off_by_one(t: torch.Tensor) -> torch.Tensor:
    """A copy that starts one element late."""
    return t.new_zeros(t.numel() + 1)[1:].view(t.shape).copy_(t)


def make_rows(pool: Any, deferred: bool) -> Any:
    """A live row, one without tokens, a null slot, a dummy, a bad slot and a window that is too long."""
    from graphrt.steps import Rows

    def int32(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).to(pool.device)

    window = pool.spec_query_len
    lengths = [window, 0, 1, window, 2, window + 1]
    offsets = [sum(lengths[:b]) for b in range(len(lengths) + 1)]
    pool.pending.copy_(int32(window, 1, 0, 2))
    slots, rows = int32(1, 2, 0, 4, SLOTS, 3), int32(0, 1, 2, -1, 2, 3)
    return Rows(int32(*offsets), slots, rows, pool.pending if deferred else None, window)


def make_tokens(pool: Any, count: int = 24) -> Any:
    """Random activations of so many tokens, made on the host."""
    from graphrt.testing.truths import Tokens

    tokens = Tokens.allocate(pool, count)
    for part in tokens.parts():
        part.copy_(torch.randn(part.shape))
    return tokens


def errors_of(pool: Any) -> torch.Tensor:
    from graphrt.errors import error_counter

    return error_counter(pool.device)


def verify(device: torch.device, backend: str, launches: Sequence[dict[str, Any]] = ({},), **sizes: Any) -> None:
    """Stock and deferred verify of one layer, on Triton also of tokens that do not start on 16 bytes.

    Args:
        launches: what the CuTe launcher is told, one launch after the other.
    """
    from graphrt import backends

    pool = make_pool(device, **sizes)
    layer, inputs, out = pool.layers[0], *make_inputs(pool)
    constants = (layer.A_log, layer.dt_bias, layer.gate_lower_bound, layer.kv_cache[1], layer.recoverssm_records)
    for deferred, launch in product((False, True), launches):
        rows = make_rows(pool, deferred)
        if backend == "triton":
            for q in (inputs[0], off_by_one(inputs[0])):
                backends.load("triton").verify(q, *inputs[1:], *constants, rows, out, errors_of(pool))
        else:
            cute_verify(inputs, constants, rows, out, errors_of(pool), launch)


def fused(device: torch.device, backend: str, head_dim: int = 16, **sizes: Any) -> None:
    """`verify` of raw projections with the convolution, with and without a bias: two launches on Triton, else one."""
    from graphrt import backends
    from graphrt.steps import Convolution

    # A fused convolution runs over q, k and v.
    pool = make_pool(device, head_dim=head_dim, conv_dim=3 * 2 * head_dim, **sizes)
    layer, inputs, out = pool.layers[0], *make_inputs(pool)
    # The weights of a fused convolution have the dtype of the activations.
    weight, bias = (t.to(out.dtype) for t in (layer.conv_weight, layer.conv_bias))
    keeps_history = layer.kv_cache[0].shape[2] == pool.hist + WINDOW
    constants = (layer.A_log, layer.dt_bias, layer.gate_lower_bound, layer.kv_cache[1], layer.recoverssm_records)
    for deferred, given in product((False, True), (bias, None)):
        rows, conv = make_rows(pool, deferred), Convolution(layer.kv_cache[0], weight, given, keeps_history)
        if backend == "triton":
            run = backends.load("triton")
            run.fused_verify(run.conv_verify, *inputs, *constants, rows, conv, out, errors_of(pool))
            continue
        for split in (1, 2):
            cute_verify(inputs, constants, rows, out, errors_of(pool), {"conv": conv, "split": split})


def make_inputs(pool: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v, raw_g and raw_beta of a verify, and its output."""
    inputs = [part[0][None] for part in make_tokens(pool).parts()[:5]]
    return inputs, torch.zeros_like(inputs[2])


def cute_verify(
    inputs: Sequence[torch.Tensor], constants: Sequence[Any], rows: Any, out: torch.Tensor, errors: torch.Tensor,
    launch: dict[str, Any],
) -> None:  # fmt: skip
    from graphrt.kernels.cute.deferred import deferred_verify_f32

    step = (rows.query_start_loc, rows.state_indices, rows.spec_query_len, out, errors)
    deferred_verify_f32(*inputs, *constants, *step, record_rows=rows.record_rows, pending=rows.pending, **launch)


def conv(device: torch.device, **sizes: Any) -> None:
    """Convolution verify, with and without a bias, and of inputs that do not start on 16 bytes."""
    from graphrt import backends

    pool = make_pool(device, **sizes)
    layer, x = pool.layers[0], make_tokens(pool).x[0]
    state, out = layer.kv_cache[0], torch.zeros_like(x)
    keeps_history = state.shape[2] == pool.hist + WINDOW
    for deferred, bias, inputs in product((False, True), (layer.conv_bias, None), (x, off_by_one(x))):
        step = (make_rows(pool, deferred), keeps_history, 4, out, errors_of(pool))
        backends.load("triton").conv_verify(inputs, state, layer.conv_weight, bias, *step)


def by_ticket(device: torch.device) -> None:
    """Captured deferred verifies of two layers as large batches run them: two blocks, each helping the other.

    All but the first items go by ticket, which else takes hundreds of rows.
    """
    from graphrt.kernels.cute import deferred

    pool = make_pool(device, num_layers=2, **K128)
    (inputs, out), rows = make_inputs(pool), make_rows(pool, True)
    share_out, deferred.share_out = deferred.share_out, lambda items, blocks, split: (2, 2, 2)

    def chain() -> None:
        for layer in pool.layers:
            constants = (layer.A_log, layer.dt_bias, layer.gate_lower_bound, layer.kv_cache[1])
            cute_verify(inputs, (*constants, layer.recoverssm_records), rows, out, errors_of(pool), {"split": 1})

    try:
        chain()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain()
        for _ in range(2):
            graph.replay()
    finally:
        deferred.share_out = share_out


def fold(device: torch.device, backend: str, aligns: Sequence[bool] = (False, True), **sizes: Any) -> None:
    """Plan, compaction and fold of two layers without and with record rows; then what a deferred commit and a drain do.

    Args:
        aligns: whether in align mode, one after the other.
    """
    from graphrt import backends
    from graphrt.layers import LayerStack
    from graphrt.steps import Commit, Plan

    pool = make_pool(device, num_layers=2, **sizes)
    stack = LayerStack.build(pool.layers, spec_query_len=WINDOW, max_num_reqs=4)
    plan, run, rows = Plan.allocate(4, pool.device), backends.load(backend), make_rows(pool, True)
    slots, record_rows, offsets = rows.state_indices[:4], rows.record_rows[:4], rows.query_start_loc[:5]
    counts, eager = pool.pending.new_tensor([4, 1, 3, 2]), torch.tensor([1, 0, 1, 0], dtype=torch.uint8).to(pool.device)
    table = pool.pending.new_tensor([[1, 5], [2, 6], [3, 5], [4, 6]])
    blocks = (table, pool.pending.new_tensor([14, 15, 16, 31]), 16)

    def fold_plan(indexed: torch.Tensor | None, align: bool) -> None:
        run.compact_conv(stack, plan, slots, align)
        run.fold(stack, plan, slots, indexed, align)

    for align, owned in product(aligns, ((None,) * 3, (record_rows, None, None), (record_rows, pool.pending, eager))):
        commit = Commit(counts, slots, offsets, None, *(blocks if align else (None,) * 3), *owned)
        run.plan_commit(plan, commit, stack.geometry, errors_of(pool))
        fold_plan(owned[0], align)
    run.plan_flush(plan, slots, record_rows, pool.pending, True, None, stack.geometry, errors_of(pool))
    fold_plan(record_rows, False)


def step(device: torch.device, backend: str, block_size: int | None = None, **sizes: Any) -> None:
    """Staging, a captured decode step and the captured commit, flush and drain; in align mode with a block size."""
    from graphrt import KDADeferredCommitContext
    from graphrt.capture import CommitRunner, DecodeStep, Sampled, StepInputs
    from graphrt.testing.batches import verify_layers

    pool = make_pool(device, **sizes)
    context = KDADeferredCommitContext.create(pool.layers, spec_query_len=WINDOW, max_num_reqs=4, backend=backend)
    inputs, tokens = StepInputs(3, WINDOW, pool.device, 2), make_tokens(pool, 3 * WINDOW)
    out, convolved = torch.zeros_like(tokens.v), torch.zeros_like(tokens.x)
    ones = torch.ones(3, dtype=torch.int32).to(pool.device)

    def run_verify(rows: Any) -> None:
        verify_layers(pool, tokens, rows, rows.pending, backend, out, convolved)

    def sample(rows: Any, outputs: None) -> Sampled:
        count = rows.state_indices.shape[0]
        return Sampled(ones[:count], ones[:count])

    decode = DecodeStep(context, pool.pending, inputs, run_verify, sample, flush=True, mamba_block_size=block_size)
    runner = CommitRunner(context, pool.pending, inputs, [3], block_size)
    decode.capture(progress=False, dcp=True)
    runner.capture(progress=False)
    staged = {"num_reqs": 2, "record_rows": [2, 0], "query_start_loc": [0, 4, 5]}
    if block_size is not None:
        staged |= {"num_computed_tokens": [block_size - 2, 3], "block_table": [[1, 2], [4, 5]]}
    inputs.stage(state_indices=[1, 4], **staged)
    decode.replay(2, 3)
    on_device = torch.tensor([1, 4], dtype=torch.int32).to(pool.device)
    inputs.stage(state_indices=on_device, num_accepted_tokens=[2, 1], **staged)
    for mode in ("commit", "flush", "drain"):
        getattr(runner, mode)(2)


def helpers(device: torch.device) -> None:
    """The two helpers of align mode."""
    from graphrt import backends, error_counter

    def int32(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).to(device)

    run, mask = backends.load("triton"), torch.zeros(3, dtype=torch.uint8, device=device)
    for requests in (None, int32(2, 0, 7)):
        run.align_eager_mask(int32(3, 16, 30), int32(0, 4, 4, 6), 16, requests, mask)
    table, errors = int32(1, 2, 3, 4, 5, 6).view(3, 2), error_counter(device)
    run.align_state_indices(table, int32(3, 16, 40), 16, int32(0, 0, 0), errors)


K128 = {"head_dim": 128, "dtype": HALF}
SOFTPLUS = {"lower_bound": None, "dtype": HALF, "pool_dtype": HALF}
WIDE_FP16 = {"wide": True, "dtype": FP16, "pool_dtype": FP16}
BOTH_SPLITS = ({"split": 1}, {"split": 2})
CASES: dict[str, Case] = {
    "triton verify fp32": partial(verify, backend="triton"),
    "triton verify softplus 16-bit pool": partial(verify, backend="triton", **SOFTPLUS),
    "triton verify K=128 bf16": partial(verify, backend="triton", **K128),
    "triton verify wide parameters fp16": partial(verify, backend="triton", **WIDE_FP16),
    "triton verify with convolution": partial(fused, backend="triton", dtype=HALF),
    "triton verify with convolution, shifted fp16": partial(fused, backend="triton", shifted=True, dtype=FP16),
    "triton conv": conv,
    "triton conv shifting, transposed": partial(conv, turned=True, shifted=True),
    "triton fold": partial(fold, backend="triton", aligns=[False]),
    "triton fold align": partial(fold, backend="triton", aligns=[True]),
    "triton fold channels innermost": partial(fold, backend="triton", turned=True),
    "triton fold softplus 16-bit pool": partial(fold, backend="triton", **SOFTPLUS),
    "triton fold wide parameters fp16": partial(fold, backend="triton", **WIDE_FP16),
    "triton fold shifted, padded slots": partial(fold, backend="triton", shifted=True, padded=True),
    "triton align helpers": helpers,
    "triton captured step": partial(step, backend="triton"),
    "triton captured step align": partial(step, backend="triton", block_size=16),
    **{
        f"cute verify {kind}": partial(verify, backend="cute", launches=BOTH_SPLITS, head_dim=128, dtype=dtype)
        for kind, dtype in (("bf16", HALF), ("fp16", FP16))
    },
    **{
        f"cute verify {kind} with convolution{', shifted' if shifted else ''}": partial(
            fused, backend="cute", head_dim=128, dtype=dtype, shifted=shifted
        )
        for kind, dtype in (("bf16", HALF), ("fp16", FP16))
        for shifted in (False, True)
    },
    "cute verify wide parameters with convolution": partial(fused, backend="cute", wide=True, **K128),
    "cute verify programmatic": partial(verify, backend="cute", launches=({"programmatic": True},), **K128),
    **{
        f"cute fold {kind}{' align' if align else ''}": partial(
            fold, backend="fp32_deferred", aligns=[align], head_dim=128, dtype=dtype
        )
        for kind, dtype in (("bf16", HALF), ("fp16", FP16))
        for align in (False, True)
    },
    "cute fold wide parameters": partial(fold, backend="fp32_deferred", wide=True, **K128),
    "cute captured verify by ticket": by_ticket,
    "cute captured step": partial(step, backend="fp32_deferred", **K128),
}


def run_case(name: str, device: str, lanes: int) -> None:
    """Run a case to its end; `lanes` of a warp arrive at an mbarrier in the CuTe kernels."""
    if name.startswith("cute"):
        from graphrt.kernels.cute import tile

        tile.ARRIVING_LANES = lanes
    torch.manual_seed(0)
    CASES[name](torch.device(device))
    if device == "cuda":
        torch.cuda.synchronize()
    print(f"ran: {name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?", choices=CASES, metavar="CASE")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--lanes", type=int, default=1, help="lanes of a warp that arrive at an mbarrier (CuTe)")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    args = parser.parse_args()
    if args.list or args.case is None:
        print("\n".join(CASES))
        return 0
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    run_case(args.case, args.device, args.lanes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
