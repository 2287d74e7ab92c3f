"""Which tables of the documents follow from code and results, and what do they say now?

    python tools/document_tables.py            rewrite them
    python tools/document_tables.py --check    only say which are out of date; a test does the same

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`:

    support    backends by what `graphrt.backends.supports` answers for every value of every fact (needs CuTe DSL)
    figures    the step benchmark of tools/results/h200/step.json
    host       the host's time for staging and a replay, tools/results/h200/host.json
    errors     every tools/results/*/errors.json, from tools/measure_errors.py
    tools      the first line of every tool's docstring
    peers_*    tools/results/h200/peers.csv, from tools/bench_peers.py, and peer_check_*.json, from tools/peer_check.py
"""

import argparse
import ast
import csv
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
TOOLS = ROOT / "tools"
RESULTS = TOOLS / "results"

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


def host_table() -> str:
    """Host microseconds of `stage` and a replay, by form of the metadata and rows; of a repeated run the last."""
    lines = map(json.loads, (RESULTS / "h200" / "host.json").read_text().splitlines())
    times = {(line["form"], line["rows"]): line["stage_us"] + line["replay_us"] for line in lines if "form" in line}
    forms, sizes = ({key[i]: None for key in times} for i in (0, 1))
    head = ("metadata as", *(f"{rows} row{'s' * (rows > 1)}" for rows in sizes))
    return _table(head, [(form, *(f"{times[form, rows]:.0f}" for rows in sizes)) for form in forms])


def tools_table() -> str:
    """Every tool and the first line of its docstring."""
    docs = [(path.name, ast.get_docstring(ast.parse(path.read_text()))) for path in sorted(TOOLS.glob("*.py"))]
    return _table(("tool", "what"), [(f"`{name}`", (doc or "").partition("\n")[0]) for name, doc in docs])


def errors_table() -> str:
    """Relative errors against the float64 oracle, by backend and data."""
    rows = []
    for path in sorted(RESULTS.glob("*/errors.json")):
        found = json.loads(path.read_text())
        for row in found["rows"]:
            errors = [f"{row[name]:.1e}" for name in ("u", "checkpoint", "checkpoint_64")]
            rows.append((f"`{row['backend']}`", found["device"], row["data"], *errors, f"{row['out']:.3f}"))
    head = ("backend", "device", "data", "u", "checkpoint", "checkpoint, 64 windows", "BF16 outputs, roundings")
    return _table(head, rows)


def peers_steps(state: str, conv: bool, names: dict[str, str], tail: str = "") -> str:
    """Microseconds (and how many times faster than the peer) by batch size: windows of 8, 4 accepted."""
    found = _peers()
    batches = sorted({key[0] for key in found})
    rows = []
    for batch in batches:
        cells = [str(batch)]
        for what in names:
            one = found[batch, 8, 4, state, what + (" + conv" if conv else "") + tail]
            ratio = "" if one["to_peer"] in ("", "1.0") else f" ({float(one['to_peer']):.2f}x)"
            cells.append(f"{float(one['us']):.0f}{ratio}")
        rows.append(tuple(cells))
    return _table(("requests", *names.values()), rows)


def peers_accepted() -> str:
    """How many times faster than the peer, and times the floor, by window and accepted count."""
    found, what = _peers(), "graphrt fp32_deferred deferred"
    points = sorted({key[1:3] for key in found})
    rows = []
    for window, accepted in points:
        ones = [found[batch, window, accepted, "float32", what] for batch in (1, 4, 16, 64, 128)]
        cells = [f"{float(one['to_peer']):.2f}x, {float(one['to_floor']):.2f}" for one in ones]
        rows.append((str(window), str(accepted), *cells))
    return _table(("window", "accepted", "1 request", *(f"{batch} requests" for batch in (4, 16, 64, 128))), rows)


