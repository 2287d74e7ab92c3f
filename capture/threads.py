"""No other thread takes part in a CPU tape: its launches would run at once, and be missing from every replay."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from graphrt.capture.nodes import Tape
from graphrt.capture.refusals import Refusal

_hands_over = ((threading.Thread, "start"), (ThreadPoolExecutor, "submit"))
_one_at_a_time = threading.RLock()
_recording: dict[int, Tape] = {}
"""By thread: the tape that it records."""
_originals: dict[str, Any] = {}


@contextmanager
def one_thread(tape: Tape) -> Iterator[None]:
    """Refuse to start a thread, or to give work to a pool of threads, in this thread and for the length of the block.

    Other threads, recording or not, start what they like.
    """
    me = threading.get_ident()
    with _one_at_a_time:
        if not _recording:
            _watch()
        _recording[me] = tape
    try:
        yield
    finally:
        with _one_at_a_time:
            del _recording[me]
            if not _recording:
                _unwatch()


def _watch() -> None:
    for owner, verb in _hands_over:
        _originals[verb] = getattr(owner, verb)
        setattr(owner, verb, _watched(f"{owner.__name__}.{verb}", _originals[verb]))


def _unwatch() -> None:
    for owner, verb in _hands_over:
        setattr(owner, verb, _originals.pop(verb))


def _watched(call: str, original: Any) -> Any:
    def start(self: Any, *args: Any, **kwargs: Any) -> Any:
        tape = _recording.get(threading.get_ident())
        if tape is not None:
            tape.refuse(
                Refusal(
                    f"{call}()",
                    "gives work to another thread, which would run it now and leave it out of the replay",
                    "launch from the thread that records",
                )
            )
        return original(self, *args, **kwargs)

    return start
