"""Every block of code in the documents holds: Python runs, commands parse, tables follow from code, links resolve.

Blocks of a document run in order in one namespace, on the CPU. A line `print(...)  # text` prints that text. A block
that needs a GPU is marked ```python gpu: its imports and names are checked, it does not run.
"""

import argparse
import ast
import builtins
import codeop
import importlib
import importlib.util
import itertools
import json
import re
import shlex
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from graphrt import reset_errors

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    path.relative_to(ROOT).as_posix() for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
]
# Subcommands that take a second at most. The others are parsed only.
CHEAP = {"doctor", "plan"}


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the mark behind it, and the text with as many lines in front as in the document."""

    document: str
    line: int
    language: str
    mark: str
    text: str

    def __str__(self):
        return f"{self.document}:{self.line}"


def blocks_of(document, *languages):
    """The blocks of a document in order; those of some languages, or all."""
    source = (ROOT / document).read_text()
    found = []
    for match in re.finditer(r"^ *```(\w+)(?: (\w+))?\n(.*?)^ *```$", source, flags=re.MULTILINE | re.DOTALL):
        line = source.count("\n", 0, match.start(3)) + 1
        found.append(Block(document, line, match[1], match[2] or "", match[3]))
    return [block for block in found if not languages or block.language in languages]


def commands_of(block):
    """The commands of a shell block, each as its words: lines behind `$ ` in a console, every line of a script."""
    text = block.text.replace("\\\n", " ")
    lines = text.splitlines()
    if block.language == "console":
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    for line in lines:
        words = shlex.split(line, comments=True)
        for is_separator, command in itertools.groupby(words, lambda word: word in ("&&", "|", ";")):
            command = list(itertools.dropwhile(lambda word: re.fullmatch(r"[A-Z_]+=.*", word), command))
            if command and not is_separator:
                yield command


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_blocks_run_in_order_and_print_what_they_say(document, capsys, monkeypatch, tmp_path):
    """One namespace a document. Blocks marked gpu are checked for syntax and names."""
    monkeypatch.chdir(tmp_path)
    reset_errors("cpu")  # a page starts in a fresh process
    names = {"__name__": "document"}
    for block in blocks_of(document, "python"):
        tree = ast.parse("\n" * (block.line - 1) + block.text, str(ROOT / document))
        if block.mark == "gpu":
            check_names(tree, names, block)
            continue
        assert block.mark == "", f"{block}: unknown mark {block.mark!r}"
        exec(compile(tree, str(ROOT / document), "exec"), names)
        promised = re.findall(r"^ *print\(.*\)  # (.*)$", block.text, flags=re.MULTILINE)
        assert capsys.readouterr().out.splitlines() == promised, str(block)


def check_names(tree, names, block):
    """Every name of an unexecuted block is defined before it or in it, and every attribute of a module exists."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            exec(compile(ast.Module([node], []), str(block), "exec"), names)
    nodes = list(ast.walk(tree))
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    stored |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    stored |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    known = stored | names.keys() | vars(builtins).keys()
    missing = {node.id for node in nodes if isinstance(node, ast.Name)} - known
    assert not missing, f"{block}: no such names: {sorted(missing)}"
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id not in stored:
            owner = names.get(node.value.id)
            assert owner is None or hasattr(owner, node.attr), f"{block}: {node.value.id} has no {node.attr}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_blocks_can_be_pasted_into_the_interpreter(document):
    """Line by line: a blank line ends every indented block, and stands nowhere inside one."""
    for block in blocks_of(document, "python"):
        waiting = []
        for number, line in enumerate([*block.text.splitlines(), ""], start=block.line):
            waiting.append(line)
            try:
                complete = codeop.compile_command("\n".join(waiting))
            except SyntaxError as error:
                raise AssertionError(f"{document}:{number}: {error.msg}: {line}") from error
            waiting = [] if complete else waiting
        assert not any(waiting), f"{block}: ends inside a statement"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_name_programs_files_and_options_that_exist(document):
    """Every command of a shell block parses; those of graphrt that are cheap also run."""
    for block in blocks_of(document, "console", "sh"):
        for command in commands_of(block):
            check_command(command, block)


def check_command(command, block="here"):
    """AssertionError unless the program is known and its arguments are such as it takes."""
    program, *arguments = command
    name = Path(program).name
    assert name in CHECKS, f"{block}: nothing checks {program!r}; add it to CHECKS"
    try:
        CHECKS[name](arguments)
    except Exception as error:
        raise AssertionError(f"{block}: {shlex.join(command)}: {error}") from error


@pytest.mark.parametrize("document", DOCUMENTS)
def test_data_blocks_parse(document):
    """JSON and TOML are what they say; the rest is prose or output."""
    parsers = {"json": json.loads, "toml": tomllib.loads}
    for block in blocks_of(document):
        if block.language in parsers:
            parsers[block.language](block.text)
        else:
            assert block.language in ("python", "console", "sh", "text"), f"{block}: language {block.language!r}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_nothing_is_left_to_be_filled_in(document):
    """No marks of unfinished places."""
    assert re.findall(r"@[A-Z]{3,}@|\bTODO\b|\bTBD\b|\bFIXME\b", (ROOT / document).read_text()) == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files_and_headings_that_exist(document):
    """Relative links resolve from the document's folder; a fragment is a heading of its target."""
    source = re.sub(r"```.*?```", "", (ROOT / document).read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", source):
        if target.startswith(("http://", "https://")):
            continue
        path, _, fragment = target.partition("#")
        file = (ROOT / document).parent / path if path else ROOT / document
        assert file.exists(), f"{document}: no {target}"
        if fragment:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), flags=re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert fragment in anchors, f"{document}: no heading {target}"


