"""Environment variables: documented values only, one place that reads them, one table that tells users."""

import ast
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from graphrt import RecordSlots, backends, environment
from graphrt.capture import StepInputs, record
from graphrt.cli import app
from graphrt.profiling import KernelMarks

ROOT = Path(__file__).parents[1]
SWITCHES = [environment.CHECK, environment.ANNOTATE]


def stage():
    """A call that reads values in checked mode."""
    StepInputs(1, 1, torch.device("cpu"), ledger=RecordSlots(1, "cpu")).stage(num_reqs=0)


@pytest.mark.parametrize("switch", SWITCHES, ids=lambda switch: switch.name)
def test_a_switch_is_on_for_1_and_off_for_0_or_nothing(switch, monkeypatch):
    """Asked anew each time."""
    monkeypatch.delenv(switch.name, raising=False)
    assert not switch.is_on()
    for value, wanted in {"1": True, "0": False, "": False}.items():
        monkeypatch.setenv(switch.name, value)
        assert switch.is_on() is wanted


@pytest.mark.parametrize("value", ["banana", "true", "on", "2", " 1"])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("GRAPHRT_CHECK", stage),
        ("GRAPHRT_CHECK", lambda: record(lambda: None, device="cpu")),
        ("GRAPHRT_ANNOTATE", lambda: KernelMarks("step")),
    ],
    ids=["stage", "record", "annotate"],
)
def test_any_other_value_is_refused_by_the_first_call_that_asks(name, call, value, monkeypatch):
    """The variable, the values that it may have, and what came."""
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=rf"^{name}: expected 1 \(on\), or 0 or nothing \(off\), got '{value}'$"):
        call()


@pytest.mark.parametrize("switch", SWITCHES, ids=lambda switch: switch.name)
def test_every_command_refuses_a_wrong_value(switch, monkeypatch):
    """Before it works, in one sentence."""
    monkeypatch.setenv(switch.name, "banana")
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["plan"])
    assert result.exit_code == 2 and f"{switch.name}: expected 1" in result.output and "Traceback" not in result.output


@pytest.mark.parametrize(("value", "can_run"), [("1", True), ("true", True), ("on", True), ("0", False), ("no", False)])
def test_triton_is_interpreted_where_triton_itself_says_so(value, can_run, monkeypatch):
    """TRITON_INTERPRET is Triton's: what it takes for true is true."""
    monkeypatch.setenv("TRITON_INTERPRET", value)
    facts = backends.Facts(torch.device("cpu"), torch.float32, 16, True, None, 4, torch.float32)
    assert bool(backends.supports("triton", facts)) is can_run


def test_only_one_module_reads_the_environment():
    """Whoever looks for a variable finds all of them."""
    reading = []
    for folder in ("graphrt", "kernels", "capture"):
        for path in (ROOT / folder).rglob("*.py"):
            words = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
            reading += [path.name] if words & {"environ", "getenv"} else []
    assert reading == ["environment.py"]


def test_every_variable_is_in_the_table_of_the_documents():
    """And nothing else is."""
    source = (ROOT / "graphrt" / "environment.py").read_text()
    known = set(re.findall(r'"([A-Z]+_[A-Z_]+)"', source)) | {"TRITON_INTERPRET"}
    section = (
        (ROOT / "docs" / "embedding.md").read_text().partition("## Environment variables")[2].partition("\n## ")[0]
    )
    assert set(re.findall(r"^\| `([A-Z_]+)`", section, flags=re.MULTILINE)) == known
    assert {switch.name for switch in SWITCHES} <= known
