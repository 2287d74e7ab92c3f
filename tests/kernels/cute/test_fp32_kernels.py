"""The FP32 CuTe kernels against a float64 oracle, and against each other bit for bit."""

from itertools import pairwise

import fp32_steps as steps
import pytest
import torch
from fp32_steps import int32, relative

from graphrt.errors import NUM_KINDS

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

# Relative norm; design section 2 promises 2e-6 or twice the error of the FP32 token-by-token form.
TOL_STATE, TOL_U = 2e-6, 4e-6
TOL_OUT = {torch.bfloat16: 3e-3, torch.float16: 4e-4}


@pytest.fixture(scope="module")
def kernels():
    pytest.importorskip("cutlass")
    from graphrt.kernels.cute import commit, deferred

    return commit, deferred


def run_verify(
    deferred,
    case,
    tokens,
    loc,
    slots,
    rows=None,
    pending=None,
    q=8,
    programmatic=None,
    errors=None,
    split=None,
    conv=None,
):
    errors = torch.zeros(2 * NUM_KINDS, dtype=torch.int32, device="cuda") if errors is None else errors
    deferred.deferred_verify_f32(
        tokens.q, tokens.k, tokens.v, tokens.raw_g, tokens.raw_beta, case.a_log, case.dt_bias, steps.LOWER_BOUND,
        case.state, case.records, loc, slots, q, tokens.out, errors,
        record_rows=rows, pending=pending, programmatic=programmatic, split=split, conv=conv,
    )  # fmt: skip
    return errors


def check_verify(case, before, tokens, loc, slots, rows, pending, q, dtype):
    """Every byte a verify may write, and that it wrote no other."""
    out, state = torch.zeros_like(tokens.out).double(), before.state.double()
    correction, key_gate = before.correction.double(), before.key_gate.clone()
    untouched = before.state.clone()
    for b, slot in enumerate(slots):
        first, length = loc[b], min(loc[b + 1] - loc[b], q)
        if slot <= 0:
            continue
        row = rows[b]
        n = pending[row] if row >= 0 else 0
        folded = steps.fold64(before.state[slot], before, row, n)
        u, o = steps.window64(folded, before, tokens, first, length)
        out[0, first : first + length] = o
        if row >= 0:
            state[slot] = folded
            if n > 0:
                untouched[slot] = case.state[slot]
            correction[row, :, :length] = u
            key_gate[row, :, :length, : steps.K] = tokens.k[0, first : first + length].transpose(0, 1)
            key_gate[row, :, :length, steps.K :] = tokens.raw_g[0, first : first + length].transpose(0, 1)
    assert relative(case.state, state) < TOL_STATE
    assert torch.equal(case.state, untouched), "a slot that nothing was folded into changed"
    assert relative(case.correction, correction) < TOL_U
    assert torch.equal(case.key_gate, key_gate)
    assert relative(tokens.out, out) < TOL_OUT[dtype]
    assert torch.equal(tokens.out == 0, out == 0) or ((out == 0) & (tokens.out != 0)).sum() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("strong", [False, True], ids=["random", "strong"])
