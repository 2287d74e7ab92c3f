"""The comparison of `long_replay.py`: notes of what was replayed, worked off by the float64 oracle in the same order.

Nothing here waits for the device until `Comparison.settle` reads how far everything was from the oracle.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from replay_step import RecordedStep
from torch import Tensor

from graphrt.testing.truths import Tokens, Truths

# Relative norm of a checkpoint after any number of windows (design section 2), and an output's rounding to 16 bits.
STATE_TOLERANCE = 1e-5
OUTPUT_TOLERANCE = 1e-4


@dataclass
class Request:
    """A request that is being decoded: where its state is, and what of it is pending."""

    name: int
    row: int
    table: list[int]
    position: int
    pending: int = 0
    published: list[int] = field(default_factory=list)
    """Columns of blocks that end at a boundary it has passed."""

    def column(self, block_size: int | None) -> int:
        """Column of the block that holds its state."""
        return 0 if block_size is None else max(self.position - 1, 0) // block_size

    def slot(self, block_size: int | None) -> int:
        """The slot that holds its state."""
        return self.table[self.column(block_size)]


@dataclass(frozen=True)
class Crossing:
    """A request that reached the end of a block: `length` tokens behind the first of its window."""

    name: int
    row: int
    column: int
    first: int
    length: int


@dataclass(frozen=True)
class Step:
    """One step as the host decided it; lists by live row."""

    number: int
    num_tokens: int
    """Of the recording: those of all its rows."""
    rows: list[int]
    firsts: list[int]
    lengths: list[int]
    accepted: list[int]
    owned: list[int]
    """Tokens of rows that have a state, dummies included: all others must get zero outputs."""
    crossings: list[Crossing]

    @property
    def tokens(self) -> list[int]:
        """Tokens of live rows."""
        return [i for first, n in zip(self.firsts, self.lengths, strict=True) for i in range(first, first + n)]


class Comparison:
    """What was noted and not yet compared, the oracle's states, and the largest deviations so far.

    Attributes:
        worst_state_error: relative norm of a checkpoint.
        worst_output_error: beyond rounding, relative to the root mean square of the step's outputs.
    """

    def __init__(self, recorded: RecordedStep, block_size: int | None) -> None:
        self.recorded, self.block_size = recorded, block_size
        self.truths = Truths(recorded.pool)
        self.journal: list[Callable[[], None]] = []
        self.boundaries: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.notes: dict[str, list[tuple[str, Tensor]]] = {"state": [], "output": [], "never": []}
        self.states_compared = self.boundaries_compared = 0
        self.worst_state_error = self.worst_output_error = 0.0

    def admitted(self, row: int, state: Tensor, history: Tensor) -> None:
        """A row has a new owner with this state, [L, H, V, K] and [L, conv_dim, W - 1]."""

        def admit() -> None:
            self.truths.state[row], self.truths.history[row] = state.double(), history.double()

        self.journal.append(admit)

    def stepped(self, step: Step) -> None:
        """Compare what a step wrote to the log, and advance the oracle by it."""
        offset, device, window = self.recorded.offset, self.recorded.device, self.recorded.window

        def compare() -> None:
            tokens = self.recorded.tokens(step.number, step.num_tokens)
            if step.crossings:
                self._states_at_boundaries(step.crossings, tokens)
            wanted = self.truths.step(step.rows, step.firsts, step.lengths, step.accepted, tokens)
            at = torch.tensor(step.firsts, device=device)[:, None] + offset[:window]
            known = offset[:window] < torch.tensor(step.lengths, device=device)[:, None]
            unowned = torch.ones(step.num_tokens, dtype=torch.bool, device=device)
            unowned[torch.tensor(step.owned, dtype=torch.int64, device=device)] = False
            logged = self.recorded.logged(step.number)
            for what, log, want in zip(("output", "convolution"), logged, wanted, strict=True):
                got, where = log[:, : step.num_tokens], f"{what} of step {step.number}"
                beyond = _beyond_rounding(got[:, at.clamp(max=step.num_tokens - 1)], want, known)
                self.notes["output"].append((where, beyond))
                self.never(f"{where} where no token is", ((got != 0).flatten(2).any(2) & unowned).any())

        self.journal.append(compare)

    def _states_at_boundaries(self, crossings: list[Crossing], tokens: Tokens) -> None:
        """The oracle's states at the block boundaries that a step reaches, kept by request and column."""
        rows, counts = [one.row for one in crossings], [one.length for one in crossings]
        before = self.truths.state[rows].clone(), self.truths.history[rows].clone()
        self.truths.step(rows, [one.first for one in crossings], counts, counts, tokens)
        for one in crossings:
            self.boundaries[one.name, one.column] = (
                self.truths.state[one.row].clone(), self.truths.history[one.row].clone()
            )  # fmt: skip
        self.truths.state[rows], self.truths.history[rows] = before

    def folded(self, one: Request, when: str) -> None:
        """Compare its checkpoint and history, which must be folded, and those of every block it has finished."""
        row, name, where = one.row, one.name, f"request {one.name} {when}"
        current = self.recorded.copy(one.slot(self.block_size))
        blocks = {column: self.recorded.copy(one.table[column]) for column in one.published}
        num_layers = len(self.recorded.pool.layers)
        self.states_compared += num_layers
        self.boundaries_compared += len(blocks) * num_layers

        def compare() -> None:
            self._compare(where, current, (self.truths.state[row], self.truths.history[row]))
            for column, block in blocks.items():
                self._compare(f"block {column} of {where}", block, self.boundaries[name, column])

        self.journal.append(compare)

    def never(self, what: str, wrong: Tensor) -> None:
        """Note what must be true nowhere."""
        self.notes["never"].append((what, wrong))

    def settle(self, living: Iterable[Request]) -> None:
        """Let the oracle do what was noted, and read what differs.

        Args:
            living: whose block boundaries may still be asked for.

        Raises:
            AssertionError: naming what left the oracle, and by how much.
        """
        journal, self.journal = self.journal, []
        for entry in journal:
            entry()
        names = {(one.name, column) for one in living for column in one.published}
        self.boundaries = {key: value for key, value in self.boundaries.items() if key in names}
        self.worst_state_error = max(self.worst_state_error, self._worst("state", STATE_TOLERANCE))
        self.worst_output_error = max(self.worst_output_error, self._worst("output", OUTPUT_TOLERANCE))
        self._worst("never", 0.0)

    def _compare(self, where: str, got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
        (state, history), (true_state, true_history) = got, want
        error = (state.double() - true_state).flatten(1).norm(dim=1) / true_state.flatten(1).norm(dim=1)
        self.notes["state"].append((f"checkpoint of {where}", error.max()))
        self.never(f"history of {where}", history.double() != true_history)

    def _worst(self, kind: str, allowed: float) -> float:
        notes, self.notes[kind] = self.notes[kind], []
        if not notes:
            return 0.0
        values = torch.stack([v.any().double() if v.dtype == torch.bool else v.double() for _, v in notes]).tolist()
        for (what, _), value in zip(notes, values, strict=True):
            assert value <= allowed, f"{what}: error {value:.3g}, allowed {allowed:.3g}"
        return max(values)


def _beyond_rounding(got: Tensor, want: Tensor, known: Tensor) -> Tensor:
    """How far tokens [L, B, Q, ...] are from the oracle's, beyond half a last bit of their dtype, by their RMS."""
    mask = known.view(1, *known.shape, *[1] * (want.ndim - 3))
    excess = (got.double() - want).abs() - 0.5 * torch.finfo(got.dtype).eps * want.abs()
    square = torch.where(mask, want.square(), 0).sum() / mask.expand_as(want).sum().clamp(min=1)
    return torch.where(mask, excess, 0).max() / square.sqrt().clamp(min=1e-30)
