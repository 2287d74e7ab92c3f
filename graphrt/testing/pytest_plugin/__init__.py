"""Pytest fixtures of graphrt. Installed as `graphrt_pytest`: loading it imports neither torch nor graphrt."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def graphrt_device() -> str:
    """The device to test on: "cuda" where there is one, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def graphrt_pool(graphrt_device: str) -> Callable[..., Any]:
    """`graphrt.testing.poisoned_pool` on the device of the tests: NaN wherever nothing may be read."""
    from functools import partial

    from graphrt.testing import poisoned_pool

    return partial(poisoned_pool, device=graphrt_device)


@pytest.fixture
def graphrt_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that torch leaves uninitialised starts as NaN (or the smallest integer) for the length of the test."""
    import torch

    from graphrt.capture.shadow import poison

    def poisoned(make: Callable[..., Any]) -> Callable[..., Any]:
        def make_poisoned(*args: Any, **kwargs: Any) -> Any:
            t = make(*args, **kwargs)
            if t.device.type != "meta" and t.layout is torch.strided:
                # Through an alias: a leaf that wants a gradient may not be written.
                t.detach().fill_(poison(t.dtype))
            return t

        return make_poisoned

    for owner, names in (
        (torch, ("empty", "empty_like", "empty_strided")),
        (torch.Tensor, ("new_empty", "new_empty_strided")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture
def graphrt_no_errors(graphrt_device: str) -> Iterator[None]:
    """Fails the test if a kernel had to clamp or skip a bad value in it (`graphrt.error_counts`)."""
    import graphrt

    before = graphrt.error_counts(graphrt_device)
    yield
    after = graphrt.error_counts(graphrt_device)
    counted = {kind: n - before[kind] for kind, n in after.items() if n != before[kind]}
    if counted:
        pytest.fail(f"kernels met bad values on {graphrt_device}: {counted}")