CHECKED = {
    "outputs, in roundings": r"(eager|crossed|deferred): outputs, roundings",
    "outputs, relative norm": r"(eager|crossed|deferred): outputs, norm",
    "corrections": r"(eager|crossed|deferred): corrections",
    "checkpoints after each commit, block boundaries too": r"(eager|crossed): checkpoints",
    "whole pools at the end, deferred drained": r"(eager|crossed|deferred): whole pool at the end",
    "keys, gates, histories: elements that differ": r"(eager|crossed|deferred): .*, differing",
    "fla-core to vllm: outputs, in roundings": r"fla: outputs, roundings",
    "fla-core to vllm: checkpoints": r"fla: checkpoints",
    "vllm to float64: checkpoints": r"peer to the oracle: checkpoints",
    "graphrt to float64: checkpoints": r"(eager|deferred) to the oracle: checkpoints",
}


def peers_check() -> str:
    """Worst figure of each kind over all cases of tools/peer_check.py, and its limit."""
    files = {"`fp32_deferred`": "fp32_deferred", "`triton`": "triton", "`triton`, BF16 checkpoints": "bf16"}
    found = [json.loads((RESULTS / "h200" / f"peer_check_{name}.json").read_text()) for name in files.values()]
    rows = []
    for label, pattern in CHECKED.items():
        cells = []
        for one in found:
            ones = [row for case in one["cases"].values() for row in case if re.fullmatch(pattern, row["what"])]
            # Where roundings are compared the norm says nothing more.
            shown = ones and not (label.endswith("norm") and one["args"]["state"] == "float32")
            cells.append(f"{max(row['worst'] for row in ones):.2g} of {ones[0]['limit']:g}" if shown else "")
        rows.append((label, *cells))
    return _table(("worst figure, of its limit", *files), rows)


def peers_bytes() -> str:
    """MiB of checkpoints and records that one request holds, all layers."""
    found, rows = _peers(), []
    for name, state, what in (
        ("graphrt, vllm", "float32", "graphrt fp32_deferred deferred"),
        ("graphrt, vllm, BF16 checkpoints", "bfloat16", "graphrt triton deferred"),
        ("fla-core, a state per token", "float32", "fla state per token"),
    ):
        one = found[1, 8, 4, state, what]
        rows.append((name, *(f"{int(one[column]) / 2**20:.1f}" for column in ("state_bytes", "record_bytes"))))
    return _table(("MiB a request, window of 8", "checkpoints", "records"), rows)


def _peers() -> dict[tuple[int, int, int, str, str], dict[str, str]]:
    """Rows of the comparison by batch, window, accepted count, dtype of the checkpoints, and what was measured."""
    with (RESULTS / "h200" / "peers.csv").open() as file:
        rows = list(csv.DictReader(file))
    keys = ("batch", "window", "accepted")
    return {(*(int(row[key]) for key in keys), row["state"], row["what"]): row for row in rows}


PEERS = {"vllm triton commit": "vllm"}
OURS = {
    f"graphrt {backend} {kind}": f"`{backend}` {kind}"
    for backend in ("fp32_deferred", "triton")
    for kind in ("deferred", "eager")
}
OURS_BF16 = {f"graphrt triton {kind}": f"`triton` {kind}" for kind in ("deferred", "eager")}
PEERS_BF16 = {"vllm cute commit": "vllm, CuTe commit", "vllm triton commit": "vllm, Triton commit"}
ALONE = {"graphrt fp32_deferred eager": "`fp32_deferred` fold", "graphrt triton eager": "`triton` fold"}
COUNTED = {"graphrt fp32_deferred deferred": "deferred: no fold"}

TABLES = {
    "support": support_table,
    "figures": figures_table,
    "host": host_table,
    "errors": errors_table,
    "tools": tools_table,
    "peers_fp32": lambda: peers_steps("float32", False, PEERS | OURS | {"fla state per token": "fla-core"}),
    "peers_conv": lambda: peers_steps("float32", True, PEERS | OURS),
    "peers_bf16": lambda: peers_steps("bfloat16", False, PEERS_BF16 | OURS_BF16),
    "peers_commit": lambda: peers_steps("float32", False, PEERS | ALONE | COUNTED, ", commit alone"),
    "peers_commit_bf16": lambda: peers_steps(
        "bfloat16", False, PEERS_BF16 | {"graphrt triton eager": "`triton` fold"}, ", commit alone"
    ),
    "peers_check": peers_check,
    "peers_accepted": peers_accepted,
    "peers_bytes": peers_bytes,
}


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
