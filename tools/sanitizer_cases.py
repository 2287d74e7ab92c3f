"""Small runs of every kernel variant, each in a process of its own: what `tools/sanitize.py` puts under the sanitizer.

`tools/racecheck.py` takes the CuTe cases from here as well.

    python tools/sanitizer_cases.py --list
    python tools/sanitizer_cases.py "triton fold align"

On the CPU (`--device cpu`) the Triton cases run in the interpreter, which shows that they run at all.
"""

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

Case = Callable[[torch.device], None]
HALF, SINGLE = torch.bfloat16, torch.float32
SLOTS, WINDOW = 7, 4


def make_pool(device: torch.device, **changes: Any) -> Any:
    """A pool of 7 slots and 4 record rows, slots 1 to 4 and the null slot filled, everything initialised."""
    from graphrt.testing import poisoned_pool

    sizes = {"num_layers": 1, "num_slots": SLOTS, "max_num_reqs": 4, "spec_query_len": WINDOW, "conv_dim": 24}
    pool = poisoned_pool(device=device, **sizes | changes)
    for slot in range(5):
        pool.fill(slot, slot)
    for layer in pool.layers:
        for records in (layer.recoverssm_records.correction, layer.recoverssm_records.key_gate):
            records.zero_()
    return pool


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


def verify(device: torch.device, backend: str, launch: dict[str, Any], conv: bool = False, **sizes: Any) -> None:
    """Stock and deferred verify of one layer; `launch` goes to the CuTe launcher, with the convolution if asked."""
    from graphrt import backends

    pool = make_pool(device, **sizes)
    layer, tokens = pool.layers[0], make_tokens(pool)
    if conv:
        layer.conv_weight, layer.conv_bias = (t.to(HALF) for t in (layer.conv_weight, layer.conv_bias))
    inputs = [part[0][None] for part in tokens.parts()[:5]]
    out = torch.zeros_like(inputs[2])
    for deferred in (False, True):
        rows = make_rows(pool, deferred)
        constants = (layer.A_log, layer.dt_bias, layer.gate_lower_bound, layer.kv_cache[1], layer.recoverssm_records)
        if backend == "triton":
            backends.load("triton").verify(*inputs, *constants, rows, out, errors_of(pool))
            continue
        from graphrt.kernels.cute.deferred import deferred_verify_f32
        from graphrt.steps import Convolution

        fused = Convolution(layer.kv_cache[0], layer.conv_weight, layer.conv_bias, True) if conv else None
        step = (rows.query_start_loc, rows.state_indices, rows.spec_query_len, out, errors_of(pool))
        rows_of = {"record_rows": rows.record_rows, "pending": rows.pending}
        deferred_verify_f32(*inputs, *constants, *step, conv=fused, **rows_of, **launch)


def conv(device: torch.device, columns: int, transposed: bool) -> None:
    """Convolution verify with `columns` columns less than history and window."""
    from graphrt import backends

    pool = make_pool(device)
    layer, tokens = pool.layers[0], make_tokens(pool)
    state = layer.kv_cache[0][:, :, : layer.kv_cache[0].shape[2] - columns].contiguous()
    if transposed:
        state = state.transpose(1, 2).contiguous().transpose(1, 2)
    out = torch.zeros_like(tokens.x[0])
    for deferred in (False, True):
        rows = make_rows(pool, deferred)
        weights = (layer.conv_weight, layer.conv_bias)
        backends.load("triton").conv_verify(tokens.x[0], state, *weights, rows, columns == 0, 4, out, errors_of(pool))


