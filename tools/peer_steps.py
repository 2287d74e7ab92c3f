"""The kinds of step that bench_peers.py puts side by side: graphrt's, vllm's and fla-core's, over the same tensors."""

from types import SimpleNamespace

import torch

import graphrt

BOUND = -5.0
WIDTH = 4
MAIN = (8, 4)
"""Window and accepted count of the points that also get the convolution and the torch backend."""


class Model:
    """Static tensors of L layers for up to `batch` requests and one window size."""

    def __init__(self, args, window: int, device: torch.device):
        batch, h, d, self.window, self.device = max(args.batch), args.heads, args.head_dim, window, device
        self.layers_count, self.heads, self.dim, self.batch = args.layers, h, d, batch

        def noise(*size: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, shift: float = 0.0):
            return torch.empty(size, device=device, dtype=dtype).normal_(shift, scale)

        conv_dim, act = 3 * h * d, torch.bfloat16
        # One pool serves everybody; only fla uses more than one slot of a request.
        self.pools = {
            "float32": noise(args.layers, 1 + batch * window, h, d, d),
            "bfloat16": noise(args.layers, 1 + batch, h, d, d, dtype=act),
        }
        convs = noise(args.layers, 1 + batch, conv_dim, WIDTH - 1 + window - 1, dtype=act)
        records = [graphrt.allocate_records(batch, h, window, d, act, device) for _ in range(args.layers)]
        for one in records:
            one.correction.normal_()
            one.key_gate.normal_()
        shared = {
            "A_log": noise(h, scale=0.3), "dt_bias": noise(h * d, scale=0.3), "local_num_heads": h, "head_dim": d,
            "gate_lower_bound": BOUND, "weight": noise(conv_dim, WIDTH, dtype=act, scale=0.5),
        }  # fmt: skip
        self.layers = {
            name: [
                SimpleNamespace(**shared, kv_cache=(convs[i], pool[i, : 1 + batch]), recoverssm_records=records[i])
                for i in range(args.layers)
            ]
            for name, pool in self.pools.items()
        }
        tokens = batch * window
        self.x = noise(tokens, conv_dim, dtype=act)
        self.q, self.k, self.v = (noise(1, tokens, h, d, dtype=act) for _ in range(3))
        self.raw_g = noise(1, tokens, h, d, dtype=act, scale=1.5, shift=-2.0)
        self.raw_beta = noise(1, tokens, h, dtype=act)
        self.out, self.conv_out = torch.empty_like(self.q), torch.empty_like(self.x)

        def counted(count: int, start: int = 0, stride: int = 1):
            return torch.arange(count, device=device, dtype=torch.int32) * stride + start

        self.loc, self.slots, self.rows = counted(batch + 1, 0, window), counted(batch, 1), counted(batch)
        self.token_slots = counted(batch * window, 1).view(batch, window)
        self.pending, self.accepted, self.ones = (torch.ones_like(self.rows) for _ in range(3))

    def accept(self, count: int) -> None:
        """From now on every request accepts, and has pending, so many tokens."""
        self.accepted.fill_(count)
        self.pending.fill_(count)

    def bytes_per_request(self, state: str, states: int = 1, records: bool = True) -> tuple[int, int]:
        """Of checkpoints and of records, all layers."""
        pool, first = self.pools[state], self.layers[state][0].recoverssm_records
        row = sum(t[0].numel() * t.element_size() for t in (first.correction, first.key_gate)) if records else 0
        return states * pool[:, 0].numel() * pool.element_size(), row * self.layers_count

    def part(self, batch: int) -> SimpleNamespace:
        """The tensors of a step of `batch` requests: views."""
        tokens = batch * self.window
        cut = {name: getattr(self, name)[:, :tokens] for name in ("q", "k", "v", "raw_g", "raw_beta", "out")}
        cut |= {name: getattr(self, name)[:tokens] for name in ("x", "conv_out")}
        cut |= {name: getattr(self, name)[:batch] for name in ("slots", "rows", "token_slots", "accepted", "ones")}
        return SimpleNamespace(**cut, loc=self.loc[: batch + 1], batch=batch)


class Step:
    """A kind of step over a model: `verify(part)` and `commit(part)`; bytes and the number of its layers."""

    peer = None
    """Name of the step it is compared with."""
    per_token = False

    def __init__(self, name: str, model: Model, state: str):
        self.name, self.model, self.state, self.layers = name, model, state, model.layers[state]

    def run(self, part) -> None:
        self.verify(part)
        self.commit(part)

    def arguments(self, part, layer, qkv=None) -> tuple:
        q, k, v = qkv or (part.q, part.k, part.v)
        gate = (part.raw_g, part.raw_beta, layer.A_log, layer.dt_bias, BOUND, layer.kv_cache[1])
        return (q, k, v, *gate, layer.recoverssm_records, part.loc, part.slots, self.model.window, part.out)

    def split(self, mixed) -> tuple:
        """q, k and v out of a projection or its convolution."""
        return tuple(t.view(1, -1, self.model.heads, self.model.dim) for t in mixed.chunk(3, dim=-1))


