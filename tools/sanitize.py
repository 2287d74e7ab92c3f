"""compute-sanitizer over small runs of every kernel variant (tools/sanitizer_cases.py): a table, and an exit status.

    python tools/sanitize.py                                    memcheck, racecheck, initcheck, synccheck; 16 at a time
    python tools/sanitize.py --tools memcheck --only cute --json sanitize.json
    python tools/sanitize.py --tools racecheck --only cute --as-shipped

Each case is a process of its own, as many at a time as there are cores. Tensors are allocations of their own there
(no caching allocator), so that one byte past a tensor is an error; a case that captures graphs keeps the cache. Exit
status 1 for an error or a process that failed; warnings of racecheck are shown, and are no failure.

racecheck follows a thread to an mbarrier only if that thread arrives itself. The CuTe kernels let one lane arrive for
its warp, behind a warp barrier, which orders the other lanes' accesses before that arrival all the same. So racecheck
runs them with every lane arriving (`tile.ARRIVING_LANES`), the same kernel with nothing left to infer;
`--as-shipped` runs them as they are, and shows the lanes that it cannot follow.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass

import sanitizer_cases
from arguments import output_file
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
ERROR_STATUS = 86


@dataclass(frozen=True)
class Finding:
    """One tool over one case."""

    case: str
    tool: str
    errors: int
    warnings: int
    status: int
    seconds: float
    excerpt: str
    """The first finding and the end of what it printed, where something is wrong."""

    @property
    def ok(self) -> bool:
        return self.errors == 0 and self.status == 0

    @property
    def cell(self) -> str:
        if self.ok:
            return "clean" if not self.warnings else f"{self.warnings} warnings"
        return f"{self.errors} errors" if self.errors else f"failed ({self.status})"


def read_summary(text: str) -> tuple[int, int]:
    """Errors and warnings of what the sanitizer printed.

    ========= ERROR SUMMARY: 2 errors
    ========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)
    """
    errors = sum(map(int, re.findall(r"ERROR SUMMARY: (\d+) error", text)))
    warnings = 0
    for found in re.finditer(r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)", text):
        errors, warnings = errors + int(found[1]), warnings + int(found[2])
    return errors, warnings


def excerpt_of(text: str) -> str:
    """The start of what the sanitizer itself said, which names the access, and the end of everything."""
    said = [line for line in text.splitlines() if line.startswith("=========")]
    return "\n".join([*said[:12], "...", text[-1500:]])


def check(args: argparse.Namespace, tool: str, case: str) -> Finding:
    """Run one case under one tool."""
    options = ["--tool", tool, "--error-exitcode", str(ERROR_STATUS)]
    if tool == "memcheck":
        # torch asks the driver for what it may not have, on purpose.
        options += ["--report-api-errors", "no"]
    program = [sys.executable, sanitizer_cases.__file__, case, "--device", args.device]
    if tool == "racecheck" and case.startswith("cute") and not args.as_shipped:
        program += ["--lanes", "32"]
    environment = dict(os.environ)
    if "captured" not in case:
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [args.sanitizer, *options, *program],
            capture_output=True,
            text=True,
            env=environment,
            timeout=args.timeout,
            check=False,
        )
        text, status = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        text, status = f"{error.stdout or ''}\nno end after {args.timeout} s", 124
    errors, warnings = read_summary(text)
    if status == ERROR_STATUS and errors == 0 and warnings:
        status = 0
    if status == 0 and f"ran: {case}\n" not in text:
        status = 1
    excerpt = "" if errors == 0 and status == 0 else excerpt_of(text)
    return Finding(case, tool, errors, warnings, status, time.monotonic() - begin, excerpt)


def check_all(args: argparse.Namespace, console: Console) -> list[Finding]:
    """Every chosen tool over every chosen case, the slow tools first."""
    cases = [case for case in sanitizer_cases.CASES if args.only in case]
    if args.device == "cpu":
        cases = [case for case in cases if not case.startswith("cute")]
    order = sorted(args.tools, key=lambda tool: tool not in ("racecheck", "initcheck"))
    found = []
    with ThreadPoolExecutor(args.jobs) as pool, Progress(console=console, disable=not console.is_terminal) as bar:
        jobs = [pool.submit(check, args, tool, case) for tool in order for case in cases]
        task = bar.add_task("sanitizer", total=len(jobs))
        for job in as_completed(jobs):
            found.append(job.result())
            bar.advance(task)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=110, help="seconds for one process")
    parser.add_argument(
        "--sanitizer", default=shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    )
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: Triton's interpreter, for a dry run"
    )
    parser.add_argument("--as-shipped", action="store_true", help="racecheck: one lane arrives for its warp")
    parser.add_argument("--json", type=output_file, help="write the findings here")
    args = parser.parse_args()
    if shutil.which(args.sanitizer) is None:
        print(f"--sanitizer: expected a program, got {args.sanitizer}; it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    console, begin = Console(width=140), time.monotonic()
    found = check_all(args, console)
    by_case: dict[str, dict[str, Finding]] = {}
    for finding in found:
        by_case.setdefault(finding.case, {})[finding.tool] = finding
    table = Table("case", *args.tools, title=f"compute-sanitizer, {time.monotonic() - begin:.0f} s")
    for case in sanitizer_cases.CASES:
        if case in by_case:
            table.add_row(case, *(by_case[case][tool].cell for tool in args.tools))
    console.print(table)
    for finding in found:
        if not finding.ok:
            print(f"--- {finding.tool}, {finding.case}: {finding.cell}\n{finding.excerpt}", file=sys.stderr)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(f) for f in found], indent=1) + "\n", encoding="utf-8")
    return 0 if found and all(finding.ok for finding in found) else 1


if __name__ == "__main__":
    sys.exit(main())
