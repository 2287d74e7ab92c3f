"""Kinds of torch operations that a step is made of, each as a small program over static tensors."""

import pytest
import torch
import torch.nn.functional as F

PROGRAMS = {
    "arithmetic": lambda s: (s["x"] * 2 + s["y"], s["x"] @ s["w"], 1 / (1 + s["x"].exp())),
    "reduce": lambda s: (s["x"].sum(-1), s["x"].max(dim=1), s["x"].amin(), s["x"].var(0), s["x"].argmax()),
    "sort": lambda s: (
        s["x"].sort(-1, descending=True),
        s["x"].topk(2),
        s["x"].argsort(),
        s["x"].kthvalue(2),
    ),
    "in place": lambda s: s["x"].add_(s["y"]).mul_(0.5).clamp_(-1, 1),
    "out": lambda s: torch.add(s["x"], s["y"], out=s["z"]),
    "two outs": lambda s: torch.max(s["x"], 1, out=(s["row"], s["row_index"])),
    "copy and fill": lambda s: (s["z"].copy_(s["x"]), s["row"].fill_(3.0), s["y"].zero_()),
    "broadcast copy": lambda s: s["z"].copy_(s["row"].unsqueeze(-1)),
    "setitem number": lambda s: s["x"].__setitem__((slice(None), 1), 7.0),
    "setitem tensor": lambda s: s["x"].__setitem__(slice(1, 3), s["y"][:2]),
    "setitem mask": lambda s: s["x"].__setitem__(s["y"] > 0, 0.0),
    "setitem mask bf16": lambda s: s["low"].__setitem__(s["low"] > 0, -1),
    "setitem whole": lambda s: s["x"].__setitem__(Ellipsis, s["y"] * 3),
    "setitem indices": lambda s: s["x"].__setitem__((s["perm"], s["perm"]), s["row"]),
    "masked fill": lambda s: (s["x"].masked_fill(s["x"] > 0, 2.0), s["y"].masked_fill_(s["y"] < 0, -2.0)),
    "gather": lambda s: (s["x"].gather(1, s["index"]), s["x"].index_select(0, s["perm"]), s["x"][s["perm"]]),
    "take along": lambda s: torch.take_along_dim(s["x"], s["index"], 1),
    "scatter": lambda s: s["x"].scatter_(1, s["index"], s["y"]),
    "scatter reduce": lambda s: s["x"].scatter_reduce_(1, s["index"], s["y"], "amax"),
    "index copy": lambda s: (
        s["x"].index_copy_(0, s["perm"], s["y"]),
        s["z"].index_add_(0, s["perm"], s["y"]),
    ),
    "index put accumulate": lambda s: s["x"].index_put_((s["perm"],), s["y"], accumulate=True),
    "where": lambda s: torch.where(s["x"] > 0, s["y"], 0.5),
    "cat and stack": lambda s: (
        torch.cat([s["x"], s["y"]]),
        torch.stack([s["x"], s["z"]], 1),
        torch.hstack([s["x"], s["y"]]),
    ),
    "cumulate": lambda s: (s["x"].cumsum(0), s["x"].cumprod(1), s["x"].cummax(0), s["x"].logcumsumexp(1)),
    "factories": lambda s: (
        torch.zeros(3),
        torch.ones(2, 2),
        torch.full((4,), 2.5),
        torch.arange(5),
        torch.eye(3),
        torch.linspace(0, 1, 5),
        s["x"].new_zeros(2),
        torch.full_like(s["x"], 3),
        torch.zeros(2, dtype=torch.uint8),
    ),
    "views": lambda s: (
        s["x"].t() + 1,
        s["x"].view(-1)[1:] * 2,
        s["x"].unfold(1, 2, 1).sum(-1),
        s["x"].diagonal() + 0,
    ),
    "write through an unannounced view": lambda s: torch.ops.aten._unsafe_view(s["x"], [16]).add_(1),
    "write through a view": lambda s: (s["x"].t()[1].add_(1), s["x"].view(-1)[::3].mul_(2)),
    "chain of views of results": lambda s: (s["x"] + 1).t().reshape(-1).view(2, 8)[1].chunk(2),
    "split and unbind": lambda s: [part * 2 for part in (s["x"] + 1).split(2)] + list((s["y"] + 1).unbind(1)),
    "iterate": lambda s: [row.sum() for row in s["x"]],
    "dtypes": lambda s: (
        s["x"].bfloat16(),
        s["x"].to(torch.float64),
        s["x"].long(),
        s["low"].float(),
        s["x"].to(s["x"]),
    ),
    "complex": lambda s: (
        torch.complex(s["x"], s["y"]).conj() @ s["w"].to(torch.complex64),
        torch.fft.fft(s["x"]),
    ),
    "no-op conversions": lambda s: (
        s["x"].contiguous().add_(1),
        s["x"].float().mul_(2),
        s["x"].reshape(4, 4).sub_(3),
    ),
    "dense": lambda s: (
        F.linear(s["x"], s["w"], s["row"]),
        F.linear(s["low"], s["low"]),
        F.layer_norm(s["x"], (4,)),
    ),
    "batched": lambda s: (s["x"][None] @ s["w"].expand(3, 4, 4), torch.einsum("ij,jk->ki", s["x"], s["y"])),
    "attention": lambda s: F.scaled_dot_product_attention(*(s[k].view(1, 1, 4, 4) for k in ("x", "y", "w"))),
    "convolution": lambda s: F.conv1d(s["x"][None], s["w"][:, None, :2], groups=4),
    "activations": lambda s: (
        F.silu(s["x"]),
        F.gelu(s["x"]),
        F.softplus(s["x"]),
        s["x"].sigmoid(),
        F.softmax(s["low"], 0),
    ),
    "losses": lambda s: (F.cross_entropy(s["x"], s["perm"]), F.log_softmax(s["x"], -1), s["x"].logsumexp(0)),
    "quantile": lambda s: s["x"].quantile(0.5, dim=1),
    "bits": lambda s: (
        (s["perm"] << 2) | 1,
        ~s["perm"],
        s["perm"] // 2,
        s["perm"] % 3,
        s["perm"].bool().logical_not(),
    ),
    "search": lambda s: (torch.searchsorted(s["sorted"], s["row"]), torch.bucketize(s["row"], s["sorted"])),
    "repeat": lambda s: (
        s["row"].repeat(3),
        s["row"].repeat_interleave(2),
        s["x"].roll(1, 0),
        s["x"].flip(1),
        s["x"].tril(),
    ),
    "repeats on the device": lambda s: torch.repeat_interleave(s["row"], s["perm"], output_size=6),
    "lists": lambda s: (
        torch._foreach_add([s["x"], s["y"]], 1.0),
        torch._foreach_mul_([s["z"], s["row"]], 2.0),
    ),
    "result reshaped in place": lambda s: ((s["x"] + 1).unsqueeze_(0) * 2, (s["x"] * 3).t_() + s["y"]),
    "random": lambda s: (
        torch.rand(3),
        torch.randn(2, 2),
        torch.randint(0, 9, (4,)),
        torch.randperm(5),
        s["x"].normal_(),
    ),
    "random from tensors": lambda s: (
        torch.bernoulli(s["x"].sigmoid()),
        torch.multinomial(s["x"].exp(), 2),
        F.dropout(s["y"]),
    ),
    "inference mode": lambda s: inference(s),
}


@torch.inference_mode()
def inference(s):
    y = F.linear(s["x"], s["w"]).reshape(-1)
    s["z"].copy_(y.view(4, 4).contiguous())
    return y.to(torch.float64), y[::2].contiguous()


def square_state():
    return {
        "x": torch.randn(4, 4),
        "y": torch.randn(4, 4),
        "z": torch.randn(4, 4),
        "w": torch.randn(4, 4),
        "low": torch.randn(4, 4).bfloat16(),
        "row": torch.randn(4),
        "row_index": torch.zeros(4, dtype=torch.int64),
        "sorted": torch.randn(6).sort().values,
        "perm": torch.randperm(4),
        "index": torch.randint(0, 4, (4, 4)),
    }


def refresh_square(s, step):
    for key in ("x", "y", "w", "low", "row"):
        s[key].normal_()
    s["sorted"].copy_(torch.randn(6).sort().values)
    s["perm"].copy_(torch.randperm(4))
    s["index"].random_(0, 4)


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_replays_like_eager(check_replay_equals_eager, program):
    """Replay equals eager for this kind of operation, with new inputs at every step."""
    check_replay_equals_eager(program, square_state(), refresh_square)
