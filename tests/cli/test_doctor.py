"""`graphrt doctor`: what it finds, and its exit status."""

import json

import pytest
from terminal import refusal
from typer.testing import CliRunner

from graphrt.cli import app, doctor, trial
from graphrt.cli.doctor import _allowed


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["doctor", *arguments])


def findings(*arguments):
    result = run("--json", "-", *arguments)
    return result.exit_code, {f["what"]: (f["state"], f["detail"]) for f in json.loads(result.stdout)}


def test_the_doctor_says_what_would_run_and_why_nothing_better():
    """On the CPU the plain backend runs, its trial step agrees with float64, and each refusal has its reason."""
    status, found = findings("--device", "cpu")
    assert status == 0
    assert found["would run"] == ("ok", "torch: torch is the default on the CPU")
    assert found["backend fp32_deferred"][0] == "note" and "need a CUDA device" in found["backend fp32_deferred"][1]
    assert found["trial step"][0] == "ok"
    assert {"Python", "torch", "triton", "nvidia-cutlass-dsl", "driver", "NVTX"} <= set(found)


def test_a_backend_that_cannot_run_makes_the_exit_status_1(monkeypatch):
    """Asked for by name, a backend that cannot run is a fault."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for backend in ("triton", "fp32_deferred"):
        status, found = findings("--device", "cpu", "--backend", backend, "-Q", "3", "--no-trial")
        assert status == 1 and found["would run"][0] == "bad" and backend in found["would run"][1]
    assert findings("--device", "cpu", "--backend", "torch", "--no-trial")[0] == 0


def test_a_wrong_trial_step_makes_the_exit_status_1(monkeypatch):
    """Numbers that are off, NaN among them, and kernels that fail are found."""
    for outcome in (lambda *_: float("nan"), lambda *_: 0.5, lambda *_: 1 / 0):
        monkeypatch.setattr(trial, "largest_error", outcome)
        status, found = findings("--device", "cpu")
        assert status == 1 and found["trial step"][0] == "bad"


def test_a_package_that_is_missing_or_too_old_is_found(monkeypatch):
    """A missing extra is a note with the way to get it, a missing dependency a fault."""
    known = doctor.metadata.version

    def version(name):
        if name in ("nvidia-cutlass-dsl", "nvtx"):
            raise doctor.metadata.PackageNotFoundError
        return "2.9.1" if name == "torch" else known(name)

    monkeypatch.setattr(doctor.metadata, "version", version)
    status, found = findings("--device", "cpu", "--no-trial")
    assert status == 1
    assert found["nvidia-cutlass-dsl"][0] == "note" and "graphrt[cute]" in found["nvidia-cutlass-dsl"][1]
    assert found["nvtx"][0] == "bad"
    assert found["torch"][0] == "note" and found["torch"][1].startswith("2.9.1, and graphrt was made for")
    # People can copy it: brackets are no markup.
    assert "pip install 'graphrt[cute]'" in run("--device", "cpu", "--no-trial").stdout


@pytest.mark.parametrize(
    ("version", "wanted", "allowed"),
    [
        ("2.13.0+cpu", "<2.15,>=2.11", True),
        ("2.9.1", "<2.15,>=2.11", False),
        ("2.15.0", "<2.15,>=2.11", False),
        ("4.8.1", "==4.8.1", True),
        ("4.8.2", "==4.8.1", False),
        ("3.10", ">=3.6", True),
        ("1.0", "", True),
    ],
)
def test_versions_compare_as_numbers(version, wanted, allowed):
    """2.9 is before 2.11, and a local suffix does not count."""
    assert _allowed(version, wanted) is allowed


def test_a_gpu_that_is_not_there_is_a_usage_error():
    """One sentence and exit status 2, no traceback."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert "expected a CUDA device" in refusal(run("--device", "cuda"))
