"""The whole step in one recording: k replays decode what eager steps and one token at a time decode."""

import random
import re

import pytest
import torch
from engine import CONV_DIM, DIM, HEADS, WINDOW, Engine, assert_same, int32
from toy import Toy

from graphrt import RecordSlots, align_state_indices, error_counts, reset_errors
from graphrt.capture import CaptureError, DecodeStep, Sampled, StepInputs

PROMPTS = {0: ([1, 2, 3, 0, 1, 1, 2], 9), 1: ([2], 17), 2: ([3, 1, 0, 0, 2], 6)}
REQUESTS = [*PROMPTS.values(), ([0, 0], 12), ([1, 3, 3, 3], 1), ([2, 0, 1, 2], 14)]


def started(device, **options):
    """A toy with three requests staged, recorded unless sizes is empty."""
    toy = Toy(device, **options)
    toy.step.capture(progress=False)
    begin(toy)
    return toy


def begin(toy):
    stride = toy.inputs.block_table_width or 1
    for b, (prompt, new_tokens) in PROMPTS.items():
        toy.admit(b, prompt, new_tokens)
    toy.stage({b: (b + 1, 1 + b * stride, len(prompt)) for b, (prompt, _) in PROMPTS.items()})


def texts(toy):
    return [toy.text[b, : toy.target[b]].tolist() for b in range(len(toy.text))]


def test_replays_equal_the_same_steps_eager(device):
    """Step for step the recording and its twin, launched from Python, hold the same bytes (B10)."""
    toy, twin = started(device), Toy(device)
    begin(twin)
    for step in range(20):
        toy.step.replay(3)
        twin.step.run(3)
        assert_same(toy.everything(), twin.everything(), f"step {step}")
        assert torch.equal(toy.step.outputs[0][0], twin.step.outputs[0][0])
    assert toy.step.last_miss_reason is None


@pytest.mark.parametrize("sizes", [None, [1, 2]], ids=["one size", "a miss"])
def test_replayed_steps_decode_what_one_token_at_a_time_decodes(device, sizes):
    """Six requests on three rows: k replays between two looks of the host, finished rows replaced at a look."""
    toy, reference = Toy(device, sizes=sizes), Toy(device)
    toy.step.capture(progress=False)
    waiting, running, done, free = list(enumerate(REQUESTS)), {}, {}, [0, 1, 2, 3, 4]
    reset_errors(device)
    for _ in range(40):
        live = [row >= 0 for row in toy.inputs.record_rows.tolist()]
        for b in [b for b in running if not live[b]]:
            number, row = running.pop(b)
            done[number] = toy.text[b, : toy.target[b]].tolist()
            toy.engine.context.drain(int32([row + 1], device), int32([row], device), toy.engine.pending)
            free.append(row)
        fresh = {}
        for b in range(3):
            if b not in running and waiting:
                number, (prompt, new_tokens) = waiting.pop(0)
                row = free.pop(0)
                # A zeroed slot for each new request.
                for layer in toy.engine.layers:
                    for state in layer.kv_cache:
                        state[row + 1].zero_()
                toy.admit(b, prompt, new_tokens)
                fresh[b], running[b] = (row, row + 1, len(prompt)), (number, row)
        if not running:
            break
        toy.stage(fresh)
        toy.step.replay(3, steps=4)
    for number, (prompt, new_tokens) in enumerate(REQUESTS):
        for layer in reference.engine.layers:
            for state in layer.kv_cache:
                state[1].zero_()
        assert done[number] == reference.decode_one_by_one(1, prompt, new_tokens), f"request {number}"
    assert not any(error_counts(device).values())
    assert (toy.step.last_miss_reason is None) == (sizes is None)


def test_k_steps_are_k_replays_and_nothing_of_the_host_between_them(device, monkeypatch):
    """No callable runs, nothing of graphrt is launched and nothing waits: the recording alone makes k steps of one."""
    toy, twin = started(device), started(device)
    recording, calls = toy.step.recording(3), []
    replay = type(recording).replay
    monkeypatch.setattr(type(recording), "replay", lambda self: (calls.append(self), replay(self)))
    toy.step.verify = toy.step.sample = lambda *_: pytest.fail("a callable ran in a replay")
    # A tape's own launches do not pass through here, nor those of a graph.
    monkeypatch.setattr("graphrt.capture.step.launch", lambda name, *_: pytest.fail(f"{name} was launched"))
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        toy.step.replay(3, steps=9)
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert calls == [recording] * 9
    for _ in range(9):
        twin.step.replay(3)
    assert_same(toy.everything(), twin.everything(), "nine steps at once and one by one")


