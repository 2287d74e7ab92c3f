"""A small engine to drive recordings with: two KDA layers with convolutions, and the verify of a window.

Two engines made alike hold the same bytes. One is driven by replays, its twin eagerly with the caller's own tensors.
"""

import random

import torch

from graphrt import KDADeferredCommitContext, KDALayer, allocate_records, kda_conv_verify, kda_deferred_verify

HEADS, DIM, WIDTH, WINDOW = 2, 16, 3, 4
CONV_DIM = 3 * HEADS * DIM


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def assert_same(got, want, what):
    """Equal bit for bit; both are dicts of tensors."""
    for key, tensor in want.items():
        torch.testing.assert_close(
            got[key], tensor, rtol=0, atol=0, equal_nan=True, msg=lambda text, key=key: f"{what}, {key}: {text}"
        )


class Engine:
    """R record rows, state slots 0..slots-1 with 0 null, windows of up to 4 tokens."""

    def __init__(self, device, rows=6, slots=9, num_layers=2, keeps_history=True, backend=None):
        self.device, self.rows, self.slots = torch.device(device), rows, slots
        self.backend = backend or ("triton" if self.device.type == "cuda" else "torch")
        draw = torch.Generator().manual_seed(7)

        def random_tensor(*shape):
            return torch.randn(shape, generator=draw).to(device)

        columns = WIDTH - 1 + WINDOW - (not keeps_history)
        self.layers = [
            KDALayer(
                kv_cache=(random_tensor(slots, CONV_DIM, columns), random_tensor(slots, HEADS, DIM, DIM)),
                recoverssm_records=allocate_records(rows, HEADS, WINDOW, DIM, torch.float32, device),
                A_log=random_tensor(HEADS),
                dt_bias=random_tensor(HEADS * DIM),
                local_num_heads=HEADS,
                head_dim=DIM,
                gate_lower_bound=-5.0,
                conv_weight=random_tensor(CONV_DIM, WIDTH),
            )
            for _ in range(num_layers)
        ]
        self.context = KDADeferredCommitContext.create(
            self.layers, spec_query_len=WINDOW, max_num_reqs=rows, backend=self.backend
        )
        self.pending = torch.zeros(rows, dtype=torch.int32, device=device)

    def state(self):
        """Copies of everything that must not change by accident: the scratch row and the plan are work space."""
        kept = {"pending": self.pending}
        for i, layer in enumerate(self.layers):
            kept |= {
                f"conv {i}": layer.kv_cache[0],
                f"checkpoint {i}": layer.kv_cache[1],
                f"u {i}": layer.recoverssm_records.correction,
                f"key and gate {i}": layer.recoverssm_records.key_gate,
            }
        return {key: tensor.clone() for key, tensor in kept.items()}

    def verify(self, rows, x, pending=None):
        """Outputs [L, T, H, V] of the window inputs x [L, T, CONV_DIM + H*K + H]; anything with the step's fields."""
        pending = self.pending if pending is None else pending
        step = (rows.query_start_loc, rows.state_indices, WINDOW)
        owned = {"record_rows": rows.record_rows, "pending": pending, "backend": self.backend}
        outputs = []
        for layer, inputs in zip(self.layers, x, strict=True):
            qkv, gate, beta = inputs.split((CONV_DIM, HEADS * DIM, HEADS), dim=-1)
            mixed = kda_conv_verify(qkv.contiguous(), layer.kv_cache[0], layer.conv_weight, None, *step, **owned)
            q, k, v = mixed[None].unflatten(-1, (3, HEADS, DIM)).unbind(2)
            out = kda_deferred_verify(
                q, k, v, gate[None].unflatten(-1, (HEADS, DIM)), beta[None].contiguous(), layer.A_log, layer.dt_bias,
                layer.gate_lower_bound, layer.kv_cache[1], layer.recoverssm_records, *step, **owned,
            )  # fmt: skip
            outputs.append(out[0])
        return torch.stack(outputs)

    def window_inputs(self, rng, num_tokens=None):
        """Random x for a step of up to R rows."""
        draw = torch.Generator().manual_seed(rng.randrange(2**31))
        tokens = self.rows * WINDOW if num_tokens is None else num_tokens
        shape = (len(self.layers), tokens, CONV_DIM + HEADS * DIM + HEADS)
        return torch.randn(shape, generator=draw).to(self.device)


class Batch:
    """One random step: distinct live rows, ragged windows, accepted counts by request."""

    def __init__(self, rng: random.Random, engine, most, least_rows=1, slot_of=lambda row: row + 1, tokens=None):
        self.n = rng.randint(least_rows, most)
        self.record_rows = rng.sample(range(engine.rows), self.n)
        self.state_indices = [slot_of(row) for row in self.record_rows]
        lengths = [rng.randint(0, WINDOW) for _ in range(self.n)] if tokens is None else [tokens] * self.n
        self.query_start_loc = [sum(lengths[:b]) for b in range(self.n + 1)]
        self.accepted = [rng.randint(0, length) for length in lengths]
        self.eager = [rng.random() < 0.4 for _ in range(self.n)]
        self.requests = rng.sample(range(self.n + 2), self.n)
        self.lengths = lengths

    def by_request(self, values, fill=3):
        """The rows' values in the order of their requests, as an engine keeps them."""
        placed = [fill] * (max(self.requests) + 1)
        for request, value in zip(self.requests, values, strict=True):
            placed[request] = value
        return placed

    def host(self):
        """The arguments of `stage`, as plain lists."""
        return {
            "num_reqs": self.n,
            "state_indices": self.state_indices,
            "record_rows": self.record_rows,
            "query_start_loc": self.query_start_loc,
            "num_accepted_tokens": self.by_request(self.accepted),
            "eager": self.eager,
            "request_indices": self.requests,
        }

    def commit(self, engine, eager=False, **align):
        """Commit eagerly, with tensors of the batch's own size."""
        device = engine.device
        engine.context.commit(
            int32(self.by_request(self.accepted), device),
            int32(self.state_indices, device),
            int32(self.query_start_loc, device),
            request_indices=int32(self.requests, device),
            record_rows=int32(self.record_rows, device),
            pending=engine.pending,
            eager=torch.tensor(self.eager, device=device) if eager else None,
            **align,
        )

    def verify(self, engine, x):
        """Verify eagerly, with tensors of the batch's own size."""

        class Rows:
            state_indices = int32(self.state_indices, engine.device)
            record_rows = int32(self.record_rows, engine.device)
            query_start_loc = int32(self.query_start_loc, engine.device)

        return engine.verify(Rows, x)