def fold(device: torch.device, backend: str, align: bool, indexed: bool, **sizes: Any) -> None:
    """Plan, compaction and fold of two layers, and a drain."""
    from graphrt import backends
    from graphrt.layers import LayerStack
    from graphrt.steps import Commit, Plan

    pool = make_pool(device, num_layers=2, **sizes)
    stack = LayerStack.build(pool.layers, spec_query_len=WINDOW, max_num_reqs=4)
    plan, run, rows = Plan.allocate(4, pool.device), backends.load(backend), make_rows(pool, True)
    slots, record_rows = rows.state_indices[:4], rows.record_rows[:4] if indexed else None
    offsets, counts = rows.query_start_loc[:5], pool.pending.new_tensor([4, 1, 3, 2])
    table = pool.pending.new_tensor([[1, 5], [2, 6], [3, 5], [4, 6]]) if align else None
    computed = pool.pending.new_tensor([14, 15, 16, 31]) if align else None
    commit = Commit(counts, slots, offsets, None, table, computed, 16 if align else None, record_rows, None, None)
    run.plan_commit(plan, commit, stack.geometry, errors_of(pool))
    run.compact_conv(stack, plan, slots, align)
    run.fold(stack, plan, slots, record_rows, align)
    if indexed and not align:
        run.plan_flush(plan, slots, record_rows, pool.pending, True, None, stack.geometry, errors_of(pool))
        run.compact_conv(stack, plan, slots, False)
        run.fold(stack, plan, slots, record_rows, False)


def step(device: torch.device, backend: str, **sizes: Any) -> None:
    """Staging, a captured decode step and the captured commit, flush and drain."""
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

    decode = DecodeStep(context, pool.pending, inputs, run_verify, sample, flush=True)
    runner = CommitRunner(context, pool.pending, inputs, [3])
    decode.capture(progress=False, dcp=True)
    runner.capture(progress=False)
    inputs.stage(num_reqs=2, state_indices=[1, 4], record_rows=[2, 0], query_start_loc=[0, 4, 5])
    decode.replay(2, 3)
    inputs.stage(
        num_reqs=2, state_indices=torch.tensor([1, 4], dtype=torch.int32).to(pool.device), record_rows=[2, 0],
        query_start_loc=[0, 4, 5], num_accepted_tokens=[2, 1],
    )  # fmt: skip
    for mode in ("commit", "flush", "drain"):
        getattr(runner, mode)(2)


def helpers(device: torch.device) -> None:
    """The two helpers of align mode."""
    from graphrt import align_eager_mask, align_state_indices

    def int32(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).to(device)

    align_eager_mask(int32(3, 16, 30), int32(0, 4, 4, 6), 16, request_indices=int32(2, 0, 7))
    align_state_indices(int32(1, 2, 3, 4, 5, 6).view(3, 2), int32(3, 16, 40), 16)


K128 = {"head_dim": 128, "dtype": HALF}
# The fused convolution runs over q, k and v; its weights have the dtype of the activations.
FUSED = {"conv_dim": 3 * 2 * 128}
CASES: dict[str, Case] = {
    "triton verify fp32": partial(verify, backend="triton", launch={}),
    "triton verify softplus 16-bit pool": partial(
        verify, backend="triton", launch={}, lower_bound=None, dtype=HALF, pool_dtype=HALF
    ),
    "triton verify K=128 bf16": partial(verify, backend="triton", launch={}, **K128),
    "triton conv": partial(conv, columns=0, transposed=False),
    "triton conv shifting, transposed": partial(conv, columns=1, transposed=True),
    "triton fold": partial(fold, backend="triton", align=False, indexed=False),
    "triton fold indexed": partial(fold, backend="triton", align=False, indexed=True),
    "triton fold align": partial(fold, backend="triton", align=True, indexed=False),
    "triton fold align indexed": partial(fold, backend="triton", align=True, indexed=True, pool_dtype=HALF),
    "triton align helpers": helpers,
    "triton captured step": partial(step, backend="triton"),
    **{
        f"cute verify split {split}{' with convolution' if conv else ''}": partial(
            verify, backend="cute", launch={"split": split}, conv=conv, **K128, **FUSED
        )
        for split in (1, 2)
        for conv in (False, True)
    },
    "cute verify programmatic": partial(verify, backend="cute", launch={"programmatic": True}, **K128),
    "cute verify fp16": partial(verify, backend="cute", launch={}, head_dim=128, dtype=torch.float16),
    **{
        f"cute fold{' align' if align else ''}{' indexed' if indexed else ''}": partial(
            fold, backend="fp32_deferred", align=align, indexed=indexed, **K128
        )
        for align in (False, True)
        for indexed in (False, True)
    },
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
