"""Layers and contexts: an engine's own objects, several layers in one fold, parameters that change in place."""

from types import SimpleNamespace

import pytest
import torch
from rig import Pool, Target, loose
from steps import Batch, Row, commit, core_verify, drain, verify
from truth import Truth, check_step, run_step, start

from graphrt import (
    FP32_DEFERRED,
    NULL_BLOCK_ID,
    SCRATCH_ROW,
    KDADeferredCommitContext,
    KDARecoverSSMCommitContext,
    RecordSlots,
    allocate_records,
)

CPU = Target("torch", "cpu")


def serve_two_requests(pool):
    """Two deferred steps of two requests and a drain: outputs and states are the oracles'."""
    truths = start(pool, {0: 3, 4: 2})
    for counts in ([3, 2], [1, 1]):
        run_step(Batch(pool, [Row(3, 0, 4), Row(2, 4, 3)]), truths, counts)
    drain(pool, [3, 2], [0, 4])
    truths[0].assert_state(pool, 3)
    truths[4].assert_state(pool, 2)


def test_every_layer_is_folded_with_its_own_parameters(backend_device):
    """Five layers with different gates, pools and records all reach their oracles in one commit, flush and
    drain.
    """
    pool = Pool(backend_device, backend_device.shape(layers=5, heads=1))
    truths = start(pool, {0: 3, 4: 2})
    run_step(Batch(pool, [Row(3, 0, 4), Row(2, 4, 3)]), truths, [3, 2])
    drain(pool, [3, 2], [0, 4])
    truths[0].assert_state(pool, 3)
    truths[4].assert_state(pool, 2)


@pytest.mark.parametrize("engine_layout", [False, True], ids=["hist+Q", "hist+Q-1"])
@pytest.mark.parametrize("kind", [KDARecoverSSMCommitContext, KDADeferredCommitContext])
def test_an_engines_own_layers_serve(backend_device, engine_layout, kind):
    """Objects with the required attributes alone work: W comes from `conv_width`, or from hist = C - Q + 1."""
    backend_device.spare(engine_layout != (kind is KDARecoverSSMCommitContext))
    pool = Pool(backend_device, backend_device.shape(layers=2, engine_layout=engine_layout))
    width = {} if engine_layout else {"conv_width": pool.shape.width}
    pool.context = kind.create(
        [loose(layer, conv=False) for layer in pool.layers],
        spec_query_len=4,
        max_num_reqs=6,
        backend=backend_device.backend,
        **width,
    )
    serve_two_requests(pool)


