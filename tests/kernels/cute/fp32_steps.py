"""Random decode steps for the FP32 kernels, and a float64 token-by-token oracle that shares no code with them."""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

K = 128
LOWER_BOUND = -5.0


@dataclass
class Case:
    """One layer's static tensors."""

    state: Tensor  # [slots, H, V, K]
    correction: Tensor  # [R, H, Q, V]
    key_gate: Tensor  # [R, H, Q, 2K]
    a_log: Tensor
    dt_bias: Tensor

    @property
    def records(self):
        return SimpleNamespace(correction=self.correction, key_gate=self.key_gate)

    def clone(self) -> "Case":
        return Case(
            self.state.clone(), *(_with_scratch(x) for x in (self.correction, self.key_gate)), self.a_log, self.dt_bias
        )


def _with_scratch(x: Tensor) -> Tensor:
    """A copy of [R, ...] that starts one row into its allocation."""
    copy = x.new_zeros((x.shape[0] + 1, *x.shape[1:]))
    copy[1:] = x
    return copy[1:]


def make_case(slots, rows, heads, q, dtype=torch.bfloat16, device="cuda", strong=False) -> Case:
    """Random contents; `strong` makes decays strong and keys alike, where inexact decays would show."""
    key_gate = torch.randn(rows, heads, q, 2 * K, device=device)
    if strong:
        key_gate[..., :K] = 0.2 * key_gate[..., :K] + torch.randn(K, device=device)
        key_gate[..., K:] = key_gate[..., K:] * 4
    return Case(
        state=torch.randn(slots, heads, K, K, device=device) * 0.3,
        correction=_with_scratch(torch.randn(rows, heads, q, K, device=device) * 0.5),
        key_gate=_with_scratch(key_gate.to(dtype)),
        a_log=torch.rand(heads, device=device) - 0.5,
        dt_bias=torch.randn(heads * K, device=device),
    )


def make_tokens(total, heads, dtype=torch.bfloat16, device="cuda", strong=False) -> SimpleNamespace:
    """q, k, v, raw_g, raw_beta of `total` tokens, as views of one projection with gaps, and a poisoned out."""
    wide = torch.randn(1, total, 4 * heads * K + 8, device=device)
    if strong:
        wide[..., heads * K : 2 * heads * K] *= 0.2
        wide[..., heads * K : 2 * heads * K] += torch.randn(heads * K, device=device)
        wide[..., 3 * heads * K : 4 * heads * K] *= 4
    wide = wide.to(dtype)
    q, k, v, g = (wide[..., i * heads * K : (i + 1) * heads * K].view(1, total, heads, K) for i in range(4))
    beta = torch.randn(1, total, heads + 3, device=device).to(dtype)[..., :heads]
    out = torch.full((1, total, heads, K), float("nan"), device=device, dtype=dtype)
    return SimpleNamespace(q=q, k=k, v=v, raw_g=g, raw_beta=beta, out=out)


def int32(values, device="cuda") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def decay(raw_g: Tensor, case: Case) -> Tensor:
    """exp(g) of raw gates [..., H, K]."""
    a = case.a_log.double().exp()[:, None]
    return (LOWER_BOUND * torch.sigmoid(a * (raw_g + case.dt_bias.double().view(-1, K)))).exp()


def fold64(state: Tensor, case: Case, row: int, n: int) -> Tensor:
    """[H, V, K] after the first n records of a row."""
    state = state.double()
    for t in range(n):
        kg = case.key_gate[row, :, t].double()
        key, e = unit(kg[:, :K]), decay(kg[:, K:], case)
        state = state * e[:, None] + case.correction[row, :, t].double()[:, :, None] * key[:, None]
    return state


def window64(state: Tensor, case: Case, tokens, first: int, length: int) -> tuple[Tensor, Tensor]:
    """u [H, length, V] and o [length, H, V] of a window from `state`."""
    u, o = [], []
    for t in range(first, first + length):
        q, k, v, g = (x[0, t].double() for x in (tokens.q, tokens.k, tokens.v, tokens.raw_g))
        key, query, e = unit(k), unit(q) * K**-0.5, decay(g, case)
        beta = torch.sigmoid(tokens.raw_beta[0, t].double())[:, None]
        state = state * e[:, None]
        u_t = beta * (v - (state * key[:, None]).sum(-1))
        state = state + u_t[:, :, None] * key[:, None]
        u.append(u_t)
        o.append((state * query[:, None]).sum(-1))
    if not u:
        empty = state.new_zeros(0, state.shape[0], K)
        return empty.transpose(0, 1), empty
    return torch.stack(u, 1), torch.stack(o)


def relative(x: Tensor, y: Tensor) -> float:
    """Norm of the difference over the norm of y; infinite for NaN."""
    error = (x.double() - y.double()).norm() / y.double().norm().clamp_min(1e-30)
    return float(error) if torch.isfinite(error) else float("inf")


def stack_of(cases: list[Case], q: int, lower_bound: float = LOWER_BOUND) -> SimpleNamespace:
    """What `fold` reads of a context's layers."""

    def table(values):
        return torch.tensor(values, dtype=torch.int64, device=cases[0].state.device)

    def pair(name, tensors):
        return {
            f"{name}_addrs": table([t.data_ptr() for t in tensors]),
            f"{name}_strides": table([t.stride(0) for t in tensors]),
        }

    names = {
        "checkpoint": "state",
        "correction": "correction",
        "key_gate": "key_gate",
        "A_log": "a_log",
        "dt_bias": "dt_bias",
    }
    lists = {name: [getattr(case, field) for case in cases] for name, field in names.items()}
    tables = {}
    for name, tensors in lists.items():
        tables |= pair(name, tensors)
    return SimpleNamespace(
        checkpoints=lists["checkpoint"],
        corrections=lists["correction"],
        key_gates=lists["key_gate"],
        A_logs=lists["A_log"],
        dt_biases=lists["dt_bias"],
        lower_bound=lower_bound,
        spec_query_len=q,
        **tables,
    )


def plan_of(lens, final, boundary=None, boundary_lens=None) -> SimpleNamespace:
    zeros = [0] * len(lens)
    return SimpleNamespace(
        commit_lens=int32(lens),
        final_state_indices=int32(final),
        boundary_state_indices=int32(boundary or zeros),
        boundary_recovery_lens=int32(boundary_lens or zeros),
    )
