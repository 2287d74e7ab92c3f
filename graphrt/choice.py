"""Commit eagerly or defer? A measured table says from which batch size on deferring is the faster.

At small batches the fold of an eager commit in the same graph can beat the replay in the next verify. Which one wins
depends on the device, the backend and the shape, so it is measured: `--choose` of `tools/bench_step.py` and
`tools/bench_peers.py` writes the table that ships as `choice.json`. `CommitRunner` and `DecodeStep` look their shape up
once and make the rows of small captures eager. `commit` itself never changes `eager`.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .checks import check_count, check_path, fail

if TYPE_CHECKING:
    from .context import KDARecoverSSMCommitContext

log = logging.getLogger("graphrt")

TABLE = Path(__file__).with_name("choice.json")

Table = Sequence[Mapping[str, Any]]
"""Entries with the fields of a StepShape and `deferred_from`: null where an eager commit won at every batch."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a measurement holds for."""

    device: str
    """Name of the device, as torch gives it; "cpu" without one."""
    backend: str
    layers: int
    heads: int
    """On this device."""
    head_dim: int
    spec_query_len: int

    @classmethod
    def of(cls, context: "KDARecoverSSMCommitContext") -> "StepShape":
        """The shape of a context's steps."""
        checkpoint = context.checkpoints[0]
        return cls(
            device=device_name(checkpoint.device),
            backend=context.backend,
            layers=len(context.checkpoints),
            heads=checkpoint.shape[1],
            head_dim=checkpoint.shape[-1],
            spec_query_len=context.spec_query_len,
        )

    def __str__(self) -> str:
        return (
            f"{self.backend} on {self.device}, {self.layers} layers of {self.heads} heads of {self.head_dim}, "
            f"window {self.spec_query_len}"
        )


@dataclass(frozen=True, slots=True)
class CommitChoice:
    """Which captures commit eagerly, and why."""

    deferred_from: int | None
    """The smallest capture that defers; None: all commit eagerly."""
    reason: str
    """One sentence."""

    def eager(self, num_reqs: int) -> bool:
        """Whether a capture of so many rows commits them at once."""
        return self.deferred_from is None or num_reqs < self.deferred_from


Choice = CommitChoice | Table | PathLike[str] | str | None
"""How a user asks: nothing (the shipped table), "deferred", "eager", a table or its path, or a settled choice."""


def choose_commit(shape: StepShape, choice: Choice = None) -> CommitChoice:
    """Settle eager or deferred for a shape. What nobody measured is deferred.

    Args:
        shape: `StepShape.of(context)`, or one made by hand.
        choice: None looks the shape up in the shipped table. "deferred" and "eager" settle it for every size. A table
            (as `load_table` gives it), or the path of one, is used in place of the shipped one.

    Raises:
        ValueError: for anything else, and for a table that is none.
    """
    if isinstance(choice, CommitChoice):
        return choice
    if isinstance(choice, str):
        if choice not in ("deferred", "eager"):
            fail("choice", "None, 'deferred', 'eager', a table or its path as a Path", repr(choice))
        return CommitChoice(None if choice == "eager" else 1, f"{choice} at every size, as asked for")
    table, source = _table(choice)
    wanted = asdict(shape)
    for entry in table:
        if all(entry.get(key) == value for key, value in wanted.items()):
            return _measured(entry["deferred_from"], shape, source)
    return CommitChoice(1, f"deferred at every size: {source} has no measurement of {shape}")


def load_table(path: PathLike[str] = TABLE) -> list[dict[str, Any]]:
    """The entries of a table that `--choose` of a bench in `tools/` wrote.

    Raises:
        ValueError: if the file is no such table. OSError: if it cannot be read.
    """
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        fail("choice", f"a table in {path}", f"no JSON ({error})")
    return _checked(table)


def first_deferred(measured: Iterable[tuple[int, float, float]]) -> int | None:
    """From (batch, deferred µs, eager µs): the batch from which on no eager step is faster; None if the last one is."""
    first = None
    for batch, deferred, eager in sorted(measured, reverse=True):
        if deferred > eager:
            return first
        first = batch
    return 1


def device_name(device: torch.device) -> str:
    """What a table calls a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _table(choice: object) -> tuple[Table, str]:
    if choice is None:
        return load_table(), "the shipped table"
    if isinstance(choice, PathLike):
        path = Path(check_path("choice", choice, "a table, or the path of one"))
        return load_table(path), path.name
    return _checked(choice), "the given table"


def _checked(table: object) -> list[dict[str, Any]]:
    if not isinstance(table, Sequence) or not all(isinstance(e, Mapping) for e in table):
        fail("choice", "a table: a list of entries", type(table).__name__)
    entries = [dict(entry) for entry in table]
    for entry in entries:
        if "deferred_from" not in entry:
            fail("choice", "a deferred_from in every entry", entry)
        if entry["deferred_from"] is not None:
            entry["deferred_from"] = check_count("choice: deferred_from", entry["deferred_from"], 1)
    return entries


def _measured(deferred_from: int | None, shape: StepShape, source: str) -> CommitChoice:
    if deferred_from is None:
        how = "eager at every size"
    elif deferred_from == 1:
        how = "deferred at every size"
    else:
        how = f"eager below {deferred_from} rows, deferred from there on"
    return CommitChoice(deferred_from, f"{how}: measured for {shape} ({source})")