def test_parameters_changed_in_place_are_used(backend_device):
    """A fold reads the layers' own A_log and dt_bias, not copies made when the context was created."""
    pool = Pool(backend_device, backend_device.shape(layers=2))
    for params in pool.params:
        params.A_log.add_(0.5)
        params.dt_bias.sub_(1.0)
    truths = start(pool, {0: 3})
    run_step(Batch(pool, [Row(3, 0, 4)]), truths, [4])
    drain(pool, [3], [0])
    truths[0].assert_state(pool, 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_parameters_of_every_float_dtype_serve(backend_device, dtype):
    """A_log and dt_bias need not be FP32; they are read in FP32."""
    backend_device.spare(dtype != torch.float64)
    pool = Pool(backend_device, backend_device.shape(layers=2, param=dtype))
    serve_two_requests(pool)


def test_a_stock_context_has_every_method_of_a_deferred_one(backend_device):
    """`KDARecoverSSMCommitContext` defers, flushes and drains as well."""
    pool = Pool(backend_device, backend_device.shape(layers=1), kind=KDARecoverSSMCommitContext)
    truths = start(pool, {0: 3})
    run_step(Batch(pool, [Row(3, 0, 4)]), truths, [2])
    assert pool.pending[0] == 2
    batch = Batch(pool, [Row(3, 0, 4)])
    pool.context.flush(batch.state_indices, batch.record_rows, pool.pending)
    check_step(batch, verify(batch, deferred=False), {0: truths[0]}, [3])
    commit(batch, [3])
    drain(pool, [3], [0])
    truths[0].assert_state(pool, 3)


def test_two_contexts_over_one_pool_agree_on_what_is_pending(backend_device):
    """State lives in the tensors: one context may fold what another has counted."""
    pool = Pool(backend_device, backend_device.shape(layers=1))
    other = Pool(backend_device, pool.shape, params=pool.params)
    truths = start(pool, {0: 3})
    run_step(Batch(pool, [Row(3, 0, 4)]), truths, [2])
    context = KDADeferredCommitContext.create(
        pool.layers, spec_query_len=4, max_num_reqs=6, backend=other.context.backend
    )
    context.drain(pool.int32([3]), pool.int32([0]), pool.pending)
    truths[0].assert_state(pool, 3)


def test_backends_can_be_mixed_between_verify_and_fold(backend_device):
    """Records are one format: what this backend recorded, the torch backend folds, and the reverse."""
    if backend_device.backend == "torch":
        pytest.skip("the other backends meet torch here")
    torch_side = Target("torch", backend_device.device)
    for first, second in ((backend_device, torch_side), (torch_side, backend_device)):
        pool = Pool(first, first.shape(layers=1))
        truths = start(pool, {0: 3})
        run_step(Batch(pool, [Row(3, 0, 4)]), truths, [3])
        pool.target = second
        batch = Batch(pool, [Row(3, 0, 2)])
        check_step(batch, verify(batch), {0: truths[0]}, [0])
        truths[0].assert_state(pool, 3)


def test_records_start_zeroed_one_row_into_their_allocation():
    """Shapes, dtypes and the scratch row are those of the contract, and every byte is zero."""
    records = allocate_records(5, 3, 4, 16, torch.bfloat16, torch.device("cpu"))
    assert records.correction.shape == (5, 3, 4, 16) and records.correction.dtype == torch.float32
    assert records.key_gate.shape == (5, 3, 4, 32) and records.key_gate.dtype == torch.bfloat16
    for tensor in (records.correction, records.key_gate):
        assert tensor.storage_offset() == tensor.stride(0) == tensor[0].numel()
        assert tensor.untyped_storage().nbytes() == 6 * tensor[0].numel() * tensor.element_size()
        memory = tensor.as_strided((6 * tensor[0].numel(),), (1,), 0)
        assert not bool(memory.ne(0).any())


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float8_e4m3fn, "float32"], ids=str)
def test_records_of_a_dtype_that_no_verify_takes_are_refused(dtype):
    """By name, before they are allocated."""
    with pytest.raises(ValueError, match=r"^dtype: expected a floating dtype of 16 bits or more, got"):
        allocate_records(2, 1, 4, 16, dtype, torch.device("cpu"))


def test_corrections_of_float64_records_are_float64():
    """A pool in double precision keeps its corrections in double precision."""
    records = allocate_records(2, 1, 4, 16, torch.float64, torch.device("cpu"))
    assert records.correction.dtype == torch.float64


def test_the_sentinels_are_those_of_the_engine():
    """Names and values of the three constants are fixed."""
    assert (NULL_BLOCK_ID, SCRATCH_ROW, FP32_DEFERRED) == (0, -1, "fp32_deferred")


@pytest.mark.parametrize("kind", [KDARecoverSSMCommitContext, KDADeferredCommitContext])
@pytest.mark.parametrize("asked", ["auto", "fp32_deferred", "torch"])
def test_a_context_says_which_backend_it_runs_and_why(kind, asked):
    """On the CPU every request ends at a backend that runs there, with a sentence where it is another one."""
    pool = Pool(CPU, CPU.shape(layers=1), kind=kind, backend=asked)
    assert pool.context.backend in ("triton", "torch")
    assert isinstance(pool.context.backend_reason, str)
    if asked == "torch":
        assert pool.context.backend == "torch"
    else:
        assert len(pool.context.backend_reason.split()) > 3
    truths = start(pool, {0: 3})
    run_step(Batch(pool, [Row(3, 0, 4)]), truths, [2])
    drain(pool, [3], [0])
    truths[0].assert_state(pool, 3)


