"""A small deferred trace on the backend that would run, against the float64 oracle."""

import torch

from graphrt import KDADeferredCommitContext
from graphrt.backends import Facts
from graphrt.testing import Oracle, Row, deferred_step, make_batch, poisoned_pool

# Relative norms of the checkpoint: what FP32 keeps over a long trace; a few roundings of a 16-bit pool.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
_HEADS, _SLOT, _RECORD_ROW = 2, 1, 0


def largest_error(backend: str, facts: Facts) -> float:
    """Error of the checkpoint after two deferred windows and a drain, as a relative norm; NaN if it is none."""
    window = facts.spec_query_len
    pool = poisoned_pool(
        num_layers=1,
        num_heads=_HEADS,
        head_dim=facts.head_dim,
        spec_query_len=window,
        num_slots=3,
        max_num_reqs=2,
        conv_dim=3 * _HEADS * facts.head_dim,
        lower_bound=facts.lower_bound,
        dtype=facts.key_dtype,
        pool_dtype=facts.dtype,
        device=facts.device,
    )
    context = KDADeferredCommitContext.create(pool.layers, spec_query_len=window, max_num_reqs=2, backend=backend)
    pool.fill(_SLOT, seed=0)
    oracle = Oracle.of_slot(pool.layers[0], _SLOT)
    for seed, accepted in enumerate((window, (window + 1) // 2)):
        batch = make_batch(pool, [Row(0, _SLOT, _RECORD_ROW, window, accepted)], size=1, seed=seed)
        deferred_step(context, pool, batch, backend=backend)
        q, k, raw_g, v, raw_beta, x = batch.tokens(0, 0, window)
        oracle.step(q, k, raw_g, v, raw_beta, x, accepted)
    context.drain(batch.state_indices, batch.record_rows, pool.pending)
    got = pool.layers[0].kv_cache[1][_SLOT].double()
    return float((got - oracle.state).norm() / oracle.state.norm())
