"""What tools refuse on the command line, before they work."""

import ast
import importlib
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import arguments
import bench_nvtx
import pytest

TOOLS = Path(__file__).parents[2] / "tools"

WRITTEN = {"--json", "--csv", "--plot", "--choose", "--out"}


def options_that_write():
    """(tool, option, the name of its type) of every option that names a file to write."""
    for path in sorted(TOOLS.glob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
                kinds = [keyword.value.id for keyword in call.keywords if keyword.arg == "type"]
                for option in {argument.value for argument in call.args} & WRITTEN:
                    yield path.name, option, kinds


def test_every_tool_tries_its_outputs_before_it_works():
    """By the type of the option; folders that a tool makes for itself are none."""
    found = list(options_that_write())
    assert len(found) > 12
    wanted = {"--plot": ["plot_file"]}
    folders = [("peers.py", "--out"), ("train_demo.py", "--out")]
    wrong = [one for one in found if one[2] != wanted.get(one[1], ["output_file"]) and one[:2] not in folders]
    assert wrong == []


def test_a_tool_refuses_a_path_that_it_could_not_write(monkeypatch, capsys, tmp_path):
    """In the words of its command line, exit status 2; nothing was measured."""
    monkeypatch.setattr(bench_nvtx, "repeat", None)
    monkeypatch.setattr(sys, "argv", ["bench_nvtx.py", "--json", str(tmp_path / "no" / "x.json")])
    with pytest.raises(SystemExit) as stopped:
        bench_nvtx.main()
    assert stopped.value.code == 2
    assert f"argument --json: cannot write {tmp_path / 'no' / 'x.json'}: there is no folder" in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_first(monkeypatch, tmp_path):
    """Not after minutes, when it is to be drawn."""
    monkeypatch.setattr(arguments, "find_spec", lambda name: None)
    with pytest.raises(ArgumentTypeError, match="matplotlib"):
        arguments.plot_file(str(tmp_path / "x.png"))
    monkeypatch.setattr(arguments, "find_spec", lambda name: object())
    assert arguments.plot_file(str(tmp_path / "x.png")) == tmp_path / "x.png"
    with pytest.raises(ArgumentTypeError, match="it is a folder"):
        arguments.plot_file(str(tmp_path))


@pytest.mark.parametrize(
    ("tool", "words", "why"),
    [
        ("bench_step", [], "needs a CUDA device"),
        ("bench_host", [], "needs a CUDA device"),
        ("bench_peers", [], "needs a CUDA device"),
        ("bench_peers", ["--device", "cuda"], "argument --device: expected a device of this machine"),
        ("peer_check", [], "argument --device: expected a device of this machine"),
        ("soak", ["--device", "gpu"], "argument --device: expected a device, such as 'cpu' or 'cuda', got 'gpu'"),
        ("racecheck", [], "compute-sanitizer"),
    ],
)
def test_a_tool_says_what_this_machine_lacks(tool, words, why, monkeypatch, capsys):
    """In a sentence, exit status 2, without a traceback."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(sys, "argv", [tool, *words])
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(tool).main()
    assert stopped.value.code == 2 and why in capsys.readouterr().err


def test_an_earlier_comparison_is_read_without_a_gpu(monkeypatch, tmp_path):
    """`--read` measures nothing."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    rows = tmp_path / "peers.csv"
    rows.write_text("batch,window,accepted,state,what,us\n1,8,4,float32,vllm,10\n")
    drawn = []
    monkeypatch.setattr(sys, "argv", ["bench_peers.py", "--read", str(rows), "--plot", str(tmp_path / "peers.png")])
    monkeypatch.setattr(arguments, "find_spec", lambda name: object())
    bench_peers = importlib.import_module("bench_peers")
    monkeypatch.setattr(bench_peers, "plot", lambda rows, path: drawn.extend(rows))
    bench_peers.main()
    assert [row["us"] for row in drawn] == ["10"]
