"""When a verify may read before its predecessor has ended, and that its code keeps to it (B58, B59, B60)."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from graphrt.kernels.cute import order
from graphrt.kernels.cute.order import Position, Span, Touched
from graphrt.steps import Convolution


def layer(base, inputs=10**6, out=2 * 10**6):
    """A verify of the layer whose memory starts at `base`: checkpoint, records and pending; tokens in, tokens out."""
    state, records, pending = Span(base, 100, 8, 100), Span(base + 1000, 10, 8, 10), Span(base + 2000, 4, 8, 4)
    return Touched((state, records, pending), (Span(inputs, 50, 8, 50),), (state, records, Span(out, 50, 8, 50)))


def test_another_layers_verify_may_overlap():
    """Layers with memory of their own that share tokens, outputs and pending do not conflict."""
    shared = Span(99, 4, 8, 4)
    one, two = (layer(base)._replace(early=(*layer(base).early, shared)) for base in (10_000, 20_000))
    assert not two.conflicts(one)


def test_the_same_layers_verify_may_not_overlap():
    """Two verifies of one layer without a commit between: the second reads what the first writes."""
    assert layer(10_000).conflicts(layer(10_000))


@pytest.mark.parametrize("where", range(3), ids=["checkpoint", "records", "pending"])
def test_whatever_the_predecessor_writes_is_not_read_early(where):
    """Outputs of the layer before that lie over this layer's early reads."""
    mine = layer(10_000)
    assert mine.conflicts(layer(20_000, out=mine.early[where].start + 30))


def test_a_checkpoint_that_the_predecessor_reads_is_not_written_early():
    """The folded state goes back before the wait: not over the tokens of the verify before."""
    mine = layer(10_000)
    assert mine.conflicts(layer(20_000, inputs=mine.early[0].start))
    assert not mine.conflicts(layer(20_000, inputs=mine.early[2].start)), "reading what is only read is no conflict"


def test_pools_whose_layers_alternate_do_not_meet():
    """Pages of two layers in turn in one allocation are apart; a byte more and they are not."""
    page = Span(0, 100, 8, 40)
    assert not page.meets(Span(40, 100, 8, 60)) and not Span(40, 100, 8, 60).meets(page)
    assert page.meets(Span(40, 100, 8, 61)) and page.meets(Span(39, 100, 8, 60))
    assert page.meets(Span(40, 90, 8, 40)), "other strides meet somewhere"
    assert not page.meets(Span(40, 100, 0, 60)), "nothing is not met"


def test_a_tensors_span_covers_what_it_may_touch():
    """Strided views, and a scratch row in front."""
    records = torch.zeros(6, 3, 4)[1:]
    span = Span.of(records, 0, 1)
    assert (span.start, span.end) == (records.data_ptr() - 48, records.data_ptr() + 240)
    tokens = torch.zeros(1, 5, 2, 8)[..., :4]
    assert Span.of(tokens, 1) == (tokens.data_ptr(), 64, 5, 48)


def test_only_a_known_sole_predecessor_allows_early_reads(monkeypatch):
    """Another node, another capture, no capture, or several predecessors: the kernel waits first."""
    mine, before = layer(10_000), layer(20_000)
    here = Position(capture=7, node=1234)
    monkeypatch.setattr(order, "_last", (here, before))
    for position, early in (
        (here, True),
        (here._replace(node=5), False),
        (here._replace(capture=8), False),
        (None, False),
    ):
        monkeypatch.setattr(order, "position", lambda stream, position=position: position)
        assert order.may_start_early(1, mine) is early, position
    order.launched(1, mine)
    monkeypatch.setattr(order, "position", lambda stream: here)
    assert not order.may_start_early(1, mine), "the last launch was outside a capture"


def test_layers_that_share_a_convolution_state_or_a_scratch_row_conflict():
    """What a verify reads early is compared with all that the one before writes: history and scratch row included."""
    deferred = pytest.importorskip("graphrt.kernels.cute.deferred")
    index, alive = torch.zeros(3, dtype=torch.int32), []

    def touched(index, state, correction, key_gate, conv_state):
        sized, parameters = [torch.zeros(1, 1, 1, 4) for _ in range(6)], (torch.zeros(1), torch.zeros(4))
        conv = Convolution(conv_state, torch.zeros(3, 4), None, True)
        alive.append((sized, parameters, conv))  # memory that is gone may be the next one's
        layer = state, correction[1:], key_gate[1:]
        return deferred.touched(sized, layer, (index, None, index, None), parameters, conv)

    memory = [(torch.zeros(2, 1, 4, 4), torch.zeros(3, 4), torch.zeros(3, 8), torch.zeros(2, 3, 7)) for _ in range(2)]
    one, two = (touched(index, *tensors) for tensors in memory)
    assert not two.conflicts(one) and not one.conflicts(two)
    assert touched(index, *memory[1][:3], memory[0][3]).conflicts(one), "one convolution state"
    for records in memory[0][1:3]:
        mine = touched(records[0].view(torch.int32), *memory[1])
        assert mine.conflicts(one), "the one before writes its scratch row, where indices of this one are"


