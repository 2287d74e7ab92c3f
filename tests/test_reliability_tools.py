"""tools/soak.py and tools/sanitize.py: what they find, and what they say when they find it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture
def soak(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import soak

    return soak


@pytest.fixture
def sanitize(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import sanitize

    return sanitize


def run(module, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [module.__name__, *arguments])
    return module.main()


SMALL = ("--steps", "6", "--rows", "2", "--layers", "1", "--device", "cpu")


def test_a_soak_that_holds_ends_with_its_figures(soak, monkeypatch, tmp_path):
    """Steps, replays, faults and both memory figures are written, and the status is 0."""
    path = tmp_path / "soak.json"
    assert run(soak, monkeypatch, *SMALL, "--json", str(path)) == 0
    facts = json.loads(path.read_text())
    assert facts["steps"] >= 6 and facts["comparisons"] > 0 and facts["grown"] == []
    assert facts["backend"] == "torch" and set(facts["at the end"]) == {"device", "rss"}


def test_a_soak_that_parts_from_the_oracle_fails_and_names_the_step(soak, monkeypatch, capsys):
    """A state that is changed behind the service's back is found, with seed and step."""
    make = soak.make_service

    def spoilt(args, device):
        service = make(args, device)
        finish = service.finish

        def bad_finish(request):
            service.pool.layers[0].kv_cache[1][request.slot] += 1e-3
            finish(request)

        service.finish = bad_finish
        return service

    monkeypatch.setattr(soak, "make_service", spoilt)
    assert run(soak, monkeypatch, *SMALL) == 1
    assert "steps, seed 0: request" in capsys.readouterr().err


def test_a_soak_tells_growth_of_device_memory_from_that_of_the_process(soak):
    """One byte on the device is too much; the process has an allowance."""
    run = {"after a tenth": {"device": 100, "rss": 0}, "at the end": {"device": 100, "rss": 8 << 20}}
    assert soak.growth(run, 8) == []
    assert "process grew by 8.0 MiB" in soak.growth(run, 7)[0]
    run["at the end"]["device"] = 101
    assert soak.growth(run, 8) == ["device memory grew by 1 bytes"]


@pytest.mark.parametrize(
    ("text", "summary"),
    [
        ("========= ERROR SUMMARY: 0 errors", (0, 0)),
        ("========= ERROR SUMMARY: 1 error", (1, 0)),
        ("========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)", (1, 2)),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", (0, 0)),
        ("", (0, 0)),
    ],
)
def test_summaries_of_the_sanitizer_are_read(sanitize, text, summary):
    """Both of its forms, singular and plural."""
    assert sanitize.read_summary(text) == summary


@pytest.mark.parametrize(
    ("output", "status", "cell"),
    [
        ("ran: triton conv\n========= ERROR SUMMARY: 0 errors", 0, "clean"),
        ("ran: triton conv\n========= ERROR SUMMARY: 2 errors", 86, "2 errors"),
        ("ran: triton conv\n= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)", 86, "2 warnings"),
        ("Traceback", 1, "failed (1)"),
        ("========= ERROR SUMMARY: 0 errors", 0, "failed (1)"),
    ],
    ids=["clean", "errors", "warnings", "crash", "never ran"],
)
def test_a_case_is_clean_only_if_it_ran_and_nothing_was_found(
    sanitize, monkeypatch, tmp_path, capsys, output, status, cell
):
    """A program that stands in for the sanitizer: what it prints and how it ends decides."""
    stub = tmp_path / "compute-sanitizer"
    stub.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\nexit {status}\n")
    stub.chmod(0o755)
    path = tmp_path / "findings.json"
    arguments = ("--sanitizer", str(stub), "--tools", "racecheck", "--only", "triton conv", "--json", str(path))
    bad = run(sanitize, monkeypatch, *arguments)
    findings = {f["case"]: f for f in json.loads(path.read_text())}
    assert set(findings) == {"triton conv", "triton conv shifting, transposed"}
    found = sanitize.Finding(**findings["triton conv"])
    assert found.cell == cell
    assert bad == 1  # the other case never ran under this name
    assert ("triton conv: failed" in capsys.readouterr().err) == cell.startswith("failed")


def test_a_missing_sanitizer_is_named(sanitize, monkeypatch, capsys):
    """No table without the program."""
    assert run(sanitize, monkeypatch, "--sanitizer", "/nowhere/compute-sanitizer") == 2
    assert capsys.readouterr().err.startswith("--sanitizer: expected a program")


@pytest.mark.parametrize("case", ["triton align helpers", "triton fold align", "triton conv"])
def test_cases_of_the_sanitizer_run(sanitize, case):
    """In the interpreter, or on the device where there is one."""
    sanitize.sanitizer_cases.CASES[case](torch.device("cuda" if torch.cuda.is_available() else "cpu"))


COVERAGE = """
import sanitizer_cases, sanitizer_coverage
assert sanitizer_coverage.main() == 0
for name in ("cute fold wide parameters", "triton fold softplus 16-bit pool"):
    del sanitizer_cases.CASES[name]
assert sanitizer_coverage.main() == 1
"""


def test_every_kernel_variant_has_a_case_of_the_sanitizer():
    """What the compile check knows is launched by a case, on CuTe and on Triton; a variant without one is named."""
    pytest.importorskip("cutlass")
    # Kernels that are defined under the interpreter have no launches to collect.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(TOOLS)}
    done = subprocess.run([sys.executable, "-c", COVERAGE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cute fold wide parameters\ntriton graphrt_fold_kernel BOUNDED=False" in done.stdout