class Ours(Step):
    """graphrt on one backend."""

    def __init__(self, model: Model, state: str, backend: str, deferred: bool, conv: bool = False, layers: int = 0):
        kind = f"graphrt {backend} {'deferred' if deferred else 'eager'}{' + conv' if conv else ''}"
        super().__init__(kind, model, state)
        self.layers = self.layers[: layers or None]
        self.deferred, self.conv, self.peer = deferred, conv, f"vllm{' + conv' if conv else ''}"
        options = {"spec_query_len": model.window, "max_num_reqs": model.batch, "backend": backend}
        self.context = graphrt.KDADeferredCommitContext.create(self.layers, **options)
        self.backend = self.context.backend

    def rows(self, part) -> dict:
        return {"record_rows": part.rows, "pending": self.model.pending} if self.deferred else {}

    def verify(self, part) -> None:
        call = graphrt.kda_deferred_verify if self.deferred else graphrt.kda_recoverssm_verify
        rows, raw = {**self.rows(part), "backend": self.backend}, self.split(part.x) if self.conv else None
        for layer in self.layers:
            conv = graphrt.FusedConv(layer.kv_cache[0], layer.weight) if self.conv else None
            call(*self.arguments(part, layer, raw), **rows, conv=conv)

    def commit(self, part) -> None:
        self.context.commit(part.accepted, part.slots, part.loc, **self.rows(part))


class Vllm(Step):
    """The engine's Triton verify and one of its commits."""

    def __init__(self, model: Model, state: str, vllm, commit: str, conv: bool = False):
        super().__init__(f"vllm {commit} commit{' + conv' if conv else ''}", model, state)
        self.vllm, self.conv = vllm, conv
        options = {"spec_query_len": model.window, "max_num_reqs": model.batch, "backend": commit}
        self.context = vllm.context.create(self.layers, **options)

    def verify(self, part) -> None:
        qkv = self.split(part.conv_out) if self.conv else None
        for layer in self.layers:
            if self.conv:
                self.vllm.conv_update(
                    part.x, layer.kv_cache[0], layer.weight, None, activation="silu", conv_state_indices=part.slots,
                    num_accepted_tokens=part.ones, query_start_loc=part.loc, max_query_len=self.model.window,
                    out=part.conv_out,
                )  # fmt: skip
            self.vllm.verify(*self.arguments(part, layer, qkv))

    def commit(self, part) -> None:
        self.context.commit(part.accepted, part.slots, part.loc)


class PerToken(Step):
    """fla-core: a state of its own for every token of a window."""

    peer, per_token = "vllm", True

    def __init__(self, model: Model, fla):
        super().__init__("fla state per token", model, "float32")
        self.fla = fla

    def verify(self, part) -> None:
        for layer, pool in zip(self.layers, self.model.pools["float32"], strict=True):
            self.fla.recurrent(
                part.q, part.k, part.v, part.raw_g, part.raw_beta, layer.A_log, layer.dt_bias, pool,
                state_v_first=True, cu_seqlens=part.loc, ssm_state_indices=part.token_slots,
                num_accepted_tokens=part.accepted, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True, lower_bound=BOUND, out=part.out,
            )  # fmt: skip

    def commit(self, part) -> None:
        """Nothing: the next verify starts from the state of the last accepted token."""


def steps_of(model: Model, vllm, fla, args) -> list[Step]:
    """The kinds of step at every point, the peer of each dtype first. Torch and the convolution: main points only."""
    steps: list[Step] = [Vllm(model, "float32", vllm, "triton")]
    for backend in args.backend:
        steps += [Ours(model, "float32", backend, deferred) for deferred in (True, False)]
    steps.append(PerToken(model, fla))
    if model.device.type == "cuda":
        vllm.cute_commit()
        steps.append(Vllm(model, "bfloat16", vllm, "cute"))
    steps.append(Vllm(model, "bfloat16", vllm, "triton"))
    steps += [Ours(model, "bfloat16", "triton", deferred) for deferred in (True, False)]
    if model.window == MAIN[0]:
        steps.append(Vllm(model, "float32", vllm, "triton", conv=True))
        for backend in args.backend:
            steps += [Ours(model, "float32", backend, deferred, conv=True) for deferred in (True, False)]
        steps += [Ours(model, "float32", "torch", deferred, layers=2) for deferred in (True, False)]
    return [step for step in steps if not isinstance(step, Ours) or step.backend in step.name]


def agreeing(steps: list[Step], model: Model) -> tuple[list[Step], list[str]]:
    """The steps whose verify runs and gives the first request the peer's outputs; and why others are left out."""
    part, outs, left_out = model.part(1), {}, []
    for step in sorted(steps, key=lambda step: step.per_token):  # fla writes states: last
        model.accept(1)
        model.pending.zero_()
        try:
            step.verify(part)
            out = part.out.double()
        except Exception as error:
            left_out.append(f"{step.state} {step.name}: {type(error).__name__}: {error}")
            continue
        if len(step.layers) < model.layers_count:
            continue
        kind = (step.state, getattr(step, "conv", False))
        want = outs.setdefault(kind, out.clone())
        error = float((out - want).norm() / want.norm())
        # The engine's convolution rounds its products to 16 bits; its window shifts with every call.
        if not error < 1e-2 and not kind[1]:
            left_out.append(f"{step.state} {step.name}: outputs differ from the peer's by {error:.2g}")
    bad = {reason.partition(": ")[0] for reason in left_out}
    return [step for step in steps if f"{step.state} {step.name}" not in bad], left_out
