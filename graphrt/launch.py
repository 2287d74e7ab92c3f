"""The seam between graphrt's entry points and a recording.

Every public operation ends in `launch(name, run, *args)`. Outside a tape that calls `run(*args)` at once. While a
CPU tape records (`graphrt.capture`), the tape keeps the call as one opaque node and runs nothing: whatever Python a
backend executes inside, a recording sees what a CUDA graph would see, one launch. While a CUDA graph is captured, the
recorder is a watch that runs each call, and checks that its kernels get into the graph. A call that no recording gets
has a range for profilers around it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from . import profiling
from .capturing import current_capture, is_capturing
from .checks import check_flag


class Recorder(Protocol):
    """Whoever gets the launches: a tape instead of having them run, a watch on the way."""

    def launch(self, name: str, run: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Keep the call `run(*args)` for later, or run it; its tensors must stay the same objects."""


_recorder: ContextVar[Recorder | None] = ContextVar("graphrt_recorder", default=None)
# Which recording is under way. Not the recorder itself: whoever keeps this to compare would keep its tensors alive.
_recording: ContextVar[object] = ContextVar("graphrt_recording", default=None)


def launch(name: str, run: Callable[..., None], *args: Any) -> None:
    """Run `run(*args)` now, or hand it to the recording under way.

    `run` returns nothing: what it produces, it writes into tensors among `args`.
    """
    recorder = _recorder.get()
    if recorder is not None:
        recorder.launch(name, run, args)
    elif profiling.ranges is None:
        run(*args)
    else:
        with profiling.annotated_launch(name, args):
            run(*args)


def is_recording() -> bool:
    """True while a recording gets the launches of this thread, whatever it does with them."""
    return _recorder.get() is not None


def execution() -> tuple[object, int]:
    """Where launches go from here, to compare: into this recording or capture, or at once to the device, (None, 0)."""
    return _recording.get(), current_capture()


def runs_at_once() -> bool:
    """Whether launches go to the device at once: outside of every recording and capture, whoever makes it."""
    return _recording.get() is None and not is_capturing()


def refuse_in_recording(name: str) -> None:
    """RuntimeError inside a recording or capture, for an order that holds once: every replay would carry it out again.

    A warm-up is no recording yet.
    """
    if not runs_at_once():
        raise RuntimeError(
            f"{name} is for one time, and a replay would repeat it in every step: call it between two replays"
        )


@contextmanager
def record_into(recorder: Recorder) -> Iterator[None]:
    """Send every launch of this thread to `recorder` for the length of the block."""
    token, recording = _recorder.set(recorder), _recording.set(object())
    try:
        yield
    finally:
        _recording.reset(recording)
        _recorder.reset(token)


_programmatic: ContextVar[bool] = ContextVar("graphrt_programmatic", default=True)


@contextmanager
def programmatic_launches(enabled: bool = True) -> Iterator[None]:
    """Whether verifies inside the block are launched programmatically (PDL) where their kernels can be: the default.

    A verify is then launched while its predecessor still runs, and in a captured graph it reads its checkpoint and
    replays its records before the predecessor has ended where that is safe. The bits are the same either way. A
    recording keeps what was set when it was made. Only `fp32_deferred` has such kernels.
    """
    check_flag("enabled", enabled)
    token = _programmatic.set(enabled)
    try:
        yield
    finally:
        _programmatic.reset(token)


def is_programmatic() -> bool:
    """What `programmatic_launches` says here."""
    return _programmatic.get()
