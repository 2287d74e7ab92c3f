"""`create` refuses layers that share what a step writes, and takes layers that lie side by side in one allocation."""

import dataclasses
import itertools
import random
import re

import pytest
import torch

from graphrt import KDADeferredCommitContext, KDALayer, allocate_records
from graphrt.checks import check_entries_apart
from graphrt.overlap import check_apart, check_pool_apart

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


def squeezed(t, stride):
    """The same memory with another slot stride."""
    return t.as_strided(t.shape, (stride, *t.stride()[1:]), t.storage_offset())


@pytest.mark.parametrize("field", ["kv_cache[0]", "kv_cache[1]", "correction", "key_gate"])
@pytest.mark.parametrize("short", [1, 16])
def test_a_pool_whose_slots_overlap_is_refused(field, short):
    """One slot's last values would be the next one's first, so that a request writes a stranger's state."""
    layer = make_layer()
    pools, records = list(layer.kv_cache), layer.recoverssm_records
    if field in ("correction", "key_gate"):
        rows = getattr(records, field)
        layer.recoverssm_records = dataclasses.replace(records, **{field: squeezed(rows, rows[0].numel() - short)})
        field = f"recoverssm_records.{field}"
    else:
        i = int(field[-2])
        pools[i] = squeezed(pools[i], pools[i][0].numel() - short)
        layer.kv_cache = tuple(pools)
    error = rf"^layers\[0\]\.{re.escape(field)}: expected entries with memory of their own, got strides"
    with pytest.raises(ValueError, match=error):
        create([layer])


def test_slots_may_have_gaps_and_interleave():
    """Padded slots, slots in the gaps of another pool, and channels of all slots side by side share no byte."""
    conv, state = CONV[0] * CONV[1], HEADS * DIM * DIM
    padded = make_layer(
        conv=torch.zeros(SLOTS, conv + 24)[:, :conv].unflatten(-1, CONV),
        checkpoint=torch.zeros(SLOTS, state + 16)[:, :state].unflatten(-1, (HEADS, DIM, DIM)),
    )
    woven = make_layer(conv=torch.zeros(CONV[1], SLOTS, CONV[0]).permute(1, 2, 0))
    assert create([padded, woven]).backend == "torch"


def test_whether_entries_meet_is_what_their_addresses_say():
    """Every pair of sizes and strides drawn: refused exactly where two entries have the same address."""
    draw, met = random.Random(0), set()
    for _ in range(2000):
        shape = [draw.randint(1, 4) for _ in range(draw.randint(1, 4))]
        strides = [draw.randint(0, 20) for _ in shape]
        t = torch.empty(300).as_strided(shape, strides)
        steps = [torch.arange(n).mul(s) for n, s in zip(shape, strides, strict=True)]
        addresses = {sum(map(int, place)) for place in itertools.product(*steps)}
        try:
            check_entries_apart("t", t)
            refused = False
        except ValueError:
            refused = True
        assert refused == (len(addresses) < t.numel()), (shape, strides)
        met.add(refused)
    assert met == {True, False}


def test_a_parameter_of_no_dimension_is_one_value():
    """A_log of one head may be a scalar, in an arena that the states are in too."""
    arena = torch.zeros(12)
    states = arena[:8].view(2, 4)
    check_pool_apart("conv_state", states, {"A_log": (arena[8], 0)})
    with pytest.raises(ValueError, match=r"^conv_state: expected memory of its own, got that of A_log"):
        check_pool_apart("conv_state", states, {"A_log": (arena[7], 0)})


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
