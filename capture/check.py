"""`check_replay`: a recording against eager execution, bit for bit, with other inputs at every step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from graphrt.capture import bits
from graphrt.capture.bits import Named, TensorGroup
from graphrt.capture.errors import CaptureError
from graphrt.capture.shadow import tensors_in
from graphrt.checks import check_callable, check_count

FROZEN = (
    "two replays with different inputs gave the same bytes where eager execution gave different ones: the recording "
    "reads inputs as they were when it was made; stage them into the tensors that the recorded function reads"
)


class Replayable(Protocol):
    """A Recording, or anything that replays like one. With `outputs`, these are compared too."""

    def replay(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Difference:
    """The first element at which a replay left other bytes than the eager step.

    step      of the check, from 0
    name      of the tensor, as it was given; `result` for what the function returned
    layer     position in the sequence of tensors given under this name; None for a single tensor
    index     of the element in that tensor
    eager     what the eager step left there, as text
    replayed  what the replay left there
    elements  how many elements of this tensor differ
    """

    step: int
    name: str
    layer: int | None
    index: tuple[int, ...]
    eager: str
    replayed: str
    elements: int

    @property
    def slot(self) -> int | None:
        """The first index: state slot, record row or token."""
        return self.index[0] if self.index else None

    def __str__(self) -> str:
        layer = "" if self.layer is None else f", layer {self.layer}"
        slot = "" if self.slot is None else f", slot {self.slot}, element {list(self.index)}"
        return (
            f"step {self.step}: {self.name}{layer}{slot}: eager {self.eager}, replay {self.replayed} "
            f"({self.elements} elements of it differ)"
        )


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What `check_replay` found. True if nothing differs.

    name        of the recording
    steps       steps that ran: all that were asked for, or up to the first difference
    tensors     how many tensors were compared after each step, results included
    changed     those that some eager step changed
    difference  the first one; None if there is none
    hint        what the difference looks like, such as inputs frozen in the recording; or empty
    """

    name: str
    steps: int
    tensors: int
    changed: tuple[str, ...]
    difference: Difference | None = None
    hint: str = ""

    @property
    def ok(self) -> bool:
        """Whether something was compared and nothing differs."""
        return self.difference is None and bool(self.changed)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.difference is not None:
            return f"replay of {self.name!r} differs at {self.difference}" + (f"; {self.hint}" if self.hint else "")
        if not self.changed:
            return (
                f"replay of {self.name!r}: no step changed any of the {self.tensors} tensors, so nothing was compared; "
                "give the tensors that a step writes, and inputs under which it writes them"
            )
        return f"replay of {self.name!r} equals eager execution: {self.steps} steps, {self.tensors} tensors, every byte"

    def raise_if_different(self) -> None:
        """CaptureError with the report, unless it is `ok`."""
        if not self.ok:
            raise CaptureError(str(self))


def check_replay(
    sequence: Replayable,
    eager_fn: Callable[[], Any],
    inputs_of_step: Callable[[int], object],
    steps: int,
    tensors: TensorGroup,
) -> ReplayReport:
    """Run every step eagerly and by replay from the same state, and compare all bytes after each.

    sequence        a Recording of `eager_fn`, or anything with `replay()`
    eager_fn        the recorded function; tensors that it returns are compared with `sequence.outputs`
    inputs_of_step  writes the inputs of step i into the tensors that the function reads. It must depend on i alone,
                    for it is called for each of the two runs; give other slots, lengths and counts at every step
    steps           how many
    tensors         by name, one tensor or one a layer: everything that a step writes and a later step reads. A tensor
                    of the state that is missing here runs twice as fast as the others, and shows up as a difference

    Both runs draw the same random numbers. The first difference ends the check; the report names step, tensor, layer,
    slot, element and both values, and says so if the recording reads inputs frozen when it was made. A check in which
    no step changes anything is not `ok`. The tensors and the random state are put back at the end, also after an error.

    Memory: three copies of `tensors`, and two of the results.
    """
    steps = check_count("steps", steps, 1)
    check_callable("eager_fn", eager_fn)
    check_callable("inputs_of_step", inputs_of_step)
    check_callable("sequence.replay", getattr(sequence, "replay", None))
    run = _Check(sequence, eager_fn, inputs_of_step, bits.named(tensors))
    first, random = bits.snapshot(run.group), _random_state()
    try:
        with torch.no_grad():
            return run.compare(steps)
    finally:
        bits.restore(run.group, first)
        _set_random_state(random)


