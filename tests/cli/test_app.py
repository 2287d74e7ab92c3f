"""The `graphrt` command as a whole."""

import re
import subprocess
import sys

import pytest
from terminal import refusal, words
from typer.testing import CliRunner

import graphrt
from graphrt.cli import app

COMMANDS = ("doctor", "plan", "demo", "bench", "graph", "profile")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples_and_json(command):
    """A new user reads what it does and copies a line; a script reads JSON."""
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"graphrt {command}" in result.output.partition("Examples:")[2]
    assert "--json" in result.output
    assert CliRunner().invoke(app, [command, "-h"]).output == result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_help_breaks_its_lines_where_the_terminal_ends(command):
    """Not where the source does: on a wide terminal every paragraph in front of the examples is one line."""
    wide = CliRunner(env={"COLUMNS": "1000"}).invoke(app, [command, "--help"]).output
    prose = wide.partition("Examples:")[0].strip()
    assert [paragraph for paragraph in re.split(r"\n\s*\n", prose) if "\n" in paragraph.strip()] == []


def test_the_commands_are_these():
    """Without one, the list is shown."""
    result = CliRunner().invoke(app, [])
    assert all(f" {command} " in result.output for command in COMMANDS)


def test_python_m_graphrt_is_the_command():
    """Both ways in are one."""
    done = subprocess.run([sys.executable, "-m", "graphrt", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"graphrt {graphrt.__version__}\n"


def test_a_choice_that_is_none_is_told_without_the_name_of_an_exception():
    """The sentence begins with the value; how typer checks it is no matter of the user's."""
    told = refusal(CliRunner().invoke(app, ["plan", "--preset", "llama"]))
    assert "Invalid value for '--preset': 'llama' is not one of 'kimi-k3', 'kimi-linear'" in told


def test_optional_arguments_stand_in_one_pair_of_brackets():
    """`[BENCH]...`: none, or some."""
    usage = words(CliRunner().invoke(app, ["bench", "--help"])).partition("Measure")[0]
    assert "bench [OPTIONS] [BENCH]" in usage and "[[" not in usage