@pytest.mark.parametrize("q", [8, 5, 1])
@pytest.mark.parametrize("split", [1, 2])
def test_deferred_verify_matches_the_oracle(kernels, split, q, strong, dtype):
    """Ragged windows, a null row, a row without a record row, one without tokens, an over-long one, and a tail."""
    lengths = [q, 0, max(q - 3, 1), 2 * q + 1, 1, q, q]
    slots = [3, 5, 0, 7, 2, 9, 4]
    rows = [2, 0, 1, 3, -1, 6, 5]
    loc = [0]
    for length in lengths:
        loc.append(loc[-1] + length)
    pending = [q, 3 % (q + 1), 0, 1, 7 % (q + 1), 0, q // 2]
    case = steps.make_case(11, 7, 3, q, dtype, strong=strong)
    before = case.clone()
    tokens = steps.make_tokens(loc[-1] + 5, 3, dtype, strong=strong)
    errors = run_verify(kernels[1], case, tokens, int32(loc), int32(slots), int32(rows), int32(pending), q, split=split)
    check_verify(case, before, tokens, loc, slots, rows, pending, q, dtype)
    assert errors.tolist()[5] == 1, "the over-long row is counted once"


@pytest.mark.parametrize("heads, batch", [(12, 64), (5, 61)])
@pytest.mark.parametrize("split", [1, 2])
def test_many_items_a_block(kernels, split, heads, batch):
    """Every ring turns many times, with pending 0 to Q, and the second step replays the first one's records."""
    q = 8
    case = steps.make_case(batch + 1, batch, heads, q)
    slots = list(range(batch, 0, -1))
    rows = [(7 * b + 3) % batch for b in range(batch)] if batch % 7 else list(range(batch))
    loc = [q * b for b in range(batch + 1)]
    for step in range(2):
        pending = [(r * 5 + step) % (q + 1) for r in range(batch)]
        before, tokens = case.clone(), steps.make_tokens(loc[-1], heads)
        errors = run_verify(
            kernels[1], case, tokens, int32(loc), int32(slots), int32(rows), int32(pending), q, split=split
        )
        check_verify(case, before, tokens, loc, slots, rows, pending, q, torch.bfloat16)
        assert not errors.any()


@pytest.mark.parametrize("heads, batch", [(12, 40), (5, 7)])
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("keeps", [True, False], ids=["hist+Q", "hist+Q-1"])
def test_convolution_inside_has_the_bits_of_a_launch_before(kernels, split, heads, batch, dtype, keeps):
    """Rings turn many times; ragged rows, with pending 0 to Q; state and outputs as by the Triton convolution first."""
    from graphrt.kernels.conv import conv_verify
    from graphrt.steps import Convolution, Rows

    q, width, deferred = 8, 4, kernels[1]
    lengths = [(5 * b + 3) % (q + 1) for b in range(batch)]
    loc = [sum(lengths[:b]) for b in range(batch + 1)]
    case = steps.make_case(batch + 1, batch, heads, q, dtype)
    dim, columns = 3 * heads * steps.K, width - 1 + q - (not keeps)
    state = torch.randn(batch + 1, dim, columns, device="cuda").to(dtype)
    if not keeps:
        state = state.transpose(1, 2).contiguous().transpose(1, 2)
    weight, bias = torch.randn(dim, width, device="cuda").to(dtype), torch.randn(dim, device="cuda").to(dtype)
    tokens = steps.make_tokens(loc[-1] + 3, heads, dtype)
    x = torch.randn(loc[-1] + 3, dim, device="cuda").to(dtype)
    tokens.raw_beta = tokens.raw_beta.float() if keeps else tokens.raw_beta
    slots, rows = int32(list(range(batch, 0, -1))), int32([-1 if b == 3 else b for b in range(batch)])
    pending = int32([(r * 5 + 1) % (q + 1) for r in range(batch)])
    mine, mixed, conv_state = case.clone(), torch.empty_like(x), state.clone()
    errors = torch.zeros(2 * NUM_KINDS, dtype=torch.int32, device="cuda")
    conv_verify(x, conv_state, weight, bias, Rows(int32(loc), slots, rows, pending, q), keeps, batch, mixed, errors)
    tokens.q, tokens.k, tokens.v = mixed[None].unflatten(-1, (3, heads, steps.K)).unbind(2)
    run_verify(deferred, case, tokens, int32(loc), slots, rows, pending, q, split=split)
    want = tokens.out.clone()
    tokens.out.fill_(float("nan"))
    tokens.q, tokens.k, tokens.v = x[None].unflatten(-1, (3, heads, steps.K)).unbind(2)
    conv = Convolution(state, weight, bias, keeps)
    run_verify(deferred, mine, tokens, int32(loc), slots, rows, pending, q, split=split, conv=conv)
    assert torch.equal(state, conv_state)
    assert torch.equal(mine.key_gate, case.key_gate)
    assert torch.equal(mine.state, case.state) and torch.equal(mine.correction, case.correction)
    assert torch.equal(tokens.out, want)


@pytest.mark.parametrize("splits", [(1, 1), (1, 2), (2, 1)], ids=str)
def test_replay_flush_and_commit_have_the_same_bits(kernels, splits):
    """Fold of n records: in the verify and by the fold kernel, and outputs after either, one or two blocks a head."""
    commit, deferred = kernels
    q, batch, heads = 8, 20, 4
    case = steps.make_case(batch + 2, batch, heads, q)
    pending = [b % (q + 1) for b in range(batch)]
    slots, rows = list(range(1, batch + 1)), list(range(batch))[::-1]
    loc = int32([q * b for b in range(batch + 1)])
    tokens = steps.make_tokens(q * batch, heads)
    replayed, flushed = case.clone(), case.clone()
    run_verify(deferred, replayed, tokens, loc, int32(slots), int32(rows), int32(pending), split=splits[0])
    outputs = tokens.out.clone()
    plan = steps.plan_of([pending[r] for r in rows], slots)
    commit.fold(steps.stack_of([flushed], q), plan, int32(slots), int32(rows), False)
    assert torch.equal(replayed.state, flushed.state)
    tokens.out.fill_(float("nan"))
    run_verify(deferred, flushed, tokens, loc, int32(slots), int32(rows), split=splits[1])
    assert torch.equal(outputs, tokens.out)
    assert torch.equal(replayed.correction, flushed.correction)
    assert torch.equal(replayed.key_gate, flushed.key_gate)
    assert torch.equal(replayed.state, flushed.state), "the stock verify wrote the checkpoint"


@pytest.mark.parametrize("indexed", [False, True], ids=["batch rows", "record rows"])
def test_fold_of_all_layers_with_a_boundary(kernels, indexed):
    """Source, boundary and final block in every combination of equal and different; null and -1 rows change nothing."""
    q, layers, heads, batch = 8, 3, 2, 9
    cases = [steps.make_case(40, batch + 3, heads, q) for _ in range(layers)]
    before = [case.clone() for case in cases]
    source = [1, 2, 3, 4, 0, 6, 7, 8, 99]
    final = [1, 12, 13, 14, 15, 16, 17, 18, 19]
    boundary = [0, 2, 13, 24, 25, 26, 27, 0, 29]
    lens = [8, 5, 4, 7, 3, 0, 6, 1, 2]
    boundary_lens = [0, 3, 4, 7, 2, 0, 1, 0, 1]
    rows = [5, 4, 3, 2, 1, 0, -1, 11, 8] if indexed else list(range(batch))
    plan = steps.plan_of(lens, final, boundary, boundary_lens)
    kernels[0].fold(steps.stack_of(cases, q), plan, int32(source), int32(rows) if indexed else None, True)
    for case, old in zip(cases, before, strict=True):
        want = old.state.double()
        touched = set()
        for b, row in enumerate(rows):
            if not 0 < source[b] < 40 or row < 0 or lens[b] == 0:
                continue
            if boundary[b] > 0 and boundary_lens[b] > 0:
                want[boundary[b]] = steps.fold64(old.state[source[b]], old, row, boundary_lens[b])
                touched.add(boundary[b])
            want[final[b]] = steps.fold64(old.state[source[b]], old, row, lens[b])
            touched.add(final[b])
        assert relative(case.state, want) < TOL_STATE
        rest = [s for s in range(40) if s not in touched]
        assert torch.equal(case.state[rest], old.state[rest])


def test_boundary_state_has_the_bits_of_a_commit_of_that_length(kernels):
    """The state stored at a boundary after b records is that of a commit of b records."""
    q = 8
    case = steps.make_case(40, 9, 2, q)
    lens, source = [8] * 9, list(range(1, 10))
    boundary, ends = list(range(11, 20)), [1, 2, 3, 4, 5, 6, 7, 8, 4]
    plan = steps.plan_of(lens, list(range(21, 30)), boundary, ends)
    kernels[0].fold(steps.stack_of([case], q), plan, int32(source), None, True)
    kernels[0].fold(steps.stack_of([case], q), steps.plan_of(ends, source), int32(source), None, False)
    assert torch.equal(case.state[11:20], case.state[1:10])


def test_later_drafts_change_no_bit_of_earlier_tokens(kernels):
    """Other finite drafts, NaN and Inf behind token 2 leave outputs and records of tokens 0..2 as they are."""
    q, batch, heads = 8, 6, 3
    case = steps.make_case(batch + 1, batch, heads, q)
    loc, slots = int32([q * b for b in range(batch + 1)]), int32(list(range(1, batch + 1)))
    rows, pending = int32(list(range(batch))), int32([4] * batch)
    tokens = steps.make_tokens(q * batch, heads)
    results = []
    for poison in (None, 3.0, float("nan"), float("inf")):
        mine = case.clone()
        tokens.out.fill_(float("nan"))
        if poison is not None:
            for x in (tokens.q, tokens.k, tokens.v, tokens.raw_g, tokens.raw_beta):
                x.view(1, batch, q, *x.shape[2:])[:, :, 3:] = poison
        run_verify(kernels[1], mine, tokens, loc, slots, rows, pending)
        results.append(
            (tokens.out.view(batch, q, heads, -1)[:, :3].clone(), mine.correction[:, :, :3].clone(), mine.state)
        )
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


def test_poisoned_records_past_the_pending_count_are_not_seen(kernels):
    """NaN in records n..Q-1 of the row, in its neighbours and in the scratch row."""
    q, batch, heads = 8, 6, 3
    case = steps.make_case(batch + 1, batch, heads, q)
    clean, poisoned = case.clone(), case.clone()
    poisoned.correction[:, :, 4:] = float("nan")
    poisoned.key_gate[:, :, 4:] = float("nan")
    loc, slots = int32([q * b for b in range(batch + 1)]), int32(list(range(1, batch + 1)))
    rows, pending = int32(list(range(batch))), int32([4] * batch)
    tokens = steps.make_tokens(q * batch, heads)
    run_verify(kernels[1], clean, tokens, loc, slots, rows, pending)
    want = tokens.out.clone()
    run_verify(kernels[1], poisoned, tokens, loc, slots, rows, pending)
    assert torch.equal(clean.state, poisoned.state) and torch.equal(want, tokens.out)


def test_hostile_indices_stay_inside_and_are_counted(kernels):
    """Slots, rows, counts and offsets out of range: counted, clamped, and nothing of a stranger changes."""
    q, heads = 8, 2
    case = steps.make_case(4, 3, heads, q)
    before = case.clone()
    tokens = steps.make_tokens(24, heads)
    loc, slots = int32([0, 8, 6, 2**31 - 1]), int32([2**31 - 1, -5, 2])
    rows, pending = int32([0, 1, 77]), int32([-7, 2**31 - 1, 5])
    errors = run_verify(kernels[1], case, tokens, loc, slots, rows, pending)
    assert torch.equal(case.state, before.state)
    assert torch.equal(case.correction, before.correction) and torch.equal(case.key_gate, before.key_gate)
    assert errors.tolist()[:6] == [1, 1, 0, 0, 0, 2]
    assert torch.isfinite(tokens.out.float()).all()


@pytest.mark.parametrize("batch", [1, 3, 8, 40])
@pytest.mark.parametrize("split", [1, 2])
def test_programmatic_chain_in_a_graph_has_the_same_bits(kernels, split, batch):
    """Layer after layer, each reading the one before, 20 replays: as launched one by one without the attribute."""
    q, heads, layers = 8, 12, 6
    cases = [steps.make_case(batch + 1, batch, heads, q) for _ in range(layers)]
    loc, slots = int32([q * b for b in range(batch + 1)]), int32(list(range(1, batch + 1)))
    rows, pending = int32(list(range(batch))), int32([4] * batch)
    tokens = [steps.make_tokens(q * batch, heads) for _ in range(layers)]
    for one, two in pairwise(tokens):
        two.v = one.out  # each layer's values are what the layer before has just written

    errors = torch.zeros(2 * NUM_KINDS, dtype=torch.int32, device="cuda")

    def step(mine, programmatic):
        for l in range(layers):
            run_verify(
                kernels[1],
                mine[l],
                tokens[l],
                loc,
                slots,
                rows,
                pending,
                programmatic=programmatic,
                errors=errors,
                split=split,
            )

    plain, chained = [c.clone() for c in cases], [c.clone() for c in cases]
    for _ in range(20):
        step(plain, False)
    want = tokens[-1].out.clone()
    warm = [c.clone() for c in cases]
    step(warm, True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(chained, True)
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(want, tokens[-1].out)
    assert all(torch.equal(a.state, b.state) for a, b in zip(plain, chained, strict=True))
    assert all(torch.equal(a.correction, b.correction) for a, b in zip(plain, chained, strict=True))
