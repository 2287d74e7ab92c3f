"""No FP32 kernel compiles after `create`: whatever a context and its verifies can launch has been made there."""

from itertools import product

import pytest
import torch

from graphrt import KDADeferredCommitContext, KDALayer, KDARecoverSSMRecords, allocate_records
from graphrt.layers import LayerStack
from graphrt.steps import Convolution, Plan, Rows

SLOTS, HEADS, Q, WIDTH = 3, 2, 4, 4


def make_layer(device, dtype=torch.bfloat16):
    """One layer of the smallest size the kernels take."""
    dim = 3 * HEADS * 128
    return KDALayer(
        kv_cache=(
            torch.zeros(SLOTS, dim, WIDTH - 1 + Q, dtype=dtype, device=device),
            torch.zeros(SLOTS, HEADS, 128, 128, device=device),
        ),
        recoverssm_records=allocate_records(200, HEADS, Q, 128, dtype, torch.device(device)),
        A_log=torch.zeros(HEADS, device=device),
        dt_bias=torch.zeros(HEADS * 128, device=device),
        local_num_heads=HEADS,
        head_dim=128,
        gate_lower_bound=-5.0,
        conv_weight=torch.zeros(dim, WIDTH, dtype=dtype, device=device),
    )


def every_launch(layer, stack, plan, cute):
    """Folds and verifies in all their forms: batches on both sides of every threshold, both dtypes of beta."""
    commit, deferred = cute
    records = KDARecoverSSMRecords(stack.corrections[0], stack.key_gates[0])
    conv = Convolution(stack.conv_states[0], layer.conv_weight, None, stack.conv_keeps_history)
    device, dtype = stack.device, stack.key_gates[0].dtype
    pending = torch.zeros(200, dtype=torch.int32, device=device)
    errors = torch.zeros(64, dtype=torch.int32, device=device)
    for batch in (1, 40, 200):
        zeros = torch.zeros(batch, dtype=torch.int32, device=device)
        token = torch.zeros(1, 1, HEADS, 128, dtype=dtype, device=device)
        offsets = torch.zeros(batch + 1, dtype=torch.int32, device=device)
        for align, rows in product((False, True), (None, zeros)):
            commit.fold(stack, plan, zeros, rows, align)
        for wide, rows in product(
            (False, True), (Rows(offsets, zeros, zeros, pending, Q), Rows(offsets, zeros, None, None, Q))
        ):
            beta = token[..., 0].float() if wide else token[..., 0]
            inputs = (token, token, token, token, beta, layer.A_log, layer.dt_bias, -5.0, stack.checkpoints[0], records)
            deferred.verify(*inputs, rows, torch.empty_like(token), errors)
            deferred.fused_verify(None, *inputs, rows, conv, torch.empty_like(token), errors)


@pytest.fixture
def cute():
    pytest.importorskip("cutlass")
    from graphrt.kernels.cute import commit, deferred

    return commit, deferred


def test_create_makes_every_variant_that_can_be_launched(monkeypatch, cute, caplog):
    """The variants that launches ask for are among those made, without a GPU; the time it took is said once."""
    from graphrt.kernels.cute import build

    made, launched = set(), set()
    monkeypatch.setattr(build.Kernels, "load", lambda self, facts, device: made.add((id(self), facts)))
    monkeypatch.setattr(build.Kernels, "launch", lambda self, facts, *rest: launched.add((id(self), facts)))
    monkeypatch.setattr(build.Kernels, "count", lambda self: len(made))
    for module in cute:
        monkeypatch.setattr(module, "sm_count", lambda device: 8)
    layer = make_layer("cpu")
    stack = LayerStack.build([layer], spec_query_len=Q, max_num_reqs=200)
    cute[1].compile_variants(stack)
    assert caplog.text.count("CuTe DSL kernels compiled in") == 1
    caplog.clear()
    every_launch(layer, stack, Plan.allocate(200, torch.device("cpu")), cute)
    assert launched == made, "and none is made in vain"
    cute[1].compile_variants(stack)
    assert not caplog.text, "there is nothing to say where nothing was compiled"


@pytest.mark.parametrize("chosen", [True, False])
def test_a_fold_without_record_rows_is_whose_it_is_chosen_to_be(monkeypatch, cute, chosen):
    """`use_commit_f32` is asked there, with heads, rows and layers, and nowhere else."""
    from graphrt.kernels.cute import build

    commit, ran, asked = cute[0], [], []
    monkeypatch.setattr(build.Kernels, "launch", lambda self, *rest: ran.append("cute"))
    monkeypatch.setattr("graphrt.kernels.fold.fold", lambda *arguments: ran.append("triton"))
    monkeypatch.setattr(commit, "use_commit_f32", lambda *sizes: asked.append(sizes) or chosen)
    monkeypatch.setattr(commit, "sm_count", lambda device: 8)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    stack = LayerStack.build([make_layer("cpu")], spec_query_len=Q, max_num_reqs=200)
    plan, slots = Plan.allocate(200, torch.device("cpu")), torch.zeros(5, dtype=torch.int32)
    commit.fold(stack, plan, slots, slots, False)
    assert (ran, asked) == (["cute"], [])
    commit.fold(stack, plan, slots, None, True)
    assert (ran[1:], asked) == (["cute" if chosen else "triton"], [(HEADS, 5, 1)])


@pytest.mark.gpu
@pytest.mark.sm90
def test_nothing_compiles_after_create(cute, caplog):
    """On the device, with the time of all variants of one shape under a minute."""
    layer = make_layer("cuda", torch.float16)
    context = KDADeferredCommitContext.create([layer], spec_query_len=Q, max_num_reqs=200)
    assert context.backend == "fp32_deferred"
    times = [record.args[1] for record in caplog.records if "CuTe DSL kernels compiled in" in record.message]
    assert len(times) <= 1 and all(seconds < 60 for seconds in times)
    before = [module.KERNELS.count() for module in cute]
    every_launch(layer, context.stack, context.plan, cute)
    torch.cuda.synchronize()
    assert [module.KERNELS.count() for module in cute] == before
