"""What the host refuses before any launch: each message names the argument, what was expected and what came."""

import pytest
import torch
from rig import Pool, Snapshot, Target, loose, paged
from steps import Batch, Row
from truth import start

from graphrt import (
    FusedConv,
    KDADeferredCommitContext,
    KDARecoverSSMCommitContext,
    align_eager_mask,
    align_state_indices,
    allocate_records,
    kda_conv_verify,
    kda_deferred_verify,
    kda_recoverssm_verify,
)

CPU = Target("torch", "cpu")
INT32, META = torch.int32, torch.device("meta")


def ints(*values, dtype=INT32):
    return torch.tensor(values, dtype=dtype)


@pytest.fixture
def pool():
    pool = Pool(CPU, CPU.shape(layers=1))
    start(pool, {0: 1, 1: 2})
    return pool


def commit_arguments(pool):
    batch = Batch(pool, [Row(1, 0, 4), Row(2, 1, 4)])
    return {
        "num_accepted_tokens": ints(1, 2),
        "state_indices": batch.state_indices,
        "query_start_loc": batch.query_start_loc,
        "record_rows": batch.record_rows,
        "pending": pool.pending,
    }


def align_arguments():
    return {
        "block_table": torch.ones(2, 3, dtype=INT32),
        "num_computed_tokens": ints(3, 3),
        "mamba_block_size": 16,
    }


# Changed arguments, the argument the message names, and words of "expected" and "got" that it contains.
COMMIT_FAULTS = {
    "counts too short": ({"num_accepted_tokens": ints(1)}, "num_accepted_tokens", ("2", "1")),
    "counts of another dtype": (
        {"num_accepted_tokens": ints(1, 2, dtype=torch.int64)}, "num_accepted_tokens", ("int32", "int64")),
    "counts of two dimensions": ({"num_accepted_tokens": ints([1, 2])}, "num_accepted_tokens", ("1",)),
    "counts elsewhere": (
        {"num_accepted_tokens": torch.empty(2, dtype=INT32, device=META)}, "num_accepted_tokens", ("cpu", "meta")),
    "slots of another dtype": ({"state_indices": ints(1, 2, dtype=torch.int64)}, "state_indices", ("int32", "int64")),
    "slots elsewhere": (
        {"state_indices": torch.empty(2, dtype=INT32, device=META)}, "state_indices", ("cpu", "meta")),
    "slots in a list": ({"state_indices": [1, 2]}, "state_indices", ("int32", "list")),
    "no slots": ({"state_indices": None}, "state_indices", ("int32", "NoneType")),
    "a single slot": ({"state_indices": torch.tensor(1, dtype=INT32)}, "state_indices", ("int32", "[]")),
    "eager in a list": ({"eager": [True, False]}, "eager", ("uint8", "list")),
    "blocks of half a token": (align_arguments() | {"mamba_block_size": 16.5}, "mamba_block_size", ("int", "float")),
    "blocks past 32 bits": (align_arguments() | {"mamba_block_size": 2**40}, "mamba_block_size", (str(2**40),)),
    "offsets without an end": ({"query_start_loc": ints(0, 4)}, "query_start_loc", ("3", "2")),
    "offsets elsewhere": (
        {"query_start_loc": torch.empty(3, dtype=INT32, device=META)}, "query_start_loc", ("cpu", "meta")),
    "rows too short": ({"record_rows": ints(0)}, "record_rows", ("2", "1")),
    "rows of another dtype": ({"record_rows": ints(0, 1, dtype=torch.int64)}, "record_rows", ("int32", "int64")),
    "pending too short": ({"pending": ints(0, 0)}, "pending", ("6", "2")),
    "pending of another dtype": ({"pending": torch.zeros(6)}, "pending", ("int32", "float32")),
    "pending without rows": ({"record_rows": None}, "record_rows", ("pending",)),
    "eager without pending": ({"pending": None, "eager": torch.zeros(2, dtype=torch.bool)}, "eager", ("pending",)),
    "eager too short": ({"eager": torch.zeros(1, dtype=torch.bool)}, "eager", ("2", "1")),
    "eager of another dtype": ({"eager": torch.zeros(2)}, "eager", ("uint8", "float32")),
    "requests too short": ({"request_indices": ints(0)}, "request_indices", ("2", "1")),
    "requests of another dtype": (
        {"request_indices": ints(0, 1, dtype=torch.int64)}, "request_indices", ("int32", "int64")),
    "table alone": ({"block_table": torch.ones(2, 3, dtype=INT32)}, "num_computed_tokens", ()),
    "computed alone": ({"num_computed_tokens": ints(3, 3)}, "block_table", ()),
    "block size alone": ({"mamba_block_size": 16}, "block_table", ()),
    "no block size": (align_arguments() | {"mamba_block_size": None}, "mamba_block_size", ()),
    "blocks below a window": (align_arguments() | {"mamba_block_size": 3}, "mamba_block_size", ("4", "3")),
    "blocks of nothing": (align_arguments() | {"mamba_block_size": 0}, "mamba_block_size", ("4", "0")),
    "flat table": (align_arguments() | {"block_table": ints(1, 2)}, "block_table", ("2",)),
    "table of too few requests": (
        align_arguments() | {"block_table": torch.ones(1, 3, dtype=INT32)}, "block_table", ("at least 2", "got 1")),
    "table of another dtype": (
        align_arguments() | {"block_table": torch.ones(2, 3, dtype=torch.int64)}, "block_table", ("int32", "int64")),
    "computed elsewhere": (
        align_arguments() | {"num_computed_tokens": torch.empty(2, dtype=INT32, device=META)},
        "num_computed_tokens", ("cpu", "meta")),
    "table elsewhere": (
        align_arguments() | {"block_table": torch.empty(2, 3, dtype=INT32, device=META)},
        "block_table", ("cpu", "meta")),
}  # fmt: skip


