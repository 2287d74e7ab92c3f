"""What the demo claims, checked: each claim is a verdict with the numbers behind it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from graphrt import error_counts

from .serve import Completion, DecodeLoop

MOST_GAP = 5e-2
"""Logits closer than this may come in either order. Windows of different lengths differ by FP32 rounding only, but each
16-bit activation that it moves across a rounding boundary moves the logits by up to 1.5e-2 (measured)."""


@dataclass(frozen=True)
class Verdict:
    """One claim, whether it held, and the evidence in words."""

    claim: str
    passed: bool
    detail: str


def same_tokens(claim: str, mine: Mapping[str, Completion], other: Mapping[str, Completion]) -> Verdict:
    """Compare two decodes of the same requests, byte by byte.

    A difference is excused only where the model itself was undecided: both tokens were within MOST_GAP of each other
    at the first place where a text differs (what follows there is another text).
    """
    found = {name: _first_difference(completion, other[name]) for name, completion in mine.items()}
    differences = {name: difference for name, difference in found.items() if difference}
    detail = "; ".join(f"{name!r} {difference}" for name, difference in differences.items())
    passed = all(difference.gap <= MOST_GAP for difference in differences.values())
    return Verdict(claim, passed, detail or _closest_call(mine))


@dataclass(frozen=True)
class _Difference:
    position: int
    gap: float

    def __str__(self) -> str:
        return f"differs first at byte {self.position}, where the top two logits are {self.gap:.3e} apart"


def _first_difference(a: Completion, b: Completion) -> _Difference | None:
    for position, (x, y) in enumerate(zip(a.text, b.text, strict=True)):
        if x != y:
            return _Difference(position, max(a.gaps[position], b.gaps[position]))
    return None


def _closest_call(completions: Mapping[str, Completion]) -> str:
    total = sum(len(c.generated) for c in completions.values())
    smallest = min(min(c.gaps[len(c.request.prompt) :]) for c in completions.values())
    return f"{total} tokens of {len(completions)} requests; closest call: top two logits {smallest:.3e} apart"


@dataclass
class BitComparison:
    """Compares two loops in lockstep: the logits of every step, then the states of the finished requests."""

    claim: str
    mine: DecodeLoop
    other: DecodeLoop
    num_steps: int = 0
    differing_steps: list[int] = field(default_factory=list)

    def after_step(self) -> None:
        """Compare the logits [B*Q, 256] both loops just computed, bit for bit."""
        if not torch.equal(self.mine.logits, self.other.logits):
            self.differing_steps.append(self.num_steps)
        self.num_steps += 1

    def verdict(self) -> Verdict:
        """Both loops must be finished."""
        others = self.other.completions
        unequal = [
            name
            for name, done in self.mine.completions.items()
            if done.text != others[name].text or not all(map(torch.equal, done.states, others[name].states))
        ]
        detail = f"logits of {self.num_steps} steps and final states of {len(others)} requests"
        if self.differing_steps:
            first = self.differing_steps[0]
            detail = f"logits of {len(self.differing_steps)} of {self.num_steps} steps differ, first in step {first}"
        if unequal:
            detail += "; text or final state differs: " + ", ".join(map(repr, unequal))
        passed = not unequal and not self.differing_steps
        return Verdict(self.claim, passed, detail)


def no_device_errors(device: torch.device) -> Verdict:
    """graphrt counts every index it had to clamp on the device; a correct loop has none."""
    counts = {kind: count for kind, count in error_counts(device).items() if count}
    return Verdict("no index had to be clamped on the device", not counts, str(counts or "no event was counted"))
