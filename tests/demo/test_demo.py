"""`graphrt demo` end to end, and that each of its claims can fail."""

import json
import os
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from graphrt import KDADeferredCommitContext
from graphrt.capture import DecodeStep
from graphrt.cli import app
from graphrt.demo import run, step
from graphrt.demo.prompts import EXCERPTS, make_requests
from graphrt.launch import is_recording

RUNNER = CliRunner()
ARGUMENTS = ["demo", "--batch", "2", "--query-len", "4"]


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch, short_requests):
    monkeypatch.setattr(run, "make_requests", lambda count, tokens: short_requests)


@pytest.fixture
def one_request(monkeypatch, few_tokens, short_requests):
    """Enough to find a fault."""
    monkeypatch.setattr(run, "make_requests", lambda count, tokens: short_requests[:1])


def invoke(*more):
    return RUNNER.invoke(app, [*ARGUMENTS, *more], catch_exceptions=False)


def verdicts(path):
    return {verdict["claim"]: verdict["passed"] for verdict in json.loads(path.read_text())["verdicts"]}


def test_the_demo_passes_and_writes_what_it_shows(tmp_path, short_requests):
    report = tmp_path / "report.json"
    result = invoke("--device", "cpu", "--json", str(report))
    assert result.exit_code == 0, result.output
    assert result.stderr == "", "bars are for terminals"
    assert result.output.count("PASS") == 4 and "FAIL" not in result.output and "{+" in result.output
    written = json.loads(report.read_text())
    assert written["passed"] and written["backend"] == "torch" and written["step_us"] == written["backend_us"] == {}
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


def test_a_deferred_commit_that_loses_a_token_is_found_out(monkeypatch, tmp_path, one_request):
    whole = KDADeferredCommitContext.commit

    def lossy(self, num_accepted_tokens, *args, eager, **kwargs):
        lost = (num_accepted_tokens > 2) & (eager == 0)
        whole(self, num_accepted_tokens - lost.int(), *args, eager=eager, **kwargs)

    monkeypatch.setattr(KDADeferredCommitContext, "commit", lossy)
    result = invoke("--device", "cpu", "--json", str(tmp_path / "report.json"))
    assert result.exit_code == 1
    passed = verdicts(tmp_path / "report.json")
    assert not passed["deferred commit is bit-identical to eager commit"]
    assert passed["replayed steps are bit-identical to the same launches made anew"]


def test_a_replay_that_differs_from_its_launches_is_found_out(monkeypatch, tmp_path, one_request):
    """A recording that forgets one accepted draft, where the launched step does not."""
    whole = DecodeStep._commit

    def lossy(self, rows, sampled):
        if is_recording():
            fewer = sampled.num_accepted_tokens - (sampled.num_accepted_tokens > 2).int()
            sampled = replace(sampled, num_accepted_tokens=fewer)
        whole(self, rows, sampled)

    monkeypatch.setattr(DecodeStep, "_commit", lossy)
    result = invoke("--device", "cpu", "--json", str(tmp_path / "report.json"))
    assert result.exit_code == 1
    passed = verdicts(tmp_path / "report.json")
    assert not passed["replayed steps are bit-identical to the same launches made anew"]
    assert passed["deferred commit is bit-identical to eager commit"]


def test_an_index_out_of_range_is_found_out(monkeypatch, tmp_path, one_request):
    whole = DecodeStep._commit

    def one_more(self, rows, sampled):
        whole(self, rows, replace(sampled, num_accepted_tokens=sampled.num_accepted_tokens + 1))

    monkeypatch.setattr(DecodeStep, "_commit", one_more)
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
    written = json.loads(report.read_text())
    assert set(written["step_us"]) == set(run.TIMED_MODES)
    assert written["backend_us"][written["backend"]] == written["step_us"]["replay, deferred commit"]
    assert {"triton", "torch"} <= set(written["backend_us"])


@pytest.mark.sm90
def test_the_demo_is_faster_with_fp32_deferred_than_with_triton(monkeypatch, tmp_path):
    """The whole step, model and sampling included, in replay with deferred commit, as `graphrt demo` shows it."""
    monkeypatch.setattr(run, "make_requests", make_requests)
    report = tmp_path / "report.json"
    result = invoke("--device", "cuda", "--batch", "4", "--query-len", "8", "--json", str(report))
    assert result.exit_code == 0, result.output
    written = json.loads(report.read_text())
    assert written["backend"] == "fp32_deferred", written["backend_reason"]
    assert written["backend_us"]["fp32_deferred"] < written["backend_us"]["triton"]
