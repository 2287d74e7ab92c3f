"""Seeds from the test's name, skips of GPU tests, the backends, and Triton's interpreter without a GPU."""

import os
import zlib

import pytest
import torch

if not torch.cuda.is_available():
    # Read by Triton when a kernel is defined, so it must be set before graphrt is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    from triton.language import core
    from triton.runtime import interpreter

    def call_device_function(self, *args, **kwargs):
        """Call it in the language that its kernel has patched already: to patch anew takes half of a test's time."""
        if core.is_builtin(core.full):
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call_device_function

BACKENDS = [
    pytest.param("torch-cpu"),
    pytest.param(
        "triton-cpu",
        marks=pytest.mark.skipif(not INTERPRETED, reason="Triton compiles here: see triton-cuda"),
    ),
    pytest.param("torch-cuda", marks=pytest.mark.gpu),
    pytest.param("triton-cuda", marks=pytest.mark.gpu),
    pytest.param("fp32_deferred-cuda", marks=pytest.mark.gpu),
]


def pytest_collection_modifyitems(items):
    for item in items:
        if ("gpu" in item.keywords or "sm90" in item.keywords) and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
        elif "sm90" in item.keywords and torch.cuda.get_device_capability() < (9, 0):
            item.add_marker(pytest.mark.skip(reason="needs compute capability 9.0 or later"))


@pytest.fixture(autouse=True)
def seed(request):
    """The data of a test depends on its name alone, not on order or selection."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(params=BACKENDS)
def backend_device(request):
    """Each backend on each device that can run it."""
    from rig import Target

    return Target(*request.param.split("-"))
