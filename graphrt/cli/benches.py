"""The benches that `graphrt bench` can run: each a tool of the checkout, and how to read what it measured."""

import csv
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).resolve().parents[2]
"""Where `tools/` lies beside the package in a checkout (an editable install). A wheel has none."""


class Figure(NamedTuple):
    """One measured number."""

    bench: str
    case: str
    what: str
    value: float
    unit: str
    to_floor: float | None
    """Times what the card's memory allows."""


@dataclass(frozen=True)
class Bench:
    """A tool, and its result in one file."""

    name: str
    about: str
    tool: str
    result: str
    """Name of the file that it writes."""
    read: Callable[[Path], Iterable[Figure]]
    needs_gpu: bool
    options: tuple[str, ...] = ()
    """Beside where the result goes; `{out}` is the folder."""
    quick: tuple[str, ...] = ()
    result_option: str = "--json"
    can_plot: bool = False
    usual: bool = True
    """Runs when nobody chose."""

    def why_not(self) -> str:
        """Why it cannot run here, or nothing."""
        if not self.path.is_file():
            return f"{self.tool} is not here: benches are run from a checkout (git clone, pip install -e .)"
        if self.needs_gpu:
            import torch

            if not torch.cuda.is_available():
                return "it needs a CUDA device, and torch finds none"
        return ""

    @property
    def path(self) -> Path:
        return CHECKOUT / self.tool

    def command(self, out: Path, quick: bool) -> list[str]:
        """The command line that measures into folder `out`."""
        words = [sys.executable, str(self.path), self.result_option, str(out / self.result)]
        words += [word.format(out=out) for word in self.options]
        if self.can_plot and find_spec("matplotlib") is not None:
            words += ["--plot", str(out / f"{self.name}.png")]
        return [*words, *(self.quick if quick else ())]

    def run(self, out: Path, quick: bool) -> None:
        """Measure anew; an earlier result in the folder is overwritten.

        Raises:
            RuntimeError: with the end of what the tool said, if it failed.
        """
        (out / self.result).unlink(missing_ok=True)
        done = subprocess.run(self.command(out, quick), capture_output=True, text=True)
        (out / f"{self.name}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
        if done.returncode != 0:
            last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
            raise RuntimeError(f"{self.tool} failed: {''.join(last)}")

    def figures(self, out: Path) -> list[Figure]:
        """What lies in folder `out` of an earlier run.

        Raises:
            ValueError: naming the file and what is wrong with it.
        """
        path = out / self.result
        try:
            return list(self.read(path))
        except KeyError as error:
            why = f"it has no {error}"
        except json.JSONDecodeError as error:
            why = f"it is no JSON ({error})"
        except UnicodeDecodeError:
            why = "it is no text"
        except OSError as error:
            why = f"it cannot be read: {error.strerror}"
        except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
            why = f"its values have another form ({error})"
        raise ValueError(f"{path} is no result of {self.tool}: {why}")


def _rows(count: int | str) -> str:
    return f"{count} row" if int(count) == 1 else f"{count} rows"


def _step(path: Path) -> Iterable[Figure]:
    for row in sorted(json.loads(path.read_text(encoding="utf-8"))["rows"], key=lambda row: int(row["batch"])):
        for what, floor in (("deferred", "floor"), ("eager", "floor"), ("fold", "two_pass"), ("flush", "two_pass")):
            if what in row:
                time = float(row[what])
                yield Figure("step", _rows(row["batch"]), what, time, "us", time / float(row[floor]))


def _host(path: Path) -> Iterable[Figure]:
    for result in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        if "form" in result:
            case = f"{_rows(result['rows'])}, {result['form']}"
            time = float(result["stage_us"]) + float(result["replay_us"])
            yield Figure("host", case, "stage + replay", time, "us", None)


def _nvtx(path: Path) -> Iterable[Figure]:
    for result in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        case = "tool attached" if result["attached"] else "no tool"
        for what, value in result["ns"].items():
            yield Figure("nvtx", case, what, float(value), "ns", None)


def _replay(path: Path) -> Iterable[Figure]:
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        for what in ("deferred", "eager"):
            yield Figure("replay", _rows(row["batch"]), what, float(row[what]), "us", None)


def _peers(path: Path) -> Iterable[Figure]:
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            case = f"{_rows(row['batch'])}, Q = {row['window']}, {row['accepted']} accepted, {row['state']}"
            ratio = float(row["to_floor"]) if row["to_floor"] else None
            yield Figure("peers", case, row["what"], float(row["us"]), "us", ratio)


BENCHES = {
    bench.name: bench
    for bench in (
        Bench(
            "replay", "a recorded step, deferred and eager, any backend", "tools/bench_replay.py", "replay.json",
            _replay, needs_gpu=False, quick=("--batch", "1", "4", "--repeats", "3"), can_plot=True,
        ),
        Bench(
            "step", "the FP32 kernels of a step against the memory's floor", "tools/bench_step.py", "step.json",
            _step, needs_gpu=True, quick=("--batch", "1", "64"), can_plot=True,
        ),
        Bench(
            "host", "host cost of staging and replay", "tools/bench_host.py", "host.json",
            _host, needs_gpu=True, quick=("--rows", "64", "--steps", "500"),
        ),
        Bench(
            "nvtx", "host cost of profiling ranges", "tools/bench_nvtx.py", "nvtx.json",
            _nvtx, needs_gpu=False, quick=("--loops", "2000"),
        ),
        Bench(
            "peers", "the same step by vllm and fla-core (downloads their wheels)", "tools/bench_peers.py", "peers.csv",
            _peers, needs_gpu=True, quick=("--batch", "1", "64", "--window", "8"), result_option="--csv",
            can_plot=True, usual=False,
        ),
    )
}  # fmt: skip
