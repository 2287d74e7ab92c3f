"""Are the FP32 kernels clean under compute-sanitizer: memcheck, racecheck, synccheck? On the GPU machine.

Runs every variant once on a small case (2 heads, Q = 4, 3 rows: ragged, dummy and with pending records) under each
tool, all tools side by side, and prints their verdicts; the logs go to --logs. Exit status 1 if a verdict is not clean.

`racecheck` follows a thread to an mbarrier only if that thread arrives itself. The kernels let one lane arrive for its
warp, behind a warp barrier, which orders the other lanes' accesses before that arrival all the same. So racecheck runs
twice: as shipped, where it reports those lanes, and with every lane arriving (`tile.ARRIVING_LANES`), the same kernel
with nothing left to infer, which must be clean.

    python tools/sanitize.py [--logs DIR] [--tool memcheck ...]
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

# Label: (compute-sanitizer tool, lanes of a warp that arrive, whether it must be clean)
RUNS = {
    "memcheck": ("memcheck", 1, True),
    "synccheck": ("synccheck", 1, True),
    "racecheck, every lane arrives": ("racecheck", 32, True),
    "racecheck, as shipped": ("racecheck", 1, False),
}


def run_cases(lanes: int) -> None:
    """Every variant once; this is the process under the tool."""
    from graphrt.kernels.cute import tile

    tile.ARRIVING_LANES = lanes
    import torch
    from step_model import Model

    model = Model(1, 2, 4, 3, 2)
    model.loc.copy_(torch.tensor([0, 4, 6, 9]))
    model.rows[2] = -1
    for align in (False, True):
        model.plan.boundary_state_indices.copy_(model.slots.flip(0) * align)
        model.plan.boundary_recovery_lens.fill_(int(align))
        model.fold(align)
    for conv in ("", "inside"):
        for split in (1, 2):
            for deferred in (True, False):
                model.verifies(deferred, conv, split)
    torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=Path, default=Path("sanitizer-logs"))
    parser.add_argument("--tool", nargs="*", choices=sorted({tool for tool, _, _ in RUNS.values()}))
    parser.add_argument("--run", type=int, metavar="LANES", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        run_cases(args.run)
        return 0
    args.logs.mkdir(parents=True, exist_ok=True)
    started = {}
    for label, (tool, lanes, _) in RUNS.items():
        if args.tool and tool not in args.tool:
            continue
        log = args.logs / f"{label.replace(', ', '-').replace(' ', '-')}.txt"
        options = ["--report-api-errors", "no"] if tool == "memcheck" else []
        options += ["--racecheck-report", "all"] if tool == "racecheck" else []
        command = ["compute-sanitizer", "--tool", tool, *options, "--log-file", log]
        command += [sys.executable, __file__, "--run", str(lanes)]
        started[label] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True), log
    failed = False
    for label, (process, log) in started.items():
        output, _ = process.communicate()
        text = log.read_text(errors="replace") if log.exists() else output
        summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", text) or [output[-2000:] or "no summary"]
        print(f"{label}: {summary[-1]}")
        clean = process.returncode == 0 and re.match(r"0 (errors|hazards)", summary[-1]) is not None
        failed |= RUNS[label][2] and not clean
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
