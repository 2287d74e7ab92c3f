"""Which kernels run: `fp32_deferred` (CuTe DSL), `triton`, or `torch`, and the sentence that says why."""

import importlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from .sentinels import FP32_DEFERRED

log = logging.getLogger("graphrt")

BACKENDS = (FP32_DEFERRED, "triton", "torch")


@dataclass(frozen=True, slots=True)
class Backend:
    """The launchers of one backend. Arguments are checked already; nothing here allocates or reads a value."""

    name: str
    plan_commit: Callable[..., None]
    plan_flush: Callable[..., None]
    compact_conv: Callable[..., None]
    fold: Callable[..., None]
    verify: Callable[..., None]
    conv_verify: Callable[..., None]
    align_eager_mask: Callable[..., None]
    align_state_indices: Callable[..., None]
    stage: Callable[..., None]
    advance: Callable[..., None]


@dataclass(frozen=True, slots=True)
class Support:
    """True or false, with the reason."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend and why it is this one."""

    backend: Backend
    reason: str


@cache
def load(name: str) -> Backend:
    """The launchers of a backend; Triton and CuTe DSL are imported here, at first use."""
    files = {"plan": "plan", "conv": "conv", "fold": "fold", "verify": "verify", "stage": "stage"}
    if name == "torch":
        files = dict.fromkeys(files, "reference") | {"plan": "reference_plan", "stage": "reference_stage"}
    modules = {part: importlib.import_module(f".kernels.{file}", "graphrt") for part, file in files.items()}
    return Backend(
        name=name,
        plan_commit=modules["plan"].plan_commit,
        plan_flush=modules["plan"].plan_flush,
        compact_conv=modules["conv"].compact_conv,
        fold=modules["fold"].fold,
        verify=modules["verify"].verify,
        conv_verify=modules["conv"].conv_verify,
        align_eager_mask=modules["plan"].align_eager_mask,
        align_state_indices=modules["plan"].align_state_indices,
        stage=modules["stage"].stage,
        advance=modules["stage"].advance,
    )


def by_device(device: torch.device) -> Backend:
    """Launchers of operations without arithmetic, which need no choice: Triton on a GPU, torch elsewhere."""
    return load("triton" if device.type == "cuda" else "torch")


def supports(name: str, state_ref: Tensor, lower_bound: float | None) -> Support:
    """Whether backend `name` can run on checkpoints like `state_ref` [slots, H, V, K] with this gate."""
    if name == "torch":
        return Support(True, "plain torch runs everywhere")
    if name == "triton":
        return _triton_support(state_ref.device, state_ref.dtype)
    if name == FP32_DEFERRED:
        return Support(False, "the FP32 CuTe DSL kernels are not part of this version")
    raise ValueError(f"backend: expected 'auto' or one of {', '.join(map(repr, BACKENDS))}, got {name!r}")


def _triton_support(device: torch.device, dtype: torch.dtype) -> Support:
    if dtype == torch.float64:
        return Support(False, "the Triton kernels have no float64 form")
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            return Support(False, f"the Triton kernels need compute capability 8.0, {device} has {capability}")
        return Support(True, f"Triton compiles for {device}")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return Support(True, "Triton's interpreter runs on the CPU")
    return Support(
        False, f"Triton does not run on {device.type} tensors (TRITON_INTERPRET=1 before import does, slowly)"
    )


def choose(requested: str, state_ref: Tensor, lower_bound: float | None) -> Choice:
    """Settle the backend for checkpoints like `state_ref`.

    `auto` and `fp32_deferred` fall back to the next backend that can run, logged once; `triton` and `torch` do not.

    Raises:
        ValueError: for an unknown name, and where a backend asked for by name cannot run.
    """
    if requested == "auto":
        # Interpreted kernels are for tests: on the CPU the specification itself is the default.
        candidates: tuple[str, ...] = ("torch",) if state_ref.device.type == "cpu" else BACKENDS
    elif requested == FP32_DEFERRED:
        candidates = BACKENDS
    else:
        support = supports(requested, state_ref, lower_bound)
        if not support:
            raise ValueError(f"backend: {requested!r} cannot run here: {support.reason} (use backend='auto')")
        return Choice(load(requested), f"{requested} was asked for")

    refusals = []
    for name in candidates:
        support = supports(name, state_ref, lower_bound)
        if support:
            break
        # What fp32_deferred falls back to on the CPU is the default there, interpreter or not.
        refusals.append(f"not {name}: {support.reason}")
        if state_ref.device.type == "cpu":
            name = "torch"
            break
    reason = "; ".join([f"{name} runs", *refusals])
    if refusals:
        _log_once(reason)
    return Choice(load(name), reason)


@cache
def _log_once(reason: str) -> None:
    log.warning("graphrt backend: %s", reason)
