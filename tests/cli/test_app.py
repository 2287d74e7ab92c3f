"""The `graphrt` command as a whole."""

import subprocess
import sys

import pytest
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


def test_the_commands_are_these():
    """Without one, the list is shown."""
    result = CliRunner().invoke(app, [])
    assert all(f" {command} " in result.output for command in COMMANDS)


def test_python_m_graphrt_is_the_command():
    """Both ways in are one."""
    done = subprocess.run([sys.executable, "-m", "graphrt", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"graphrt {graphrt.__version__}\n"
