"""Does the suite notice a fault? Breaks the product on purpose (tools/mutants), one fault at a time.

Each mutant gets a copy of the package and of the tests in a temporary folder; the tests that should find it run there.
A mutant that no test finds has survived: the exit status is 1. Nothing of the working tree is touched.

    python tools/mutate.py --jobs 2
    python tools/mutate.py --only drain "16-bit"
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutants import MUTANTS, Mutant
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
# Where setuptools maps the folders of the tree.
PACKAGES = {
    "graphrt": "graphrt",
    "kernels": "graphrt/kernels",
    "capture": "graphrt/capture",
    "graphrt/testing/pytest_plugin": "graphrt_pytest",
}


def copy_tree(folder: Path) -> None:
    """The package as it is installed, and the tests."""
    skip = shutil.ignore_patterns("__pycache__", "*.pyc")
    for source, target in PACKAGES.items():
        shutil.copytree(ROOT / source, folder / "site" / target, ignore=skip, dirs_exist_ok=True)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=skip)
    shutil.copy(ROOT / "pyproject.toml", folder)


def apply(mutant: Mutant, folder: Path) -> None:
    """Break the copy.

    Raises:
        ValueError: if the text does not occur exactly once.
    """
    top, _, rest = mutant.file.partition("/")
    path = folder / "site" / PACKAGES[top] / rest
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: {mutant.file} has its text {text.count(mutant.old)} times, expected once")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")


def run(mutant: Mutant | None, timeout: float, tests: tuple[str, ...], select: str) -> tuple[str, float]:
    """What found the mutant, or "" if nothing did; and seconds. None is the product as it is."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_tree(folder)
        if mutant is not None:
            apply(mutant, folder)
        environment = os.environ | {"PYTHONPATH": str(folder / "site"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-k", select, *tests]
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            return "no end in time", time.monotonic() - begin
    seconds = time.monotonic() - begin
    if done.returncode == 0:
        return "", seconds
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    found = failed[0].split(" ")[1].rpartition("/")[2] if failed else f"pytest ended with {done.returncode}"
    return found, seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="mutants whose name contains one of these")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for the tests of one mutant")
    args = parser.parse_args()
    chosen = [m for m in MUTANTS if not args.only or any(text in m.name for text in args.only)]
    table = Table("mutant", "file", "found by", "seconds")
    survivors = []
    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = [pool.submit(run, m, args.timeout, m.tests, m.select) for m in chosen]
        for mutant, job in zip(chosen, jobs, strict=True):
            found, seconds = job.result()
            print(f"{mutant.name}: {found or 'SURVIVED'} ({seconds:.0f} s)", file=sys.stderr, flush=True)
            table.add_row(mutant.name, mutant.file, found or "nothing", f"{seconds:.0f}")
            survivors += [] if found else [mutant.name]
    Console(width=150).print(table)
    print(f"{len(chosen)} mutants, {len(chosen) - len(survivors)} found, {len(survivors)} survived")
    return 1 if survivors or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
