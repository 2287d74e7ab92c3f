"""The seam between graphrt's entry points and a recording.

Every public operation ends in `launch(name, run, *args)`. Outside a tape that calls `run(*args)` at once. While a
CPU tape records (`graphrt.capture`), the tape keeps the call as one opaque node and runs nothing: whatever Python a
backend executes inside, a recording sees what a CUDA graph would see, one launch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol


class Recorder(Protocol):
    """Whoever wants the launches instead of having them run."""

    def launch(self, name: str, run: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Keep the call `run(*args)` for later; its tensors must stay the same objects."""


_recorder: ContextVar[Recorder | None] = ContextVar("graphrt_recorder", default=None)


def launch(name: str, run: Callable[..., None], *args: Any) -> None:
    """Run `run(*args)` now, or hand it to the tape that is recording.

    `run` returns nothing: what it produces, it writes into tensors among `args`.
    """
    recorder = _recorder.get()
    if recorder is None:
        run(*args)
    else:
        recorder.launch(name, run, args)


def is_recording() -> bool:
    """True while a CPU tape takes the launches (a CUDA capture runs them into the stream instead)."""
    return _recorder.get() is not None


@contextmanager
def record_into(recorder: Recorder) -> Iterator[None]:
    """Send every launch of this thread to `recorder` for the length of the block."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)
