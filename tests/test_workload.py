"""What the benches measure on: random data of every layer's own, and the counts that were asked for."""

import pytest
import torch

from graphrt.workload import Sizes, Workload

SIZES = Sizes(layers=2, heads=2, head_dim=32, spec_query_len=4, batch=3, accepted=2)


def pages(layer):
    """The tensors of a layer."""
    records = layer.recoverssm_records
    parameters = (layer.A_log, layer.dt_bias, layer.conv_weight)
    return [*layer.kv_cache, records.correction, records.key_gate, *parameters]


def test_every_layer_lies_on_random_pages_of_its_own():
    """Nothing is zero, nothing is a copy of another layer's, and no two tensors share their storage."""
    first, second = (pages(layer) for layer in Workload(SIZES, torch.device("cpu")).layers)
    assert len({tensor.untyped_storage().data_ptr() for tensor in first + second}) == len(first + second)
    for ours, theirs in zip(first, second, strict=True):
        assert ours.count_nonzero() == ours.numel() and not torch.equal(ours, theirs)


def test_every_replay_leaves_the_accepted_count_pending():
    """The first step replays nothing; each later one what the one before it accepted."""
    workload = Workload(SIZES, torch.device("cpu"), commit="deferred")
    workload.capture()
    assert workload.slots.pending.tolist() == [0, 0, 0]
    workload.replay(2)
    assert workload.slots.pending.tolist() == [2, 2, 2]


@pytest.mark.parametrize("accepted", [-1, 5])
def test_no_more_is_accepted_than_a_window_holds(accepted):
    """The argument is named."""
    with pytest.raises(ValueError, match="accepted"):
        Workload(Sizes(2, 2, 32, 4, 3, accepted), torch.device("cpu"))
