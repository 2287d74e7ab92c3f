"""One request's bits in recordings of other sizes."""

import random
from functools import partial

import pytest
import torch
from engine import WINDOW, Engine

from graphrt.capture import StepInputs, record


@pytest.mark.parametrize("keeps_history", [True, False], ids=["hist+Q", "hist+Q-1"])
def test_a_request_has_the_same_bits_in_recordings_of_every_size(device, keeps_history):
    """Alone in a recording of one row, and in the first or the last of 8 or 16 rows among others or padding: outputs,
    records and states of the request are byte-equal (B85).
    """
    rows, mine = 16, 5
    start = Engine(device, rows=rows, slots=rows + 2, keeps_history=keeps_history)
    x = start.window_inputs(random.Random(3), rows * WINDOW)
    want = None
    for size, place, crowded in ((1, 0, False), (8, 0, True), (8, 7, True), (16, 15, True), (16, 0, False)):
        engine = Engine(device, rows=rows, slots=rows + 2, keeps_history=keeps_history)
        engine.pending[mine] = 2
        inputs = StepInputs(rows, WINDOW, engine.device)
        staged, tokens = inputs.rows(size), x[:, : size * WINDOW].clone()
        # The first tokens are those of the request, wherever its row is.
        tokens[:, place * WINDOW : (place + 1) * WINDOW] = x[:, :WINDOW]
        recording = record(partial(engine.verify, staged, tokens), device=engine.device, name="verify")
        others = [row for row in range(rows) if row != mine][: size - 1]
        order = [*others[:place], mine, *others[place:]]
        live = order if crowded else [mine]
        inputs.stage(
            num_reqs=len(live), state_indices=[row + 1 for row in live], record_rows=live,
            query_start_loc=[b * WINDOW for b in range(len(live) + 1)],
        )  # fmt: skip
        recording.replay()
        layer = engine.layers[0]
        got = {
            "outputs": recording.outputs[:, place * WINDOW : (place + 1) * WINDOW].clone(),
            "checkpoint": layer.kv_cache[1][mine + 1].clone(),
            "convolution": layer.kv_cache[0][mine + 1].clone(),
            "correction": layer.recoverssm_records.correction[mine].clone(),
            "key and gate": layer.recoverssm_records.key_gate[mine].clone(),
        }
        want = want or got
        for name, tensor in want.items():
            assert torch.equal(got[name].view(torch.int32), tensor.view(torch.int32)), (
                f"{name} in row {place} of {size}"
            )