def assert_refused(call, name, words):
    """`call` raises a ValueError that names the argument and contains these words."""
    with pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    assert name in message, message
    assert all(word in message for word in words), message


@pytest.mark.parametrize("fault", COMMIT_FAULTS)
def test_a_commit_refuses_a_wrong_argument(pool, fault):
    """A commit with a wrong argument raises and changes nothing."""
    change, name, words = COMMIT_FAULTS[fault]
    arguments = commit_arguments(pool) | change
    before = Snapshot(pool)
    assert_refused(lambda: pool.context.commit(**arguments), name, words)
    assert before.changed() == []


@pytest.mark.parametrize("method", ["commit", "flush", "drain"])
def test_a_batch_over_the_plan_is_refused(pool, method):
    """More rows than `max_num_reqs` name both numbers."""
    slots, rows = pool.int32([0] * 7), pool.int32([-1] * 7)
    calls = {
        "commit": lambda: pool.context.commit(
            slots, slots, pool.int32([0] * 8), record_rows=rows, pending=pool.pending
        ),
        "flush": lambda: pool.context.flush(slots, rows, pool.pending),
        "drain": lambda: pool.context.drain(slots, rows, pool.pending),
    }
    assert_refused(calls[method], "state_indices", ("6", "7"))


FOLD_FAULTS = {
    "slots": ({"state_indices": ints(1, 2, dtype=torch.int64)}, "state_indices", ("int32", "int64")),
    "slots elsewhere": (
        {"state_indices": torch.empty(2, dtype=INT32, device=META)}, "state_indices", ("cpu", "meta")),
    "rows": ({"record_rows": ints(0)}, "record_rows", ("2", "1")),
    "pending": ({"pending": ints(0)}, "pending", ("6", "1")),
    "slots in a list": ({"state_indices": [1, 2]}, "state_indices", ("int32", "list")),
    "no rows": ({"record_rows": None}, "record_rows", ("NoneType",)),
    "no pending": ({"pending": None}, "pending", ("NoneType",)),
}  # fmt: skip


