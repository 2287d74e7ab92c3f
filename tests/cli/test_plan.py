"""`graphrt plan`: the bytes it gives are the bytes that are allocated."""

import json

import pytest
import torch
from terminal import refusal
from typer.testing import CliRunner

from graphrt import KDADeferredCommitContext, KDALayer, RecordSlots, allocate_records
from graphrt.capture import StepInputs
from graphrt.cli import app
from graphrt.footprint import PRESETS, Model, Service, footprint


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *arguments])


def planned(*arguments):
    result = run("--json", "-", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_plan_is_what_is_allocated():
    """Every part of a small model equals the bytes of the allocations of a real one, scratch rows included (B96)."""
    model, service = Model("small", 3, 4, 16, 4, -5.0), Service(5, 6, 9, tensor_parallel=2, block_table_width=3)
    heads, window = 2, 5
    layers = [
        KDALayer(
            (torch.zeros(9, 3 * heads * 16, 3 + window, dtype=torch.bfloat16), torch.zeros(9, heads, 16, 16)),
            allocate_records(6, heads, window, 16, torch.bfloat16, "cpu"),
            torch.zeros(heads), torch.zeros(heads * 16), heads, 16, -5.0, torch.zeros(3 * heads * 16, 4),
        )
        for _ in range(3)
    ]  # fmt: skip
    context = KDADeferredCommitContext.create(layers, spec_query_len=window, max_num_reqs=6, backend="torch")
    found = footprint(model, service).parts
    assert found["checkpoints"] == sum(layer.kv_cache[1].nbytes for layer in layers)
    assert found["convolution states"] == sum(layer.kv_cache[0].nbytes for layer in layers)
    records = [t for layer in layers for t in (layer.recoverssm_records.correction, layer.recoverssm_records.key_gate)]
    assert found["records"] == sum(t.untyped_storage().nbytes() for t in records)
    assert found["records"] == 3 * (1 + 6) * heads * window * (4 * 16 + 2 * 2 * 16)
    assert found["plan"] == context.commit_lens.untyped_storage().nbytes()
    tables = [t for t in vars(context.stack).values() if isinstance(t, torch.Tensor)]
    assert found["tables of addresses"] == sum(t.nbytes for t in tables)
    ledger = RecordSlots(6, "cpu")
    assert found["ledger (pending, generation)"] >= ledger.pending.nbytes + ledger.generation.nbytes
    inputs = StepInputs(6, window, torch.device("cpu"), block_table_width=3)
    assert found["staging"] == 2 * inputs.state_indices.untyped_storage().nbytes() + ledger.pending.nbytes


def test_the_defaults_are_kimi_k3_on_eight_devices():
    """69 layers of 12 heads: the records are 6 bytes a channel and token, the checkpoints 54 MB a slot."""
    found = planned()
    parts = found["bytes"]["parts"]
    assert found["model"]["layers"] == 69 and found["service"]["tensor_parallel"] == 8
    assert parts["records"] == 69 * 257 * 12 * 8 * (4 * 128 + 2 * 2 * 128)
    assert parts["checkpoints"] == 257 * 69 * 12 * 128 * 128 * 4
    assert found["bytes"]["snapshots"] == 8 * 256 * 69 * 12 * 128 * 128 * 4
    assert found["bytes"]["total"] == sum(parts.values()) + found["bytes"]["graphs"]
    # what is neither state nor records stays small
    assert sum(parts.values()) - parts["records"] - parts["checkpoints"] - parts["convolution states"] < 64 << 10


def test_options_change_the_shape():
    """Layers, heads, dtypes and slots all count."""
    sizes = ["-L", "2", "-H", "6", "--tp", "3", "--head-dim", "32", "-Q", "4", "-R", "8", "--slots", "20"]
    found = planned(*sizes, "--checkpoint-dtype", "bf16", "--dtype", "fp16")["bytes"]["parts"]
    assert found["checkpoints"] == 2 * 20 * 2 * 32 * 32 * 2
    assert found["convolution states"] == 2 * 20 * 3 * 2 * 32 * (3 + 4) * 2


def test_the_largest_sizes_that_options_take_are_counted():
    """They are far above any machine, and still bytes that can be told."""
    sizes = ["-L", "1", "-H", "4096", "--tp", "1", "--head-dim", "1024", "-Q", "16", "-R", str(2**20)]
    found = planned(*sizes, "--slots", str(2**24), "--blocks", "1")["bytes"]["parts"]
    assert found["checkpoints"] == 2**24 * 4096 * 1024 * 1024 * 4


def test_the_table_shows_every_part(tmp_path):
    """People get a table and, if they ask for it, the file as well."""
    result = run("--preset", "kimi-linear", "--json", str(tmp_path / "plan.json"))
    assert result.exit_code == 0 and "\x1b" not in result.stdout
    found = json.loads((tmp_path / "plan.json").read_text())
    for part, count in found["bytes"]["parts"].items():
        assert part.split()[0] in result.stdout and f"{count:,}" in result.stdout
    assert found["model"]["gate_lower_bound"] is None and PRESETS["kimi-linear"].layers == 20


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--tp", "7"], "'--tp': expected a divisor of 96 heads, got 7"),
        (["--head-dim", "100"], "'--head-dim': expected a power of two"),
        (["--head-dim", "2048"], "'--head-dim'"),
        (["--heads", "1000000"], "'--heads'"),
        (["--slots", "1"], "2"),
        (
            ["--slots", "256"],
            "'--slots': expected at least 257, one for each of 256 requests and the null slot, got 256",
        ),
        (["--preset", "gpt"], "kimi-k3"),
        (["--json", "/nowhere/plan.json"], "cannot write"),
    ],
)
def test_a_bad_value_is_one_sentence(arguments, why):
    """Exit status 2 and the reason; no traceback."""
    assert why in refusal(run(*arguments))
