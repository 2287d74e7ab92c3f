"""The README's quickstart runs as printed."""

import re
from pathlib import Path

import torch

import graphrt
from graphrt.capture import record

README = Path(__file__).parents[1] / "README.md"


def test_the_quickstart_advances_two_requests():
    """The printed lines, given sizes and a model, decode: states move and the last step's tokens are pending."""
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)
    slots, W, Q, L, H, K, R, steps = 4, 4, 2, 2, 1, 16, 3, 3
    conv_dim, device, dtype = 3 * H * K, torch.device("cpu"), torch.float32
    inputs = torch.randn(4, conv_dim)
    weight = torch.randn(conv_dim, W)
    query_start_loc = torch.tensor([0, 2, 4], dtype=torch.int32)
    state_indices = torch.tensor([1, 2], dtype=torch.int32)
    record_rows = torch.full((2,), -1, dtype=torch.int32)
    accepted = torch.zeros(2, dtype=torch.int32)

    def model(layers, query_start_loc, state_indices, record_rows, pending, accepted):
        rows = (query_start_loc, state_indices, Q)
        owned = {"record_rows": record_rows, "pending": pending}
        for layer in layers:
            x = graphrt.kda_conv_verify(inputs, layer.kv_cache[0], weight, None, *rows, **owned)
            q, k, v = x[None].unflatten(-1, (3, H, K)).unbind(2)
            gate = (layer.A_log, layer.dt_bias, layer.gate_lower_bound)
            state, records = layer.kv_cache[1], layer.recoverssm_records
            graphrt.kda_deferred_verify(q, k, v, k, k[..., 0], *gate, state, records, *rows, **owned)
        accepted.fill_(2)

    names = dict(locals(), torch=torch, graphrt=graphrt, record=record)
    names |= {"A_log": torch.zeros(H), "dt_bias": torch.zeros(H * K)}
    exec(compile(code, str(README), "exec"), names)
    assert names["ledger"].pending.tolist() == [2, 2, 0]
    for _, checkpoint in names["pools"]:
        assert checkpoint[1:3].abs().amax(dim=(1, 2, 3)).min() > 0
        assert checkpoint[3].abs().max() == 0