@pytest.mark.parametrize("method", ["flush", "drain"])
@pytest.mark.parametrize("fault", FOLD_FAULTS)
def test_flush_and_drain_refuse(pool, method, fault):
    """A fold with a wrong argument raises and changes nothing."""
    change, name, words = FOLD_FAULTS[fault]
    arguments = {"state_indices": ints(1, 2), "record_rows": ints(0, 1), "pending": pool.pending} | change
    before = Snapshot(pool)
    assert_refused(lambda: getattr(pool.context, method)(**arguments), name, words)
    assert before.changed() == []


def verify_arguments(pool):
    t, params = Batch(pool, [Row(1, 0, 4), Row(2, 1, 4)]).tokens[0], pool.params[0]
    inputs = {name: getattr(t, name)[None] for name in ("q", "k", "v", "raw_g", "raw_beta")}
    return inputs | {
        "A_log": params.A_log,
        "dt_bias": params.dt_bias,
        "lower_bound": params.lower_bound,
        "checkpoint_state": pool.checkpoint(0),
        "records": pool.records(0),
        "query_start_loc": ints(0, 4, 8),
        "state_indices": ints(1, 2),
        "spec_query_len": 4,
        "record_rows": ints(0, 1),
        "pending": pool.pending,
        "backend": "torch",
    }


WRONG = torch.zeros
VERIFY_FAULTS = {
    "q of fewer tokens": ({"q": WRONG(1, 7, 2, 16)}, "k", ("8", "7")),
    "q of another head count": ({"q": WRONG(1, 8, 3, 16)}, "q", ("2", "3")),
    "k of another dimension": ({"k": WRONG(1, 8, 2, 32)}, "k", ("16", "32")),
    "k of another dtype than the records": (
        {"k": WRONG(1, 8, 2, 16, dtype=torch.bfloat16)}, "k", ("float32", "bfloat16")),
    "raw_g of another dtype than the records": (
        {"raw_g": WRONG(1, 8, 2, 16, dtype=torch.bfloat16)}, "raw_g", ("float32", "bfloat16")),
    "k with scattered channels": ({"k": WRONG(1, 8, 16, 2).transpose(2, 3)}, "k", ()),
    "v without batch": ({"v": WRONG(8, 2, 16)}, "v", ()),
    "raw_beta of fewer heads": ({"raw_beta": WRONG(1, 8, 1)}, "raw_beta", ("2", "1")),
    "raw_beta elsewhere": ({"raw_beta": WRONG(1, 8, 2, device=META)}, "raw_beta", ("cpu", "meta")),
    "A_log elsewhere": ({"A_log": WRONG(2, device=META)}, "A_log", ("cpu", "meta")),
    "dt_bias elsewhere": ({"dt_bias": WRONG(32, device=META)}, "dt_bias", ("cpu", "meta")),
    "A_log of other heads": ({"A_log": WRONG(3)}, "A_log", ("2", "3")),
    "A_log of integers": ({"A_log": WRONG(2, dtype=INT32)}, "A_log", ("int32",)),
    "dt_bias of another size": ({"dt_bias": WRONG(2)}, "dt_bias", ("32", "2")),
    "a bound that is not negative": ({"lower_bound": 5.0}, "lower_bound", ("5.0",)),
    "offsets without an end": ({"query_start_loc": ints(0, 4)}, "query_start_loc", ("3", "2")),
    "offsets of another dtype": (
        {"query_start_loc": ints(0, 4, 8, dtype=torch.int64)}, "query_start_loc", ("int32", "int64")),
    "slots of another dtype": ({"state_indices": ints(1, 2, dtype=torch.int64)}, "state_indices", ("int32", "int64")),
    "slots elsewhere": (
        {"state_indices": torch.empty(2, dtype=INT32, device=META)}, "state_indices", ("cpu", "meta")),
    "rows too short": ({"record_rows": ints(0)}, "record_rows", ("2", "1")),
    "a window over the records": ({"spec_query_len": 5}, "records", ("4", "5")),
    "a window of nothing": ({"spec_query_len": 0}, "spec_query_len", ("at least 1", "0")),
    "checkpoint of other heads": (
        {"checkpoint_state": WRONG(4, 3, 16, 16)}, "q", ("2", "3")),
    "checkpoint of wider values": (
        {"checkpoint_state": WRONG(4, 2, 32, 16), "v": WRONG(1, 8, 2, 32)}, "checkpoint_state", ("V = K", "32")),
    "checkpoint that is transposed": (
        {"checkpoint_state": WRONG(4, 2, 16, 16).transpose(2, 3)}, "checkpoint_state", ()),
    "checkpoint of integers": ({"checkpoint_state": WRONG(4, 2, 16, 16, dtype=INT32)}, "checkpoint_state", ("int32",)),
    "out of fewer tokens": ({"out": WRONG(1, 7, 2, 16)}, "out", ("8", "7")),
    "out elsewhere": ({"out": WRONG(1, 8, 2, 16, device=META)}, "out", ("cpu", "meta")),
    "v of numbers": ({"v": [1.0]}, "v", ("list",)),
    "no A_log": ({"A_log": None}, "A_log", ("NoneType",)),
    "a bound of text": ({"lower_bound": "-5"}, "lower_bound", ("-5",)),
    "an infinite bound": ({"lower_bound": float("-inf")}, "lower_bound", ("inf",)),
    "no checkpoint": ({"checkpoint_state": None}, "checkpoint_state", ("NoneType",)),
    "no records": ({"records": None}, "records", ("NoneType",)),
    "slots in a list": ({"state_indices": [1, 2]}, "state_indices", ("int32", "list")),
    "no window": ({"spec_query_len": None}, "spec_query_len", ("NoneType",)),
    "one output for all tokens": ({"out": WRONG(1, 1, 2, 16).expand(1, 8, 2, 16)}, "out", ("strides",)),
    "an unknown backend": ({"backend": "cuda"}, "backend", ("torch", "cuda")),
}  # fmt: skip


