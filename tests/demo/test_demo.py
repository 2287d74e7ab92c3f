"""`graphrt demo` end to end, and that each of its claims can fail."""

import json
import os

import pytest
import torch
from typer.testing import CliRunner

from graphrt.cli import app
from graphrt.demo import run, step
from graphrt.demo.prompts import EXCERPTS, make_requests

RUNNER = CliRunner()
ARGUMENTS = ["demo", "--batch", "2", "--query-len", "4"]


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch, short_requests):
    monkeypatch.setattr(run, "make_requests", lambda count, tokens: short_requests)


def invoke(*more):
    return RUNNER.invoke(app, [*ARGUMENTS, *more], catch_exceptions=False)


def verdicts(path):
    return {verdict["claim"]: verdict["passed"] for verdict in json.loads(path.read_text())["verdicts"]}


def test_the_demo_passes_and_writes_what_it_shows(tmp_path, short_requests):
    report = tmp_path / "report.json"
    result = invoke("--device", "cpu", "--json", str(report))
    assert result.exit_code == 0, result.output
    assert result.output.count("PASS") == 3 and "FAIL" not in result.output and "{+" in result.output
    written = json.loads(report.read_text())
    assert written["passed"] and written["backend"] == "torch" and written["step_us"] == {}
    assert [r["name"] for r in written["requests"]] == [r.name for r in short_requests]
    assert len(written["accepted_drafts_histogram"]) == 4 and written["mean_accepted_drafts"] > 0
    assert written["record_rows_used"] == 2 and written["launches_per_step"] > 0
    assert set(written["memory_bytes"]) >= {"checkpoints", "records", "plan"}


def test_accepting_every_draft_is_found_out(monkeypatch, tmp_path):
    def accept_all(window, choice, known, window_len):
        return window_len

    monkeypatch.setattr(step, "accept_greedily", accept_all)
    result = invoke("--device", "cpu", "--json", str(tmp_path / "report.json"))
    assert result.exit_code == 1
    assert "FAIL" in result.output and "top two" in result.output
    passed = verdicts(tmp_path / "report.json")
    assert not passed["tokens are those of one-token greedy decoding"]
    assert passed["deferred commit is bit-identical to eager commit"]


def test_a_deferred_commit_that_loses_a_token_is_found_out(monkeypatch, tmp_path):
    whole = step.DecodeStep._commit

    def lossy(self, accepted):
        whole(self, accepted - (accepted > 2).long() if self.deferred else accepted)

    monkeypatch.setattr(step.DecodeStep, "_commit", lossy)
    result = invoke("--device", "cpu", "--json", str(tmp_path / "report.json"))
    assert result.exit_code == 1
    assert not verdicts(tmp_path / "report.json")["deferred commit is bit-identical to eager commit"]


def test_an_index_out_of_range_is_found_out(monkeypatch, tmp_path):
    whole = step.DecodeStep._commit
    monkeypatch.setattr(step.DecodeStep, "_commit", lambda self, accepted: whole(self, accepted + 1))
    result = invoke("--device", "cpu", "--json", str(tmp_path / "report.json"))
    assert result.exit_code == 1
    assert not verdicts(tmp_path / "report.json")["no index had to be clamped on the device"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_device_that_is_not_there_is_a_usage_error():
    result = invoke("--device", "cuda")
    assert result.exit_code == 2 and "CUDA" in result.output


@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="needs Triton's interpreter")
def test_a_backend_that_cannot_run_is_a_usage_error(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    result = invoke("--device", "cpu", "--backend", "triton")
    assert result.exit_code == 2 and "cannot run" in result.output


def test_the_version_is_printed():
    result = RUNNER.invoke(app, ["--version"])
    assert result.exit_code == 0 and result.output.startswith("graphrt ")


def test_prompts_are_excerpts_of_different_lengths_with_names_of_their_own():
    requests = make_requests(2 * len(EXCERPTS), 10)
    assert len({r.name for r in requests}) == len(requests)
    assert all(100 <= len(r.prompt) <= 400 and r.prompt.startswith((b"def ", b"class ")) for r in requests)
    assert len({r.prompt for r in requests}) == len(requests)
    assert len({r.new_tokens for r in requests}) > 4
    with pytest.raises(ValueError, match="tokens"):
        make_requests(1, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_the_demo_passes_on_a_gpu_and_times_its_steps(tmp_path, backend):
    report = tmp_path / "report.json"
    result = invoke("--device", "cuda", "--backend", backend, "--json", str(report))
    assert result.exit_code == 0, result.output
    assert set(json.loads(report.read_text())["step_us"]) == set(run.TIMED_MODES)