def test_the_text_of_a_context_reads_no_tensor():
    """In a log or a traceback it says what it is, and neither waits for the device nor prints the pools."""
    pool = Pool(CPU, CPU.shape(layers=2))
    text = "KDADeferredCommitContext('torch', 2 layers, spec_query_len=4, max_num_reqs=6, on cpu)"
    assert repr(pool.context) == str(pool.context) == text


def test_contexts_and_layers_are_themselves_alone():
    """They may be looked for in lists and be keys, and no tensor is compared for it."""
    pools = [Pool(CPU, CPU.shape(layers=2)) for _ in range(2)]
    contexts, layers = [pool.context for pool in pools], [layer for pool in pools for layer in pool.layers]
    assert [contexts.index(one) for one in contexts] == [0, 1] and len(set(contexts)) == 2
    assert [layers.index(one) for one in layers] == [0, 1, 2, 3] and len(set(layers)) == 4


def test_the_default_backends_are_auto_and_fp32_deferred():
    """Without a backend both contexts find one; on the CPU it is the torch one."""
    pool = Pool(CPU, CPU.shape(layers=1))
    for kind in (KDARecoverSSMCommitContext, KDADeferredCommitContext):
        assert kind.create(pool.layers, spec_query_len=4, max_num_reqs=6).backend == "torch"


def test_verifies_without_a_backend_choose_one(backend_device):
    """`backend="auto"` gives the oracle's outputs on any device."""
    pool = Pool(backend_device, backend_device.shape(layers=1))
    pool.fill(3)
    batch = Batch(pool, [Row(3, 0, 4)])
    got = core_verify(batch, 0, deferred=False, backend="auto")
    [(exact, _)] = Truth(pool, 3).step(batch.windows(0), 0)
    torch.testing.assert_close(got.cpu().double(), exact.out, atol=1e-2, rtol=1e-2)


WRONG_LAYERS = {
    "no pools": ({"kv_cache": None}, "kv_cache", ("NoneType",)),
    "checkpoints of integers": (
        lambda layer: {"kv_cache": (layer.kv_cache[0], layer.kv_cache[1].int())}, "kv_cache[1]", ("int32",)),
    "a number for checkpoints": (
        lambda layer: {"kv_cache": (layer.kv_cache[0], layer.kv_cache[1].sum())}, "kv_cache[1]", ("[any, 2", "got []")),
    "two heads and a half": ({"local_num_heads": 2.5}, "local_num_heads", ("float",)),
    "two heads as a float": ({"local_num_heads": 2.0}, "local_num_heads", ("float",)),
    "one slot for all": (
        lambda layer: {"kv_cache": (layer.kv_cache[0], layer.kv_cache[1][:1].expand(12, -1, -1, -1))},
        "kv_cache[1]", ("strides",)),
    "fewer slots of the convolution": (
        lambda layer: {"kv_cache": (layer.kv_cache[0][:11], layer.kv_cache[1])}, "kv_cache[0]", ("12", "11")),
    "no records": ({"recoverssm_records": None}, "recoverssm_records", ("NoneType",)),
    "rounded corrections": (
        lambda layer: {"recoverssm_records": records_like(layer, correction=lambda t: t.bfloat16())},
        "recoverssm_records.correction", ("float32", "bfloat16")),
    "fewer rows of keys": (
        lambda layer: {"recoverssm_records": records_like(layer, key_gate=lambda t: t[:6])},
        "recoverssm_records.key_gate", ("7", "6")),
    "A_log of integers": ({"A_log": torch.zeros(2, dtype=torch.int32)}, "A_log", ("int32",)),
    "no dt_bias": ({"dt_bias": None}, "dt_bias", ("NoneType",)),
    "a bound of text": ({"gate_lower_bound": "-5"}, "gate_lower_bound", ("-5",)),
    "a head of half a channel": ({"head_dim": 16.5}, "head_dim", ("16.5",)),
    "the weight of torch's Conv1d": ({"conv_weight": torch.zeros(20, 1, 4)}, "conv_weight", ("[20, 1, 4]",)),
}  # fmt: skip


