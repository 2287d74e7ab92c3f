"""Seeds from the test's name, the GPU markers' skips, and Triton's interpreter where there is no GPU."""

import os
import zlib

import pytest
import torch

if not torch.cuda.is_available():
    # Read by Triton when a kernel is defined, so it must be set before graphrt is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


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
