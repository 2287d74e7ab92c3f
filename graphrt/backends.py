"""Which kernels run: `fp32_deferred` (CuTe DSL), `triton`, or `torch`, and the sentence that says why."""

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from .checks import fail
from .environment import triton_interprets
from .kernels.fused import composed
from .sentinels import FP32_DEFERRED
from .wheels import mixed_wheels

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
    fused_verify: Callable[..., None]
    """The verify with a convolution in front; its first argument is the launcher for where that takes two launches."""
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
    if name == FP32_DEFERRED:
        files |= {"fold": "cute.commit", "verify": "cute.deferred"}
    modules = {part: importlib.import_module(f".kernels.{file}", "graphrt") for part, file in files.items()}
    return Backend(
        name=name,
        plan_commit=modules["plan"].plan_commit,
        plan_flush=modules["plan"].plan_flush,
        compact_conv=modules["conv"].compact_conv,
        fold=modules["fold"].fold,
        verify=modules["verify"].verify,
        fused_verify=getattr(modules["verify"], "fused_verify", partial(composed, modules["verify"].verify)),
        conv_verify=modules["conv"].conv_verify,
        align_eager_mask=modules["plan"].align_eager_mask,
        align_state_indices=modules["plan"].align_state_indices,
        stage=modules["stage"].stage,
        advance=modules["stage"].advance,
    )


def by_device(device: torch.device) -> Backend:
    """Launchers of operations without arithmetic, which need no choice: Triton on a GPU, torch elsewhere."""
    return load("triton" if device.type == "cuda" else "torch")


@dataclass(frozen=True, slots=True)
class Facts:
    """What a choice depends on: the checkpoints, the gate, the window and the dtype of the records' keys."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    aligned: bool
    """Every slot and row starts on 16 bytes."""
    lower_bound: float | None
    spec_query_len: int
    key_dtype: torch.dtype

    @classmethod
    def of(
        cls,
        checkpoint: Tensor,
        lower_bound: float | None,
        spec_query_len: int,
        key_dtype: torch.dtype,
        aligned: bool = True,
    ) -> "Facts":
        """Of checkpoints like `checkpoint` [slots, H, V, K]; `aligned` adds what the caller knows of other tensors."""
        aligned = aligned and checkpoint.data_ptr() % 16 == 0 and checkpoint.stride(0) % 4 == 0
        device, dim = checkpoint.device, checkpoint.shape[-1]
        return cls(device, checkpoint.dtype, dim, aligned, lower_bound, spec_query_len, key_dtype)


def supports(name: str, facts: Facts) -> Support:
    """Whether backend `name` can run."""
    if name == "torch":
        return Support(True, "plain torch runs everywhere")
    if name == "triton":
        return _triton_support(facts.device, facts.dtype)
    if name == FP32_DEFERRED:
        return _cute_support(facts)
    raise ValueError(f"backend: expected 'auto' or one of {', '.join(map(repr, BACKENDS))}, got {name!r}")


def _triton_support(device: torch.device, dtype: torch.dtype) -> Support:
    if dtype == torch.float64:
        return Support(False, "the Triton kernels have no float64 form")
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            return Support(False, f"the Triton kernels need compute capability 8.0, {device} has {capability}")
        return Support(True, f"Triton compiles for {device}")
    if device.type == "cpu" and triton_interprets():
        return Support(True, "Triton's interpreter runs on the CPU")
    hint = "TRITON_INTERPRET=1 before import interprets it, slowly"
    return Support(False, f"Triton does not run on {device.type} tensors ({hint})")


def _cute_support(facts: Facts) -> Support:
    # Asked first: importing CuTe DSL takes seconds.
    if facts.device.type != "cuda":
        return Support(False, f"the CuTe DSL kernels need a CUDA device, the checkpoints are on {facts.device}")
    try:
        commit = importlib.import_module(".kernels.cute.commit", "graphrt")
    except ImportError as error:
        return Support(False, f"CuTe DSL cannot be imported ({error}): pip install 'graphrt[cute]'")
    mix = _mixed_wheels()
    if mix:
        return Support(False, f"the CuTe DSL installation is mixed up: {mix}")
    support: Support = commit.support_of(facts)
    return support


@cache
def _mixed_wheels() -> str:
    return mixed_wheels()


_choices: dict[tuple[str, Facts], Choice] = {}


def choose(requested: str, facts: Facts) -> Choice:
    """Settle the backend; asked again with the same facts it answers from memory.

    `auto` and `fp32_deferred` fall back to the next backend that can run, logged once; `triton` and `torch` do not.

    Raises:
        ValueError: for an unknown name, and where a backend asked for by name cannot run.
    """
    if not isinstance(requested, str):
        fail("backend", "a name", type(requested).__name__)
    key = (requested, facts)
    if key not in _choices:
        _choices[key] = _choose(requested, facts)
    return _choices[key]


def _choose(requested: str, facts: Facts) -> Choice:
    on_cpu = facts.device.type == "cpu"
    if requested == "auto" and on_cpu:
        return Choice(load("torch"), "torch is the default on the CPU")
    if requested not in ("auto", FP32_DEFERRED):
        support = supports(requested, facts)
        if not support:
            raise ValueError(f"backend: {requested!r} cannot run here: {support.reason} (use 'auto')")
        return Choice(load(requested), f"{requested} was asked for")

    refusals = []
    # Interpreted Triton kernels are for tests: on the CPU the fallback is the specification itself.
    for name in (FP32_DEFERRED, "torch") if on_cpu else BACKENDS:
        support = supports(name, facts)
        if support:
            break
        refusals.append(f"not {name}: {support.reason}")
    reason = "; ".join([f"{name} runs", *refusals])
    if refusals:
        _log_once(reason)
    return Choice(load(name), reason)


def choose_conv(requested: str, x: Tensor) -> Backend:
    """The launchers of a convolution verify, which `fp32_deferred` leaves to Triton."""
    if requested in ("auto", FP32_DEFERRED):
        return load("torch") if x.dtype == torch.float64 else by_device(x.device)
    facts = Facts(x.device, x.dtype, 0, True, None, 0, x.dtype)
    return choose(requested, facts).backend


@cache
def _log_once(reason: str) -> None:
    log.warning("graphrt backend: %s", reason)
