"""A step's deferred commit as one object, which every layer that cannot replay may ask to flush."""

import weakref
from dataclasses import dataclass, field

from torch import Tensor

from .context import KDARecoverSSMCommitContext
from .launch import Recorder, recorder
from .steps import Owners


@dataclass
class KDARecoverSSMDeferred:
    """One step's deferred commit, as a metadata build hands it to the verify and to whoever flushes.

    record_rows    [>= B] int32: record row of each row, -1 for none
    pending        [R] int32, by record row
    eager          [B] bool or uint8: rows committed now (align mode: near a block boundary); None for no row
    context        whose layers are folded
    state_indices  [B] int32: state slot of each row
    flushed        whether `flush` has run
    owners         whom the rows were staged for; without it they are taken as they are
    """

    record_rows: Tensor
    pending: Tensor
    eager: Tensor | None
    context: KDARecoverSSMCommitContext = field(repr=False, compare=False)
    state_indices: Tensor = field(repr=False, compare=False)
    flushed: bool = False
    owners: Owners | None = field(default=None, repr=False, compare=False)
    _recorder: weakref.ref[Recorder] | None = field(default=None, init=False, repr=False, compare=False)

    def flush(self) -> None:
        """Fold the step's pending records before a verify that does not replay them; at most once per step object.

        RuntimeError for an object that is used inside a recording and outside of it, or in two: it would be left out
        of the second. Make it inside the recorded function.
        """
        here = recorder()
        if self.flushed:
            self._check_place(here)
            return
        self.context.flush(self.state_indices, self.record_rows, self.pending, self.owners)
        self.flushed, self._recorder = True, None if here is None else weakref.ref(here)

    def _check_place(self, here: Recorder | None) -> None:
        there = None if self._recorder is None else self._recorder()
        # A recording that is gone is not the same as none.
        if there is here and (here is None) == (self._recorder is None):
            return
        place = "outside of this recording" if self._recorder is None else "inside a recording"
        raise RuntimeError(
            f"flush: this step object was flushed before, {place}, so nothing would be folded here; make a step object "
            "inside the recorded function, and one of its own for every step that is launched from Python"
        )
