"""The table of eager or deferred commits (`graphrt.choice`), written by the benches that measure both."""

from collections.abc import Iterable
from dataclasses import asdict
from json import dumps
from pathlib import Path

from graphrt.choice import StepShape, first_deferred, load_table


def put_choice(path: Path, shape: StepShape, pending: int, measured: Iterable[tuple[int, float, float]]) -> None:
    """Replace a shape's entry, or add one at the end.

    Args:
        path: of the table; made if there is none.
        pending: tokens that were pending in the deferred steps.
        measured: (batch, deferred µs, eager µs).
    """
    facts = asdict(shape)
    table = load_table(path) if path.exists() else []
    table = [entry for entry in table if any(entry.get(key) != value for key, value in facts.items())]
    table.append(facts | {"pending": pending, "deferred_from": first_deferred(measured)})
    path.write_text(dumps(table, indent=1) + "\n", encoding="utf-8")