@pytest.mark.parametrize("known", [True, False], ids=["one predecessor", "a join, or none"])
def test_behind_a_join_a_verify_is_launched_plainly(monkeypatch, known):
    """In a capture the attribute needs exactly one predecessor; without it nothing is read early either."""
    deferred = pytest.importorskip("graphrt.kernels.cute.deferred")
    launched = []
    monkeypatch.setattr(deferred, "is_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=1))
    monkeypatch.setattr(order, "position", lambda stream: Position(7, 1234) if known else None)
    monkeypatch.setattr(order, "_last", None)
    monkeypatch.setattr(deferred, "sm_count", lambda device: 132)
    monkeypatch.setattr(deferred.KERNELS, "launch", lambda facts, device, *values: launched.append(values))
    token, one = torch.zeros(1, 1, 2, 128, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int32)
    # Alive side by side: memory of a layer that is gone may be the next one's.
    layers = [
        (torch.zeros(2, 2, 128, 128), torch.zeros(2, 2, 4, 128), torch.zeros(2, 2, 4, 256), torch.empty_like(token))
        for _ in range(2)
    ]
    for row, (state, correction, key_gate, out) in enumerate(layers):
        records = SimpleNamespace(correction=correction[1:], key_gate=key_gate[1:])
        deferred.deferred_verify_f32(
            token, token, token, token, token[..., 0], torch.zeros(2), torch.zeros(256), -5.0,
            state, records, one, one[:1], 4, out, one,
            record_rows=one[row:], pending=one,
        )  # fmt: skip
    early, programmatic = ([values[at] for values in launched] for at in (-6, -2))
    assert programmatic == [int(known)] * 2
    assert early == [0, int(known)], "the second one follows another layer's verify"


def test_below_hopper_nothing_is_launched_programmatically(monkeypatch):
    """B60: without the wait instruction there is no attribute either, for the kernels do not run there at all."""
    commit = pytest.importorskip("graphrt.kernels.cute.commit")
    from graphrt.backends import Facts

    facts = Facts(torch.device("cuda:0"), torch.float32, 128, True, -5.0, 8, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert not commit.support_of(facts) and "9.0" in commit.support_of(facts).reason


@pytest.fixture(scope="module", params=[0, 4], ids=["plain", "with convolution"])
def ptx(request, tmp_path_factory):
    """Instructions of a compiled verify, one a line."""
    pytest.importorskip("cutlass")
    from graphrt.kernels.cute import deferred

    folder = tmp_path_factory.mktemp("ptx")
    fp32 = torch.float32
    facts = deferred.verify_facts(2, 4, torch.bfloat16, fp32, fp32, request.param, True, 1 + request.param // 4)
    deferred.KERNELS.compile(facts, "sm_90a", f"--keep-ptx --dump-dir={folder}")
    (path,) = Path(folder).glob("*.ptx")
    lines = (line.split("//")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


GLOBAL = re.compile(r"\b(ld\.global|st\.global|ld\.volatile|red\.|atom\.|cp\.async|ld\.[bfus]\d|st\.[bfus]\d)")


def places(ptx, what):
    """Line numbers at which an instruction occurs."""
    return [i for i, line in enumerate(ptx) if re.search(what, line)]


def test_the_wait_stands_before_the_first_access_of_global_memory(ptx):
    """B58, B60: nothing is read in front of it, and only one branch, on the launch's own flag, leads around it."""
    wait = places(ptx, r"griddepcontrol\.wait")[0]
    assert places(ptx, GLOBAL)[0] > wait
    branch = [line for line in ptx[:wait] if "bra" in line][-1]
    target = re.search(r"\$\w+", branch).group()
    assert target + ":" in ptx[wait : wait + 3], "the branch leads behind the wait"
    condition = re.search(r"%p\d+", branch).group()
    flag = re.search(r"setp\.\S+\s+\S+, (%r\d+), 0", next(line for line in ptx if f"{condition}," in line)).group(1)
    assert any(line.startswith("ld.param") and flag in line for line in ptx[:wait]), "the flag is an argument"


def test_global_memory_is_read_past_l1(ptx):
    """Early reads have no wait in front that would drop what L1 kept from launches before.

    Every load but those of arguments and shared memory is volatile; no copy goes through L1, no prefetch into it.
    """
    loads = {line for line in ptx if re.search(r"\bldu?\.(?!param|shared)", line)}
    assert len(loads) > 20 and all(re.search(r"\bld\.volatile\.global\.", line) for line in loads), loads
    copies = [ptx[at] for at in places(ptx, r"cp\.async\.c[ag]\.")]
    assert copies and all("cp.async.cg.shared.global " in line for line in copies)
    assert all("cp.async.bulk.prefetch.L2.global" in ptx[at] for at in places(ptx, "prefetch"))


def test_dependents_are_released_right_after_a_wait(ptx):
    """B60: one release, and no instruction between it and the wait in front of it."""
    (release,) = places(ptx, r"griddepcontrol\.launch_dependents")
    assert ptx[release - 1] == "griddepcontrol.wait;"


def test_tokens_are_loaded_behind_the_loaders_wait(ptx):
    """Bulk loads of state (two halves) and records (two) stand in front of the loader's own wait, no copy does."""
    waits = places(ptx, r"griddepcontrol\.wait")
    assert len(waits) == 3
    loads, copies = places(ptx, r"cp\.async\.bulk\.shared::cluster\.global"), places(ptx, r"cp\.async\.cg\.shared")
    assert len(loads) == 4 and max(loads) < waits[1]
    assert len(copies) == 4 * 2, "of q, k, gates and v, four tokens each, two at a time"
    assert waits[1] < min(copies) and max(copies) < waits[2]


def test_no_item_is_complete_before_the_loaders_wait(ptx):
    """Of an item without tokens the lanes have nothing to wait for: its history would be moved too early."""
    waits = places(ptx, r"griddepcontrol\.wait")
    expected, landed = (places(ptx, rf"mbarrier\.arrive\.{kind}") for kind in (r"expect_tx", r"noinc"))
    assert len(expected) == 3 and max(expected) < waits[1], "state, record and correction"
    assert len(landed) == 2 and waits[1] < min(landed) and max(landed) < waits[2], "tokens and values"
