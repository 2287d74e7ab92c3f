"""What others hold by address is not copied, for the copy would read and write the original's memory."""

import copy
import pickle

import pytest
import torch
from rig import Pool, Target

from graphrt import KDARecoverSSMDeferred, RecordSlots
from graphrt.capture import CommitRunner, DecodeStep, StepInputs, record

CPU = Target("torch", "cpu")


@pytest.fixture(scope="module")
def fixed():
    """One of each, by name."""
    pool = Pool(CPU, CPU.shape(layers=1, heads=1))
    ledger, inputs = RecordSlots(pool.shape.rows, "cpu"), StepInputs(4, pool.shape.query_len, "cpu")
    parts, x = (pool.context, ledger.pending, inputs), torch.zeros(1)
    rows = inputs.rows(2)
    found = [
        pool.context,
        pool.context.stack,
        ledger,
        inputs,
        CommitRunner(*parts),
        DecodeStep(*parts, print, print),
        record(lambda: x.add_(1), device="cpu"),
        KDARecoverSSMDeferred(rows.record_rows, ledger.pending, None, pool.context, rows.state_indices),
    ]
    return {type(each).__name__: each for each in found}


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_what_others_hold_by_address_refuses_to_be_copied(fixed, how):
    """TypeError with the class: a context's copy would fold the layers of the original."""
    assert len(fixed) == 8
    for name, each in fixed.items():
        with pytest.raises(TypeError, match=rf"^a {name} cannot be copied or pickled: .*; make another"):
            how(each)
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            how({"inside": [each]}) if how is not copy.copy else how(each)


def test_layers_and_records_may_be_copied(fixed):
    """They are plain tensors; a copy of the records keeps its scratch row."""
    pool = Pool(CPU, CPU.shape(layers=1, heads=1))
    twin = copy.deepcopy(pool.records(0))
    assert twin.correction.storage_offset() == pool.records(0).correction.storage_offset() > 0
    assert twin.correction.data_ptr() != pool.records(0).correction.data_ptr()