def test_a_recorded_step_can_be_looked_at(device):
    """The recording that a number of rows replays; none where they run eagerly."""
    toy = Toy(device, sizes=[1, 2])
    assert toy.step.recording(1) is None
    toy.step.capture(progress=False)
    assert toy.step.recording(1).num_nodes > 0 and toy.step.recording(1) is not toy.step.recording(2)
    assert toy.step.recording(3) is None
    with pytest.raises(ValueError, match=r"^num_reqs: expected 0\.\.3"):
        toy.step.recording(4)


def test_drafts_are_accepted_and_rejected(device):
    """The toy is a test of speculation only if steps accept different counts."""
    toy, seen = started(device), set()
    for _ in range(12):
        toy.step.replay(3)
        seen |= set(toy.step.outputs[1].num_accepted_tokens.tolist())
    assert seen >= {0, 1, 2, WINDOW}


def test_finished_rows_turn_into_padding_and_stay(device):
    """Past its target a row is padding on the device; later replays change nothing of it, nor of anybody."""
    toy = started(device)
    toy.step.replay(3, steps=25)
    assert toy.inputs.record_rows.tolist() == [-1] * 3
    assert toy.inputs.state_indices.tolist() == [0] * 3
    assert toy.inputs.query_start_loc.tolist() == [0] * 4
    before = toy.everything()
    toy.step.replay(3, steps=5)
    assert_same(toy.everything(), before, "after five more steps")
    # What the last steps accepted is pending still, for whoever drains it.
    reference = Toy(device)
    for b, (prompt, new_tokens) in PROMPTS.items():
        assert reference.decode_one_by_one(b + 1, prompt, new_tokens) == texts(toy)[b]
    toy.engine.context.drain(int32([1, 2, 3], device), int32([1, 2, 3], device), toy.engine.pending)
    for mine, theirs in zip(toy.engine.layers, reference.engine.layers, strict=True):
        torch.testing.assert_close(mine.kv_cache[1][1:4], theirs.kv_cache[1][1:4], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("flush", [False, True], ids=["deferred", "flush in the step"])
def test_align_mode_moves_the_state_from_block_to_block(device, flush):
    """Source slots advance on the device; each block that ends at a boundary holds the state of that boundary."""
    size, width = 6, 4
    toy = started(device, slots=1 + 3 * width, block_size=size, width=width, flush=flush)
    reference = Toy(device, slots=1 + 3 * width)
    for layer in reference.engine.layers:
        for state, mine in zip(layer.kv_cache, toy.engine.layers[0].kv_cache, strict=True):
            assert state.shape == mine.shape
    reset_errors(device)
    while (toy.inputs.record_rows >= 0).any():
        toy.step.replay(3)
        live = toy.inputs.record_rows >= 0
        want = align_state_indices(toy.inputs.block_table, toy.inputs.num_computed_tokens, size)
        assert torch.equal(toy.inputs.state_indices, torch.where(live, want, 0))
    assert not any(error_counts(device).values())
    for b, (prompt, new_tokens) in PROMPTS.items():
        slot = 1 + b * width
        text = texts(toy)[b]
        assert reference.decode_one_by_one(slot, prompt, new_tokens) == text
        for block in range((len(text) - 1) // size):
            check = Toy(device, slots=1 + 3 * width)
            check.decode_one_by_one(slot, text[: (block + 1) * size], 1)
            for mine, theirs in zip(toy.engine.layers, check.engine.layers, strict=True):
                got, expected = mine.kv_cache[1][slot + block], theirs.kv_cache[1][slot]
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_step_without_a_commit_has_accepted_nothing(device):
    """Abandoned after its verify, a step counts as accepted 0; the next gives the bytes of an undisturbed run (B39)."""
    toy, twin = started(device), started(device)
    for one in (toy, twin):
        one.step.replay(3, steps=4)
    assert toy.engine.pending.any()
    sample = toy.step.sample
    toy.step.sample = lambda rows, verified: 1 / 0
    with pytest.raises(ZeroDivisionError):
        toy.step.run(3)
    assert not toy.engine.pending[toy.inputs.record_rows.long()].any()
    toy.step.sample = sample
    for step in range(6):
        toy.step.replay(3)
        twin.step.replay(3)
        assert_same(toy.everything(), twin.everything(), f"step {step} after the abandoned one")


def test_a_flush_inside_the_step_serves_a_stock_verify(device):
    """A verify that replays nothing, behind the recorded flush, gives the bytes of the deferred step (B08)."""
    deferred, stock = started(device), started(device, stock=True, flush=True)
    for step in range(15):
        deferred.step.replay(3)
        stock.step.replay(3)
        assert_same(stock.everything(), deferred.everything(), f"step {step}")


def test_what_a_step_flushes_is_a_value_on_the_device(device):
    """One recording drains the rows of the mask and replays the others, whatever the mask was at capture."""
    rng, toy, plain = random.Random(1), started(device, flush=True), started(device)
    for step in range(15):
        mask = [rng.randint(0, 1) for _ in range(3)]
        toy.step.flush_rows.copy_(int32(mask, device))
        owed, rows = toy.engine.pending.tolist(), toy.inputs.record_rows.tolist()
        toy.step.replay(3)
        for flushed, row in zip(mask, rows, strict=True):
            assert row < 0 or toy.step.replayed[row] == (0 if flushed else owed[row])
        plain.step.replay(3)
        assert_same(toy.everything(), plain.everything(), f"step {step}")


@pytest.mark.parametrize("flag", [2, -1])
def test_any_flag_but_zero_flushes_a_row_into_its_own_slot(device, flag):
    """The mask is a mask, whatever was written to it: no row is folded into the slot of another."""
    toy, plain = started(device, flush=True), started(device, flush=True)
    for step in range(6):
        toy.step.flush_rows.copy_(int32([flag, 0, flag], device))
        plain.step.flush_rows.copy_(int32([1, 0, 1], device))
        toy.step.replay(3)
        plain.step.replay(3)
        assert torch.equal(toy.step.replayed, plain.step.replayed)
        assert_same(toy.everything(), plain.everything(), f"step {step}")


def test_checked_mode_names_a_live_row_behind_the_step(device, monkeypatch):
    """Two rows of three would be three in a replay of that size; the third is not lost, and not run by surprise."""
    monkeypatch.setenv("GRAPHRT_CHECK", "1")
    toy = started(device)
    before = toy.everything()
    with pytest.raises(ValueError, match=r"^num_reqs: expected 3, for row 2 is live as well, got 2"):
        toy.step.replay(2)
    assert_same(toy.everything(), before, "after the refusal")
    toy.step.replay(3)


def test_a_mask_put_in_the_place_of_the_static_one_is_found(device, monkeypatch):
    """`flush_rows` is written into; a new tensor under its name would never be read (B04)."""
    monkeypatch.setenv("GRAPHRT_CHECK", "1")
    toy = started(device, flush=True)
    toy.step.replay(3)
    toy.step.flush_rows = torch.zeros(3, dtype=torch.bool, device=device)
    with pytest.raises(CaptureError, match=r"static tensor 'step.flush_rows' is not the one that was recorded"):
        toy.step.replay(3)


@pytest.mark.parametrize("block_size", [None, 6])
def test_checked_mode_finds_nothing_in_steps_that_are_right(device, monkeypatch, block_size):
    """Launched from Python every call reads its values: rows out of the mask, padding and finished rows pass."""
    align = {"slots": 13, "block_size": block_size, "width": 4} if block_size else {}
    toy, plain, rng = Toy(device, flush=True, **align), Toy(device, flush=True, **align), random.Random(2)
    for one in (toy, plain):
        begin(one)
    for step in range(20):
        mask = int32([rng.randint(0, 1) for _ in range(3)], device)
        for one, check in ((toy, "1"), (plain, "0")):
            monkeypatch.setenv("GRAPHRT_CHECK", check)
            one.step.flush_rows.copy_(mask)
            one.step.run(3)
        assert_same(toy.everything(), plain.everything(), f"step {step}")


def test_a_step_that_raised_keeps_only_its_own_rows_open(device, monkeypatch):
    """Checked mode: the rows are those of the step's ledger, though its verifies are given other counts (B91)."""
    monkeypatch.setenv("GRAPHRT_CHECK", "1")
    engine, others = Engine(device, rows=3), RecordSlots(3, device)
    ledger = RecordSlots(3, device)
    inputs, x = (
        StepInputs(3, WINDOW, device, ledger=ledger),
        torch.randn(2, 3 * WINDOW, CONV_DIM + HEADS * DIM + HEADS, device=device),
    )

    def verify(rows):
        engine.verify(rows, x)
        raise ZeroDivisionError

    step = DecodeStep(engine.context, ledger.pending, inputs, verify, lambda rows, _: None)

    def run():
        rows = ledger.rows(["a", "b"])
        inputs.stage(num_reqs=2, state_indices=[1, 2], record_rows=rows, query_start_loc=[0, WINDOW, 2 * WINDOW])
        step.run(2)

    for name in ("a", "b"):
        ledger.admit(name)
        others.admit(name)
    with pytest.raises(ZeroDivisionError):
        run()
    ledger.release("a")
    ledger.admit("a")
    others.release("b")
    with pytest.raises(RuntimeError, match=r"^record row 1 was verified and not committed"):
        run()
    ledger.release("b")
    ledger.admit("b")
    with pytest.raises(ZeroDivisionError):
        run()


@pytest.mark.parametrize("dcp", [False, True], ids=["padding", "dcp"])
def test_a_size_may_be_captured_in_mid_service(device, dcp):
    """Between two steps a capture and idle dummy steps change no byte of what follows (B12, B19)."""
    toy, twin = Toy(device, sizes=[1]), started(device)
    begin(toy)
    toy.step.run(3)
    twin.step.replay(3)
    before = toy.everything()
    torch.manual_seed(3)
    toy.step.capture(progress=False, sizes=[3], dcp=dcp)
    assert_same(toy.everything(), before, "after capture")
    for step in range(10):
        toy.step.replay(3)
        toy.step.replay_dummy(3, dcp=dcp)
        twin.step.replay(3)
        assert_same(toy.everything(), twin.everything(), f"step {step}")
    assert toy.step.last_miss_reason is None


def test_capture_leaves_the_random_state(device):
    """A sampler that draws random numbers goes on with those it would have drawn."""
    toy = Toy(device)
    sample = toy.step.sample
    noise = torch.zeros(3, device=device)

    def sampling(rows, verified):
        noise.copy_(torch.rand(3, device=device))
        return sample(rows, verified)

    toy.step.sample = sampling
    torch.manual_seed(5)
    toy.step.capture(progress=False)
    begin(toy)
    toy.step.replay(3)
    torch.manual_seed(5)
    assert torch.equal(noise, torch.rand(3, device=device))


def test_an_idle_step_draws_no_number_of_the_next_real_one(device):
    """A sampler's random numbers are the same with and without dummy steps in between (B12)."""
    toy = Toy(device)
    sample, noise = toy.step.sample, torch.zeros(3, device=device)

    def sampling(rows, verified):
        noise.copy_(torch.rand(3, device=device))
        return sample(rows, verified)

    toy.step.sample = sampling
    toy.step.capture(progress=False)
    begin(toy)
    drawn = []
    for dummies in (0, 2):
        torch.manual_seed(5)
        toy.step.replay(3)
        for _ in range(dummies):
            toy.step.replay_dummy(3)
        toy.step.replay(3)
        drawn.append(noise.clone())
    assert torch.equal(*drawn)


def test_outputs_past_the_live_tokens_are_zero(device):
    """Outputs start as poison and end as zeros behind the live tokens, ragged windows or not (B22)."""
    toy = started(device)
    for _ in range(20):
        tokens = int(toy.inputs.query_start_loc[-1])
        toy.step.replay(3)
        out = toy.step.outputs[0][1]
        assert not out[:, tokens:].any() and out.isfinite().all()
        out.fill_(float("nan"))


def test_padding_rows_reach_nobody(device):
    """Live ids left in the block table behind padding rows lead nowhere, in later steps of a chain too (B14)."""
    toy = started(device, slots=13, block_size=6, width=4)
    toy.step.replay(3, steps=3)
    table = toy.inputs.block_table.clone()
    toy.inputs.stage(num_reqs=3, block_table=table)
    toy.inputs.block_table.copy_(table)
    before = toy.engine.state()
    toy.step.replay(3, steps=4)
    assert_same(toy.engine.state(), before, "after four padded steps")


def test_a_wrong_order_of_calls_is_an_error(device):
    toy = Toy(device)
    with pytest.raises(RuntimeError, match=r"^replay before capture"):
        toy.step.replay(3)
    toy.step.capture(progress=False)
    toy.step.close()
    toy.step.close()
    with pytest.raises(RuntimeError, match=r"^replay after close"):
        toy.step.replay(3)


def test_bad_results_of_the_callables_are_named(device):
    """What `sample` returns is checked when the step is launched or recorded, and names the field."""
    toy = Toy(device)
    two, three = torch.zeros(2, dtype=torch.int32, device=device), torch.zeros(3, dtype=torch.int32, device=device)
    for result, message in (
        (None, "sample: expected a Sampled as its result, got NoneType"),
        (Sampled(two, three), "Sampled.num_accepted_tokens: expected 3 entries, got 2"),
        (Sampled(three, three.long()), "Sampled.query_lens: expected [any] int32, got [3] int64"),
        (Sampled(three, three, three), "Sampled.finished: expected [3] bool or uint8, got [3] int32"),
    ):
        toy.step.sample = lambda rows, verified, result=result: result
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            toy.step.run(3)
    with pytest.raises(ValueError, match=r"^inputs: expected spec_query_len"):
        DecodeStep(toy.engine.context, toy.engine.pending, StepInputs(3, 2, device), toy.verify, toy.sample)


def test_a_recorded_step_is_the_launches_it_says(device):
    """The first launch is the staging, the last the advance; with a flush there is a drain between."""
    if device.type == "cuda":
        pytest.skip("names of launches are those of the tape")
    for flush in (False, True):
        step = started(device, flush=flush).step
        names = [node.name for node in step.recording(3).nodes]
        own = [name for name in names if name.startswith("graphrt.")]
        verifies = ["graphrt.conv_verify", "graphrt.deferred_verify"] * 2
        drain = ["graphrt.drain"] if flush else []
        assert own == ["graphrt.stage", *drain, *verifies, "graphrt.commit", "graphrt.advance"]
        assert names[0] == "graphrt.stage" and names[-1] == "graphrt.advance"


@pytest.mark.gpu
def test_a_step_is_made_whichever_device_is_the_current_one():
    """Its advance is compiled when it is made, on the device of its rows."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    device = torch.device("cuda", 1)
    with torch.cuda.device(device):
        toy = Toy(device)
    parts = toy.engine.context, toy.engine.pending, toy.inputs
    with torch.cuda.device(0):
        DecodeStep(*parts, toy.verify, toy.sample).close()
    torch.cuda.synchronize(device)


MISUSES = {
    "verify": lambda toy, rows: toy.engine.verify(rows, toy.embedding[:, [0] * 12]),
    "drain": lambda toy, rows: toy.engine.context.drain(rows.state_indices, rows.record_rows, toy.engine.pending),
    "commit": lambda toy, rows: toy.engine.context.commit(
        rows.record_rows, rows.state_indices, rows.query_start_loc, record_rows=rows.record_rows,
        pending=toy.engine.pending,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISUSES)
@pytest.mark.parametrize("where", ["verify", "sample"])
def test_the_counts_that_a_step_has_taken_over_are_refused_in_its_callables(device, name, where):
    """A verify that replayed the zeroed counts would lose every request's accepted tokens, without a word."""
    toy = Toy(device)
    begin(toy)
    before, own = toy.everything(), getattr(toy.step, where)

    def misused(rows, *out):
        MISUSES[name](toy, rows)
        return own(rows, *out)

    setattr(toy.step, where, misused)
    with pytest.raises(ValueError, match=r"^pending: expected the counts of the step, StepRows.pending, got"):
        toy.step.capture(progress=False)
    for key, tensor in toy.everything().items():
        assert torch.equal(tensor, before[key]), key
    setattr(toy.step, where, own)
    toy.step.capture(progress=False)
    toy.step.replay(3, 30)
    assert [len(text) for text in texts(toy)] == [len(prompt) + new for prompt, new in PROMPTS.values()]
    MISUSES["drain"](toy, toy.inputs.rows(3))
