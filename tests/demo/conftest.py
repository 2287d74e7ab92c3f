"""Requests of a few tokens: enough for drafts, early finishes and reused rows."""

import pytest

from graphrt.demo.serve import Request

LOOKUP = b"def ne(a, b):\n    return a != b\n\ndef "


@pytest.fixture
def short_requests():
    """Four requests of different prompts and lengths, for two batch rows."""
    return [
        Request("long", LOOKUP, 14),
        Request("early", b"import os\nimport ", 3),
        Request("next", LOOKUP[:20], 7),
        Request("last", b"x", 4),
    ]