def test_the_readme_leads_to_every_document():
    """Nobody finds a page that nothing links to."""
    readme = (ROOT / "README.md").read_text()
    assert [path for path in DOCUMENTS if path != "README.md" and f"]({path})" not in readme] == []


def test_tables_of_the_documents_follow_from_code_and_results():
    """`python tools/document_tables.py` rewrites what this finds."""
    pytest.importorskip("cutlass", reason="the support table asks the CuTe DSL kernels too")
    spec = importlib.util.spec_from_file_location("document_tables", ROOT / "tools" / "document_tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    assert "<!-- table: support -->" in (ROOT / "README.md").read_text()
    for path in tables.documents():
        assert tables.updated(path.read_text()) == path.read_text(), f"{path.name}: run tools/document_tables.py"


def test_a_command_that_does_not_exist_fails_its_check():
    """The checks above can fail."""
    for line in (
        "graphrt demo --no-such-option",
        "graphrt no-such-command",
        "make no-such-target",
        "python tools/no_such_tool.py",
        "python tools/bench_step.py --no-such-option",
        "python -m no_such_module",
        "pytest tests/test_no_such.py",
        "pytest -m nosuchmarker",
        "pip install -e .[nosuchextra]",
        "nsys profile graphrt no-such-command",
        "no-such-program",
    ):
        with pytest.raises(AssertionError):
            check_command(line.split())


@cache
def graphrt_command():
    return typer.main.get_command(importlib.import_module("graphrt.cli").app)


def check_graphrt(arguments):
    """Parse the arguments by the command's own rules; run it too if it is cheap."""
    if not arguments or arguments[0].startswith("-"):
        result = CliRunner().invoke(importlib.import_module("graphrt.cli").app, arguments)
        assert result.exit_code == 0, result.output
        return
    group = graphrt_command()
    with group.make_context("graphrt", [], resilient_parsing=True) as context:
        name, command, rest = group.resolve_command(context, arguments)
        command.make_context(name, list(rest), parent=context).close()
    if name in CHEAP:
        result = CliRunner().invoke(importlib.import_module("graphrt.cli").app, arguments)
        assert result.exit_code == 0, result.output


def check_make(arguments):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    missing = [word for word in arguments if "=" not in word and not word.startswith("-") and word not in targets]
    assert not missing, f"no target {missing}"


def check_python(arguments):
    """A module is ours or known; a script of the checkout exists and names every option that is given to it."""
    if arguments[0] == "-m":
        module, *rest = arguments[1:]
        if module == "venv":
            return
        assert module in CHECKS, f"nothing checks module {module!r}"
        CHECKS[module](rest)
        return
    script = ROOT / arguments[0]
    assert script.is_file(), f"no file {arguments[0]}"
    text = script.read_text()
    for option in (word.partition("=")[0] for word in arguments[1:] if word.startswith("-")):
        assert f'"{option}"' in text, f"{arguments[0]} has no option {option}"


def check_pytest(arguments):
    """Files exist; a marker expression names markers that are declared."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("-m", default="")
    parser.add_argument("-k")
    parser.add_argument("-n")
    parser.add_argument("-q", action="store_true")
    parser.add_argument("-x", action="store_true")
    parser.add_argument("--fixtures", action="store_true")
    parser.add_argument("--collect-only", action="store_true")
    parser.add_argument("paths", nargs="*")
    options, unknown = parser.parse_known_args(arguments)
    assert not unknown, f"unknown options {unknown}"
    for path in options.paths:
        assert (ROOT / path.partition("::")[0]).exists(), f"no {path}"
    declared = {marker.partition(":")[0] for marker in settings()["tool"]["pytest"]["ini_options"]["markers"]}
    missing = set(re.findall(r"\w+", options.m)) - declared - {"and", "or", "not"}
    assert not missing, f"no markers {missing}"


def check_pip(arguments):
    extras = settings()["project"]["optional-dependencies"]
    for word in arguments:
        for group in re.findall(r"(?:^\.|graphrt)\[([\w,]+)\]", word):
            missing = set(group.split(",")) - extras.keys()
            assert not missing, f"no extra {missing}"


def check_profiler(arguments):
    """The profiler itself may not be installed here: what it runs is checked."""
    starts = [i for i, word in enumerate(arguments) if Path(word).name in ("graphrt", "python")]
    if starts:
        name, *rest = arguments[starts[0] :]
        CHECKS[Path(name).name](rest)


def check_nothing(arguments):
    """A program that is no part of this project."""


@cache
def settings():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


CHECKS = {
    "graphrt": check_graphrt,
    "make": check_make,
    "python": check_python,
    "pytest": check_pytest,
    "pip": check_pip,
    "nsys": check_profiler,
    "ncu": check_profiler,
    "compute-sanitizer": check_profiler,
    "git": check_nothing,
    "cd": check_nothing,
    "source": check_nothing,
    "export": check_nothing,
    "dot": check_nothing,
}
