"""Types of tools' options: what cannot be written or used is refused on the command line, not after minutes of work."""

from argparse import ArgumentTypeError
from importlib.util import find_spec
from pathlib import Path

from graphrt.checks import check_device
from graphrt.cli.outputs import fault_of_file


def output_file(text: str) -> Path:
    """A file to write."""
    path = Path(text)
    if fault := fault_of_file(path):
        raise ArgumentTypeError(f"cannot write {path}: {fault}")
    return path


def plot_file(text: str) -> Path:
    """A picture to write, which matplotlib draws."""
    if find_spec("matplotlib") is None:
        raise ArgumentTypeError("plots need matplotlib: pip install 'graphrt[plot]'")
    return output_file(text)


def device_option(text: str) -> str:
    """A device of this machine, by name."""
    try:
        return str(check_device("device", text))
    except ValueError as error:
        raise ArgumentTypeError(str(error).partition(": ")[2]) from error
