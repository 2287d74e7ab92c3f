"""`create` refuses layers that share what a step writes, and takes layers that lie side by side in one allocation."""

import dataclasses
import re

import pytest
import torch

from graphrt import KDADeferredCommitContext, KDALayer, allocate_records
from graphrt.overlap import check_apart

ROWS, SLOTS, HEADS, WINDOW, DIM, HIST = 3, 4, 2, 4, 16, 3
CONV = (3 * HEADS * DIM, HIST + WINDOW)


def make_layer(conv=None, checkpoint=None, records=None):
    return KDALayer(
        kv_cache=(
            torch.zeros(SLOTS, *CONV) if conv is None else conv,
            torch.zeros(SLOTS, HEADS, DIM, DIM) if checkpoint is None else checkpoint,
        ),
        recoverssm_records=records or allocate_records(ROWS, HEADS, WINDOW, DIM, torch.float32, "cpu"),
        A_log=torch.zeros(HEADS),
        dt_bias=torch.zeros(HEADS * DIM),
        local_num_heads=HEADS,
        head_dim=DIM,
        gate_lower_bound=-5.0,
    )


def create(layers):
    return KDADeferredCommitContext.create(
        layers, spec_query_len=WINDOW, max_num_reqs=ROWS, backend="torch", conv_width=HIST + 1
    )


def shares_conv(a):
    return make_layer(conv=a.kv_cache[0])


def shares_checkpoint(a):
    return make_layer(checkpoint=a.kv_cache[1])


def overlaps_checkpoint(a):
    """The slots of one begin in the middle of the other's."""
    home = torch.zeros(SLOTS + 1, HEADS, DIM, DIM)
    a.kv_cache = (a.kv_cache[0], home[:-1])
    return make_layer(checkpoint=home.view(-1)[DIM:].as_strided(home[1:].shape, home.stride()))


def shares_records(a):
    return make_layer(records=a.recoverssm_records)


def shares_key_gates(a):
    own = allocate_records(ROWS, HEADS, WINDOW, DIM, torch.float32, "cpu")
    return make_layer(records=dataclasses.replace(own, key_gate=a.recoverssm_records.key_gate))


def takes_a_row_as_scratch_row(a):
    """Rows behind each other in one allocation: the scratch row of the second is a row of the first."""
    home = allocate_records(2 * ROWS, HEADS, WINDOW, DIM, torch.float32, "cpu")
    parts = [
        dataclasses.replace(home, correction=home.correction[at], key_gate=home.key_gate[at])
        for at in (slice(0, ROWS), slice(ROWS, 2 * ROWS))
    ]
    a.recoverssm_records = parts[0]
    return make_layer(records=parts[1])


@pytest.mark.parametrize(
    ("second", "field"),
    [
        (shares_conv, "kv_cache[0]"),
        (shares_checkpoint, "kv_cache[1]"),
        (overlaps_checkpoint, "kv_cache[1]"),
        (shares_records, "recoverssm_records"),
        (shares_key_gates, "recoverssm_records.key_gate"),
        (takes_a_row_as_scratch_row, "recoverssm_records"),
    ],
)
def test_layers_that_share_memory_are_refused_by_name(second, field):
    """The error names the field of the later layer and the one whose memory it is."""
    first = make_layer()
    layers = [first, second(first)]
    field = rf"\.{re.escape(field)}"
    with pytest.raises(ValueError, match=rf"^layers\[1\]{field}.* memory of its own, got that of layers\[0\]{field}"):
        create(layers)


def test_a_layer_given_twice_is_refused():
    layer = make_layer()
    with pytest.raises(ValueError, match=r"^layers\[1\]\..* expected memory of its own, got that of layers\[0\]"):
        create([layer, layer])


def test_layers_side_by_side_in_one_allocation_serve():
    """Slots of two layers and both their states in turn, as engines page them, share an allocation but no byte."""
    conv, state = CONV[0] * CONV[1], HEADS * DIM * DIM
    pages = torch.zeros(SLOTS, 2, conv + state)
    layers = [
        make_layer(
            conv=pages[:, i, :conv].unflatten(-1, CONV),
            checkpoint=pages[:, i, conv:].unflatten(-1, (HEADS, DIM, DIM)),
        )
        for i in range(2)
    ]
    assert create(layers).backend == "torch"


def test_parameters_may_be_shared():
    """Nothing writes A_log and dt_bias, so two layers may have the same."""
    first, second = make_layer(), make_layer()
    second.A_log, second.dt_bias = first.A_log, first.dt_bias
    assert create([first, second]).backend == "torch"


def test_the_holes_between_entries_count_as_free():
    """Columns of one matrix do not meet; shifted by less than their width they do."""
    home = torch.zeros(8, 10)
    check_apart([("a", home[:, :5], 0), ("b", home[:, 5:], 0)])
    with pytest.raises(ValueError, match=r"^b: expected memory of its own, got that of a "):
        check_apart([("a", home[:, :6], 0), ("b", home[:, 5:], 0)])
    with pytest.raises(ValueError, match=r"^b: "):
        check_apart([("a", home[:, 5:], 0), ("b", home[1:, :6], 0)])
    with pytest.raises(ValueError, match=r"^b: "):
        check_apart([("a", home[::2, :5], 0), ("b", home[:, 5:], 0)])