@pytest.mark.parametrize("fault", VERIFY_FAULTS)
@pytest.mark.parametrize("deferred", [False, True], ids=["stock", "deferred"])
def test_a_verify_refuses_a_wrong_argument(pool, deferred, fault):
    """A verify with a wrong argument raises and changes nothing."""
    change, name, words = VERIFY_FAULTS[fault]
    arguments = verify_arguments(pool) | change
    if not deferred:
        del arguments["pending"]
    before = Snapshot(pool)
    verify = kda_deferred_verify if deferred else kda_recoverssm_verify
    assert_refused(lambda: verify(**arguments), name, words)
    assert before.changed() == []


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        ({"pending": ints(0, 0)}, "pending", ("6", "2")),
        ({"pending": torch.zeros(6)}, "pending", ("int32", "float32")),
        ({"record_rows": None}, "record_rows", ()),
    ],
    ids=["pending too short", "pending of another dtype", "pending without rows"],
)
def test_a_deferred_verify_refuses_missing_rows_and_pending(pool, change, name, words):
    """The deferred verify needs record rows and pending of every record row."""
    assert_refused(lambda: kda_deferred_verify(**(verify_arguments(pool) | change)), name, words)


def test_a_stock_verify_needs_a_record_row_for_every_batch_row(pool):
    """Without `record_rows` a batch larger than the records is refused, not wrapped."""
    arguments = verify_arguments(pool) | {"record_rows": None, "state_indices": pool.int32([0] * 7)}
    arguments["query_start_loc"] = pool.int32([0, 4, 8, 8, 8, 8, 8, 8])
    del arguments["pending"]
    assert_refused(lambda: kda_recoverssm_verify(**arguments), "state_indices", ("6", "7"))


