"""Records of one backend folded by another: what a verify leaves is the same whoever wrote it."""

import os

import pytest
import torch
from rig import Pool, Shape, Target
from steps import Batch, Row, commit, conv_verify, core_verify, drain
from truth import start

from graphrt import FP32_DEFERRED, KDADeferredCommitContext

compiled = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles here")
PAIRS = [
    pytest.param("torch", "triton", "cpu", marks=compiled),
    pytest.param("triton", "torch", "cpu", marks=compiled),
    *(
        pytest.param(verify, fold, "cuda", marks=[pytest.mark.gpu, pytest.mark.sm90])
        for verify in ("torch", "triton", FP32_DEFERRED)
        for fold in ("torch", "triton", FP32_DEFERRED)
        if verify != fold
    ),
]


@pytest.mark.parametrize(("verify_by", "fold_by", "device"), PAIRS)
def test_records_of_one_backend_are_folded_by_another(verify_by, fold_by, device):
    """Records start as poison; three tokens are verified by one backend: rows 0 to 2 of both streams are fresh, row 3
    keeps its poison, and the fold of the other gives the oracle's state and history (B92).
    """
    target = Target(verify_by, device)
    half = device == "cuda"
    shape = Shape(head_dim=128 if half else 16, act=torch.bfloat16 if half else torch.float32, layers=1)
    pool = Pool(target, shape)
    truths = start(pool, {4: 2})
    options = {"spec_query_len": shape.query_len, "max_num_reqs": shape.rows, "backend": fold_by}
    pool.context = KDADeferredCommitContext.create(pool.layers, **options)
    assert pool.context.backend == fold_by
    for accepted in (2, 3):
        batch = Batch(pool, [Row(2, 4, 3)])
        core_verify(batch, 0, deferred=True)
        conv_verify(batch, 0, deferred=True)
        records = pool.records(0)
        for tensor in (records.correction, records.key_gate):
            assert bool(tensor[4, :, :3].isfinite().all()) and bool(tensor[4, :, 3:].isnan().all())
        truths[4].step(batch.windows(0), accepted)
        commit(batch, [accepted])
        drain(pool, [2], [4])
        truths[4].assert_state(pool, 2)
