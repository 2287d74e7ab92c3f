"""`graphrt graph`: the chain of a recorded step."""

import json
import re

import pytest
import torch
from terminal import refusal
from typer.testing import CliRunner

from graphrt import workload
from graphrt.cli import app
from graphrt.cli.graph import Run, folded

SMALL = ["--device", "cpu", "-H", "1", "--head-dim", "16", "-Q", "2", "-B", "2"]


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["graph", *SMALL, *arguments])


def test_the_chain_shows_each_layer_once_and_how_often():
    """Three layers are one section, three times: a verify with its convolution."""
    result = run("-L", "3")
    assert result.exit_code == 0, result.output
    rows = [line.split("│")[1:-1] for line in result.stdout.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row][:4] for row in rows] == [
        ["0", "", "stage", "graphrt.stage"],
        ["1", "x 3", "verify", "graphrt.deferred_verify"],
        ["4", "", "commit", "graphrt.commit"],
        ["5", "", "stage", "graphrt.advance"],
    ]
    assert "longest chain 6" in result.stdout


def test_json_and_dot_hold_every_node(tmp_path):
    """Both files are whole, and JSON on standard output is nothing but JSON."""
    nodes = json.loads(run("-L", "2", "--json", "-", "--dot", str(tmp_path / "step.dot")).stdout)["nodes"]
    assert len(nodes) == 5 and [node["index"] for node in nodes] == list(range(5))
    text = (tmp_path / "step.dot").read_text()
    assert text.startswith("digraph") and text.count("->") == 4
    assert run("-L", "2", "--dot", "-").stdout == text


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--head-dim", "24"], "'--head-dim': expected a power of two of at least 16, got 24"),
        (["--head-dim", "2048"], "'--head-dim'"),
        (["-H", "100000"], "'--heads'"),
        (["-B", "100000"], "'--batch'"),
        (["--backend", "triton"], "'--backend': 'triton' cannot run here"),
        (["--device", "cuda"], "'--device': expected a CUDA device"),
    ],
)
def test_a_value_that_does_not_fit_names_its_option(arguments, why, monkeypatch):
    """In the words of the command line, not by an argument inside; exit status 2, no traceback."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert why in refusal(run(*arguments))


@pytest.mark.parametrize(
    ("names", "runs"),
    [
        ("", []),
        ("a", [Run(0, 1, 1)]),
        ("sababababc", [Run(0, 1, 1), Run(1, 2, 4), Run(9, 1, 1)]),
        ("aaab", [Run(0, 1, 3), Run(3, 1, 1)]),
        ("xabcabcx", [Run(0, 1, 1), Run(1, 3, 2), Run(7, 1, 1)]),
    ],
)
def test_repeated_nodes_fold_into_runs(names, runs):
    """Every node is in exactly one run."""
    found = folded(list(names))
    assert found == runs
    assert "".join(names[r.start : r.start + r.length] * r.times for r in found) == names


def of_the_gpu(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 12.00 GiB. GPU 0 has ...")


def of_the_cpu(*_, **__):
    # More than addresses of 64 bits are used for.
    torch.empty(2**58)


def test_a_step_without_room_is_refused_before_anything_is_allocated(monkeypatch):
    """What it needs, what there is, and what to do."""
    monkeypatch.setattr(workload.Workload, "__init__", lambda *_, **__: pytest.fail("allocated"))
    result = run("-L", "100", "-H", "64", "--head-dim", "1024", "-B", "4096")
    assert result.exit_code == 1 and "fewer rows or layers" in result.output and "Traceback" not in result.output
    checkpoints = 100 * 4097 * 64 * 1024 * 1024 * 4 / 2**30
    assert 1 < float(re.search(r"needs ([\d,.]+) GiB", result.output)[1].replace(",", "")) / checkpoints < 1.02


@pytest.mark.parametrize("allocate", [of_the_gpu, of_the_cpu])
def test_too_little_memory_is_one_sentence(allocate, monkeypatch):
    """Exit status 1, and what to do; any other fault of torch is none of the user's."""
    monkeypatch.setattr(workload.Workload, "__init__", allocate)
    result = run()
    assert result.exit_code == 1 and "fewer rows or layers" in result.output and "Traceback" not in result.output

    def wrong(*arguments, **options):
        raise RuntimeError("no such operator")

    monkeypatch.setattr(workload.Workload, "__init__", wrong)
    assert isinstance(run().exception, RuntimeError)