def conv_arguments(pool):
    params = pool.params[0]
    return {
        "x": torch.zeros(8, 20),
        "conv_state": pool.conv(0),
        "conv_weight": params.conv_weight,
        "conv_bias": params.conv_bias,
        "query_start_loc": ints(0, 4, 8),
        "state_indices": ints(1, 2),
        "spec_query_len": 4,
        "record_rows": ints(0, 1),
        "pending": pool.pending,
        "backend": "torch",
    }


CONV_FAULTS = {
    "x of other channels": ({"x": WRONG(8, 21)}, "x: expected", ("20", "21")),
    "x with scattered channels": ({"x": WRONG(20, 8).T}, "x", ()),
    "x of another dtype than the state": (
        {"x": WRONG(8, 20, dtype=torch.bfloat16)}, "x", ("float32", "bfloat16")),
    "state elsewhere": ({"conv_state": WRONG(12, 20, 7, device=META)}, "conv_state: expected", ("cpu", "meta")),
    "state the other way round": ({"conv_state": WRONG(12, 7, 20)}, "conv_state: expected", ("20", "[12, 7, 20]")),
    "state of other channels": ({"conv_state": WRONG(12, 24, 7)}, "conv_state: expected", ("20", "24")),
    "state of overlapping slots": (
        {"conv_state": WRONG(2000).as_strided((12, 20, 7), (133, 7, 1))}, "conv_state: expected", ("(133, 7, 1)",)),
    "x elsewhere": ({"x": WRONG(8, 20, device=META)}, "x: expected", ("cpu", "meta")),
    "weight elsewhere": ({"conv_weight": WRONG(20, 4, device=META)}, "conv_weight: expected", ("cpu", "meta")),
    "weight of other channels": ({"conv_weight": WRONG(21, 4)}, "conv_weight: expected", ("20", "21")),
    "weight that fits no layout": ({"conv_weight": WRONG(20, 3)}, "conv_state", ()),
    "bias of other channels": ({"conv_bias": WRONG(4)}, "conv_bias", ("20", "4")),
    "pending without rows": ({"record_rows": None}, "record_rows", ("pending",)),
    "rows too short": ({"record_rows": ints(1)}, "record_rows", ("2", "1")),
    "offsets without an end": ({"query_start_loc": ints(0, 4)}, "query_start_loc", ("3", "2")),
    "slots of another dtype": ({"state_indices": ints(1, 2, dtype=torch.int64)}, "state_indices", ("int32", "int64")),
    "out of fewer tokens": ({"out": WRONG(7, 20)}, "out", ("8", "7")),
}  # fmt: skip


@pytest.mark.parametrize("fault", CONV_FAULTS)
def test_a_convolution_verify_refuses_a_wrong_argument(pool, fault):
    """A convolution verify with a wrong argument raises and changes nothing."""
    change, name, words = CONV_FAULTS[fault]
    arguments = conv_arguments(pool) | change
    before = Snapshot(pool)
    assert_refused(lambda: kda_conv_verify(**arguments), name, words)
    assert before.changed() == []


@pytest.mark.parametrize("kind", [KDARecoverSSMCommitContext, KDADeferredCommitContext])
@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        ({"spec_query_len": 0}, "spec_query_len", ("0",)),
        ({"spec_query_len": 5}, "records", ("5", "4")),
        ({"max_num_reqs": 7}, "records", ("7", "6")),
        ({"max_num_reqs": 0}, "max_num_reqs", ("0",)),
        ({"backend": "cuda"}, "backend", ("cuda",)),
        ({"conv_width": 3}, "conv_width", ("3",)),
        ({"check": 1}, "check", ("True or False", "1")),
        ({"layers": []}, "layers", ()),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_create_refuses_a_wrong_layer(pool, kind, change, name, words):
    """A context that cannot work is refused when it is made."""
    arguments = {"layers": pool.layers, "spec_query_len": 4, "max_num_reqs": 6, "backend": "torch"} | change
    layers = arguments.pop("layers")
    assert_refused(lambda: kind.create(layers, **arguments), name, words)


