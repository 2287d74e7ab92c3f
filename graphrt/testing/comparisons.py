"""Comparisons that wait for nobody: each leaves a number on the device, and `settle` reads them all at once."""

from collections.abc import Sequence

import torch
from torch import Tensor

# Relative norm by dtype of what is compared: a state after many windows, or the outputs of one.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


class Comparisons:
    """Numbers that are too large where something is wrong."""

    def __init__(self) -> None:
        self._notes: list[tuple[str, Tensor, float]] = []
        self.done = 0

    def never(self, what: str, wrong: Tensor) -> None:
        """`wrong` is a bool tensor that must be false."""
        self._notes.append((what, wrong.any().double(), 0.0))

    def near(self, what: str, got: Tensor, want: Tensor, dims: Sequence[int]) -> None:
        """The norm of the difference over these dimensions is small beside that of what was wanted, for each entry."""
        difference, scale = (x.square().sum(tuple(dims)).sqrt() for x in (got.double() - want, want))
        error = (difference / (scale + 1e-30)).where(difference != 0, 0).max()
        self._notes.append((what, error, TOLERANCE[got.dtype]))

    def near_rows(self, what: str, got: Tensor, want: Tensor, starts: Sequence[int], lengths: Sequence[int]) -> None:
        """Outputs of the rows of a step, row by row and layer by layer.

        Args:
            got: [L, T, ...]. want: [L, B, Q, ...].
            starts, lengths: [B]: first token of each row, and how many of its tokens count.
        """
        first, length = (torch.tensor(values, device=got.device) for values in (starts, lengths))
        t = torch.arange(want.shape[2], device=got.device)
        valid = (t < length[:, None]).view(1, *want.shape[1:3], *[1] * (want.ndim - 3))
        mine = got[:, (first[:, None] + t).clamp(max=got.shape[1] - 1)]
        mine, wanted = (torch.where(valid, part, 0) for part in (mine, want))
        self.near(what, mine, wanted, range(2, want.ndim))

    def settle(self) -> None:
        """Read what was found so far. Waits for the device.

        Raises:
            AssertionError: for the first comparison that failed.
        """
        notes, self._notes = self._notes, []
        if not notes:
            return
        self.done += len(notes)
        errors = torch.stack([error for _, error, _ in notes]).tolist()
        for (what, _, allowed), error in zip(notes, errors, strict=True):
            if not error <= allowed:
                raise AssertionError(f"{what}: error {error:.3g}, allowed {allowed:.3g}")