class _Check:
    """One check under way."""

    def __init__(
        self,
        sequence: Replayable,
        eager_fn: Callable[[], Any],
        inputs_of_step: Callable[[int], object],
        group: list[Named],
    ) -> None:
        self.sequence, self.eager_fn, self.inputs_of_step, self.group = sequence, eager_fn, inputs_of_step, group
        self.name = str(getattr(sequence, "name", type(sequence).__name__))
        self.live = [entry.tensor for entry in group]
        # A step starts from the state and the random numbers after the one before, in both runs.
        self.start = bits.snapshot(group)
        self.random = _random_state()

    def compare(self, steps: int) -> ReplayReport:
        changed: set[str] = set()
        for step in range(steps):
            results = [t.clone() for t in self.eager(step)]
            state, random = bits.snapshot(self.group), _random_state()
            changed.update(self.group[i].label for i in bits.changed(state, self.start))
            replayed = self.replay(step)
            # A function that returns its static outputs to nobody, or a sequence without outputs, has no results.
            if not results or not replayed:
                results, replayed = [], []
            self._check_results(results, replayed)
            changed.update(f"result[{i}]" for i in range(len(results)))
            difference = self._difference(step, [*self.live, *replayed], [*state, *results])
            if difference is not None:
                break
            self.start, self.random = state, random
        # Of a single step the caller may have no inputs of another one.
        frozen = difference is not None and steps > 1 and self._is_frozen(step)
        compared, hint = len(self.group) + len(results), FROZEN if frozen else ""
        return ReplayReport(self.name, step + 1, compared, tuple(sorted(changed)), difference, hint)

    def eager(self, step: int) -> list[Tensor]:
        """One eager step from the start state; its results."""
        self._stage(step)
        return tensors_in(self.eager_fn())

    def replay(self, step: int) -> list[Tensor]:
        """One replay from the start state; the recording's results."""
        self._stage(step)
        self.sequence.replay()
        return tensors_in(getattr(self.sequence, "outputs", None))

    def _stage(self, step: int) -> None:
        bits.restore(self.group, self.start)
        _set_random_state(self.random)
        self.inputs_of_step(step)

    def _check_results(self, eager: list[Tensor], replayed: list[Tensor]) -> None:
        shapes = [[(list(t.shape), t.dtype) for t in results] for results in (eager, replayed)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"eager_fn: expected the results of recording {self.name!r}, {shapes[1]}, got {shapes[0]}")

    def _difference(self, step: int, got: Sequence[Tensor], want: Sequence[Tensor]) -> Difference | None:
        differing = bits.changed(got, want)
        if not differing:
            return None
        i = differing[0]
        results = [Named("result", j, t) for j, t in enumerate(got[len(self.group) :])]
        entry = [*self.group, *results][i]
        index = bits.first_difference(got[i], want[i]) or ()
        replayed, eager = bits.both_values(got[i], want[i], index)
        elements = bits.count_differences(got[i], want[i])
        return Difference(step, entry.name, entry.layer, index, eager, replayed, elements)

    def _is_frozen(self, step: int) -> bool:
        """Whether the inputs of another step make no difference to a replay, though they do to an eager step."""
        other = step - 1 if step else step + 1
        return self._same(self.replay, step, other) and not self._same(self.eager, step, other)

    def _same(self, run: Callable[[int], list[Tensor]], step: int, other: int) -> bool:
        """Whether two runs from one state leave the same bytes, the inputs themselves aside."""
        self._stage(step)
        staged = bits.snapshot(self.group)
        self._stage(other)
        inputs = set(bits.changed(self.live, staged))
        results = [t.clone() for t in run(step)]
        state = bits.snapshot(self.group)
        again = run(other)
        return not bits.changed(again, results) and set(bits.changed(self.live, state)) <= inputs


def _random_state() -> tuple[Tensor, list[Tensor]]:
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []


def _set_random_state(state: tuple[Tensor, list[Tensor]]) -> None:
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])