@pytest.mark.parametrize("head_dim", [8, 24, 96, 1])
def test_create_refuses_head_dimensions_that_are_no_power_of_two_from_16(head_dim):
    """The message names head_dim and its value."""
    assert_refused(lambda: Pool(CPU, CPU.shape(head_dim=head_dim, layers=1)), "head_dim", (str(head_dim),))


def replaced_cache(layer, checkpoint=None, conv=None):
    """Put another checkpoint or convolution state into a layer."""
    old_conv, old_checkpoint = layer.kv_cache
    layer.kv_cache = (
        old_conv if conv is None else conv,
        old_checkpoint if checkpoint is None else checkpoint,
    )


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (lambda layer: replaced_cache(layer, checkpoint=WRONG(12, 2, 16, 32)), "kv_cache[1]"),
        (lambda layer: replaced_cache(layer, checkpoint=WRONG(12, 2, 16, 16).transpose(2, 3)), "kv_cache[1]"),
        (
            lambda layer: replaced_cache(layer, checkpoint=WRONG(12, 2, 16, 16, dtype=torch.bfloat16)),
            "kv_cache[1]",
        ),
        (lambda layer: replaced_cache(layer, conv=WRONG(12, 21, 7)), "kv_cache[0]"),
        (lambda layer: replaced_cache(layer, conv=paged(12, (20, 7), torch.bfloat16, "cpu")), "kv_cache[0]"),
        (lambda layer: setattr(layer, "gate_lower_bound", -4.0), "gate_lower_bound"),
        (lambda layer: setattr(layer, "gate_lower_bound", None), "gate_lower_bound"),
        (lambda layer: setattr(layer, "A_log", WRONG(3)), "A_log"),
        (lambda layer: setattr(layer, "dt_bias", WRONG(3)), "dt_bias"),
        (
            lambda layer: setattr(
                layer,
                "recoverssm_records",
                allocate_records(6, 2, 4, 16, torch.bfloat16, torch.device("cpu")),
            ),
            "records",
        ),
        (
            lambda layer: setattr(
                layer, "recoverssm_records", allocate_records(5, 2, 4, 16, torch.float32, torch.device("cpu"))
            ),
            "",
        ),
    ],
    ids=[
        "K",
        "transposed",
        "dtype",
        "channels",
        "conv dtype",
        "bound",
        "no bound",
        "A_log",
        "bias",
        "records",
        "rows",
    ],
)
def test_create_refuses_a_layer_that_differs_and_names_its_index(fault, name):
    """All layers of a context agree; the message tells which one does not."""
    layers = [loose(layer) for layer in Pool(CPU, CPU.shape(layers=3)).layers]
    fault(layers[2])
    create = KDADeferredCommitContext.create
    assert_refused(lambda: create(layers, spec_query_len=4, max_num_reqs=6, backend="torch"), name, ("2",))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: align_eager_mask(ints(1), ints(0, 1, 2), 16), "num_computed_tokens"),
        (lambda: align_eager_mask(ints(1), ints(0, 1), 0), "mamba_block_size"),
        (lambda: align_eager_mask(ints(1, dtype=torch.int64), ints(0, 1), 16), "num_computed_tokens"),
        (lambda: align_eager_mask(ints(1), ints(0, 1), 16, out=torch.zeros(1)), "out"),
        (lambda: align_state_indices(ints(1), ints(1), 16), "block_table"),
        (lambda: align_state_indices(ints([1]), ints(1, 2), 16), "num_computed_tokens"),
        (lambda: align_state_indices(ints([1]), ints(1), -1), "mamba_block_size"),
        (lambda: align_state_indices(ints([1]), ints(1), 16, out=ints(1, dtype=torch.int64)), "out"),
    ],
    ids=range(8),
)
def test_the_align_helpers_refuse(call, name):
    """Wrong metadata of the two helpers is named."""
    assert_refused(call, name, ())


