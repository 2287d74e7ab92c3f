"""The recorded step that `long_replay.py` drives: what it reads and writes on the device, and nothing of the traffic.

Its verifies take their tokens from a bank, another stretch of it at every step; its sampling reads what the host has
scripted; both outputs of every step go to a log.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from graphrt import KDADeferredCommitContext, RecordSlots
from graphrt.capture import DecodeStep, Sampled, StepInputs, StepRows
from graphrt.testing import poisoned_pool
from graphrt.testing.batches import verify_layers
from graphrt.testing.truths import Tokens

LONGEST_CHAIN = 6  # steps
SETTLE_EVERY = 100
LOG = SETTLE_EVERY + LONGEST_CHAIN
BANK = 4096  # different tokens
STRIDE = 101  # a step's first token in the bank moves by so many


class RecordedStep:
    """A `DecodeStep` over a pool of states with the ledger of its rows, recorded.

    Args:
        device, backend: where, and which kernels. requests: record rows.
        batch: most rows of a step. sizes: what is recorded.
        block_size, width: align mode, and blocks of a request (1 without it).
        flush: the step drains the rows in `decode.flush_rows` before its verify.
        seed: of parameters and tokens. shape: of the pool, as `poisoned_pool` takes it.
    """

    def __init__(
        self, device: str, backend: str, *, requests: int, batch: int, sizes: Sequence[int], block_size: int | None,
        width: int, flush: bool, seed: int, **shape: int,
    ) -> None:  # fmt: skip
        shape = {"num_layers": 2, "num_heads": 2, "head_dim": 128, "spec_query_len": 8, "conv_dim": 48} | shape
        self.pool = poisoned_pool(
            num_slots=1 + requests * width, max_num_reqs=requests, dtype=torch.bfloat16, device=device, seed=seed,
            **shape,
        )  # fmt: skip
        self.window, self.device = self.pool.spec_query_len, self.pool.device
        self.context = KDADeferredCommitContext.create(
            self.pool.layers, spec_query_len=self.window, max_num_reqs=requests, backend=backend
        )
        self.slots = RecordSlots(requests, self.device)
        self.inputs = StepInputs(batch, self.window, self.device, width if block_size else 0, ledger=self.slots)
        self.decode = DecodeStep(
            self.context, self.slots.pending, self.inputs, self.verify, self.sample,
            capture_sizes=sizes, mamba_block_size=block_size, flush=flush, choice="deferred",
        )  # fmt: skip
        self.generator = torch.Generator(device=self.device).manual_seed(seed)
        self.bank = Tokens.allocate(self.pool, BANK)
        for part, scale, shift in zip(self.bank.parts(), (1, 1, 1, 1.5, 1, 1), (0, 0, 0, -2, 0, 0), strict=True):
            part.normal_(shift, scale, generator=self.generator)
        tokens = batch * self.window
        self.offset = torch.arange(tokens, device=self.device)
        self.number, self.at = (torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(2))
        """Steps so far, and those of this chain."""
        self.script = torch.zeros(LONGEST_CHAIN + 1, 3, batch, dtype=torch.int32, device=self.device)
        """Accepted, next length and finished of each step of a chain."""
        self.out_log, self.conv_log = (
            torch.zeros(LOG, len(self.pool.layers), tokens, *shape, dtype=torch.bfloat16, device=self.device)
            for shape in (self.bank.v.shape[2:], self.bank.x.shape[2:])
        )

    def verify(self, rows: StepRows) -> None:
        """The verifies of all layers, and their outputs into the log."""
        count = rows.state_indices.shape[0] * self.window
        tokens = self.tokens(self.number, count)
        out, conv = torch.empty_like(tokens.v), torch.empty_like(tokens.x)
        verify_layers(self.pool, tokens, rows, rows.pending, self.context.backend, out, conv)
        for log, values in ((self.out_log, out), (self.conv_log, conv)):
            log.index_fill_(0, self.number % LOG, 0)
            log[:, :, :count].index_copy_(0, self.number % LOG, values[None])

    def sample(self, rows: StepRows, _: None) -> Sampled:
        """What is scripted for this step of the chain."""
        count = rows.state_indices.shape[0]
        accepted, lengths, finished = self.script.index_select(0, self.at)[0, :, :count].unbind()
        # Dummy steps turn no page.
        live = ((rows.state_indices > 0) & (rows.record_rows >= 0)).any().long()
        self.number.add_(live)
        self.at.add_(live)
        return Sampled(accepted, lengths, finished != 0)

    def tokens(self, number: Tensor | int, count: int) -> Tokens:
        """The first `count` tokens of a step."""
        index = (number * STRIDE + self.offset[:count]) % BANK
        return Tokens(*(part[:, index] for part in self.bank.parts()))

    def logged(self, number: int) -> tuple[Tensor, Tensor]:
        """What a step wrote, [L, T, H, V] and [L, T, conv_dim], as long as no more than LOG steps followed."""
        return self.out_log[number % LOG], self.conv_log[number % LOG]

    def write_script(self, script: list[list[list[int]]]) -> None:
        """What the steps of the next chain sample: accepted, next lengths and finished by row, for each step."""
        values = torch.tensor(script, dtype=torch.int32)
        self.script[: len(script), :, : values.shape[2]].copy_(values)
        self.at.zero_()

    def padded(self, count: int) -> int:
        """Rows of the recording that a step of `count` rows replays."""
        return min(n for n in self.decode.capture_sizes if n >= count)

    @property
    def num_slots(self) -> int:
        """State slots of the pool, the null slot included."""
        return len(self.pool.layers[0].kv_cache[1])

    def prefill(self, slot: int) -> tuple[Tensor, Tensor]:
        """Write a random state; returns a copy of it."""
        for conv_state, checkpoint in (layer.kv_cache for layer in self.pool.layers):
            checkpoint[slot].normal_(0, 0.3, generator=self.generator)
            conv_state[slot, :, : self.pool.hist].normal_(generator=self.generator)
        return self.copy(slot)

    def copy(self, slot: int) -> tuple[Tensor, Tensor]:
        """Checkpoints [L, H, V, K] and histories [L, conv_dim, W - 1] of a slot."""
        caches = [layer.kv_cache for layer in self.pool.layers]
        return torch.stack([c[slot] for _, c in caches]), torch.stack([c[slot, :, : self.pool.hist] for c, _ in caches])

    def poison(self, slots: list[int]) -> None:
        """Make the memory of these slots unreadable."""
        for state in (state for layer in self.pool.layers for state in layer.kv_cache):
            state[slots] = float("nan")
