"""What a recorded step and the recorded commit, flush and drain consist of, pinned: on the tape and in real graphs.

The files are `data/pinned_BACKEND.json`: of every recording the type, name and entry point of its nodes, and the edges.
Left out is what depends on the card or on a version: launch shapes, and the names of kernels that are not graphrt's.
Where something else is meant to be recorded, write the files anew, on a GPU for `triton` and `fp32_deferred`:

    PIN_TOPOLOGY=tests/capture/data pytest tests/capture/test_pinned_topology.py
"""

import json
import os
import re
from pathlib import Path

import pytest
import torch

from graphrt import FusedConv, KDADeferredCommitContext, kda_deferred_verify
from graphrt.capture import CommitRunner, DecodeStep, GraphNode, Sampled, StepInputs
from graphrt.testing import poisoned_pool
from graphrt.testing.batches import verify_layers
from graphrt.testing.truths import Tokens

DATA = Path(__file__).parent / "data"
HEADS, DIM, WINDOW, ROWS, BLOCK = 2, 128, 4, 3, 16


def name_of(node):
    """Kernels of ours by name without the compiler's suffix, copies and fills with their bytes, others as such."""
    ours = re.search(r"graphrt[._][a-z]\w*?(?=_\d\w*$|$)", node.name)
    if ours:
        return ours[0]
    bytes_of = node.facts.get("bytes")
    return "not graphrt's" if bytes_of is None else f"{node.name}, {bytes_of} bytes"


def summary(topology):
    """Everything of a topology that is the same on every card."""
    return {
        "nodes": [[node.type, name_of(node), node.stage] for node in topology.nodes],
        "edges": [[e.source, e.target, *["programmatic"] * e.programmatic] for e in topology.edges],
    }


def recordings(backend, device):
    """Summaries by name of what is recorded for a model of two layers: steps, and what a runner has."""
    pool = poisoned_pool(
        num_heads=HEADS, head_dim=DIM, spec_query_len=WINDOW, conv_dim=3 * HEADS * DIM, dtype=torch.bfloat16,
        device=device,
    )  # fmt: skip
    for layer in pool.layers:
        layer.conv_weight, layer.conv_bias = layer.conv_weight.bfloat16(), layer.conv_bias.bfloat16()
    context = KDADeferredCommitContext.create(pool.layers, spec_query_len=WINDOW, max_num_reqs=6, backend=backend)
    assert context.backend == backend
    inputs, tokens = StepInputs(ROWS, WINDOW, pool.device, block_table_width=2), Tokens.allocate(pool, ROWS * WINDOW)
    out, convolved = torch.zeros_like(tokens.v), torch.zeros_like(tokens.x)
    ones = torch.ones(ROWS, dtype=torch.int32, device=device)

    def verify(rows):
        verify_layers(pool, tokens, rows, rows.pending, backend, out, convolved)

    def fused_verify(rows):
        step = (rows.query_start_loc, rows.state_indices, WINDOW)
        for i, layer in enumerate(pool.layers):
            q, k, v = tokens.x[i][None].unflatten(-1, (3, HEADS, DIM)).unbind(2)
            gate = (tokens.raw_g[i][None], tokens.raw_beta[i][None], layer.A_log, layer.dt_bias, layer.gate_lower_bound)
            conv = FusedConv(layer.kv_cache[0], layer.conv_weight, layer.conv_bias)
            kda_deferred_verify(
                q, k, v, *gate, layer.kv_cache[1], layer.recoverssm_records, *step, out[i][None], backend=backend,
                record_rows=rows.record_rows, pending=rows.pending, conv=conv,
            )  # fmt: skip

    def sample(rows, verified):
        return Sampled(ones, ones)

    parts = (context, pool.pending, inputs)
    align = {"mamba_block_size": BLOCK, "choice": "deferred"}
    makers = {
        "decode step": DecodeStep(*parts, verify, sample, choice="deferred"),
        "decode step, convolution in the verify": DecodeStep(*parts, fused_verify, sample, choice="deferred"),
        "decode step, align mode, with a flush": DecodeStep(*parts, verify, sample, flush=True, **align),
        "runner": CommitRunner(*parts, [ROWS], choice="deferred"),
        "eager runner": CommitRunner(*parts, [ROWS], choice="eager"),
        "runner, align mode": CommitRunner(*parts, [ROWS], eager=True, **align),
    }
    found = {}
    for label, maker in makers.items():
        maker.capture(progress=False)
        for work in ("step",) if isinstance(maker, DecodeStep) else ("commit", "flush", "drain"):
            found[f"{label}: {work}"] = summary(maker._recordings.find(work, ROWS).topology())
        maker.close()
    return found


def written(summaries):
    """As JSON, a line a node."""
    parts = []
    for name, graph in summaries.items():
        nodes = ",\n  ".join(json.dumps(node) for node in graph["nodes"])
        parts.append(f' {json.dumps(name)}: {{"nodes": [\n  {nodes}\n ], "edges": {json.dumps(graph["edges"])}}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


@pytest.mark.parametrize(
    "backend",
    [
        "torch",
        pytest.param("triton", marks=pytest.mark.gpu),
        pytest.param("fp32_deferred", marks=[pytest.mark.gpu, pytest.mark.sm90]),
    ],
)
def test_what_is_recorded_is_pinned(backend):
    """A launch, copy or edge more or less than in the file, or another kind of edge, fails (B59, B75, B98)."""
    got = recordings(backend, "cpu" if backend == "torch" else "cuda")
    file = f"pinned_{backend}.json"
    folder = os.environ.get("PIN_TOPOLOGY")
    if folder:
        (Path(folder) / file).write_text(written(got), encoding="utf-8")
        pytest.skip(f"{file} is written anew, and nothing is compared")
    assert (DATA / file).exists(), f"there is no {file}; PIN_TOPOLOGY={DATA.name} makes one: {__doc__}"
    want = json.loads((DATA / file).read_text(encoding="utf-8"))
    assert list(got) == list(want)
    for name in got:
        assert got[name] == want[name], f"{name} is not what {file} says; if it is so intended, write that file anew"


@pytest.mark.parametrize(
    ("name", "facts", "pinned"),
    [
        ("graphrt_verify_f32_0", {}, "graphrt_verify_f32"),
        ("graphrt_verify_kernel", {}, "graphrt_verify_kernel"),
        ("graphrt_fold_kernel_0d1d2de", {}, "graphrt_fold_kernel"),
        ("graphrt.deferred_verify", {}, "graphrt.deferred_verify"),
        ("host to device", {"bytes": 16}, "host to device, 16 bytes"),
        ("void at::native::vectorized_elementwise_kernel<4>(int)", {"grid": [1, 1, 1]}, "not graphrt's"),
    ],
)
def test_names_that_are_pinned_do_not_depend_on_compilers(name, facts, pinned):
    """Suffixes and templates are not ours to keep."""
    assert name_of(GraphNode("kernel", name, "", facts)) == pinned
