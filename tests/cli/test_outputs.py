"""Where the commands write: every output is tried before any work, and one place takes one result."""

import json
from pathlib import Path

import pytest
from terminal import refusal, words
from typer.testing import CliRunner

from graphrt import workload
from graphrt.cli import app, benches
from graphrt.demo import run as demo_run

SMALL = ["--device", "cpu", "-L", "1", "-H", "1", "--head-dim", "16", "-Q", "2", "-B", "1"]
OUTPUTS = [
    ("doctor", "--json"),
    ("plan", "--json"),
    ("demo", "--json"),
    ("bench", "--json"),
    ("bench", "--out"),
    ("graph", "--json"),
    ("graph", "--dot"),
    ("profile", "--json"),
    ("profile", "--torch"),
]


def run(*arguments):
    return CliRunner(env={"COLUMNS": "300"}).invoke(app, list(arguments))


@pytest.fixture
def no_work(monkeypatch):
    """Whoever begins to work fails the test."""

    def work(*arguments, **options):
        raise AssertionError("work was begun")

    monkeypatch.setattr(workload.Workload, "__init__", work)
    monkeypatch.setattr(demo_run, "run_demo", work)
    monkeypatch.setattr(benches.Bench, "run", work)


@pytest.mark.parametrize(("command", "option"), OUTPUTS)
@pytest.mark.parametrize("fault", ["no folder", "a folder or file in its place"])
def test_an_output_that_cannot_be_written_is_refused_before_any_work(command, option, fault, no_work, tmp_path):
    """Exit status 2, a sentence that names the option and the path, and nothing was done."""
    (tmp_path / "file").touch()
    taken = tmp_path / "file" if option == "--out" else tmp_path
    path = taken if fault != "no folder" else tmp_path / "file" / "x" / "result"
    said = refusal(run(command, option, str(path)))
    assert f"'{option}'" in said and "cannot write" in said and str(path) in said


@pytest.mark.parametrize(("command", "option"), OUTPUTS)
def test_an_output_without_permission_is_refused_before_any_work(command, option, no_work, tmp_path, monkeypatch):
    """Root may write everywhere, so the system's answer is set here."""
    monkeypatch.setattr("graphrt.cli.outputs.os.access", lambda path, mode: False)
    said = refusal(run(command, option, str(tmp_path / "result")))
    assert f"'{option}'" in said and "may not" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ("graph", "--dot", "-", "--json", "-"),
        ("profile", "--torch", "-", "--json", "-"),
        ("graph", "--json", "same", "--dot", "same"),
        ("bench", "--out", "same", "--json", "./same"),
    ],
)
def test_two_results_in_one_place_are_refused(arguments, no_work, tmp_path, monkeypatch):
    """On standard output they would run into each other, in a file the second would be all that is left."""
    monkeypatch.chdir(tmp_path)
    said = refusal(run(*arguments))
    assert arguments[1] in said and arguments[3] in said
    assert list(tmp_path.iterdir()) == []


def test_each_output_alone_has_standard_output_for_itself(tmp_path):
    """- is nothing but the result, whichever option says it; the other one goes to its file."""
    file = tmp_path / "result"
    assert run("graph", *SMALL, "--dot", "-", "--json", str(file)).stdout.startswith("digraph")
    assert json.loads(file.read_text())["nodes"]
    trace = run("profile", *SMALL, "--steps", "1", "--torch", "-", "--json", str(file))
    assert json.loads(trace.stdout)["traceEvents"] and json.loads(file.read_text())["trace"] == "-"
    assert not Path("-").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_file_that_fills_up_in_the_end_is_one_sentence():
    """Not the user's fault: exit status 1."""
    result = run("plan", "--json", "/dev/full")
    assert result.exit_code == 1 and "error: cannot write /dev/full" in words(result)
    assert "Traceback" not in result.output
