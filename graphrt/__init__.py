"""graphrt: speculative decoding with Kimi Delta Attention, its recurrent state committed late, in replayable graphs."""

from .align import align_eager_mask, align_state_indices
from .context import KDADeferredCommitContext, KDARecoverSSMCommitContext
from .deferred import KDARecoverSSMDeferred
from .errors import ErrorKind, ErrorReport, error_counter, error_counts, error_report, reset_errors
from .fused import FusedConv
from .launch import programmatic_launches
from .layers import KDALayer
from .persist import load_state, save_state, weights_fingerprint
from .records import KDARecoverSSMRecords, allocate_records
from .sentinels import FP32_DEFERRED, NULL_BLOCK_ID, SCRATCH_ROW
from .slots import RecordSlots
from .state import BoundaryBlock, RequestState
from .steps import Owners
from .verify import kda_conv_verify, kda_deferred_verify, kda_recoverssm_verify

__version__ = "0.1.0"

__all__ = [
    "FP32_DEFERRED",
    "NULL_BLOCK_ID",
    "SCRATCH_ROW",
    "BoundaryBlock",
    "ErrorKind",
    "ErrorReport",
    "FusedConv",
    "KDADeferredCommitContext",
    "KDALayer",
    "KDARecoverSSMCommitContext",
    "KDARecoverSSMDeferred",
    "KDARecoverSSMRecords",
    "Owners",
    "RecordSlots",
    "RequestState",
    "align_eager_mask",
    "align_state_indices",
    "allocate_records",
    "error_counter",
    "error_counts",
    "error_report",
    "kda_conv_verify",
    "kda_deferred_verify",
    "kda_recoverssm_verify",
    "load_state",
    "programmatic_launches",
    "reset_errors",
    "save_state",
    "weights_fingerprint",
]