def records_like(layer, **change):
    """The records of a layer with seven rows, changed."""
    own = layer.recoverssm_records.key_gate
    records = allocate_records(7, own.shape[1], own.shape[2], own.shape[3] // 2, own.dtype, own.device)
    fields = {name: getattr(records, name) for name in ("correction", "key_gate")}
    return SimpleNamespace(**{name: change.get(name, lambda t: t)(t) for name, t in fields.items()})


@pytest.mark.parametrize("fault", WRONG_LAYERS)
def test_a_layer_that_no_kernel_could_serve_is_refused(fault):
    """What would send a kernel out of a pool or make numbers of something else names layer and field."""
    change, field, words = WRONG_LAYERS[fault]
    layer = loose(Pool(CPU, CPU.shape(layers=1)).layers[0])
    vars(layer).update(change(layer) if callable(change) else change)
    with pytest.raises(ValueError) as caught:
        KDADeferredCommitContext.create([layer], spec_query_len=4, max_num_reqs=6, backend="torch")
    assert field in str(caught.value)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_layer_without_a_field_is_told_which():
    """An engine's object that lacks an attribute is refused by the name of the attribute."""
    layer = loose(Pool(CPU, CPU.shape(layers=1)).layers[0])
    del layer.A_log
    with pytest.raises(ValueError, match=r"layers\[0\].*without A_log"):
        KDADeferredCommitContext.create([layer], spec_query_len=4, max_num_reqs=6)


def test_trainable_parameters_leave_the_state_out_of_autograd(backend_device):
    """Parameters of a module, gradients on: no output, checkpoint, convolution state or record gets a history."""
    pool = Pool(backend_device, backend_device.shape(layers=1))
    for params in pool.params:
        for tensor in (params.A_log, params.dt_bias, params.conv_weight):
            tensor.requires_grad_(True)
    start(pool, {0: 3})
    for _ in range(2):
        batch = Batch(pool, [Row(3, 0, 4)])
        verify(batch)
        commit(batch, [2])
    drain(pool, [3], [0])
    assert not [name for name, tensor in pool.tensors().items() if tensor.requires_grad]


def test_what_is_made_in_inference_mode_works_outside_of_it():
    """Records, row counts and the plan outlive the mode in which an engine happened to make them."""
    with torch.inference_mode():
        slots = RecordSlots(6, "cpu")
        records = allocate_records(6, 2, 4, 16, torch.float32, "cpu")
        slots.admit("early")
    assert slots.admit("late") == 1
    made = (slots.pending, slots.generation, records.correction, records.key_gate)
    assert not any(tensor.is_inference() for tensor in made)


@pytest.mark.parametrize("shape", [(12, 2, 32, 16), (12, 2, 16, 32), (12, 1, 16, 16), (12, 4, 16, 16)], ids=str)
def test_head_counts_and_dimensions_of_their_own_are_refused(shape):
    """A value dimension unlike the key dimension, or another number of heads than the records and gates have, raises
    before anything runs, in `create` and in a verify (B79).
    """
    pool, checkpoint = Pool(CPU, CPU.shape(layers=1)), torch.zeros(shape)
    pool.layers[0].kv_cache = (pool.layers[0].kv_cache[0], checkpoint)
    with pytest.raises(ValueError, match=r"kv_cache\[1\]"):
        KDADeferredCommitContext.create(pool.layers, spec_query_len=4, max_num_reqs=6, backend="torch")
    with pytest.raises(ValueError, match=r"^(checkpoint_state|q|records\.correction)"):
        core_verify(Batch(pool, [Row(1, 0, 4)]), 0, deferred=True)
