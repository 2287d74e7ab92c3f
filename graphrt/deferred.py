"""The deferred commit of one step as an object, for engines that hand it from their metadata build to their layers."""

from dataclasses import dataclass, field

from torch import Tensor

from .context import KDARecoverSSMCommitContext
from .fixed import Fixed
from .launch import execution
from .steps import Owners


@dataclass
class KDARecoverSSMDeferred(Fixed):
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

    _flushed_in: list[object] = field(default_factory=list, init=False, repr=False, compare=False)

    def flush(self) -> None:
        """Fold the step's pending records before a verify that does not replay them; at most once per step object.

        A recording or capture takes the flush although a warm-up has run it, or an earlier one has it, for each replay
        is a step of its own. What runs at once runs once, whatever was recorded in between.
        """
        here, places = execution(), self._flushed_in
        if self.flushed and (not places or here in places):
            return
        self.context.flush(self.state_indices, self.record_rows, self.pending, self.owners)
        self.flushed = True
        places.append(here)
