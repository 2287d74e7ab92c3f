"""`graphrt bench`: tools of the checkout, one table."""

import json
import re
from pathlib import Path

import pytest
from terminal import refusal, words
from typer.testing import CliRunner

from graphrt.cli import app, benches

ROOT = Path(__file__).parents[2]
MEASURED = '{"tool": "bench_nvtx", "attached": false, "cpu": "x", "ns": {"replay": 12.5}}'


def run(*arguments):
    return CliRunner(env={"COLUMNS": "300"}).invoke(app, ["bench", *arguments])


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout whose nvtx bench measures at once, and whose replay bench fails."""
    tools = tmp_path / "checkout" / "tools"
    tools.mkdir(parents=True)
    write = f"import sys; open(sys.argv[sys.argv.index('--json') + 1], 'w').write({MEASURED!r})"
    (tools / "bench_nvtx.py").write_text(write)
    (tools / "bench_replay.py").write_text("raise SystemExit('no memory left')")
    monkeypatch.setattr(benches, "CHECKOUT", tools.parent)
    return tools


def test_benches_run_and_what_cannot_run_says_why(checkout, tmp_path):
    """One figure comes, one bench failed, and two are missing; logs are kept."""
    result = run("--out", str(tmp_path / "out"), "--json", "-")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [(f["bench"], f["what"], f["value"], f["unit"]) for f in found["figures"]] == [
        ("nvtx", "replay", 12.5, "ns")
    ]
    notes = " ".join(found["notes"])
    assert "no memory left" in notes and "run from a checkout" in notes and "peers" not in notes
    assert (tmp_path / "out" / "replay.log").read_text().strip() == "no memory left"


def test_a_named_bench_that_gives_nothing_makes_the_exit_status_1(checkout):
    """Also where another one ran."""
    assert run("nvtx").exit_code == 0
    assert run("nvtx", "replay").exit_code == 1
    result = run("replay")
    assert result.exit_code == 1 and "no memory left" in result.output and "Traceback" not in result.output


def test_earlier_results_come_into_one_table():
    """The results that are committed are read as they are."""
    result = run("--from", str(ROOT / "tools" / "results" / "h200"), "--json", "-")
    figures = json.loads(result.stdout)["figures"]
    deferred = {f["case"]: f for f in figures if f["bench"] == "step" and f["what"] == "deferred"}
    kept = json.loads((ROOT / "tools" / "results" / "h200" / "step.json").read_text())["rows"]
    assert {f["value"] for f in deferred.values()} == {row["deferred"] for row in kept}
    assert all(1 < f["to_floor"] < 20 for f in deferred.values())
    assert {"step", "host"} <= {f["bench"] for f in figures}
    assert {"1 row", "2 rows"} <= set(deferred)


FOREIGN = [
    ("step.json", "{}", "it has no 'rows'"),
    ("step.json", "rows: 3", "it is no JSON"),
    ("step.json", "[1, 2]", "its values have another form"),
    ("step.json", '{"rows": [{"batch": 1, "deferred": "fast", "floor": 1}]}', "its values have another form"),
    ("step.json", '{"rows": [{"batch": 1, "deferred": 2, "floor": 0}]}', "its values have another form"),
    ("host.json", "3", "its values have another form"),
    ("host.json", '{"form": "lists", "rows": 1, "stage_us": [], "replay_us": []}', "its values have another form"),
    ("nvtx.json", '{"attached": true, "ns": [1]}', "its values have another form"),
    ("nvtx.json", '{"attached": true, "ns": {"replay": null}}', "its values have another form"),
    ("replay.json", b"\xff", "it is no text"),
    ("peers.csv", "batch,what\n1,graphrt\n", "it has no 'window'"),
]


@pytest.mark.parametrize(("name", "text", "why"), FOREIGN)
def test_a_file_of_somebody_else_is_named_with_what_is_wrong(name, text, why, tmp_path):
    """Whatever it holds: the option, the file, the tool whose result it is not, and no traceback."""
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    said = refusal(run("--from", str(tmp_path)))
    assert "'--from'" in said and f"{name} is no result of tools/bench_{name.partition('.')[0]}.py: {why}" in said


def test_wrong_names_and_folders_are_one_sentence(tmp_path):
    """No traceback."""
    (tmp_path / "file").touch()
    for arguments, status, why in (
        (["quick"], 2, "expected some of replay"),
        (["--from", str(tmp_path)], 1, "no results of benches in"),
        (["--from", str(tmp_path / "nothing")], 2, "'--from'"),
        (["--from", str(tmp_path / "file")], 2, "'--from'"),
        (["--from", str(tmp_path), "--quick"], 2, "--from measures nothing, so there is nothing for --quick to do"),
        (["--from", str(tmp_path), "--out", "x"], 2, "--from measures nothing, so there is nothing for --out to do"),
    ):
        result = run(*arguments)
        assert result.exit_code == status and "Traceback" not in result.output
        assert why in words(result)


def test_a_named_bench_without_a_kept_result_makes_the_exit_status_1(tmp_path):
    """Beside those that have one."""
    (tmp_path / "nvtx.json").write_text(MEASURED)
    assert run("nvtx", "--from", str(tmp_path)).exit_code == 0
    result = run("nvtx", "step", "--from", str(tmp_path))
    assert result.exit_code == 1 and "12.5" in result.output and "step.json" in words(result)


def test_a_tool_that_writes_something_else_failed(checkout):
    """Its result is read like a kept one, and the bench that gave it is left out."""
    (checkout / "bench_replay.py").write_text("import sys; open(sys.argv[2], 'w').write('{}')")
    result = run("nvtx", "replay")
    assert result.exit_code == 1 and "12.5" in result.output and "it has no 'rows'" in words(result)


@pytest.mark.parametrize("bench", benches.BENCHES.values(), ids=lambda bench: bench.name)
def test_every_bench_knows_the_options_that_it_is_called_with(bench):
    """The registry and the tools cannot drift apart."""
    text = (ROOT / bench.tool).read_text()
    known = set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', text))
    given = {word for word in bench.command(Path("out"), quick=True) if word.startswith("--")}
    assert given | ({"--plot"} if bench.can_plot else set()) <= known
