"""Tools with which an engine tests its own verify and commit against graphrt's contract.

    oracle      KDA and the short convolution in float64, token by token
    traces      random traces of requests, as a hypothesis strategy or from a seed
    pools       layers whose memory is NaN wherever nothing may be read
    batches     a step's tensors, live, padded or dummy, and the step that graphrt itself would run
    compare     equality of bytes, with the place and both values
    service     a serving loop that does all of it at random, and compares with the truth of every request

The fixtures of the pytest plugin come with the installation: `pytest --fixtures` lists them. For
recordings, `graphrt.capture.check_replay` and `state_neutral`.
"""

from .batches import Batch, deferred_step, dummy_batch, make_batch
from .compare import assert_bitwise_equal
from .oracle import Oracle, OracleWindow
from .pools import Pool, poisoned_pool
from .service import Service
from .traces import Row, TraceStep, random_trace, traces

__all__ = [
    "Batch",
    "Oracle",
    "OracleWindow",
    "Pool",
    "Row",
    "Service",
    "TraceStep",
    "assert_bitwise_equal",
    "deferred_step",
    "dummy_batch",
    "make_batch",
    "poisoned_pool",
    "random_trace",
    "traces",
]
