"""Where tools write: files that are tried when the command line is read, not after minutes of work."""

from argparse import ArgumentTypeError
from importlib.util import find_spec
from pathlib import Path

from graphrt.cli.outputs import fault_of_file


def output_file(text: str) -> Path:
    """Type of an option that names a file to write."""
    path = Path(text)
    if fault := fault_of_file(path):
        raise ArgumentTypeError(f"cannot write {path}: {fault}")
    return path


def plot_file(text: str) -> Path:
    """As `output_file`, for a picture that matplotlib draws."""
    if find_spec("matplotlib") is None:
        raise ArgumentTypeError("plots need matplotlib: pip install 'graphrt[plot]'")
    return output_file(text)
