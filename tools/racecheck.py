"""What does racecheck report of the FP32 kernels, and is it real? On the GPU machine.

racecheck takes an mbarrier to order a thread only if that thread arrives itself. The kernels let one lane arrive for
its warp, behind a warp barrier, which orders the other lanes' accesses before that arrival all the same. So it runs
twice over every variant (the CuTe cases of sanitizer_cases.py): with every lane arriving (`tile.ARRIVING_LANES`), the
same code with nothing left to infer, which must be clean; and as shipped, where every access it reports must be one of
a lane that does not arrive itself. And twice over the smallest kernel that hands something over in these two ways
(racecheck_example.py).

    python tools/racecheck.py [--logs DIR]
"""

import argparse
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

EVERY_LANE, ONE_LANE = 32, 1
# Label: (how the names of the cases that run begin, lanes of a warp that arrive, whether it must be clean)
RUNS = {
    "kernels, every lane arrives": ("cute", EVERY_LANE, True),
    "folds, as shipped": ("cute fold", ONE_LANE, False),
    "verifies, as shipped": ("cute verify", ONE_LANE, False),
    "example, every lane arrives": ("example", EVERY_LANE, True),
    "example, one lane arrives": ("example", ONE_LANE, False),
}


def run_cases(what: str, lanes: int) -> None:
    """The example, or the cases whose names begin so; this is the process under the tool."""
    if what == "example":
        from racecheck_example import run

        run(lanes)
        return
    from sanitizer_cases import CASES, run_case

    for name in CASES:
        if name.startswith(what):
            run_case(name, "cuda", lanes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=Path, default=Path("racecheck-logs"))
    parser.add_argument("--run", nargs=2, metavar=("WHAT", "LANES"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        parser.error("it needs compute-sanitizer, which comes with the CUDA toolkit, on the path")
    if args.run:
        run_cases(args.run[0], int(args.run[1]))
        return 0
    args.logs.mkdir(parents=True, exist_ok=True)
    started = {}
    for label, (what, lanes, _) in RUNS.items():
        log = args.logs / f"{label.replace(', ', '-').replace(' ', '-')}.txt"
        command = ["compute-sanitizer", "--tool", "racecheck", "--racecheck-report", "hazard", "--print-limit", "20000"]
        command += ["--show-backtrace", "no", "--log-file", log, sys.executable, __file__, "--run", what, str(lanes)]
        started[label] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True), log
    failed = False
    for label, (process, log) in started.items():
        output, _ = process.communicate()
        text = log.read_text(errors="replace") if log.exists() else output
        summary = re.findall(r"RACECHECK SUMMARY: (.*)", text) or [output[-2000:] or "no summary"]
        print(f"{label}: {summary[-1]}", flush=True)
        clean = process.returncode == 0 and summary[-1].startswith("0 hazards")
        must = RUNS[label][2]
        failed |= must and not clean
        if not must:
            failed |= explained(text)
            # The hazards themselves fill megabytes.
            log.write_text("\n".join([*text.splitlines()[:100], summary[-1]]) + "\n")
    return int(failed)


def explained(text: str) -> bool:
    """Print the hazards by kernel and by whether the thread arrives that an arrival would order; True if one does."""
    pattern = r"(RAW|WAR|WAW) hazard.*\n=+\s+(?:Write|Read) Thread \((\d+),\S* at (\S+?)\+0x"
    found = [(kernel, kind, int(thread) % 32 == 0) for kind, thread, kernel in re.findall(pattern, text)]
    for (kernel, kind, arrives), number in sorted(Counter(found).items()):
        print(f"    {number} {kind} in {kernel}: the first access by {'an arriving' if arrives else 'another'} lane")
    return any(arrives for _, _, arrives in found)


if __name__ == "__main__":
    sys.exit(main())