@pytest.mark.parametrize("name", ["q", "k", "v", "raw_g"])
def test_a_verify_refuses_an_output_over_its_inputs(pool, name):
    """The kernels read the keys and gates again after they wrote outputs; packed neighbours are welcome."""
    arguments = verify_arguments(pool)
    wide = torch.zeros(1, 8, 2 * 2 * 16)
    mine, other = (half.view(1, 8, 2, 16) for half in wide.chunk(2, -1))
    mine.copy_(arguments[name])
    shifted = mine.as_strided(mine.shape, mine.stride(), mine.storage_offset() + 16)
    before = Snapshot(pool)
    for out in (mine, shifted):
        assert_refused(lambda out=out: kda_deferred_verify(**arguments | {name: mine, "out": out}), "out", (name,))
    assert before.changed() == []
    kda_deferred_verify(**arguments | {name: mine, "out": other})


@pytest.mark.parametrize("name", ["checkpoint_state", "records", "records.key_gate", "conv.conv_state", "raw_beta"])
def test_a_verify_refuses_an_output_in_the_memory_of_other_requests(pool, name):
    """Nobody would notice: slots and records beside those of the batch would be overwritten by outputs."""
    arguments, memory = verify_arguments(pool), torch.zeros(256)
    arguments["raw_beta"] = memory[:16].view(1, 8, 2)
    x = torch.zeros(8, 3 * 2 * 16)
    fused = torch.zeros(12, 96, 7)
    if name == "conv.conv_state":
        q, k, v = (part.view(1, 8, 2, 16) for part in x.chunk(3, -1))
        arguments |= {"q": q, "k": k, "v": v, "conv": FusedConv(fused, torch.zeros(96, 4))}
    records = arguments["records"]
    base = {
        "checkpoint_state": arguments["checkpoint_state"][5], "records": records.correction[1],
        "records.key_gate": records.key_gate[2], "conv.conv_state": fused[3], "raw_beta": memory,
    }[name]  # fmt: skip
    out = base.as_strided((1, 8, 2, 16), (256, 32, 16, 1), base.storage_offset())
    before = Snapshot(pool)
    assert_refused(lambda: kda_deferred_verify(**arguments | {"out": out}), "out", (name,))
    assert before.changed() == []


def test_a_convolution_refuses_an_output_that_overlaps_its_input(pool):
    """An output one token on would be read as input of the next token."""
    x = torch.zeros(9, 20)
    state, params = pool.conv(0), pool.params[0]
    rows = (ints(0, 4, 8), ints(1, 2), 4)
    before = Snapshot(pool)
    for out in (x[:8], x[1:]):
        call = (x[:8], state, params.conv_weight, params.conv_bias, *rows, out)
        assert_refused(lambda call=call: kda_conv_verify(*call), "out", ("x",))
    stranger = state[5].as_strided((8, 20), (20, 1), state[5].storage_offset())
    call = (torch.zeros(8, 20), state, params.conv_weight, params.conv_bias, *rows, stranger)
    assert_refused(lambda: kda_conv_verify(*call), "out", ("conv_state",))
    assert before.changed() == []


@pytest.mark.parametrize("block_size", [0, 16.5, 2**31, None])
def test_align_helpers_refuse_a_block_size_that_kernels_cannot_hold(block_size):
    """A block size is an int of 1 to 2**31 - 1."""
    words = (str(block_size) if isinstance(block_size, int) else type(block_size).__name__,)
    assert_refused(lambda: align_eager_mask(ints(1), ints(0, 1), block_size), "mamba_block_size", words)
    assert_refused(lambda: align_state_indices(ints([1]), ints(1), block_size), "mamba_block_size", words)
