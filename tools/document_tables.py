"""Which tables of the documents follow from code and results, and what do they say now?

    python tools/document_tables.py            rewrite them
    python tools/document_tables.py --check    only say which are out of date; a test does the same

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`:

    support    backends by what `graphrt.backends.supports` answers for every value of every fact (needs CuTe DSL)
    figures    the step benchmark of tools/results/h200/step.json
    errors     every tools/results/*/errors.json, from tools/measure_errors.py
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch

from graphrt.backends import BACKENDS, Facts, supports
from graphrt.checks import check_head_dim

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tools" / "results"

KERNELS = {"fp32_deferred": "CuTe DSL", "triton": "Triton", "torch": "plain torch, the readable specification"}
DTYPES = {torch.float32: "FP32", torch.bfloat16: "BF16", torch.float16: "FP16", torch.float64: "FP64"}
CAPABILITIES = ((7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
# What every backend that is about speed supports; the columns vary one fact of it at a time.
KIMI = Facts(torch.device("cuda", 0), torch.float32, 128, True, -5.0, 8, torch.bfloat16)


def documents() -> list[Path]:
    """Every document of the checkout that may hold a table."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def support_table() -> str:
    """Backends, and for each fact the values with which `supports` says yes."""
    head = ("backend", "kernels", "checkpoints", "activations", "head dimension", "gate", "window", "where")
    return _table(head, [(f"`{name}`", KERNELS[name], *_columns(name)) for name in BACKENDS])


def figures_table() -> str:
    """Microseconds of one decode step by batch size, from the committed results."""
    found = json.loads((RESULTS / "h200" / "step.json").read_text())
    rows = []
    for row in sorted(found["rows"], key=lambda row: row["batch"]):
        times = [f"{row[name]:.0f}" for name in ("deferred", "eager", "fold", "floor")]
        rows.append((str(row["batch"]), *times, f"{row['deferred'] / row['floor']:.2f}"))
    return _table(("requests", "deferred step", "eager step", "fold alone", "floor", "deferred / floor"), rows)


def errors_table() -> str:
    """Relative errors against the float64 oracle, by backend and data."""
    rows = []
    for path in sorted(RESULTS.glob("*/errors.json")):
        found = json.loads(path.read_text())
        for row in found["rows"]:
            errors = [f"{row[name]:.1e}" for name in ("u", "out", "checkpoint", "checkpoint_64")]
            rows.append((f"`{row['backend']}`", found["device"], row["data"], *errors))
    return _table(("backend", "device", "data", "u", "outputs", "checkpoint", "checkpoint, 64 windows"), rows)


TABLES = {"support": support_table, "figures": figures_table, "errors": errors_table}


def updated(text: str) -> str:
    """A document's text with its tables as they should be."""

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}\n\n{TABLES[match[2]]()}\n\n{match[3]}"

    return re.sub(r"(<!-- table: (\w+) -->).*?(<!-- end of table -->)", fill, text, flags=re.DOTALL)


def _columns(name: str) -> tuple[str, ...]:
    dims = [dim for dim in range(1, 513) if _valid_head_dim(dim) and _yes(name, head_dim=dim)]
    windows = [window for window in range(1, 17) if _yes(name, spec_query_len=window)]
    return (
        _names(DTYPES[dtype] for dtype in DTYPES if _yes(name, dtype=dtype)),
        _names(DTYPES[dtype] for dtype in list(DTYPES)[:3] if _yes(name, key_dtype=dtype)),
        str(dims[0]) if len(dims) == 1 else f"any power of two from {dims[0]}",
        _names(gate for gate, bound in (("bounded", -5.0), ("softplus", None)) if _yes(name, lower_bound=bound)),
        "any" if windows[-1] == 16 else f"up to {windows[-1]}",
        _where(name),
    )


def _where(name: str) -> str:
    able = [capability for capability in CAPABILITIES if _yes(name, capability=capability)]
    places = [] if able == list(CAPABILITIES) else ["compute capability {}.{} and later".format(*able[0])]
    cpu = {"device": torch.device("cpu")}
    if _yes(name, **cpu):
        return "everywhere; the CPU's default"
    if _yes(name, interpret="1", **cpu):
        places.append("CPU through Triton's interpreter")
    return "; ".join(places)


def _yes(name: str, *, capability: tuple[int, int] = (9, 0), interpret: str = "0", **changes: object) -> bool:
    facts = replace(KIMI, **changes)
    asked = patch.object(torch.cuda, "get_device_capability", lambda device=None: capability)
    with asked, patch.dict(os.environ, TRITON_INTERPRET=interpret):
        return bool(supports(name, facts))


def _valid_head_dim(dim: int) -> bool:
    try:
        check_head_dim("head_dim", dim)
    except ValueError:
        return False
    return True


def _names(names: Iterable[str]) -> str:
    return ", ".join(names)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> int:
    """1 if `--check` finds a table that is out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    stale = [path for path in documents() if updated(path.read_text()) != path.read_text()]
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'out of date' if check else 'rewritten'}")
        if not check:
            path.write_text(updated(path.read_text()))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
