"""The pictures come from their scripts, and read on a light and on a dark page."""

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def tool(monkeypatch):
    """Import a tool by name, and call its main with arguments."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        return __import__(name).main()

    return run


def kernel(name, ts, dur):
    return {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur}


def a_trace(path, steps, commit):
    """A trace of equal steps: stage 2, verify 10, commit as given."""
    events, at = [], 1000
    for _ in range(steps):
        for name, length in (("graphrt_stage_kernel", 2), ("graphrt_verify_f32_0", 10), ("graphrt_fold_f32_0", commit)):
            events.append(kernel(name, at, length))
            at += length
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_the_data_flow_in_the_documents_is_what_its_script_draws(tool, tmp_path):
    """The file is not edited by hand, and the README shows it."""
    tool("draw_dataflow", "--out", tmp_path / "dataflow.svg")
    assert (tmp_path / "dataflow.svg").read_text() == (ROOT / "docs" / "dataflow.svg").read_text()
    assert "](docs/dataflow.svg)" in (ROOT / "README.md").read_text()


def test_a_dark_page_has_colours_of_its_own_for_everything_drawn(tool, tmp_path):
    """Every shape has a class that the dark sheet knows, over a page of the picture's own."""
    tool("draw_dataflow", "--out", tmp_path / "dataflow.svg")
    root = ElementTree.parse(tmp_path / "dataflow.svg").getroot()
    sheet = root.find(f"{SVG}style").text
    shapes = [shape for shape in root if shape.tag not in (f"{SVG}style", f"{SVG}title")]
    assert "prefers-color-scheme: dark" in sheet and shapes[0].get("class") == "page"
    assert all(f".{shape.get('class')}{{" in sheet for shape in shapes)


def test_a_timeline_draws_a_step_of_each_trace_on_one_scale(tool, tmp_path, capsys):
    """A launch of 24 µs is as wide in one panel as 2.4 launches of 10 µs in the other."""
    deferred, eager = a_trace(tmp_path / "d.json", 3, 1), a_trace(tmp_path / "e.json", 3, 24)
    assert tool("draw_timeline", f"deferred={deferred}", f"eager={eager}", "--out", tmp_path / "t.svg") == 0
    assert "deferred 13.0 us, eager 36.0 us" in capsys.readouterr().out
    root = ElementTree.parse(tmp_path / "t.svg").getroot()
    whole = {}
    for shape in root.iter(f"{SVG}rect"):
        if shape.find(f"{SVG}title") is not None:
            whole.setdefault(shape.find(f"{SVG}title").text, float(shape.get("width")))
    fold = whole["graphrt_fold_f32_0: 24.0 µs from 12.0"]
    verify = whole["graphrt_verify_f32_0: 10.0 µs from 2.0"]
    assert (fold + 0.3) / (verify + 0.3) == pytest.approx(2.4, rel=1e-3)


def test_a_file_without_steps_is_named(tool, tmp_path, capsys):
    """Exit status 1 and the file's name, no traceback."""
    other = tmp_path / "other.json"
    other.write_text('{"traceEvents": []}')
    assert tool("draw_timeline", other, "--out", tmp_path / "t.svg") == 1
    assert "other.json: no staging launch" in capsys.readouterr().err
