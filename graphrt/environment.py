"""The environment variables that the package reads: all of them, here and nowhere else.

`docs/embedding.md` has the table for users. Two are graphrt's own and switches; `TRITON_INTERPRET` and `CUTE_DSL_ARCH`
belong to Triton and CuTe DSL, and are read as those read them.
"""

import os
from typing import Any

from .checks import fail

# What os.environ reads from. A switch is asked at every launch, and os.environ takes a microsecond to find nothing.
_environment: Any = vars(os.environ)["_data"]
_VALUES = {os.environ.encodevalue(value): wanted for value, wanted in {"1": True, "0": False, "": False}.items()}


class Switch:
    """A variable that is 1 (on), or 0 or nothing (off). It is read anew each time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._key = os.environ.encodekey(name)

    def is_on(self) -> bool:
        """What it says now.

        Raises:
            ValueError: for any other value, naming variable and values.
        """
        value = _environment.get(self._key)
        if value is None:
            return False
        if value not in _VALUES:
            fail(self.name, "1 (on), or 0 or nothing (off)", repr(os.environ.decodevalue(value)))
        return _VALUES[value]


CHECK = Switch("GRAPHRT_CHECK")
"""Checked mode, where a call's own `check` is None (`graphrt.checked`; address checks of a recording)."""
ANNOTATE = Switch("GRAPHRT_ANNOTATE")
"""Marks for torch's traces on every kernel of a capture (`graphrt.profiling.KernelMarks`)."""


def triton_interprets() -> bool:
    """Whether Triton's kernels run in its interpreter, also on the CPU. Fixed when the kernels are imported."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def cute_arch() -> str:
    """The architecture that CuTe DSL is to compile for, such as sm_90a; empty for that of the device."""
    return os.environ.get("CUTE_DSL_ARCH", "")
